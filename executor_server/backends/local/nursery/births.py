"""Makes one sandbox by a fork of a nursery's zygote, up to the moment at which its guest serves.

The order, and the race that each step closes:

1. The zygote gets one end of a new socket, and nothing else. The other end is ours alone, so only the
   fork can answer. If it never comes, closing our end is enough: a fork that comes late reads the end and exits.
2. `HERE` carries the process id from the kernel, and a handle (pidfd) is opened. The id belongs to another process if
   the fork has ended meanwhile, and a process that is no child of the zygote gets no handle: nothing else is ever
   killed here. A later packet with the same id, which only the living fork can send, then confirms it.
3. Only then the plan goes to the fork. Sent earlier it would lie in the socket for a fork that comes late: a listener
   and a configuration, without a daemon that watches.
4. The record is written while the fork builds its walls, and before it serves: so a later daemon finds each sandbox
   that ever ran anything.
5. The report, and what the kernel says of the process, are compared with what must be (verification.py), and `SERVE` is
   sent. A fork that is not as it must be is killed here, having run nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from executor_server.backends.local.descriptors import is_readable, kill, wait_readable, wait_readable_too
from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.backends.local.nursery.nursery import Nursery
from executor_server.backends.local.nursery.packets import now, packet_pair, receive, send_with
from executor_server.backends.local.nursery.verification import fault_of, fault_of_process
from executor_server.backends.local.records import parent_of
from executor_server.backends.local.stderr_file import open_stderr, read_stderr
from executor_server.core import SandboxFailure
from executor_server.guest.wire.nursery_messages import FAILED, HERE, MAX_PLAN_FDS, PACKET_BYTES, SERVE, SERVING

ANSWER_TIME_S = 2.0
"""Seconds to wait for the zygote's fork, and for each of its answers; bubblewrap is there for what takes longer."""
# Seconds for a killed fork to end.
_END_TIME_S = 5.0
# Seconds to wait for the wait status of a process that has ended: the zygote reads it at once.
_STATUS_TIME_S = 1.0


class NoBirth(Exception):
    """No sandbox came of it, and nothing is left of the attempt. `reason` is a word for the metric."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class SandboxPlan:
    """One sandbox, for the process that becomes it."""

    guest: Mapping[str, object]  # the guest's configuration (guest/main.py), without descriptors
    sizes: Mapping[str, int]  # bytes of `disk` and `shm`; `files` in each file system
    rlimits: Mapping[int, int]
    host_uid: int | None
    seccomp: bytes
    environment: Mapping[str, str]
    below_tmp: Sequence[str]  # directories of the image there, to be seen in the sandbox's own /tmp
    listener: int  # descriptors of the daemon
    cpu_counter: int | None
    groups: Sequence[int]  # files by which it joins its control groups

    def packed(self, stderr: int) -> tuple[bytes, list[int]]:
        """Returns the packet, and the descriptors that go with it."""
        named = {"stderr": stderr, "listen": self.listener}
        if self.cpu_counter is not None:
            named["cpu"] = self.cpu_counter
        plan = {
            "fds": list(named),
            "guest": dict(self.guest),
            "sizes": dict(self.sizes),
            "rlimits": list(self.rlimits.items()),
            "host_uid": self.host_uid,
            "uid": SANDBOX_ID,
            "seccomp": base64.b64encode(self.seccomp).decode(),
            "environment": dict(self.environment),
            "below_tmp": list(self.below_tmp),
        }
        packet, fds = json.dumps(plan).encode(), [*named.values(), *self.groups]
        if len(packet) > PACKET_BYTES or len(fds) > MAX_PLAN_FDS:
            raise NoBirth("unsupported", f"a plan of {len(packet)} bytes and {len(fds)} descriptors")
        return packet, fds

    @property
    def kept_descriptors(self) -> int:
        """Descriptors that the process has when it reports: streams, its socket, the listener, the counter."""
        return 5 + (self.cpu_counter is not None)


class NurseryProcess:
    """The first process of a sandbox that a zygote forked. Implements `SandboxProcess`."""

    def __init__(self, nursery: Nursery, pid: int, stderr: int, ended: asyncio.Future[int]) -> None:
        """Raises OSError when there is no such process, and NoBirth when it is not the zygote's child."""
        self.nursery_id = nursery.nursery_id
        self.init_pid: int = pid
        self._init_pidfd: int | None = _open_child(pid, nursery.zygote_pid)
        self._stderr = stderr
        self._ended = ended

    def has_ended(self) -> bool:
        return self._init_pidfd is None or is_readable(self._init_pidfd)

    async def exit_code(self, deadline: float) -> int | None:
        if self._init_pidfd is not None:
            await wait_readable_too(self._init_pidfd, deadline)
        if not self.has_ended():
            return None
        await asyncio.wait([self._ended], timeout=_STATUS_TIME_S)
        if not self._ended.done() or self._ended.cancelled():
            return None
        status = self._ended.result()
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def last_words(self) -> str:
        return "" if self._init_pidfd is None else read_stderr(self._stderr)

    async def kill_and_reap(self, deadline: float) -> None:
        if self._init_pidfd is None:
            return
        kill(self._init_pidfd)
        # Readable only when the kernel has killed and reaped every other process of the namespace.
        if not await wait_readable(self._init_pidfd, deadline):
            raise SandboxFailure(f"process {self.init_pid} of a sandbox does not end")
        # Its parent, the zygote, has reaped it when the status is here; without a zygote the nursery's first one does.
        await asyncio.wait([self._ended], timeout=_STATUS_TIME_S)
        os.close(self._init_pidfd)
        os.close(self._stderr)
        self._init_pidfd = None


