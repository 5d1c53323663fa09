"""Builds environments with uv: the steps, each in a build sandbox of its own, and the checks between them.

1. Gather. uv runs in a sandbox that can reach the index only. It turns requirements into a list of wheels, and a
   program of ours downloads those that the cache lacks (wheels.py). The list is read strictly (lock.py). A policy's own
   lock file is resolved too, without dependencies; only its files are accepted.
2. Install. A second uv, without a network, gets those wheels read-only, with their hashes, and a directory to write
   to. No code of a package runs in either sandbox: only wheels are taken, and installing a wheel runs none of it.
3. Take over. Trusted code moves the directory out, checks it and makes it the daemon's own (tree.py).
4. First import, in a sandbox whose writes are dropped, except for the bytecode (warm_up.py).

The daemon itself never imports or runs anything of an environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from executor_server.backends import BuildMounts, Target
from executor_server.core import EnvironmentFailed, PackagesSpec, Progress
from executor_server.guest.wire.paths import WORK_PATH
from executor_server.network.egress import Egress
from executor_server.packages import tree
from executor_server.packages.build_sandbox import Order
from executor_server.packages.disk import Places, Walk, to_its_end
from executor_server.packages.lock import (
    MAX_LOCK_BYTES,
    Lock,
    LockError,
    Pin,
    Wheel,
    canonical,
    names_of,
    read_lock_file,
    read_resolved,
)
from executor_server.packages.uv import Listener, compile_command, install_command
from executor_server.packages.uv_sandboxes import (
    BuildSettings,
    BuildSlot,
    Python,
    UvSandbox,
    UvSandboxes,
    UvTask,
    build_spec,
)
from executor_server.packages.warm_up import STEP as FIRST_IMPORT
from executor_server.packages.warm_up import cache_tag_of, warm_up
from executor_server.packages.wheels import Wheels

OnProgress = Callable[[Progress], None]
"""Called in the event loop; must neither block nor raise."""

_LOCK_NAME = "pylock.toml"
_SITE = "site"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Built:
    """An environment that was built and checked, but not published yet."""

    modules: tuple[str, ...]  # its top-level modules, sorted
    pins: tuple[str, ...]  # `name==version` of its distributions, sorted
    size_bytes: int


class Builder(Protocol):
    """Builds environments, several at once, but never the same one twice at a time.

    Both methods raise EnvironmentFailed if another attempt is useless, and ImageNotReady, with the seconds until the
    next attempt, for a temporary failure such as an index that does not answer. Clients read the texts of both. All
    other failures raise SandboxFailure or OSError, whose texts are logged. A cancelled call destroys its build sandbox
    before the cancellation goes on.
    """

    async def resolve(self, packages: PackagesSpec, target: Target, on_progress: OnProgress) -> Lock:
        """Returns the lock of these packages for this image."""
        ...

    async def make(
        self, lock: Lock, packages: PackagesSpec, target: Target, staging: Path, on_progress: OnProgress
    ) -> Built:
        """Builds the environment of this lock in `staging`: its packages in `site` there, with their bytecode.

        `staging` is an empty directory of the daemon's user that no build sandbox can write to. Its content becomes the
        environment. The caller removes it if this raises.
        """
        ...


class UvBuilder:
    """Implements `Builder`."""

    def __init__(
        self,
        places: Places,
        wheels: Wheels,
        settings: BuildSettings,
        slot_of: Callable[[Target], BuildSlot],
        egress: Egress,
    ) -> None:
        """`slot_of` returns the build slot of a target, or raises SandboxFailure."""
        self._wheels = wheels
        self._settings = settings
        self._slot_of = slot_of
        self._sandboxes = UvSandboxes(places, settings, egress)

    async def resolve(self, packages: PackagesSpec, target: Target, on_progress: OnProgress) -> Lock:
        on_progress(Progress("resolving"))
        slot = self._slot_of(target)
        uv = await self._sandboxes.placed()
        requirements, known = packages.requirements, None
        if packages.lock_file:
            pins = await asyncio.to_thread(_read_policy_lock, packages)
            requirements = tuple(pin.requirement for pin in pins)
            known = {sha256 for pin in pins for sha256 in pin.hashes}
        wheels, python = await self._gather(slot, packages, requirements, on_progress, known)
        return Lock(
            text=canonical(wheels),
            interpreter=slot.foreign.interpreter if slot.foreign else python.interpreter,
            platform=slot.foreign.platform if slot.foreign else python.platform,
            uv_version=uv.version,
            pins=tuple(sorted(map(str, wheels))),
        )

    async def make(
        self, lock: Lock, packages: PackagesSpec, target: Target, staging: Path, on_progress: OnProgress
    ) -> Built:
        slot = self._slot_of(target)
        await self._sandboxes.placed()
        began_s = time.monotonic()
        walk = Walk()
        with self._wheels.in_use(lock.hashes):
            if await to_its_end(walk, lambda: self._wheels.missing(lock.hashes, walk)):
                await self._gather(slot, packages, lock.pins, on_progress, set(lock.hashes))
            found, python = await self._install(slot, lock, packages, staging, on_progress)
        installed_s = time.monotonic()
        on_progress(Progress(FIRST_IMPORT))
        bytecode_bytes = await self._warm_up(slot, lock, packages, staging, python, on_progress)
        _log.info(
            "environment_built",
            environment_id=lock.environment_id,
            packages=len(found.pins),
            installed_s=round(installed_s - began_s, 2),
            first_import_s=round(time.monotonic() - installed_s, 2),
        )
        return Built(tuple(found.modules), tuple(found.pins), found.size_bytes + bytecode_bytes)

    # -- the files -----------------------------------------------------------------------------------------------

    async def _gather(
        self,
        slot: BuildSlot,
        packages: PackagesSpec,
        requirements: Sequence[str],
        on_progress: OnProgress,
        known: Collection[str] | None = None,
    ) -> tuple[tuple[Wheel, ...], Python]:
        """Resolves requirements and downloads their wheels. Returns all wheels, and the build sandbox's Python.

        `known` are the hashes of a lock, whose requirements include all dependencies; no other file is accepted.
        """
        newest_s = None if packages.lock_file else packages.exclude_newer_s
        resolve = UvTask(
            compile_command(self._settings.index_url, newest_s, slot.foreign, is_locked=known is not None),
            text="".join(f"{requirement}\n" for requirement in requirements),
            output=f"/workspace/{_LOCK_NAME}",
        )
        async with (
            self._sandboxes.directory() as work,
            self._sandboxes.open(slot, work, packages.max_environment_bytes, egress=True) as sandbox,
        ):
            python = await sandbox.run(resolve, Listener("resolving"), on_progress)
            wheels = await self._resolved(sandbox, known)
            missing = [wheel for wheel in wheels if not self._wheels.has(wheel.sha256)]
            if missing:
                on_progress(Progress("downloading", 0, len(missing), "packages"))
                download = UvTask([], files=[(wheel.url, wheel.sha256) for wheel in missing])
                await sandbox.run(download, Listener("downloading", total=len(missing)), on_progress)
                walk = Walk()
                await to_its_end(walk, lambda: self._wheels.add(missing, work, walk))
        return wheels, python

    async def _resolved(self, sandbox: UvSandbox, known: Collection[str] | None) -> tuple[Wheel, ...]:
        text = b"".join([chunk async for chunk in sandbox.running.take_file(_LOCK_NAME, MAX_LOCK_BYTES)])
        try:
            return await asyncio.to_thread(read_resolved, text.decode(), known)
        except (LockError, UnicodeDecodeError) as error:
            raise EnvironmentFailed(f"the packages can't be locked: {error}") from error

    # -- installing ----------------------------------------------------------------------------------------------

    async def _install(
        self, slot: BuildSlot, lock: Lock, packages: PackagesSpec, staging: Path, on_progress: OnProgress
    ) -> tuple[tree.Tree, Python]:
        places = [self._wheels.mounted(sha256) for sha256 in lock.hashes]
        task = UvTask(install_command(places, f"{WORK_PATH}/{_SITE}", slot.foreign), text=lock.text)
        on_progress(Progress("installing", 0, len(lock.pins), "packages"))
        async with self._sandboxes.directory() as work:
            async with self._sandboxes.open(slot, work, packages.max_environment_bytes, egress=False) as sandbox:
                python = await sandbox.run(task, Listener("installing", total=len(lock.pins)), on_progress)
            walk = Walk()
            limits = packages.max_environment_bytes, self._settings.max_entries
            found = await to_its_end(walk, lambda: _take_over(work / _SITE, staging, limits, python, walk))
        return found, python

    # -- the first import ----------------------------------------------------------------------------------------

    async def _warm_up(
        self,
        slot: BuildSlot,
        lock: Lock,
        packages: PackagesSpec,
        staging: Path,
        python: Python,
        on_progress: OnProgress,
    ) -> int:
        """Makes the bytecode; returns its size. A Python of another version would make useless bytecode."""
        if lock.interpreter != python.interpreter:
            return 0
        order = Order(slot.maker, build_spec(slot.image, egress=False), BuildMounts(environment=staging))
        site = os.open(staging / _SITE, _DIRECTORY)
        try:
            written = await warm_up(
                order,
                site,
                names_of(packages.requirements or lock.pins),  # a policy's lock file is one environment for all
                cache_tag=cache_tag_of(python.version),
                time_s=self._settings.first_import_time_s,
                on_progress=on_progress,
            )
        finally:
            os.close(site)
        return written.size_bytes


def _take_over(installed: Path, staging: Path, limits: tuple[int, int], python: Python, walk: Walk) -> tree.Tree:
    """Moves the installed directory to `staging`, and checks it there. Its build sandbox is gone. Blocks.

    Raises EnvironmentFailed, Stopped, OSError.
    """
    installed.rename(staging / _SITE)
    parent = os.open(staging, _DIRECTORY)
    try:
        os.fchmod(parent, 0o755)
        found = tree.take_over(parent, _SITE, *limits, walk)
        with tree.opened_directory(_SITE, parent) as site:
            tree.make_scripts_portable(site, python.executable)
    except tree.TreeRefused as refusal:
        raise EnvironmentFailed(f"the environment of these packages is refused: {refusal}") from refusal
    finally:
        os.close(parent)
    return found


def _read_policy_lock(packages: PackagesSpec) -> tuple[Pin, ...]:
    """Reads the policy's lock file, as it was when the policy was read. Raises EnvironmentFailed, OSError."""
    with Path(packages.lock_file).open("rb") as file:
        content = file.read(MAX_LOCK_BYTES + 1)
    if hashlib.sha256(content).hexdigest() != packages.lock_sha256:
        raise EnvironmentFailed("the lock file has changed since the policy was read: reload the policy")
    try:
        pins = read_lock_file(content.decode())
    except (LockError, UnicodeDecodeError) as error:
        raise EnvironmentFailed(f"the policy's lock file can't be used: {error}") from error
    missing = set(names_of(packages.requirements)) - {pin.name for pin in pins}
    if missing:
        raise EnvironmentFailed(f"the policy's lock file does not have {', '.join(sorted(missing))}")
    return pins
