"""Uploads the guest to a machine of the cloud, confines and starts it as root, before anything else runs there.

A machine belongs to one tenant and is isolated from all others by the cloud. Within it, guest/cloud/namespaces.py makes
the walls between the code of agents and the programs that the cloud itself runs in the machine.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from executor_server.backends.e2b.archives import PackedEnvironment, unpack_s
from executor_server.backends.e2b.failures import CommandFailed
from executor_server.backends.e2b.retry import with_retries
from executor_server.backends.e2b.templates import PYTHON, Prepared
from executor_server.backends.guest_archive import GuestArchive
from executor_server.backends.seccomp_program import UnsupportedArchitecture, filter_program
from executor_server.backends.settings import (
    CA_BUNDLE,
    egress_environment,
    guest_config,
    sandbox_environment,
    shm_bytes,
)
from executor_server.core import SandboxFailure, SandboxSpec
from executor_server.guest.wire.tokens import LONG_CHAIN_LENGTH

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Machine

SANDBOX_UID = 65_533
"""User and group of the code inside: in no list of users, so they own nothing in the machine."""

_DIRECTORY = "/opt/executor"
_SOCKETS = "/run/executor"
_START_TIMEOUT_S = 60.0
# The fraction 1/N of a machine's memory is reserved for the cloud's own programs and the supervisor.
_RESERVED = 8

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class GuestFile:
    """The packed guest, read for uploading."""

    version: str
    data: bytes

    @classmethod
    def of(cls, archive: GuestArchive) -> GuestFile:
        return cls(archive.version, archive.path.read_bytes())


@dataclass(frozen=True)
class Additions:
    """The optional parts of a sandbox."""

    ca_bundle: Path | None = None  # certificate authorities that programs are to trust in place of the template's
    environment: PackedEnvironment | None = None


NOTHING_MORE = Additions()


def relay_command(version: str, sandbox_id: str) -> str:
    """Returns the command that connects to the guest, without its last argument."""
    return f"exec {PYTHON} -I -S {_guest_path(version)} relay {_socket_path(sandbox_id)}"


def egress_command(version: str, sandbox_id: str) -> str:
    """Returns the command that serves the sandbox's way out, without its last argument."""
    return f"exec {PYTHON} -I -S {_guest_path(version)} egress {_socket_path(sandbox_id)}"


async def start_guest(
    machine: Machine,
    prepared: Prepared,
    *,
    guest: GuestFile,
    sandbox_id: str,
    token: bytes,
    spec: SandboxSpec,
    preload: Sequence[str],
    additions: Additions = NOTHING_MORE,
) -> None:
    """Starts the guest; it listens when this returns. Raises SandboxFailure; the caller then ends the machine."""
    ca_bundle, environment, timeout_s = additions.ca_bundle, additions.environment, _START_TIMEOUT_S
    path = _guest_path(guest.version)
    await with_retries(lambda: machine.upload(path, guest.data))
    if ca_bundle is not None:
        authorities = await _read(ca_bundle)
        # Before the sandbox is made: it sees the machine's /etc as it is then, read-only.
        await with_retries(lambda: machine.upload(CA_BUNDLE, authorities))
    egress = egress_environment(None if ca_bundle is None else CA_BUNDLE) if spec.egress else {}
    config = _config(
        prepared,
        sandbox_id=sandbox_id,
        token=token,
        spec=spec,
        preload=preload,
        egress=egress,
        has_environment=environment is not None,
    )
    if environment is not None:
        archive = await _upload(machine, environment)
        config["packages"] = {"archive": archive, "parts": environment.parts, "version": prepared.version}
        timeout_s += unpack_s(environment.size_bytes)
    command = f"exec {PYTHON} -I -S {path} namespaces {shlex.quote(json.dumps(config))}"
    try:
        # Repeating it is harmless: the command finds the guest that it has started.
        await with_retries(lambda: machine.run(command, timeout_s=timeout_s))
    except CommandFailed as failed:
        reason = failed.stderr or f"exit code {failed.exit_code}"
        raise SandboxFailure(f"the guest does not start: {reason}") from failed


async def _upload(machine: Machine, environment: PackedEnvironment) -> str:
    """Uploads an archive, one part after the other; returns its path, to which each part's number is added."""
    path = f"{_DIRECTORY}/{environment.environment_id}.tar.gz"
    for number in range(environment.parts):
        try:
            data = await asyncio.to_thread(environment.part, number)
        except OSError as error:
            raise SandboxFailure(f"the archive of {environment.environment_id} can't be read: {error}") from error
        await with_retries(partial(machine.upload, f"{path}.{number}", data))
    return path


async def _read(ca_bundle: Path) -> bytes:
    try:
        return await asyncio.to_thread(ca_bundle.read_bytes)
    except OSError as error:
        raise SandboxFailure(f"the certificate authorities can't be read: {error.strerror}") from error


def _config(
    prepared: Prepared,
    *,
    sandbox_id: str,
    token: bytes,
    spec: SandboxSpec,
    preload: Sequence[str],
    egress: Mapping[str, str],
    has_environment: bool,
) -> dict[str, object]:
    memory_bytes = _memory_bytes(prepared, spec)
    try:
        seccomp = base64.b64encode(filter_program(prepared.machine)).decode("ascii")
    except UnsupportedArchitecture as error:
        raise SandboxFailure(f"the template's machines can't confine: {error}") from error
    return {
        "socket": _socket_path(sandbox_id),
        "uid": SANDBOX_UID,
        "gid": SANDBOX_UID,
        "environment": {**sandbox_environment(spec.processes), **egress},
        "processes": spec.processes,
        "disk_bytes": spec.disk_bytes,
        "max_files": spec.max_files,
        "shm_bytes": shm_bytes(spec.disk_bytes, memory_bytes),
        "seccomp": seccomp,
        "guest": guest_config(
            spec,
            token=token,
            connections_max=LONG_CHAIN_LENGTH,
            memory_bytes=memory_bytes,
            watch_memory=True,
            preload=preload,
            has_environment=has_environment,
        ),
    }


def _memory_bytes(prepared: Prepared, spec: SandboxSpec) -> int:
    """Returns the memory limit: in a small machine less than was granted, else its kernel would kill any process."""
    usable = prepared.memory_bytes - prepared.memory_bytes // _RESERVED
    if usable < spec.memory_bytes:
        _warn_of_memory(spec.image, spec.memory_bytes, usable)
    return min(spec.memory_bytes, usable)


@lru_cache(maxsize=64)  # one warning for all sandboxes of a kind
def _warn_of_memory(image: str, granted_bytes: int, usable_bytes: int) -> None:
    _log.warning("template_has_less_memory", image=image, granted_bytes=granted_bytes, usable_bytes=usable_bytes)


def _guest_path(version: str) -> str:
    return f"{_DIRECTORY}/guest-{version}.pyz"


def _socket_path(sandbox_id: str) -> str:
    return f"{_SOCKETS}/{sandbox_id}/guest.sock"
