"""The memory that the processes of a sandbox use, added up by the supervisor where no control group counts it.

Each one's own memory is told by its status. What lies in files in memory is nobody's own, and is counted where it is:
in the sandbox's file systems; in files without a name (memory files, deleted ones), found by the descriptors that hold
them; in System V segments; and in shared mappings, whose pages stay when no process has them in its tables any more.

A process that has closed itself to others (PR_SET_DUMPABLE) hides its descriptors and mappings from the supervisor,
which is of the same user, and a descriptor in flight between two sockets is nowhere to be seen. Resource limits bound
each such file, and the machine all of them.
"""

from __future__ import annotations

import os
import stat

from .usage import kilobytes, pids

# File systems of the sandbox's own, wherever it is made.
_IN_MEMORY = ("/workspace", "/tmp", "/dev/shm")
_SEGMENTS = "/proc/sysvipc/shm"
# Index, from 0, of the resident size among the fields of a line in it.
_RESIDENT_FIELD = 14
_BLOCK_BYTES = 512  # as st_blocks counts, whatever the file system
# Bytes of mappings that are no process's own; where a process has more, it is worth a look which they are.
_UNEXPLAINED_BYTES = 64 * 1024 * 1024
_ANONYMOUS = b"/dev/zero (deleted)"


def sandbox_memory_bytes() -> int:
    """Memory of everything in the pid namespace but the supervisor: each one's own, and what is shared or in files.

    What several processes share is counted once, as far as can be told cheaply: the most that one of them shares, or
    all that lies in files. Either may be part of the other.
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
        own += kilobytes(status, b"RssAnon:")
        shared = max(shared, kilobytes(status, b"RssShmem:"))
        _add_open_files(pid, nameless, named)
        if _unexplained_bytes(status) > _UNEXPLAINED_BYTES:
            _add_shared_mappings(pid, nameless)
    return own * 1024 + max(shared * 1024, _files_bytes() + _segments_bytes() + sum(nameless.values()))


def _files_bytes() -> int:
    used = 0
    for place in _IN_MEMORY:
        state = os.statvfs(place)
        used += (state.f_blocks - state.f_bfree) * state.f_frsize
    return used


def _add_open_files(pid: int, nameless: dict[tuple[int, int], int], named: set[int]) -> None:
    """Files without a name that it has open, on none of the file systems that are counted as a whole."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # it ended, or is closed to others
    for number in descriptors:
        try:
            status = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue  # closed meanwhile
        if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev not in named:
            nameless[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES


def _unexplained_bytes(status: bytes) -> int:
    """Address space that is neither data, nor stack, nor of a program or library: shared, or a file's."""
    known = sum(kilobytes(status, field) for field in (b"VmData:", b"VmStk:", b"VmExe:", b"VmLib:"))
    return (kilobytes(status, b"VmSize:") - known) * 1024


def _add_shared_mappings(pid: int, nameless: dict[tuple[int, int], int]) -> None:
    """Shared memory that no descriptor leads to. How much of it is filled cannot be asked, so its size counts."""
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
    """Return the resident bytes of System V shared memory in the sandbox's ipc namespace, attached or not."""
    try:
        with open(_SEGMENTS, "rb") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return 0  # a kernel without
    return sum(int(line.split()[_RESIDENT_FIELD]) for line in lines)
