"""Adds up the memory of a sandbox's processes if no control group counts it.

The status of a process gives its own memory. Memory in files belongs to no process, so it is counted where it is: in
the sandbox's file systems; in files without a name (memory files, deleted ones), found by their open descriptors; in
System V objects; and in shared mappings, whose pages remain when no process has them in its tables. A pipe or socket
counts as the most kernel memory that its kind can use.

Agent code chooses the number of processes, descriptors and mappings, so they are read in parts: each call takes a
bounded time, and the supervisor keeps its deadlines.

Not counted: files whose descriptor is in flight between two sockets. Resource limits bound each such file, and the
machine bounds all of them. A process that is closed to others (PR_SET_DUMPABLE) hides its descriptors. It is reported,
so that it can be killed.
"""

from __future__ import annotations

import os
import stat
import time

from ..wire.proc import kilobytes, pids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Optional

# The sandbox's own file systems in memory. Two places may show the same one, and an image may lack /var/tmp.
_IN_MEMORY = ("/workspace", "/tmp", "/var/tmp", "/dev/shm")
# System V objects: the file, the index of a field in its lines, and the bytes for each unit of it. The fields: resident
# bytes of memory; bytes and number of messages; semaphores.
_SYSTEM_V = (("shm", 14, 1), ("msg", 3, 1), ("msg", 4, 100), ("sem", 3, 64))
_BLOCK_BYTES = 512  # the unit of st_blocks in every file system
# If a process has more bytes of mappings that are not its own, its maps are read, which takes time.
_UNEXPLAINED_BYTES = 64 * 1024 * 1024
_ANONYMOUS = b"/dev/zero (deleted)"
_PIPE_BYTES = 64 * 1024
# The bytes of a Unix socket, whose queues no file shows: the kernel's default send buffer, and one message more. The
# backend makes the kernel ignore programs that ask for more. Every sandbox has some sockets for free.
_SOCKET_BYTES = 320 * 1024
_FREE_SOCKETS = 64
# If a protocol has more sockets, they count like Unix sockets: reading all queues takes too long.
_READ_SOCKETS = 2000
_TURN_TIME_S = 0.01


class MemoryWatch:
    """Measures all processes in the pid namespace but the supervisor, for a bounded time in each call.

    `spared` are children of the supervisor that are closed to others and run no agent code. They have limits of their
    own, and their part of the pages shared with the template process can't be read: counting all of these pages would
    charge a hundred MB that no program has.
    """

    def __init__(self) -> None:
        self.closed: set[int] = set()
        """Processes seen so far that hide their descriptors."""
        self.held_bytes = 0
        """Bytes in files and sockets, outside of the memory of processes, as of the last call."""
        self._nameless_bytes = 0  # in files without a name and pipes, as of the last complete scan
        self._holding: Optional[Iterator[None]] = None
        self._own_bytes = 0  # the processes' own, with shared pages divided
        self._dividing: Optional[Iterator[None]] = None

    @property
    def busy(self) -> bool:
        """True while a measurement is incomplete."""
        return self._holding is not None or self._dividing is not None

    def exceeds(self, limit_bytes: int, spared: frozenset[int] = frozenset()) -> bool:
        """Returns true if the sandbox uses more than the limit; false while the measurement is incomplete.

        Forks share memory: the interpreter with its savepoints and with processes that a program forks, and all of them
        with the template process of the sandbox. First they are added up as if nothing were shared, which is fast and
        mostly suffices. Only above the limit, each is charged with its part of shared pages. Shared memory and memory
        in files may contain each other. So, to count shared memory only once at little cost, the larger of two numbers
        counts: the most that one process shares, and all memory in files.
        """
        until = time.monotonic() + _TURN_TIME_S
        statuses = {pid: status for pid, status in _statuses() if pid not in spared}
        if self._holding is None:
            self._holding = self._hold(statuses)
        if _is_done(self._holding, until):
            self._holding = None
        shared = max((kilobytes(status, b"RssShmem:") for status in statuses.values()), default=0) * 1024
        held = max(shared, _files_bytes() + _system_v_bytes() + self._nameless_bytes) + _sockets_bytes()
        self.held_bytes = held
        if held + 1024 * sum(kilobytes(status, b"RssAnon:") for status in statuses.values()) <= limit_bytes:
            self._dividing = None
            return False
        if self._dividing is None:
            self._dividing = self._divide(statuses)
        if not _is_done(self._dividing, until):
            return False
        self._dividing = None
        return held + self._own_bytes > limit_bytes

    def _hold(self, statuses: dict[int, bytes]) -> Iterator[None]:
        """Adds up the memory behind descriptors and mappings. Yields after each step, as `_divide` does."""
        nameless: dict[tuple[int, int], int] = {}
        named, closed = set(_file_systems()), set()
        for pid, status in statuses.items():
            try:
                descriptors = os.listdir(f"/proc/{pid}/fd")
            except PermissionError:
                closed.add(pid)
                nameless[-1, pid] = _unexplained_bytes(status)
                continue
            except OSError:
                continue  # it ended
            for number in descriptors:
                _add_open_file(f"/proc/{pid}/fd/{number}", nameless, named)
                yield
            if _unexplained_bytes(status) > _UNEXPLAINED_BYTES:
                _add_shared_mappings(pid, nameless)
            yield
        self._nameless_bytes, self.closed = sum(nameless.values()), closed

    def _divide(self, statuses: dict[int, bytes]) -> Iterator[None]:
        total = 0
        for pid, status in statuses.items():
            total += _share_kilobytes(pid, status)
            yield
        self._own_bytes = total * 1024


