"""The local backend: sandboxes made of Linux namespaces by bubblewrap, on this host, without a service or an account.

It works for root and for an ordinary user; `check_host` reports, and `start` requires, that this host can isolate.
These walls confine a sandbox, from outside in: a host user of its own (under root's daemon; else the daemon's user),
namespaces of every kind, no network, a file system of its own (layout.py), a control group or else resource limits
(cgroups.py), no capabilities, no new privileges, and a filter of system calls (seccomp_program.py). process.py puts
them up in order.
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

from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.directory import SOCKET_NAME, BackendDirectory, new_sandbox_id
from executor_server.backends.local.descriptors import read_within
from executor_server.backends.local.egress import EgressFiles
from executor_server.backends.local.file_counts import limit_files
from executor_server.backends.local.host import Examination, examine_host
from executor_server.backends.local.images import Image, probe_image
from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.backends.local.process import BwrapProcess
from executor_server.backends.local.records import ProcessRecord, Record, write_record
from executor_server.backends.local.recovery import recover, still_serves
from executor_server.backends.local.resources import Resources
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.backends.local.system import neutral_directory
from executor_server.backends.settings import BACKLOG, TOKEN_BYTES, guest_config
from executor_server.backends.teardown import Creations, check_none_left, destroy_failed, failures_of
from executor_server.backends.users import DEFAULT_UID_BASE, HostUsers
from executor_server.channel import SocketEndpoint
from executor_server.config import LocalImage
from executor_server.core import ImageNotReady, SandboxFailure, SandboxSpec
from executor_server.guest.wire.paths import GUEST_BOOT
from executor_server.guest.wire.tokens import CHAIN_LENGTH

DEFAULT_IMAGE = "base"
# Below the state directory: a directory for each sandbox, and the files that all of them mount.
_SANDBOXES, _RUNTIME = "sandboxes", "runtime"
_CREATE_TIMEOUT_S = 20.0
_SWEEP_TIMEOUT_S = 30.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _HostCapabilities:
    """The parts that `start` found and took possession of, and `close` releases."""

    resources: Resources
    directory: BackendDirectory
    users: HostUsers | None
    images: dict[str, Image]  # as they are now; those of `resources` are as they were at the start


class LocalBackend:
    """Implements `executor_server.backends.base.Backend`.

    `images` maps names to Python environments of this host; without any, "base" is the interpreter of the daemon.
    `egress_bundle` returns the file of the egress proxy's certificate authorities, or raises SandboxFailure; without
    it, sandboxes can have no network.
    """

    def __init__(
        self,
        state_dir: Path,
        images: Mapping[str, LocalImage] | None = None,
        *,
        bwrap: Path | None = None,
        egress_bundle: Callable[[], Path] | None = None,
    ) -> None:
        self._state_dir = state_dir.absolute()
        self._images = dict(images or {DEFAULT_IMAGE: LocalImage(python=Path(sys.executable))})
        self._bwrap = bwrap
        self._egress_files = EgressFiles(egress_bundle)
        self._capabilities: _HostCapabilities | None = None
        self._live: set[LocalSandbox] = set()  # from before a sandbox has any part until no part is left
        self._creations = Creations()
        self._probing = asyncio.Lock()

    @property
    def name(self) -> str:
        return "local"

    async def start(self) -> None:
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _SANDBOXES)
        try:
            found = await self._examine()
            if found.resources is None:
                raise found.refusal("local")
        except BaseException:
            directory.release()
            raise
        # The first user is the examination's: at the next start it must not be that of an adopted sandbox.
        users = HostUsers(found.uids[1:]) if found.uids else None
        self._capabilities = _HostCapabilities(found.resources, directory, users, dict(found.resources.images))

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, LocalSandbox]:
        capabilities = self._started()
        tokens = {sandbox.sandbox_id: sandbox.token for sandbox in known}
        found = self._recover(capabilities, tokens)
        adopted = {
            sandbox.sandbox_id: sandbox for sandbox in found if sandbox.sandbox_id in tokens and still_serves(sandbox)
        }
        swept = await self._remove(capabilities, [sandbox for sandbox in found if sandbox.sandbox_id not in adopted])
        if adopted or swept:
            _log.info("sandboxes_adopted", adopted=len(adopted), swept=swept)
        return adopted

    async def sweep(self) -> int:
        capabilities = self._started()
        failed = [sandbox for sandbox in self._live if sandbox.teardown.has_failed]
        return await self._remove(capabilities, [*failed, *self._recover(capabilities, {})])

    async def fingerprint(self, spec: SandboxSpec) -> str:
        capabilities = self._started()
        resources = await self._resources(capabilities, spec)
        return _fingerprint(resources, await self._image(capabilities, spec.image), spec)

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        capabilities = self._started()
        with self._creations.one():
            image = await self._image(capabilities, spec.image)
            resources = await self._resources(capabilities, spec)
            sandbox = self._new_sandbox(capabilities, _fingerprint(resources, image, spec))
            try:
                await _build(sandbox, resources, capabilities.directory.daemon_id, image, spec)
            except BaseException as error:
                await destroy_failed(sandbox)
                if isinstance(error, OSError):  # no descriptors, memory or space left
                    raise SandboxFailure(f"cannot make a sandbox: {error}") from error
                raise
            return sandbox

    async def check_host(self) -> Sequence[HostFinding]:
        return (await self._examine()).findings

    async def close(self) -> None:
        capabilities, self._capabilities = self._capabilities, None
        await self._creations.finished()
        failures = await failures_of(sandbox.destroy() for sandbox in self._live)
        if capabilities is not None:
            capabilities.directory.release()
        check_none_left(failures)

    def _started(self) -> _HostCapabilities:
        if self._capabilities is None:
            raise SandboxFailure("the local backend is not started")
        return self._capabilities

    async def _examine(self) -> Examination:
        base = DEFAULT_UID_BASE if os.geteuid() == 0 else None
        return await examine_host(neutral_directory(self._state_dir / _RUNTIME), self._images, self._bwrap, base)

    async def _image(self, capabilities: _HostCapabilities, name: str) -> Image:
        """Returns the image as it is now: an environment may be rebuilt at any time, even from another Python."""
        image = capabilities.images.get(name)
        if image is None:
            raise SandboxFailure(f"no image {name!r}")
        if image.is_current():
            return image
        async with self._probing:
            if not capabilities.images[name].is_current():
                configured = self._images[name]
                try:
                    capabilities.images[name] = await asyncio.to_thread(
                        probe_image, name, configured.python, configured.preload
                    )
                except SandboxFailure as problem:
                    _log.warning("image_not_usable", image=name, error=str(problem))
                    raise ImageNotReady(f"image {name!r} cannot be used as it is now") from problem
                _log.info("image_changed", image=name)
            return capabilities.images[name]

    async def _resources(self, capabilities: _HostCapabilities, spec: SandboxSpec) -> Resources:
        if not spec.egress:
            return capabilities.resources
        return await self._egress_files.added_to(capabilities.resources)

    # -----------------------------------------------------------------------------------------------------------------
    # Sandboxes of this daemon and of earlier ones

    def _new_sandbox(self, capabilities: _HostCapabilities, fingerprint: str) -> LocalSandbox:
        host_uid = capabilities.users.take() if capabilities.users else None
        sandbox_id = new_sandbox_id()
        directory = capabilities.directory.of(sandbox_id)
        endpoint = SocketEndpoint(directory / SOCKET_NAME, secrets.token_bytes(TOKEN_BYTES))
        forget = self._forgetting(capabilities.users)
        sandbox = LocalSandbox(sandbox_id, directory, endpoint, fingerprint, forget, host_uid=host_uid)
        self._live.add(sandbox)
        return sandbox

    def _recover(self, capabilities: _HostCapabilities, tokens: Mapping[str, bytes]) -> list[LocalSandbox]:
        """Returns the sandboxes that have a directory and are not known yet; they are known, and their users taken."""
        known = {sandbox.sandbox_id for sandbox in self._live}
        forget = self._forgetting(capabilities.users)
        try:
            unknown = [sandbox_id for sandbox_id in capabilities.directory.sandbox_ids() if sandbox_id not in known]
            found = [recover(capabilities.directory.of(name), tokens.get(name, b""), forget) for name in unknown]
        except OSError as error:
            raise SandboxFailure(f"cannot look for sandboxes of an earlier daemon: {error}") from error
        for sandbox in found:
            self._live.add(sandbox)
            if capabilities.users and sandbox.host_uid is not None:
                capabilities.users.reserve(sandbox.host_uid)
        return found

    def _forgetting(self, users: HostUsers | None) -> Callable[[LocalSandbox], None]:
        def forget(sandbox: LocalSandbox) -> None:
            self._live.discard(sandbox)
            if users and sandbox.host_uid is not None:
                users.release(sandbox.host_uid)

        return forget

    async def _remove(self, capabilities: _HostCapabilities, sandboxes: Sequence[LocalSandbox]) -> int:
        """Destroys these, and control groups of no sandbox; returns how many. Tries all before it raises."""
        deadline = asyncio.get_running_loop().time() + _SWEEP_TIMEOUT_S
        results = await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes), return_exceptions=True)
        # After the sandboxes: one that a killed daemon was making may have a group that no record names yet.
        living = {sandbox.sandbox_id for sandbox in self._live}
        groups = capabilities.resources.leftover_cgroups(capabilities.directory.daemon_id, living)
        results += await asyncio.gather(*(group.remove(deadline) for group in groups), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            _log.warning("sandbox_left_over", error=str(failure))
        if failures:
            raise SandboxFailure(f"{len(failures)} sandboxes can't be removed: {failures[0]}") from failures[0]
        return len(results)


def _fingerprint(resources: Resources, image: Image, spec: SandboxSpec) -> str:
    layout = resources.layout
    network = f"-{layout.etc.name}" if spec.egress else ""  # another bundle makes another /etc
    return f"{spec.fingerprint}-{image.identity}-{layout.guest.version}{network}"


async def _build(sandbox: LocalSandbox, resources: Resources, daemon_id: str, image: Image, spec: SandboxSpec) -> None:
    """Acquires the sandbox's parts on the host, step by step; `destroy` releases those that are there."""
    deadline = asyncio.get_running_loop().time() + _CREATE_TIMEOUT_S
    sandbox.directory.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        sandbox.cgroup = resources.make_cgroup(daemon_id, sandbox.sandbox_id, spec)
        # Bound outside, in a directory that only we can enter: no file inside leads to the supervisor.
        listener = stack.enter_context(_listen(sandbox.endpoint.socket_path))
        ready_read, ready_write = os.pipe()
        stack.callback(os.close, ready_read)
        with contextlib.closing(os.fdopen(ready_write, "wb")):
            cpu_fd = sandbox.cgroup.open_cpu_counter() if sandbox.cgroup is not None else None
            if cpu_fd is not None:
                stack.callback(os.close, cpu_fd)
            config = _guest_config(resources, image, spec, sandbox, listener.fileno(), cpu_fd)
            command = [str(image.python), "-I", "-S", "-c", GUEST_BOOT, json.dumps(config), str(ready_write)]
            pass_fds = (listener.fileno(), ready_write, *(() if cpu_fd is None else (cpu_fd,)))
            process = resources.start(image, spec, command, cgroup=sandbox.cgroup, pass_fds=pass_fds)
            sandbox.process = process

        def record(pid: int) -> None:
            write_record(sandbox.directory, _record_of(sandbox, pid, process.popen.pid))

        await process.confine_and_release(
            host_uid=sandbox.host_uid, rlimits=resources.rlimits(spec), on_held=record, deadline=deadline
        )
        answer = await read_within(ready_read, 1, deadline)
    if not answer:
        state = "does not start in time" if answer is None else "ended at once"
        raise SandboxFailure(f"the guest {state}: {process.last_words()}")
    await _limit_files(process, spec)


