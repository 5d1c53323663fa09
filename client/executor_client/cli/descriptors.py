"""Reads and writes, on an event loop, descriptors that other programs share.

They stay in blocking mode, because the flag belongs to the open file, which we share with the shell. So each read and
write first waits until the kernel reports the descriptor ready, and writes are small enough not to block then.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable
from typing import Any

READ_BYTES = 65_536
_WRITE_BYTES = 4_096
"""Bytes that a ready pipe accepts without blocking: PIPE_BUF of Linux."""


async def read_some(descriptor: int) -> bytes:
    """Waits for bytes and returns at most READ_BYTES; b"" at the end, or if the terminal hung up."""
    loop = asyncio.get_running_loop()
    while True:
        await _ready(descriptor, loop.add_reader, loop.remove_reader)
        try:
            return os.read(descriptor, READ_BYTES)
        except BlockingIOError:  # another program read them
            continue
        except OSError as error:
            if error.errno == errno.EIO:
                return b""
            raise


async def write_all(descriptor: int, data: bytes) -> None:
    """Writes all data. Raises BrokenPipeError, OSError."""
    loop = asyncio.get_running_loop()
    left = memoryview(data)
    while left:
        if not _takes(descriptor):
            await _ready(descriptor, loop.add_writer, loop.remove_writer)
        try:
            written = os.write(descriptor, left[:_WRITE_BYTES])
        except BlockingIOError:
            await asyncio.sleep(0)
            continue
        left = left[written:]


def _takes(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


async def _ready(descriptor: int, add: Callable[[int, Callable[[], Any]], None], remove: Callable[[int], bool]) -> None:
    event = asyncio.Event()
    try:
        add(descriptor, event.set)
    except PermissionError:
        return  # epoll refuses regular files, which are always ready
    try:
        await event.wait()
    finally:
        remove(descriptor)
