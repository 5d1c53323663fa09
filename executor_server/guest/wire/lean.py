"""The C cores of json, socket, signal and collections, without the Python around them.

A sandbox is ready when its supervisor answers, and most of the time until then would go into imports: json brings re
and enum, socket brings selectors, typing costs as much as all of the supervisor. So the supervisor's modules take what
they need from here, and typing only when a type checker reads them. Whatever runs later, the interpreter and the
checker, imports as usual.
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
    """As json.dumps, compact and ASCII, for objects and arrays."""
    return _write(value).encode("ascii")


def accept(listener: socket.socket) -> socket.socket:
    """The next connection. Raises OSError."""
    fd, _ = listener._accept()  # type: ignore[attr-defined]
    return socket.socket(fileno=fd)


def passed_descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Returns the descriptors that came with a message, by the ancillary data of `recvmsg`. They are the caller's."""
    passed: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = memoryview(data)
            passed += numbers[: len(numbers) // _INT_BYTES * _INT_BYTES].cast("i")
    return passed
