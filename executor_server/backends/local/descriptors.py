"""Waits for file descriptors on the event loop, pipes that fill and processes that end, with absolute deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal


async def wait_readable(fd: int, deadline: float) -> bool:
    """Waits until `fd` can be read (for a pidfd: until its process has ended). False when the deadline came first."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[bool] = loop.create_future()
    loop.add_reader(fd, _settle, readable, True)
    timer = loop.call_at(deadline, _settle, readable, False)
    try:
        return await readable
    finally:
        timer.cancel()
        loop.remove_reader(fd)


async def wait_readable_too(fd: int, deadline: float) -> bool:
    """Waits on a duplicate: another task may wait for `fd`, or close it, and the loop allows one waiter each."""
    own = os.dup(fd)
    try:
        return await wait_readable(own, deadline)
    finally:
        os.close(own)


def _settle(readable: asyncio.Future[bool], is_readable: bool) -> None:
    if not readable.done():  # the loop may report it once more before the waiter runs
        readable.set_result(is_readable)


async def read_within(fd: int, limit_bytes: int, deadline: float) -> bytes | None:
    """Reads once there is something to read; b"" at the end of the stream, None when the deadline came first."""
    if not await wait_readable(fd, deadline):
        return None
    return os.read(fd, limit_bytes)


def is_readable(fd: int) -> bool:
    """True when it can be read right now; for a pidfd, when its process has ended."""
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def kill(pidfd: int) -> None:
    """Sends SIGKILL, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
