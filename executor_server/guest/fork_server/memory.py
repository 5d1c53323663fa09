"""Arranges the template process's memory so that a fork copies little of it.

A fork copies an entry for each page of 4 KiB, and each of a sandbox's three processes is a fork: with the usual
libraries that is most of what a sandbox costs. A huge page is one entry for 512 of them. The kernel makes huge pages of
memory that is contiguous over 2 MiB, which the arenas of Python's small objects are not, since shared libraries are
mapped between them. So they are taken ahead, in one piece.

A child that writes to a huge page copies 4 KiB of it, as it would without.
"""

from __future__ import annotations

import ctypes
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_HUGE_BYTES = 2 * 1024 * 1024
_MADV_COLLAPSE = 25  # Linux 6.1
# obmalloc.c since Python 3.10: an arena of 1 MiB has at least 63 pools, each of 31 blocks of the largest size.
_ARENAS_SINCE = (3, 10)
_POOL_BLOCKS, _ARENA_BLOCKS = 31, 63 * 31
_BLOCK_BYTES = 512

_libc = ctypes.CDLL(None, use_errno=True)


def take_arenas(count: int) -> list[object]:
    """Makes Python take `count` arenas from the kernel. Returns a few blocks of each, and frees the others for Python's
    own allocator, which would give an unused arena back to the kernel.

    These blocks fill whole pools, since a pool with room is used before the next arena. Older versions, with smaller
    arenas, go without.
    """
    if sys.version_info < _ARENAS_SINCE:
        return []
    blocks: list[object] = [None] * (count * _ARENA_BLOCKS)  # not grown later: that would leave holes between arenas
    content_bytes = _BLOCK_BYTES - sys.getsizeof(b"")
    for number in range(len(blocks)):
        blocks[number] = bytes(content_bytes)
    kept = 2 * _POOL_BLOCKS  # one whole pool, wherever they begin
    return [block for first in range(0, len(blocks), _ARENA_BLOCKS) for block in blocks[first : first + kept]]


def use_huge_pages() -> None:
    """Makes huge pages of this process's memory, where the kernel does so."""
    for start, end in _anonymous_memory():
        for address in range(-(-start // _HUGE_BYTES) * _HUGE_BYTES, end - _HUGE_BYTES + 1, _HUGE_BYTES):
            # One by one: for a range, the kernel stops at the first page that it can't make. A failure is harmless.
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_BYTES), ctypes.c_int(_MADV_COLLAPSE))


def _anonymous_memory() -> Iterator[tuple[int, int]]:
    with open("/proc/self/maps") as file:
        lines = file.readlines()
    for line in lines:
        addresses, rights, _offset, _device, _inode, *path = line.split()
        if rights == "rw-p" and path in ([], ["[heap]"]):
            start, _, end = addresses.partition("-")
            yield int(start, 16), int(end, 16)
