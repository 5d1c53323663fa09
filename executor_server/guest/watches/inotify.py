"""inotify(7), which the standard library lacks.

This module is imported after agent code has run, which may have changed the image's standard library. So it uses only
modules that the supervisor has loaded before (wire/libc.py), and not ctypes.
"""

from __future__ import annotations

import os
import struct

from ..wire.libc import checked_function

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

MODIFY, MOVED_FROM, MOVED_TO = 0x2, 0x40, 0x80
CREATE, DELETE, DELETE_SELF, MOVE_SELF = 0x100, 0x200, 0x400, 0x800
OVERFLOW, IGNORED, IS_DIRECTORY = 0x4000, 0x8000, 0x40000000
ONLY_DIRECTORIES = 0x01000000
_MASK = MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | ONLY_DIRECTORIES

_EVENT = struct.Struct("iIII")
_READ_BYTES = 64 * 1024
_init = checked_function("inotify_init1")
_add_watch = checked_function("inotify_add_watch")
_rm_watch = checked_function("inotify_rm_watch")


class Inotify:
    """One inotify descriptor. Raises OSError if the host's limits of descriptors and watches are reached."""

    def __init__(self) -> None:
        self.fd = _init(os.O_NONBLOCK | os.O_CLOEXEC)

    def add(self, directory: int) -> int:
        """Watches an open directory, and returns the number of its watch, which may exist already."""
        # By its descriptor: a path could lead elsewhere by now.
        return _add_watch(self.fd, b"/proc/self/fd/%d" % directory, _MASK)

    def remove(self, watch: int) -> None:
        """Ends a watch, unless it has ended with its directory."""
        try:
            _rm_watch(self.fd, watch)
        except OSError:
            pass  # its directory was deleted

    def read(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields (watch, events, name), as many as one read returns."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return
        place = 0
        while place < len(data):
            watch, events, _cookie, length = _EVENT.unpack_from(data, place)
            place += _EVENT.size
            yield watch, events, data[place : place + length].rstrip(b"\0")
            place += length

    def close(self) -> None:
        os.close(self.fd)
