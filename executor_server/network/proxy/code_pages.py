"""Releases the memory of a library's code that is rarely used.

Creating a certificate touches 7 MB of code and constants of `cryptography`, a sixth of the process, once a day for each
host. The kernel keeps such pages until memory is short. They are unchanged pages of a file, so after a release they are
mapped again when needed, which takes 0.2 ms for a certificate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)


class CodePages:
    """The pages of one loaded library."""

    def __init__(self, library: str) -> None:
        """`library` is its path. If the kernel does not report the mappings, nothing is released."""
        try:
            self._ranges = tuple(_unchanged(library))
        except OSError:
            self._ranges = ()

    def release(self) -> None:
        for start, end in self._ranges:
            # A failure costs only memory.
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _unchanged(library: str) -> Iterator[tuple[int, int]]:
    """Yields the parts of the library's mapping that are read-only and were never written.

    The loader writes addresses into other parts, and makes some of them read-only afterwards. After a release, they
    would have the file's content, and the next use would crash.
    """
    start = end = 0
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as mappings:
        for line in mappings:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):  # the first line of a mapping: its range, its rights, …, its path
                rights, path = rest[:4], rest.rstrip("\n").partition("/")[2]
                start, end = (int(number, 16) for number in name.split("-"))
                if "w" in rights or f"/{path}" != library:
                    end = start
            elif name == "Anonymous:" and end > start and rest.split() == ["0", "kB"]:
                yield start, end
