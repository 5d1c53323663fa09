"""The local backend: sandboxes made of Linux namespaces by bubblewrap, on this host, without a service or an account.

It works for root and for an ordinary user; `check_host` says, and `start` insists, that this host can isolate. What
confines a sandbox, from outside in: a host user of its own (under root's daemon; else the daemon's user), namespaces of
every kind, no network, a file system of its own (layout.py), a control group or else resource limits (cgroups.py), no
capabilities, no new privileges, and a filter of system calls (seccomp_program.py). process.py says in which order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import structlog

from executor_server.backend_config import LocalImage
from executor_server.backends.base import HostFinding, KnownSandbox, SocketEndpoint
from executor_server.backends.directory import SOCKET_NAME, BackendDirectory, new_sandbox_id
from executor_server.backends.endings import check_none_left, failures_of
from executor_server.backends.local.descriptors import read_within
from executor_server.backends.local.file_counts import limit_files
from executor_server.backends.local.host import Examination, examine_host
from executor_server.backends.local.images import Image, probe_image
from executor_server.backends.local.kit import Kit
from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.backends.local.process import BwrapProcess
from executor_server.backends.local.records import ProcessRecord, Record, write_record
from executor_server.backends.local.recovery import recover, still_serves
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.backends.local.system import neutral_directory
from executor_server.backends.users import DEFAULT_UID_BASE, HostUsers
from executor_server.errors import ImageNotReady, SandboxFailure
from executor_server.guest.tokens import CHAIN_LENGTH, chained
from executor_server.guest_archive import GUEST_BOOT
from executor_server.model import SandboxSpec

DEFAULT_IMAGE = "base"
# Below the state directory: a directory for each sandbox, and what all of them mount.
_SANDBOXES, _RUNTIME = "sandboxes", "runtime"
_CREATE_TIMEOUT_S = 20.0
_SWEEP_TIMEOUT_S = 30.0
_TOKEN_BYTES = 32
_BACKLOG = 8  # one daemon connects; the rest is room for its retries

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Means:
    """What `start` found and took possession of, and `close` gives back."""

    kit: Kit
    directory: BackendDirectory
    users: HostUsers | None
    images: dict[str, Image]  # as they are now; the kit's are those of the start


class LocalBackend:
    """Implements `executor_server.backends.base.Backend`.

    `images` maps names to Python environments of this host; without any, "base" is the interpreter of the daemon.
    """

    def __init__(
        self,
        state_dir: Path,
        images: Mapping[str, LocalImage] | None = None,
        *,
        bwrap: Path | None = None,
        uid_base: int = DEFAULT_UID_BASE,
    ) -> None:
        self._state_dir = state_dir.absolute()
        self._images = dict(images or {DEFAULT_IMAGE: LocalImage(python=Path(sys.executable))})
        self._bwrap = bwrap
        self._uid_base = uid_base
        self._means: _Means | None = None
        self._live: set[LocalSandbox] = set()  # from before there is anything of it until nothing is left of it
        self._creations: set[asyncio.Future[None]] = set()
        self._probing = asyncio.Lock()

    @property
    def name(self) -> str:
        return "local"

    async def start(self) -> None:
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _SANDBOXES)
        try:
            found = await self._examine()
            if found.kit is None:
                missing = [finding for finding in found.findings if finding.required and not finding.ok]
                told = " ".join(f"{finding.subject}: {finding.detail} {finding.remedy}" for finding in missing)
                raise SandboxFailure(f"this host cannot run local sandboxes. {told}")
        except BaseException:
            directory.release()
            raise
        # The first user is the examination's: an adopted sandbox must not meet it at the next start.
        users = HostUsers(found.uids[1:]) if found.uids else None
        self._means = _Means(found.kit, directory, users, dict(found.kit.images))

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, LocalSandbox]:
        means = self._started()
        tokens = {sandbox.sandbox_id: sandbox.token for sandbox in known}
        found = self._recover(means, tokens)
        adopted = {
            sandbox.sandbox_id: sandbox for sandbox in found if sandbox.sandbox_id in tokens and still_serves(sandbox)
        }
        swept = await self._remove(means, [sandbox for sandbox in found if sandbox.sandbox_id not in adopted])
        if adopted or swept:
            _log.info("sandboxes_adopted", adopted=len(adopted), swept=swept)
        return adopted

    async def sweep(self) -> int:
        means = self._started()
        undead = [sandbox for sandbox in self._live if sandbox.ending.has_failed]
        return await self._remove(means, [*undead, *self._recover(means, {})])

    async def fingerprint(self, spec: SandboxSpec) -> str:
        means = self._started()
        return _fingerprint(means, await self._image(means, spec.image), spec)

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        means = self._started()
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creations.add(finished)
        try:
            image = await self._image(means, spec.image)
            sandbox = self._new_sandbox(means, _fingerprint(means, image, spec))
            try:
                await _build(sandbox, means, image, spec)
            except BaseException as error:
                await sandbox.destroy()
                if isinstance(error, OSError):  # out of descriptors, of memory, of space
                    raise SandboxFailure(f"cannot make a sandbox: {error}") from error
                raise
            return sandbox
        finally:
            self._creations.discard(finished)
            finished.set_result(None)

    async def check_host(self) -> Sequence[HostFinding]:
        return (await self._examine()).findings

    async def close(self) -> None:
        means, self._means = self._means, None
        # Not under their hands: a creation ends by itself, soon, and then its sandbox is known to be whole or gone.
        await asyncio.gather(*self._creations)
        failures = await failures_of(sandbox.destroy() for sandbox in self._live)
        if means is not None:
            means.directory.release()
        check_none_left(failures)

    def _started(self) -> _Means:
        if self._means is None:
            raise SandboxFailure("the local backend is not started")
        return self._means

    async def _examine(self) -> Examination:
        base = self._uid_base if os.geteuid() == 0 else None
        return await examine_host(neutral_directory(self._state_dir / _RUNTIME), self._images, self._bwrap, base)

    async def _image(self, means: _Means, name: str) -> Image:
        """The image as it is now: an environment may be rebuilt under our hands, even from another Python."""
        image = means.images.get(name)
        if image is None:
            raise SandboxFailure(f"no image {name!r}")
        if image.is_current():
            return image
        async with self._probing:
            if not means.images[name].is_current():
                configured = self._images[name]
                try:
                    means.images[name] = await asyncio.to_thread(
                        probe_image, name, configured.python, configured.preload
                    )
                except SandboxFailure as problem:
                    _log.warning("image_not_usable", image=name, error=str(problem))
                    raise ImageNotReady(f"image {name!r} cannot be used as it is now") from problem
                _log.info("image_changed", image=name)
            return means.images[name]

    # -----------------------------------------------------------------------------------------------------------------
    # The sandboxes that are there, whoever made them

    def _new_sandbox(self, means: _Means, fingerprint: str) -> LocalSandbox:
        host_uid = means.users.take() if means.users else None
        sandbox_id = new_sandbox_id()
        directory = means.directory.of(sandbox_id)
        endpoint = SocketEndpoint(directory / SOCKET_NAME, secrets.token_bytes(_TOKEN_BYTES))
        forget = self._forgetting(means.users)
        sandbox = LocalSandbox(sandbox_id, directory, endpoint, fingerprint, forget, host_uid=host_uid)
        self._live.add(sandbox)
        return sandbox

    def _recover(self, means: _Means, tokens: Mapping[str, bytes]) -> list[LocalSandbox]:
        """What has a directory and is not known yet. From here on it is, and its user is taken."""
        known = {sandbox.sandbox_id for sandbox in self._live}
        forget = self._forgetting(means.users)
        try:
            unknown = [sandbox_id for sandbox_id in means.directory.sandbox_ids() if sandbox_id not in known]
            found = [recover(means.directory.of(name), tokens.get(name, b""), forget) for name in unknown]
        except OSError as error:
            raise SandboxFailure(f"cannot look for sandboxes of an earlier daemon: {error}") from error
        for sandbox in found:
            self._live.add(sandbox)
            if means.users and sandbox.host_uid is not None:
                means.users.reserve(sandbox.host_uid)
        return found

    def _forgetting(self, users: HostUsers | None) -> Callable[[LocalSandbox], None]:
        def forget(sandbox: LocalSandbox) -> None:
            self._live.discard(sandbox)
            if users and sandbox.host_uid is not None:
                users.release(sandbox.host_uid)

        return forget

    async def _remove(self, means: _Means, sandboxes: Sequence[LocalSandbox]) -> int:
        """Destroys these, and the control groups of none; says how many. Tries all before it raises SandboxFailure."""
        deadline = asyncio.get_running_loop().time() + _SWEEP_TIMEOUT_S
        results = await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes), return_exceptions=True)
        # After them: what a killed daemon was making may have a group that no record of it names yet.
        living = {sandbox.sandbox_id for sandbox in self._live}
        groups = means.kit.leftover_cgroups(means.directory.daemon_id, living)
        results += await asyncio.gather(*(group.remove(deadline) for group in groups), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            _log.warning("sandbox_left_over", error=str(failure))
        if failures:
            raise SandboxFailure(f"{len(failures)} sandboxes can't be removed: {failures[0]}") from failures[0]
        return len(results)


def _fingerprint(means: _Means, image: Image, spec: SandboxSpec) -> str:
    return f"{spec.fingerprint}-{image.identity}-{means.kit.layout.guest.version}"


async def _build(sandbox: LocalSandbox, means: _Means, image: Image, spec: SandboxSpec) -> None:
    """Everything that the sandbox holds on the host, step by step; whatever is there, `destroy` gives back."""
    deadline = asyncio.get_running_loop().time() + _CREATE_TIMEOUT_S
    kit = means.kit
    sandbox.directory.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        sandbox.cgroup = kit.make_cgroup(means.directory.daemon_id, sandbox.sandbox_id, spec)
        # Bound out here, in a directory that only we can enter: inside, no file leads to the supervisor.
        listener = stack.enter_context(_listen(sandbox.endpoint.socket_path))
        ready_read, ready_write = os.pipe()
        stack.callback(os.close, ready_read)
        with contextlib.closing(os.fdopen(ready_write, "wb")):
            cpu_fd = sandbox.cgroup.open_cpu_counter() if sandbox.cgroup is not None else None
            if cpu_fd is not None:
                stack.callback(os.close, cpu_fd)
            config = _guest_config(kit, image, spec, sandbox, listener.fileno(), cpu_fd)
            command = [str(image.python), "-I", "-S", "-c", GUEST_BOOT, json.dumps(config), str(ready_write)]
            pass_fds = (listener.fileno(), ready_write, *(() if cpu_fd is None else (cpu_fd,)))
            process = kit.start(image, spec, command, cgroup=sandbox.cgroup, pass_fds=pass_fds)
            sandbox.process = process

        def write_down(pid: int) -> None:
            write_record(sandbox.directory, _record_of(sandbox, pid, process.popen.pid))

        await process.confine_and_release(
            host_uid=sandbox.host_uid, rlimits=kit.rlimits(spec), on_held=write_down, deadline=deadline
        )
        answer = await read_within(ready_read, 1, deadline)
    if not answer:
        state = "does not start in time" if answer is None else "ended at once"
        raise SandboxFailure(f"the guest {state}: {process.last_words()}")
    await _limit_files(process, spec)


async def _limit_files(process: BwrapProcess, spec: SandboxSpec) -> None:
    """Before the guest is told anything. A host that does not allow it is told of, and serves all the same."""
    assert process.init_pid is not None
    try:
        if os.geteuid() == 0:  # a few system calls
            limit_files(process.init_pid, spec.max_files)
        else:
            await asyncio.to_thread(limit_files, process.init_pid, spec.max_files)
    except OSError as error:
        _tell_of_files(str(error))


@lru_cache(maxsize=8)  # once for each reason
def _tell_of_files(reason: str) -> None:
    _log.warning("files_not_limited", reason=reason)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _record_of(sandbox: LocalSandbox, first_pid: int, monitor_pid: int) -> Record:
    return Record(
        sandbox_id=sandbox.sandbox_id,
        fingerprint=sandbox.fingerprint,
        first=ProcessRecord.of(first_pid),
        monitor=ProcessRecord.of(monitor_pid),
        host_uid=sandbox.host_uid,
        cgroup=sandbox.cgroup,
    )


def _guest_config(
    kit: Kit, image: Image, spec: SandboxSpec, sandbox: LocalSandbox, listen_fd: int, cpu_fd: int | None
) -> dict[str, object]:
    return {
        "listen_fd": listen_fd,
        **({} if cpu_fd is None else {"cpu_fd": cpu_fd}),
        "token_hash": chained(sandbox.endpoint.token, CHAIN_LENGTH).hex(),
        "workspace": "/workspace",
        "orphan_time_s": spec.orphan_time_s,
        "memory_bytes": spec.memory_bytes,
        "processes": spec.processes,
        "drop_to": None if sandbox.host_uid is None else [SANDBOX_ID, SANDBOX_ID],
        "watch_memory": not kit.limits_memory,
        "preload": list(image.preload),
    }