def _is_done(work: Iterator[None], until: float) -> bool:
    return all(time.monotonic() < until for _ in work)


def _statuses() -> Iterator[tuple[int, bytes]]:
    for pid in pids():
        try:
            with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
                status = file.read()
        except OSError:
            continue  # it ended meanwhile
        if b"VmSize:" in status:  # else it has ended, and waits to be reaped
            yield pid, status


def _share_kilobytes(pid: int, status: bytes) -> int:
    """Returns the process's part of the pages that forks share; all of them if the kernel does not report parts."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            rollup = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended meanwhile
    except OSError:
        rollup = b""
    return kilobytes(rollup, b"Pss_Anon:") or kilobytes(status, b"RssAnon:")


def _file_systems() -> dict[int, str]:
    """Returns the file systems in memory: their devices, and a place of each."""
    return {os.stat(place).st_dev: place for place in _IN_MEMORY if os.path.isdir(place)}


def _files_bytes() -> int:
    used = 0
    for place in _file_systems().values():
        state = os.statvfs(place)
        used += (state.f_blocks - state.f_bfree) * state.f_frsize
    return used


def _add_open_file(path: str, nameless: dict[tuple[int, int], int], named: set[int]) -> None:
    """Adds a pipe, or a file without a name unless its whole file system is counted."""
    try:
        status = os.stat(path)
    except OSError:
        return  # closed meanwhile
    if stat.S_ISFIFO(status.st_mode):
        nameless[status.st_dev, status.st_ino] = _PIPE_BYTES
    elif status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev not in named:
        nameless[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES


def _unexplained_bytes(status: bytes) -> int:
    """Returns the address space of shared memory and files: all but data, stack, program and libraries."""
    known = sum(kilobytes(status, field) for field in (b"VmData:", b"VmStk:", b"VmExe:", b"VmLib:"))
    return (kilobytes(status, b"VmSize:") - known) * 1024


def _add_shared_mappings(pid: int, nameless: dict[tuple[int, int], int]) -> None:
    """Adds shared memory without a descriptor, by its size: the kernel does not report how much is in use."""
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


def _system_v_bytes() -> int:
    """Returns the bytes of System V objects in the sandbox's ipc namespace, attached or not."""
    total = 0
    for name, field, unit_bytes in _SYSTEM_V:
        total += unit_bytes * sum(int(line.split()[field]) for line in _lines(f"/proc/sysvipc/{name}")[1:])
    return total


def _sockets_bytes() -> int:
    """Returns the bytes that the sockets of the sandbox's network namespace may use, in flight included."""
    counts: dict[str, int] = {}
    for line in _lines("/proc/net/sockstat") + _lines("/proc/net/sockstat6"):
        name, _, numbers = line.decode().partition(":")
        counts[name.lower()] = int(numbers.split()[1])
    total, others = 0, counts.get("sockets", 0)
    for name in ("tcp", "tcp6", "udp", "udp6"):
        if 0 < counts.get(name, 0) <= _READ_SOCKETS:
            others -= counts[name]
            for line in _lines(f"/proc/net/{name}")[1:]:
                sent, received = line.split()[4].split(b":")
                total += 2 * (int(sent, 16) + int(received, 16))
    return total + max(0, others - _FREE_SOCKETS) * _SOCKET_BYTES


def _lines(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read().splitlines()
    except OSError:
        return []  # this kernel has none
