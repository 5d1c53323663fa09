"""What bubblewrap and the first process of a sandbox write to standard error: kept for whoever asks why it failed.

Not a pipe. A sandbox outlives the daemon, and must neither fail because nobody holds the other end any more nor wait
because nobody reads; and what a guest says, however much, must fit into a bound. So it is a file in memory of a fixed
size: what comes first is kept, and a write past its end is refused.
"""

from __future__ import annotations

import fcntl
import os

COMPLAINT_BYTES = 4096
"""At most one page, so that no part of a write that fits is refused."""

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def open_complaints() -> int:
    """The file, to be handed to the sandbox as its standard error. All who write share its position."""
    fd = os.memfd_create("complaints", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, COMPLAINT_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_complaints(fd: int) -> str:
    """What was written so far. Names host paths: never for a client."""
    return os.pread(fd, COMPLAINT_BYTES, 0).rstrip(b"\0").decode("utf-8", "backslashreplace").strip()
