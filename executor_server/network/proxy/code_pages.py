"""Gives the memory of a library's code back that is needed for moments, hours apart.

Making a certificate runs through 7 MB of the code and constants of `cryptography`, a sixth of the process, and each
host needs one a day. The kernel keeps such pages for the process until memory is short. They are a file's, unchanged:
given back, they are mapped again where they are needed, which takes 0.2 ms for a certificate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)


class CodePages:
    """The pages of one library that is loaded."""

    def __init__(self, library: str) -> None:
        """`library` is its path. Where the kernel does not say what is mapped, nothing is given back."""
        try:
            self._ranges = tuple(_unchanged(library))
        except OSError:
            self._ranges = ()

    def release(self) -> None:
        for start, end in self._ranges:
            # A refusal costs memory and nothing else.
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _unchanged(library: str) -> Iterator[tuple[int, int]]:
    """Yields the parts of the library's mapping that can't be written to and never were.

    The loader writes addresses into other parts, and protects some of these afterwards: given back, they would hold the
    file's content, and the next use would crash.
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
