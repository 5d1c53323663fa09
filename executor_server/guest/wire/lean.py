"""The C cores of json, socket, signal and collections, without the Python around them.

A sandbox is ready when its supervisor answers, and imports would take most of that time: json imports re and enum,
socket imports selectors, and typing costs as much as the whole supervisor. So the supervisor's modules import these
parts from here, and typing only for type checkers. The interpreter and the checker run later, and import as usual.
"""

from __future__ import annotations

from executor_api.strict_json import NotJson, reader, writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections import deque
    from typing import Any
else:
    import _signal as signal
    import _socket as socket
    from _collections import deque

__all__ = ["NotJson", "accept", "deque", "dumps", "loads", "passed_descriptors", "signal", "socket"]


# Bytes of a descriptor in ancillary data.
_INT_BYTES = 4


loads = reader()
_write = writer(ascii_only=True)


def dumps(value: Any) -> bytes:
    """Like json.dumps, compact and ASCII, for objects and arrays."""
    return _write(value).encode("ascii")


def accept(listener: socket.socket) -> socket.socket:
    """Returns the next connection. Raises OSError."""
    fd, _ = listener._accept()  # type: ignore[attr-defined]
    return socket.socket(fileno=fd)


def passed_descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Returns the descriptors in the ancillary data of `recvmsg`. The caller owns them."""
    passed: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = memoryview(data)
            passed += numbers[: len(numbers) // _INT_BYTES * _INT_BYTES].cast("i")
    return passed
