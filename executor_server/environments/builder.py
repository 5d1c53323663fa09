"""Makes environments with uv: the steps, each in a workshop of its own, and the checks between them.

1. Resolve. uv, in a workshop whose only way out is the index, turns requirements into a list of versions and hashes.
   Its output is read strictly (lock.py); a policy's own lock file is read in its place.
2. Install. A second uv gets nothing but those lines. It installs into a directory of the mount that its cache is in, so
   files are hard links. No code of a package runs in either workshop: only wheels are taken, and wheels run nothing.
3. Take over. The directory is moved out of that mount, checked and taken over by trusted code (tree.py), and its files
   are compared with the lists of their packages (recorded.py).
4. First import, in a workshop that can write nothing that is kept (warm_up.py).

The daemon itself never imports or runs anything of an environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from executor_server.backends import Target, Workshop
from executor_server.core import EnvironmentFailed, PackagesSpec, Progress
from executor_server.egress import Egress
from executor_server.environments import tree
from executor_server.environments.building import Built, Lock, OnProgress
from executor_server.environments.file_list import Walk, to_its_end
from executor_server.environments.lock import (
    MAX_LOCK_BYTES,
    LockError,
    Pin,
    canonical,
    names_of,
    read_lock_file,
    read_requirements,
)
from executor_server.environments.places import Places
from executor_server.environments.recorded import check_recorded
from executor_server.environments.uv import INSTALLING, UV_PATH, Listener, compile_command, install_command
from executor_server.environments.uv_workshops import Bench, BuildSettings, Python, UvTask, UvWorkshops, workshop_spec
from executor_server.environments.warm_up import STEP as FIRST_IMPORT
from executor_server.environments.warm_up import cache_tag_of, warm_up
from executor_server.environments.workshop import Order
from executor_server.guest.wire.paths import WORK_PATH

_LOCK_NAME = "lock.txt"
_SITE = "site"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_log = structlog.get_logger(__name__)


class UvBuilder:
    """Implements `Builder`."""

    def __init__(
        self, places: Places, settings: BuildSettings, bench: Callable[[Target], Bench], egress: Egress
    ) -> None:
        """`bench` returns the workshops for a target, or raises SandboxFailure."""
        self._places = places
        self._settings = settings
        self._bench = bench
        self._workshops = UvWorkshops(places, settings, egress)

    async def resolve(self, packages: PackagesSpec, target: Target, on_progress: OnProgress) -> Lock:
        on_progress(Progress("resolving"))
        bench = self._bench(target)
        uv = await self._workshops.placed()
        if packages.lock_file:
            pins = await asyncio.to_thread(_read_policy_lock, packages)
            python = await self._describe(bench, packages)
        else:
            pins, python = await self._compile(bench, packages, on_progress)
        return Lock(
            text=canonical(pins),
            interpreter=bench.foreign.interpreter if bench.foreign else python.interpreter,
            platform=bench.foreign.platform if bench.foreign else python.platform,
            uv_version=uv.version,
            pins=tuple(sorted(map(str, pins))),
        )

    async def make(
        self, lock: Lock, packages: PackagesSpec, target: Target, staging: Path, on_progress: OnProgress
    ) -> Built:
        bench = self._bench(target)
        await self._workshops.placed()
        began_s = time.monotonic()
        name = secrets.token_hex(8)
        python = await self._install(bench, lock, packages, name, on_progress)
        walk = Walk()
        found = await to_its_end(walk, lambda: self._take_over(name, staging, packages, python, walk))
        installed_s = time.monotonic()
        on_progress(Progress(FIRST_IMPORT))
        bytecode_bytes = await self._warm_up(bench, lock, packages, staging, python, on_progress)
        _log.info(
            "environment_built",
            environment_id=lock.environment_id,
            packages=len(found.pins),
            installed_s=round(installed_s - began_s, 2),
            first_import_s=round(time.monotonic() - installed_s, 2),
        )
        digests = {f"{_SITE}/{path}": digest for path, digest in found.digests.items()}
        return Built(tuple(found.modules), tuple(found.pins), found.size_bytes + bytecode_bytes, digests)

    # -- resolving -----------------------------------------------------------------------------------------------

    async def _compile(
        self, bench: Bench, packages: PackagesSpec, on_progress: OnProgress
    ) -> tuple[tuple[Pin, ...], Python]:
        task = UvTask(
            compile_command(self._settings.index_url, packages.exclude_newer_s, bench.foreign),
            packages.max_environment_bytes,
            text="".join(f"{requirement}\n" for requirement in packages.requirements),
            output=f"/workspace/{_LOCK_NAME}",
        )
        async with self._workshops.open(bench, packages.max_environment_bytes) as workshop:
            python = await self._workshops.run(workshop, bench, task, Listener("resolving"), on_progress)
            text = b"".join([chunk async for chunk in workshop.take_file(_LOCK_NAME, MAX_LOCK_BYTES)])
        try:
            return read_requirements(text.decode()), python
        except (LockError, UnicodeDecodeError) as error:
            raise EnvironmentFailed(f"the packages can't be locked: {error}") from error

    async def _describe(self, bench: Bench, packages: PackagesSpec) -> Python:
        """Asks the image's Python what it is, and whether uv runs there."""
        task = UvTask([UV_PATH, "--version"], packages.max_environment_bytes)
        async with self._workshops.open(bench, packages.max_environment_bytes) as workshop:
            return await self._workshops.run(workshop, bench, task, Listener("resolving"), lambda _: None)

    # -- installing ----------------------------------------------------------------------------------------------

    async def _install(
        self, bench: Bench, lock: Lock, packages: PackagesSpec, name: str, on_progress: OnProgress
    ) -> Python:
        directory = f"{WORK_PATH}/{INSTALLING}/{name}"
        command = install_command(self._settings.index_url, "-", f"{directory}/{_SITE}", bench.foreign)
        task = UvTask(command, packages.max_environment_bytes, text=lock.text, directory=directory)
        on_progress(Progress("installing", 0, len(lock.pins), "packages"))
        async with self._workshops.open(bench, packages.max_environment_bytes) as workshop:
            listener = Listener("installing", total=len(lock.pins))
            return await self._workshops.run(workshop, bench, task, listener, on_progress)

    def _take_over(self, name: str, staging: Path, packages: PackagesSpec, python: Python, walk: Walk) -> tree.Tree:
        """Moves what was installed to `staging`, and checks it there. Its workshop has gone. Blocks.

        Raises EnvironmentFailed, FilesDamaged, Stopped, OSError.
        """
        with contextlib.ExitStack() as stack:

            def opened(part: str | Path, directory: int | None = None) -> int:
                fd = os.open(part, _DIRECTORY, dir_fd=directory)
                stack.callback(os.close, fd)
                return fd

            # Part by part: what is in `work` belongs to the workshops' user, who could have put a link there.
            installing = opened(INSTALLING, opened(self._places.work))
            target = opened(staging)
            os.rename(_SITE, _SITE, src_dir_fd=opened(name, installing), dst_dir_fd=target)
            os.fchmod(target, 0o755)
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=installing)
            limit = packages.max_environment_bytes
            try:
                found = tree.take_over(target, _SITE, limit, self._settings.max_entries, walk)
                site = opened(_SITE, target)
                check_recorded(site, found.infos, found.digests)
            except tree.TreeRefused as refusal:
                raise EnvironmentFailed(f"the environment of these packages is refused: {refusal}") from refusal
            tree.make_scripts_portable(site, python.executable)
        return found

    # -- the first import ----------------------------------------------------------------------------------------

    async def _warm_up(
        self, bench: Bench, lock: Lock, packages: PackagesSpec, staging: Path, python: Python, on_progress: OnProgress
    ) -> int:
        """Makes the bytecode; returns its bytes. A Python of another version makes none that is of use."""
        if lock.interpreter != python.interpreter:
            return 0
        order = Order(bench.workshops, workshop_spec(bench.image, egress=False), Workshop(environment=staging))
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


def _read_policy_lock(packages: PackagesSpec) -> tuple[Pin, ...]:
    """Reads the policy's lock file, as it was when the policy was read. Raises EnvironmentFailed, OSError."""
    with Path(packages.lock_file).open("rb") as file:
        content = file.read(MAX_LOCK_BYTES + 1)
    if hashlib.sha256(content).hexdigest() != packages.lock_sha256:
        raise EnvironmentFailed("the lock file has changed since the policy was read: have the policy read again")
    try:
        pins = read_lock_file(content.decode())
    except (LockError, UnicodeDecodeError) as error:
        raise EnvironmentFailed(f"the policy's lock file can't be used: {error}") from error
    missing = set(names_of(packages.requirements)) - {pin.name for pin in pins}
    if missing:
        raise EnvironmentFailed(f"the policy's lock file does not have {', '.join(sorted(missing))}")
    return pins
