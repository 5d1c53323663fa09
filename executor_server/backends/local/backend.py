"""The local backend: sandboxes made of Linux namespaces by bubblewrap, on this host, without a service or an account.

It works for root and for an ordinary user; `check_host` says, and `start` insists, that this host can isolate. What
confines a sandbox, from outside in: a host user of its own (under root's daemon; else the daemon's user), namespaces of
every kind, no network, a file system of its own (layout.py), a control group or else resource limits (cgroups.py), no
capabilities, no new privileges, and a filter of system calls (seccomp.py). process.py says in which order.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from executor_server.backends.base import GuestEndpoint, HostFinding, KnownSandbox
from executor_server.backends.local.descriptors import read_within
from executor_server.backends.local.host import Examination, examine_host
from executor_server.backends.local.images import Image
from executor_server.backends.local.kit import Kit
from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.backends.local.records import SOCKET_NAME, sweep, write_record
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.backends.local.users import DEFAULT_UID_BASE, HostUsers
from executor_server.config import LocalImage
from executor_server.errors import SandboxFailure
from executor_server.guest.tokens import CHAIN_LENGTH, chained
from executor_server.guest_archive import GUEST_BOOT
from executor_server.model import SandboxSpec

DEFAULT_IMAGE = "base"
_CREATE_TIMEOUT_S = 20.0
_SWEEP_TIMEOUT_S = 30.0
_TOKEN_BYTES = 32
_SANDBOX_ID_BYTES = 8
_DAEMON_ID_BYTES = 4
_BACKLOG = 8  # one daemon connects; the rest is room for its retries
_SOCKET_PATH_BYTES = 107  # sockaddr_un, less the final zero

_log = structlog.get_logger(__name__)


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
        self._kit: Kit | None = None
        self._lock: int | None = None
        self._daemon_id = ""
        self._live: set[LocalSandbox] = set()
        self._creations: set[asyncio.Future[None]] = set()
        self._users: HostUsers | None = None

    @property
    def name(self) -> str:
        return "local"

    @property
    def images(self) -> Sequence[str]:
        return tuple(self._images)

    async def start(self) -> None:
        await asyncio.to_thread(self._take_state_dir)
        try:
            found = await self._examine()
            if found.kit is None:
                missing = [finding for finding in found.findings if finding.required and not finding.ok]
                told = " ".join(f"{finding.subject}: {finding.detail} {finding.remedy}" for finding in missing)
                raise SandboxFailure(f"this host cannot run local sandboxes. {told}")
            self._kit = found.kit
            self._users = HostUsers(found.uids) if found.uids else None
        except BaseException:
            self._release_state_dir()
            raise

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, LocalSandbox]:
        kit, _ = self._parts(known[0].spec.image if known else self.images[0])
        await self._sweep(kit)
        return {}

    async def sweep(self) -> int:
        return 0

    async def fingerprint(self, spec: SandboxSpec) -> str:
        kit, image = self._parts(spec.image)
        return f"{spec.fingerprint}-{kit.layout.guest.version}-{image.python}"

    def _parts(self, image_name: str) -> tuple[Kit, Image]:
        if self._kit is None:
            raise SandboxFailure("the local backend is not started")
        image = self._kit.images.get(image_name)
        if image is None:
            raise SandboxFailure(f"no image {image_name!r}")
        return self._kit, image

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        kit, image = self._parts(spec.image)
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creations.add(finished)
        try:
            sandbox = self._new_sandbox(await self.fingerprint(spec))
            try:
                await self._build(sandbox, kit, image, spec)
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
        self._kit = None
        # Not under their hands: a creation ends by itself, soon, and then its sandbox is known to be whole or gone.
        await asyncio.gather(*self._creations)
        results = await asyncio.gather(*(sandbox.destroy() for sandbox in self._live), return_exceptions=True)
        self._release_state_dir()
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("sandboxes are left over", failures)

    async def _examine(self) -> Examination:
        base = self._uid_base if os.geteuid() == 0 else None
        return await examine_host(self._runtime_dir, self._images, self._bwrap, base)

    # -----------------------------------------------------------------------------------------------------------------
    # Creation

    def _new_sandbox(self, fingerprint: str) -> LocalSandbox:
        host_uid = self._users.take() if self._users else None
        sandbox_id = secrets.token_hex(_SANDBOX_ID_BYTES)
        directory = self._sandboxes_dir / sandbox_id
        endpoint = GuestEndpoint(directory / SOCKET_NAME, secrets.token_bytes(_TOKEN_BYTES))
        sandbox = LocalSandbox(sandbox_id, directory, endpoint, fingerprint, self._forget, host_uid=host_uid)
        self._live.add(sandbox)
        return sandbox

    async def _build(self, sandbox: LocalSandbox, kit: Kit, image: Image, spec: SandboxSpec) -> None:
        deadline = asyncio.get_running_loop().time() + _CREATE_TIMEOUT_S
        sandbox.directory.mkdir(mode=0o700)
        with contextlib.ExitStack() as stack:
            sandbox.cgroup = kit.make_cgroup(self._daemon_id, sandbox.sandbox_id, spec)
            # Bound out here, in a directory that only we can enter: inside, no file leads to the supervisor.
            listener = stack.enter_context(_listen(sandbox.endpoint.socket_path))
            ready_read, ready_write = os.pipe()
            stack.callback(os.close, ready_read)
            with contextlib.closing(os.fdopen(ready_write, "wb")):
                config = _guest_config(kit, image, spec, sandbox, listener.fileno())
                command = [str(image.python), "-I", "-S", "-c", GUEST_BOOT, json.dumps(config), str(ready_write)]
                pass_fds = (listener.fileno(), ready_write)
                sandbox.process = kit.start(image, spec, command, cgroup=sandbox.cgroup, pass_fds=pass_fds)

            def write_down(pid: int) -> None:
                write_record(sandbox.directory, sandbox.sandbox_id, pid, sandbox.cgroup, sandbox.endpoint.token)

            await sandbox.process.confine_and_release(
                host_uid=sandbox.host_uid, rlimits=kit.rlimits(spec), on_held=write_down, deadline=deadline
            )
            answer = await read_within(ready_read, 1, deadline)
        if not answer:
            state = "does not start in time" if answer is None else "ended at once"
            raise SandboxFailure(f"the guest {state}: {sandbox.process.last_words()}")

    def _forget(self, sandbox: LocalSandbox) -> None:
        self._live.discard(sandbox)
        if self._users and sandbox.host_uid is not None:
            self._users.release(sandbox.host_uid)

    # -----------------------------------------------------------------------------------------------------------------
    # The state directory

    @property
    def _sandboxes_dir(self) -> Path:
        return self._state_dir / "sandboxes"

    @property
    def _runtime_dir(self) -> Path:
        return self._state_dir / "runtime"

    def _take_state_dir(self) -> None:
        """Two daemons with one state directory would sweep each other's sandboxes away."""
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sandboxes_dir.mkdir(exist_ok=True, mode=0o700)
        longest = self._sandboxes_dir / ("0" * 2 * _SANDBOX_ID_BYTES) / SOCKET_NAME
        if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES:
            raise SandboxFailure(f"the state directory {self._state_dir} has a path too long for a socket in it")
        lock = os.open(self._sandboxes_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise SandboxFailure(f"another daemon uses the state directory {self._state_dir}") from error
        self._lock = lock
        # The file that holds the lock also holds the name by which this daemon's control groups are known.
        if not os.fstat(lock).st_size:
            os.write(lock, secrets.token_hex(_DAEMON_ID_BYTES).encode())
        self._daemon_id = os.pread(lock, 2 * _DAEMON_ID_BYTES, 0).decode()

    def _release_state_dir(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _sweep(self, kit: Kit) -> None:
        deadline = asyncio.get_running_loop().time() + _SWEEP_TIMEOUT_S
        swept = await sweep(self._sandboxes_dir, deadline)
        for group in kit.leftover_cgroups(self._daemon_id):
            await group.remove(deadline)
        if swept:
            _log.info("sandboxes_swept", count=swept)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _guest_config(
    kit: Kit, image: Image, spec: SandboxSpec, sandbox: LocalSandbox, listen_fd: int
) -> dict[str, object]:
    return {
        "listen_fd": listen_fd,
        "token_hash": chained(sandbox.endpoint.token, CHAIN_LENGTH).hex(),
        "workspace": "/workspace",
        "orphan_time_s": spec.orphan_time_s,
        "memory_bytes": spec.memory_bytes,
        "processes": spec.processes,
        "drop_to": None if sandbox.host_uid is None else [SANDBOX_ID, SANDBOX_ID],
        "watch_memory": not kit.limits_memory,
        "preload": list(image.preload),
    }
