"""Adds up the memory of a sandbox's processes where no control group counts it.

A process's own memory stands in its status. Memory in files belongs to no process, and is counted where it lies: in the
sandbox's file systems; in files without a name (memory files, deleted ones), found by the descriptors that hold them;
in System V segments; and in shared mappings, whose pages stay when no process has them in its tables any more.

Not counted: descriptors and mappings of a process that has closed itself to others (PR_SET_DUMPABLE), since the
supervisor has the same uid, and files whose descriptor is in flight between two sockets. Resource limits bound each
such file, and the machine bounds all of them.
"""

from __future__ import annotations

import os
import stat

from ..wire.proc import pids
from .usage import kilobytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# The sandbox's own file systems in memory; every backend makes them.
_IN_MEMORY = ("/workspace", "/tmp", "/dev/shm")
_SEGMENTS = "/proc/sysvipc/shm"
# Index of the resident size among the fields of a line in _SEGMENTS, from 0.
_RESIDENT_FIELD = 14
_BLOCK_BYTES = 512  # the unit of st_blocks in every file system
# Bytes of mappings that are not the process's own, above which its maps are read: reading them costs time.
_UNEXPLAINED_BYTES = 64 * 1024 * 1024
_ANONYMOUS = b"/dev/zero (deleted)"


def sandbox_exceeds(limit_bytes: int) -> bool:
    """Returns whether all processes in the pid namespace but the supervisor have more.

    Forks share their own memory with each other: the interpreter with its savepoints and with processes that a program
    forks, and all of them with the zygote that the sandbox comes from. First they are added up as if nothing were
    shared, which is fast and mostly enough to know; only above the limit each is charged with its part of such pages.
    """
    return _sandbox_bytes(_own_kilobytes) > limit_bytes and _sandbox_bytes(_share_kilobytes) > limit_bytes


def _sandbox_bytes(own_kilobytes: Callable[[int, bytes], int]) -> int:
    """Returns the bytes of these processes: their own by `own_kilobytes` of number and status, shared, and in files.

    Shared memory is counted once, as far as that is cheap: the larger of the most that one process shares and all that
    lies in files, since either may contain the other.
    """
    own = shared = 0
    nameless: dict[tuple[int, int], int] = {}
    named = {os.stat(place).st_dev for place in _IN_MEMORY}
    for pid in pids():
        try:
            with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
                status = file.read()
        except OSError:
            continue  # it ended meanwhile
        own += own_kilobytes(pid, status)
        shared = max(shared, kilobytes(status, b"RssShmem:"))
        _add_open_files(pid, nameless, named)
        if _unexplained_bytes(status) > _UNEXPLAINED_BYTES:
            _add_shared_mappings(pid, nameless)
    return own * 1024 + max(shared * 1024, _files_bytes() + _segments_bytes() + sum(nameless.values()))


def _own_kilobytes(_pid: int, status: bytes) -> int:
    return kilobytes(status, b"RssAnon:")


def _share_kilobytes(pid: int, status: bytes) -> int:
    """Returns the process's part of the pages that forks share; or all, where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            rollup = file.read()
    except OSError:
        rollup = b""
    return kilobytes(rollup, b"Pss_Anon:") or _own_kilobytes(pid, status)


def _files_bytes() -> int:
    used = 0
    for place in _IN_MEMORY:
        state = os.statvfs(place)
        used += (state.f_blocks - state.f_bfree) * state.f_frsize
    return used


def _add_open_files(pid: int, nameless: dict[tuple[int, int], int], named: set[int]) -> None:
    """Adds open files without a name, unless their file system is counted as a whole."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # it ended, or is undumpable
    for number in descriptors:
        try:
            status = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue  # closed meanwhile
        if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev not in named:
            nameless[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES


def _unexplained_bytes(status: bytes) -> int:
    """Returns the address space that is neither data, stack, program nor library: shared memory or files."""
    known = sum(kilobytes(status, field) for field in (b"VmData:", b"VmStk:", b"VmExe:", b"VmLib:"))
    return (kilobytes(status, b"VmSize:") - known) * 1024


def _add_shared_mappings(pid: int, nameless: dict[tuple[int, int], int]) -> None:
    """Adds shared memory that no descriptor leads to, by its size, since the kernel does not say how much is filled."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            lines = [line for line in file if line.rstrip().endswith(_ANONYMOUS)]
    except OSError:
        return  # it ended, or is closed to others
    for line in lines:
        addresses, _, offset, device, inode = line.split(None, 5)[:5]
        start, _, end = addresses.partition(b"-")
        major, _, minor = device.partition(b":")
        key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
        nameless[key] = max(nameless.get(key, 0), int(offset, 16) + int(end, 16) - int(start, 16))


def _segments_bytes() -> int:
    """Returns the resident bytes of System V shared memory in the sandbox's ipc namespace, attached or not."""
    try:
        with open(_SEGMENTS, "rb") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return 0  # this kernel has none
    return sum(int(line.split()[_RESIDENT_FIELD]) for line in lines)
