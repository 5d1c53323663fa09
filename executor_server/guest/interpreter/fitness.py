"""Checks after each program that the interpreter's process can run another one.

Programs use up descriptors, lower limits and replace modules that the interpreter needs. Each run repairs some of that
(streams.py). The rest is found here, at the end of the run that caused it, so that the next run is not blamed. The
answer need not be true: an unfit interpreter is replaced, and one that hides it fails at its next program.
"""

from __future__ import annotations

import linecache
import os
import resource
import sys

from ..wire.link_messages import MAX_REASON_CHARS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

# Descriptors that a run needs: its message brings up to 4 and a memory file, and an import opens a file.
SPARE_DESCRIPTORS = 6
# Frames that the interpreter's own code needs around a program.
MIN_RECURSION_LIMIT = 100

_dup, _close, _getrlimit, _getrecursionlimit = os.dup, os.close, resource.getrlimit, sys.getrecursionlimit


def why_unfit(null: int, encode: Optional[Callable[[object], object]]) -> str:
    """Returns why the process can't run another program, as a clause; empty when it can.

    `null` is any open descriptor. `encode` is tried unless it is None.
    """
    try:
        highest = _getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        try:
            lowest_free = _dup(null)
            _close(lowest_free)
        except OSError as problem:
            return f"the program left it no file descriptors ({problem.strerror})"
        if lowest_free > highest >= 0:  # the kernel gives the lowest free one, so only those above it are left
            return f"the program left it fewer than {SPARE_DESCRIPTORS} file descriptors"
        limit = _getrecursionlimit()
        if limit < MIN_RECURSION_LIMIT:
            return f"the program left it a recursion limit of {limit}, and it needs {MIN_RECURSION_LIMIT}"
        if type(linecache.cache) is not dict:
            return "the program replaced the cache of linecache"
        if encode is not None:
            encode(0)
    except Exception as problem:  # noqa: BLE001 (the program may have replaced anything that this uses)
        return reason_of(problem)
    return ""


def reason_of(problem: Exception) -> str:
    """Returns the reason for a failure of the interpreter's own code."""
    try:
        text = str(problem)
    except Exception:  # noqa: BLE001 (as above)
        text = ""
    return f"its own code fails with {type(problem).__name__}: {text}"[:MAX_REASON_CHARS]
