"""The variables of an interpreter as bytes, for another interpreter: written and read inside sandboxes only.

Theory of operation. `export` forks: the copy of the interpreter pickles, so that whatever pickling runs of agent code
(a `__reduce__` that never returns, that ends the process, that changes what it is asked for) costs the copy. The copy
says which variable it has come to; one that kills it, or takes too long, is left out and another copy is made, a few
times.
`restore` must be done by the interpreter that is to have the variables, and is given a time by the supervisor.

All variables are pickled by one pickler, each as a segment of its own, so that what two of them share they share
afterwards. The protocol is 3, the last one that numbers its memo: a segment that can't be read leaves a hole, and what
refers to it fails too, instead of getting something else. An index stands at the end:

    segments | index (JSON) | u32 length of the index

Functions and classes of the program travel by value and live in the new namespace, with its builtins: the meter counts
them and the rules hold for them. Modules travel by name and are imported as the program would import them. Whatever
else a pickle names is held to the rules too: a pickle is code. It never meets the supervisor or the daemon.
"""

from __future__ import annotations

import os
import struct

from .lean import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_VARIABLES = 2048
MAX_NAME_CHARS = 256
MAX_REASON_CHARS = 300
MAX_NAMES_CHARS = 64 * 1024
"""Of all variables."""
MAX_OMITTED = 512
MAX_INDEX_BYTES = 4 * 1024 * 1024
PICKLE_PROTOCOL = 3
LENGTH = struct.Struct("!I")


class NotPickled(Exception):
    """Why a variable, or all of them, can't be written or read."""


def read_index(fd: int, size: int) -> dict[str, Any]:
    """The index of a state. Raises NotPickled for what is none."""
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
    except (OSError, struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotPickled("these are no variables that were written by a session") from error
    return dict(index)


def said_of(omitted: dict[str, str], max_named: int = MAX_OMITTED) -> list[dict[str, str]]:
    """What is said of variables that are left out, and why: of so many, in a bounded number of bytes."""
    said = [
        {"name": _plain(name, MAX_NAME_CHARS), "reason": _plain(why, MAX_REASON_CHARS)}
        for name, why in list(omitted.items())[:max_named]
    ]
    if len(omitted) > max_named:
        said.append({"name": "(others)", "reason": f"{len(omitted) - max_named} more are left out"})
    return said


def _plain(text: str, max_chars: int) -> str:
    """Printable ASCII, of which no character takes more than two bytes of JSON."""
    escaped = text[:max_chars].encode("ascii", "backslashreplace").decode()
    return "".join(each if " " <= each <= "~" else f"\\x{ord(each):02x}" for each in escaped)[:max_chars]
