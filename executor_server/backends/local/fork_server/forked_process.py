"""The forks of a fork server's template process, from the request until one waits for the plan of its sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from executor_server.backends.local.descriptors import is_readable, kill, wait_readable, wait_readable_too
from executor_server.backends.local.fork_server.packets import now, packet_pair, receive
from executor_server.backends.local.records import parent_of
from executor_server.backends.local.stderr_file import open_stderr, read_stderr
from executor_server.core import SandboxFailure
from executor_server.guest.wire.fork_server_messages import FAILED, HERE

if TYPE_CHECKING:
    from executor_server.backends.local.fork_server.fork_server import ForkServer

ANSWER_TIME_S = 2.0
"""Seconds to wait for a fork, and for each of its answers; bubblewrap makes what takes longer."""
# Seconds to wait for the wait status of a process that has ended: the template process reads it at once.
_STATUS_TIME_S = 1.0


class ForkFailed(Exception):
    """The fork made no sandbox, and nothing is left of the attempt. `reason` is a word for the metric."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ForkedProcess:
    """The first process of a sandbox that a template process forked. Implements `SandboxProcess`."""

    def __init__(self, fork_server: ForkServer, pid: int, ended: asyncio.Future[int]) -> None:
        """Raises OSError when there is no such process, and ForkFailed when it is not the template process's child."""
        self.fork_server_id = fork_server.fork_server_id
        self.init_pid: int = pid
        self.stderr = open_stderr()
        self._ended = ended
        self._init_pidfd: int | None = None
        try:
            self._init_pidfd = _open_child(pid, fork_server.template_pid)
        except BaseException:
            os.close(self.stderr)
            raise

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
        return "" if self._init_pidfd is None else read_stderr(self.stderr)

    async def kill_and_reap(self, deadline: float) -> None:
        if self._init_pidfd is None:
            return
        kill(self._init_pidfd)
        # Readable only when the kernel has killed and reaped every other process of the namespace.
        if not await wait_readable(self._init_pidfd, deadline):
            raise SandboxFailure(f"process {self.init_pid} of a sandbox does not end")
        # When the status is here, its parent, the template process, has reaped it. Without a template process, the fork
        # server's first process reaps it.
        await asyncio.wait([self._ended], timeout=_STATUS_TIME_S)
        self.release()

    def release(self) -> None:
        """Releases what the daemon holds of it. Idempotent."""
        if self._init_pidfd is not None:
            os.close(self._init_pidfd)
            os.close(self.stderr)
            self._init_pidfd = None


async def ask_fork(fork_server: ForkServer) -> tuple[ForkedProcess, socket.socket]:
    """Has the template process fork; returns a process that waits for its plan, and our end of the socket to it.

    Raises ForkFailed; a fork that comes too late ends by itself then.
    """
    ours, theirs = packet_pair()
    try:
        with theirs:
            try:
                ended = fork_server.request(theirs)
            except OSError as error:
                raise ForkFailed("silent", f"the template process can't be asked: {error}") from error
        data, pid = await next_packet(ours)
        if data != HERE or pid <= 0:
            raise ForkFailed("failed", f"the fork says {data[:80]!r}")
        try:
            return ForkedProcess(fork_server, pid, ended), ours
        except OSError as error:
            raise ForkFailed("failed", f"the fork has ended: {error}") from error
    except BaseException:
        ours.close()
        raise


def _open_child(pid: int, parent: int | None) -> int:
    """Opens a handle of a child; its id may already belong to a process with another parent."""
    pidfd = os.pidfd_open(pid)
    try:
        if parent is None or parent_of(pid) != parent or is_readable(pidfd):  # readable: it has ended
            raise ForkFailed("failed", "the fork has ended")
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


async def next_packet(ours: socket.socket) -> tuple[bytes, int]:
    """Waits for a packet of a fork; returns it with its sender. Raises ForkFailed."""
    try:
        packet = await receive(ours, now() + ANSWER_TIME_S)
    except OSError as error:
        raise ForkFailed("failed", f"no answer: {error}") from error
    if packet is None:
        raise ForkFailed("silent", f"no answer within {ANSWER_TIME_S:g} s")
    if not packet.data:
        raise ForkFailed("failed", "the fork, or the template process, has ended")
    if packet.data.startswith(FAILED):
        raise ForkFailed("failed", packet.data[len(FAILED) :].decode("utf-8", "backslashreplace"))
    return packet.data, packet.pid
