"""The standard error of bubblewrap and of a sandbox's first process, kept to explain why a sandbox failed.

It is a file and not a pipe. A sandbox outlives the daemon, and must neither fail because the other end was closed nor
wait because it is not read; and the text of a guest must have a bound. So it is a file in memory of a fixed size: the
first bytes are kept, and a write past its end is refused.
"""

from __future__ import annotations

import fcntl
import os

STDERR_BYTES = 4096
"""One page at most, so that no part of a write that fits is refused."""

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def open_stderr() -> int:
    """Makes the file, which becomes the sandbox's standard error. All processes that write share its position."""
    fd = os.memfd_create("stderr", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, STDERR_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_stderr(fd: int) -> str:
    """Returns the text so far. It names host paths: never for a client."""
    return os.pread(fd, STDERR_BYTES, 0).rstrip(b"\0").decode("utf-8", "backslashreplace").strip()
