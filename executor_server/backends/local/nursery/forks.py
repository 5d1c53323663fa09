"""The forks of a nursery's zygote, from the request until one waits for the plan of its sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from executor_server.backends.local.descriptors import is_readable, kill, wait_readable, wait_readable_too
from executor_server.backends.local.nursery.packets import now, packet_pair, receive
from executor_server.backends.local.records import parent_of
from executor_server.backends.local.stderr_file import open_stderr, read_stderr
from executor_server.core import SandboxFailure
from executor_server.guest.wire.nursery_messages import FAILED, HERE

if TYPE_CHECKING:
    from executor_server.backends.local.nursery.nursery import Nursery

ANSWER_TIME_S = 2.0
"""Seconds to wait for the zygote's fork, and for each of its answers; bubblewrap is there for what takes longer."""
# Seconds to wait for the wait status of a process that has ended: the zygote reads it at once.
_STATUS_TIME_S = 1.0


class NoBirth(Exception):
    """No sandbox came of it, and nothing is left of the attempt. `reason` is a word for the metric."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class NurseryProcess:
    """The first process of a sandbox that a zygote forked. Implements `SandboxProcess`."""

    def __init__(self, nursery: Nursery, pid: int, ended: asyncio.Future[int]) -> None:
        """Raises OSError when there is no such process, and NoBirth when it is not the zygote's child."""
        self.nursery_id = nursery.nursery_id
        self.init_pid: int = pid
        self.stderr = open_stderr()
        self._ended = ended
        self._word: socket.socket | None = None  # to a sandbox that no session has yet
        self._init_pidfd: int | None = None
        try:
            self._init_pidfd = _open_child(pid, nursery.zygote_pid)
        except BaseException:
            os.close(self.stderr)
            raise

    def keep(self, word: socket.socket) -> None:
        """Keeps the socket to it until a session has it. If the daemon dies before, the sandbox ends at once."""
        self._word = word

    def give(self, memory_bytes: int) -> None:
        """Sends it the memory of the session that has it from now on. Raises OSError when it has ended."""
        assert self._word is not None, "a sandbox that a session has already"
        with self._word:
            self._word.send(b"%d" % memory_bytes)
        self._word = None

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
        # Its parent, the zygote, has reaped it when the status is here; without a zygote the nursery's first one does.
        await asyncio.wait([self._ended], timeout=_STATUS_TIME_S)
        self.release()

    def release(self) -> None:
        """Releases what the daemon holds of it. Idempotent."""
        if self._word is not None:
            self._word.close()
            self._word = None
        if self._init_pidfd is not None:
            os.close(self._init_pidfd)
            os.close(self.stderr)
            self._init_pidfd = None


async def ask_fork(nursery: Nursery) -> tuple[NurseryProcess, socket.socket]:
    """Has the zygote fork; returns a process that waits for its plan, and our end of the socket to it.

    Raises NoBirth; a fork that comes too late ends by itself then.
    """
    ours, theirs = packet_pair()
    try:
        with theirs:
            try:
                ended = nursery.request(theirs)
            except OSError as error:
                raise NoBirth("silent", f"the zygote can't be asked: {error}") from error
        data, pid = await next_packet(ours)
        if data != HERE or pid <= 0:
            raise NoBirth("failed", f"the fork says {data[:80]!r}")
        try:
            return NurseryProcess(nursery, pid, ended), ours
        except OSError as error:
            raise NoBirth("failed", f"the fork has ended: {error}") from error
    except BaseException:
        ours.close()
        raise


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


async def next_packet(ours: socket.socket) -> tuple[bytes, int]:
    """Waits for a packet of a fork; returns it with its sender. Raises NoBirth."""
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
