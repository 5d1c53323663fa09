"""The format of a state, the variables of an interpreter as bytes, and the reader of its index.

    segments | index (JSON) | u32 length of the index

One pickler writes all variables, each as a segment of its own, so that shared objects stay shared. The protocol is 3,
the last one that numbers its memo: an unreadable segment leaves a hole, and each segment that refers to it fails, too.
With the positional memo of later protocols it would get another object.

Functions and classes of the program travel by value and live in the new namespace, with its builtins: the meter counts
them and the rules hold for them. Modules travel by name and are imported as the program would import them. All other
names in a pickle are held to the rules too, since a pickle is code. Only interpreters, inside sandboxes, write and read
states: export.py in a copy of the process, so that an endless `__reduce__` costs only the copy, restore.py in the
interpreter that gets the variables, within a time limit of the supervisor.
"""

from __future__ import annotations

import os
import struct

from ..wire.lean import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_VARIABLES = 2048
MAX_NAME_CHARS = 256
MAX_REASON_CHARS = 300
# Characters of the names of all variables together.
MAX_NAMES_CHARS = 64 * 1024
MAX_OMITTED = 512
MAX_INDEX_BYTES = 4 * 1024 * 1024
PICKLE_PROTOCOL = 3
LENGTH = struct.Struct("!I")


class NotPickled(Exception):
    """One or all variables can't be written or read; the message is the reason."""


def read_index(fd: int, size: int) -> dict[str, Any]:
    """Returns the index of a state, checked and bounded. Raises NotPickled when the file is not a state."""
    try:
        (length,) = LENGTH.unpack(os.pread(fd, LENGTH.size, size - LENGTH.size))
        if length > min(MAX_INDEX_BYTES, size - LENGTH.size):
            raise ValueError("a length past its bound")
        data = os.pread(fd, length, size - LENGTH.size - length)
        index = loads(data)
        segments, python = index["variables"], index["python"]
        texts = all(type(each["name"]) is str and len(each["name"]) <= MAX_NAME_CHARS for each in segments)
        sizes = [each["bytes"] for each in segments]
        whole = all(type(each) is int and each >= 0 for each in sizes)
        flags = all(type(each["code"]) is bool for each in segments)
        rules = all(type(each) is str for each in index["refused"])
        if not (rules and texts and whole and flags and len(segments) <= MAX_VARIABLES and len(python) == 3):
            raise ValueError("an index of another form")
        if sum(sizes) != size - LENGTH.size - length:
            raise ValueError("other sizes than it has")
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise NotPickled("these variables were not written by a session") from error
    return dict(index)


def omitted_entries(omitted: dict[str, str], max_named: int = MAX_OMITTED) -> list[dict[str, str]]:
    """Returns the names and reasons of the variables left out: at most `max_named`, in a bounded number of bytes."""
    entries = [
        {"name": _plain(name, MAX_NAME_CHARS), "reason": _plain(why, MAX_REASON_CHARS)}
        for name, why in list(omitted.items())[:max_named]
    ]
    if len(omitted) > max_named:
        entries.append({"name": "(others)", "reason": f"{len(omitted) - max_named} more are left out"})
    return entries


def _plain(text: str, max_chars: int) -> str:
    """Returns printable ASCII, no character of which takes more than two bytes of JSON."""
    escaped = text[:max_chars].encode("ascii", "backslashreplace").decode()
    return "".join(each if " " <= each <= "~" else f"\\x{ord(each):02x}" for each in escaped)[:max_chars]