async def bear(nursery: Nursery, plan: SandboxPlan, on_here: Callable[[int, NurseryProcess], None]) -> NurseryProcess:
    """Makes a sandbox. `on_here` gets its first process, before that runs anything of the sandbox.

    Raises NoBirth, and what `on_here` raises; nothing of the sandbox is left then.
    """
    ours, theirs = packet_pair()
    process: NurseryProcess | None = None
    stderr = open_stderr()
    try:
        with theirs:
            try:
                ended = nursery.request(theirs)
            except OSError as error:
                raise NoBirth("silent", f"the zygote can't be asked: {error}") from error
        pid = await _expect(ours, HERE, None, nursery)
        try:
            process = NurseryProcess(nursery, pid, stderr, ended)
            send_with(ours, *plan.packed(stderr))
        except OSError as error:
            raise NoBirth("failed", f"the fork can't be sent its plan: {error}") from error
        on_here(pid, process)
        report = await _report(ours, pid)
        fault = fault_of(report, plan, nursery.namespaces) or fault_of_process(pid, report, plan, nursery.namespaces)
        if fault:
            raise NoBirth("unverified", f"the sandbox is not as it must be: {fault}")
        try:
            ours.send(SERVE)
        except OSError as error:
            raise NoBirth("failed", f"the fork has ended: {error}") from error
        await _expect(ours, SERVING, pid, nursery)
    except BaseException:
        await _undo(process, stderr)
        raise
    finally:
        ours.close()
    return process


def _open_child(pid: int, parent: int | None) -> int:
    """Opens a handle of a child, whose id may be that of a process with another parent by now."""
    pidfd = os.pidfd_open(pid)
    try:
        if parent is None or parent_of(pid) != parent or is_readable(pidfd):  # readable: the parent was another's
            raise NoBirth("failed", "the fork has ended")
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


async def _expect(ours: socket.socket, word: bytes, pid: int | None, nursery: Nursery) -> int:
    """Waits for this packet, of this process if it is known; returns the sender."""
    data, sender = await _next(ours)
    if data != word or (pid is not None and sender != pid) or sender <= 0:
        raise NoBirth("failed", f"the fork says {data[:80]!r}")
    return sender


async def _report(ours: socket.socket, pid: int) -> dict[str, object]:
    data, sender = await _next(ours)
    try:
        report = json.loads(data)
    except ValueError as error:
        raise NoBirth("failed", f"the fork says {data[:80]!r}") from error
    if sender != pid or not isinstance(report, dict):
        raise NoBirth("failed", "another process than the fork answers")
    return report


async def _next(ours: socket.socket) -> tuple[bytes, int]:
    try:
        packet = await receive(ours, now() + ANSWER_TIME_S)
    except OSError as error:
        raise NoBirth("failed", f"no answer: {error}") from error
    if packet is None:
        raise NoBirth("silent", f"no answer within {ANSWER_TIME_S:g} s")
    if not packet.data:
        raise NoBirth("failed", "the fork, or the zygote, has ended")
    if packet.data.startswith(FAILED):
        raise NoBirth("failed", packet.data[len(FAILED) :].decode("utf-8", "backslashreplace"))
    return packet.data, packet.pid


async def _undo(process: NurseryProcess | None, stderr: int) -> None:
    if process is None:
        os.close(stderr)
        return
    await asyncio.shield(process.kill_and_reap(now() + _END_TIME_S))
