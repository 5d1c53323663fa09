"""check-host: tries the account and its templates, and reports what enforces each limit.

A template's content is visible only inside a sandbox made from it. So a sandbox of each is made as for a session, and
ended.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from executor_server.backends.base import HostFinding
from executor_server.backends.directory import new_sandbox_id
from executor_server.backends.e2b.access import open_cloud
from executor_server.backends.e2b.failures import CloudFailure, KeyRefused
from executor_server.backends.e2b.guests import GuestFile
from executor_server.backends.e2b.retry import with_retries
from executor_server.backends.e2b.sandbox import Lifetime
from executor_server.backends.e2b.sandbox_factory import DAEMON_KEY, SandboxFactory
from executor_server.backends.e2b.templates import Prepared, Templates
from executor_server.backends.guest_archive import pack_guest
from executor_server.backends.settings import TOKEN_BYTES
from executor_server.core import ImageNotReady, SandboxFailure, SandboxSpec
from executor_server.core.config import E2BSection

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Cloud

TRIED_PAIRS = (("2.63.0", "2.11.5"),)
"""Versions of e2b and e2b-code-interpreter that this backend was tried with."""

_PACKAGES = ("e2b", "e2b-code-interpreter")
_TRIAL_SPEC = SandboxSpec("", memory_bytes=2**28, processes=16, disk_bytes=2**20, orphan_time_s=60.0)
_MIB = 2**20


async def examine(section: E2BSection) -> list[HostFinding]:
    """Returns the findings in order; it stops when nothing more can be found out."""
    findings = [check_sdk()]
    try:
        cloud = await asyncio.to_thread(open_cloud, section)
    except SandboxFailure as failure:
        return [*findings, HostFinding("access", ok=False, detail=f"{failure}.", remedy="See docs/e2b.md.")]
    reached = await _reach(cloud)
    findings.append(reached)
    if reached.ok:
        findings += [await _try_image(cloud, section, name) for name in section.images]
        findings += _enforced(section)
    return findings


def check_sdk() -> HostFinding:
    """Reports if the installed packages were tried together with this backend."""
    installed = tuple(_version(package) for package in _PACKAGES)
    found = " with ".join(f"{package} {found}" for package, found in zip(_PACKAGES, installed, strict=True))
    tried = " or ".join(" with ".join(pair) for pair in TRIED_PAIRS)
    if installed in TRIED_PAIRS:
        return HostFinding("SDK", ok=True, detail=f"{found}, which this version was tried with.", required=False)
    return HostFinding(
        "SDK",
        ok=False,
        detail=f"{found}: this version was not tried with them, but with {tried}.",
        remedy="Install the tried ones: pip install 'remote-executor[e2b]'.",
        required=False,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(none)"


async def _reach(cloud: Cloud) -> HostFinding:
    begun_s = time.monotonic()
    try:
        await with_retries(lambda: cloud.list({DAEMON_KEY: "none"}))
    except KeyRefused as failure:
        return HostFinding("E2B", ok=False, detail=f"{failure}.", remedy="Make a key in the dashboard of the account.")
    except CloudFailure as failure:
        remedy = "See whether this host reaches it, and the status page of E2B."
        return HostFinding("E2B", ok=False, detail=f"{failure}.", remedy=remedy)
    return HostFinding("E2B", ok=True, detail=f"It accepts the key, and answers in {_shown_s(begun_s)}.")


async def _try_image(cloud: Cloud, section: E2BSection, name: str) -> HostFinding:
    subject, template = f"image {name}", section.images[name].template
    begun_s = time.monotonic()
    try:
        async with _trial(cloud, section, name) as prepared:
            taken = _shown_s(begun_s)
    except SandboxFailure as failure:
        detail = f"{failure}." if isinstance(failure, ImageNotReady) else f"{template}: {failure}."
        remedy = f"Name a template of the account that has Python in e2b.images.{name}."
        return HostFinding(subject, ok=False, detail=detail, remedy=remedy, required=False)
    python, memory = ".".join(map(str, prepared.version)), prepared.memory_bytes // _MIB
    detail = f"{template} has CPython {python} and {memory:,} MiB of memory. One sandbox took {taken}."
    return HostFinding(subject, ok=True, detail=detail, required=False)


@asynccontextmanager
async def _trial(cloud: Cloud, section: E2BSection, name: str) -> AsyncIterator[Prepared]:
    """Provides a sandbox for a moment. Raises SandboxFailure."""
    with tempfile.TemporaryDirectory(prefix="executor-guest-") as scratch:
        guest = await asyncio.to_thread(lambda: GuestFile.of(pack_guest(Path(scratch), with_proxy=True)))
    templates = Templates(section.images)
    lifetime = Lifetime(section.lifetime_s, pause_idle_s=None)  # an account may not be allowed to pause
    daemon_id = f"check{secrets.token_hex(4)}"  # no other sandbox has it
    factory = SandboxFactory(cloud, daemon_id, guest, templates, lifetime, section.reconnect_s, lambda _: False)
    sandbox = factory.new_sandbox(
        new_sandbox_id(),
        image=templates.of(name),
        fingerprint="",
        token=secrets.token_bytes(TOKEN_BYTES),
        forget=lambda _: None,
    )
    try:
        yield await factory.build(sandbox, replace(_TRIAL_SPEC, image=name))
    finally:
        await sandbox.destroy()


def _enforced(section: E2BSection) -> list[HostFinding]:
    """Findings about limits that the cloud does not enforce for one session."""
    by_supervisor = "E2B limits the machine only; within it the supervisor watches, and ends what takes too much."
    in_machine = "E2B does not limit it; the machine's kernel does, as set by the guest."
    return [
        HostFinding("memory limit", ok=True, detail=by_supervisor, required=False),
        HostFinding("process limit", ok=True, detail=in_machine, required=False),
        HostFinding("disk limit", ok=True, detail="It is that of files in memory, sized by the guest.", required=False),
        HostFinding(
            "processor limit",
            ok=False,
            detail="limits.cpus is not enforced: a machine has the processors of its template.",
            remedy="Build the template with as many as a session may have.",
            required=False,
        ),
        HostFinding(
            "network",
            ok=True,
            detail="E2B is asked to let nothing out; in addition, code runs in a separate network namespace.",
        ),
        HostFinding(
            "lifetime",
            ok=True,
            detail=f"E2B ends a sandbox {section.lifetime_s:g} s after the last daemon that cared for it.",
        ),
    ]


def _shown_s(begun_s: float) -> str:
    return f"{time.monotonic() - begun_s:.1f} s"