async def _limit_files(process: BwrapProcess, spec: SandboxSpec) -> None:
    """Limits the files before anything is sent to the guest. A host that does not allow it serves all the same."""
    assert process.init_pid is not None
    try:
        if os.geteuid() == 0:  # a few system calls
            limit_files(process.init_pid, spec.max_files)
        else:
            await asyncio.to_thread(limit_files, process.init_pid, spec.max_files)
    except OSError as error:
        _warn_of_files(str(error))


@lru_cache(maxsize=8)  # one warning for each reason
def _warn_of_files(reason: str) -> None:
    _log.warning("files_not_limited", reason=reason)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
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
    resources: Resources, image: Image, spec: SandboxSpec, sandbox: LocalSandbox, listen_fd: int, cpu_fd: int | None
) -> dict[str, object]:
    return {
        "listen_fd": listen_fd,
        **({} if cpu_fd is None else {"cpu_fd": cpu_fd}),
        "drop_to": None if sandbox.host_uid is None else [SANDBOX_ID, SANDBOX_ID],
        **guest_config(
            spec,
            token=sandbox.endpoint.token,
            connections_max=CHAIN_LENGTH,
            memory_bytes=spec.memory_bytes,
            watch_memory=not resources.limits_memory,
            preload=image.preload,
        ),
    }
