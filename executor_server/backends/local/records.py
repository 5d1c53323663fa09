"""What a sandbox leaves on the host, written down, so that another daemon of the same state directory can remove it.

Each sandbox has a directory of its own, `<state_dir>/sandboxes/<id>`, that only the daemon's user can enter. It holds
the socket of the guest and a record: the sandbox's first process, the time that process started (a process id alone may
since be somebody else's), its control groups and the guest's token.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.descriptors import kill, wait_readable
from executor_server.errors import SandboxFailure

SOCKET_NAME = "guest.sock"
_RECORD_NAME = "record.json"
_RECORD_BYTES = 65_536
_START_TIME_FIELD = 22 - 3  # of /proc/PID/stat, counted after the command's closing parenthesis


@dataclass(frozen=True)
class Record:
    sandbox_id: str
    pid: int
    start_time: int  # in clock ticks since boot
    boot_id: str
    cgroup_version: int
    cgroups: dict[str, str]  # controller -> directory
    token: str  # hexadecimal


def write_record(directory: Path, sandbox_id: str, pid: int, cgroup: Cgroup | None, token: bytes) -> None:
    record = Record(
        sandbox_id=sandbox_id,
        pid=pid,
        start_time=_start_time(pid),
        boot_id=_boot_id(),
        cgroup_version=cgroup.version if cgroup else 0,
        cgroups={name: str(path) for name, path in cgroup.directories.items()} if cgroup else {},
        token=token.hex(),
    )
    fd = os.open(directory / _RECORD_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(record), file)


def read_record(directory: Path) -> Record | None:
    """The record, or None when there is none that is whole: the daemon died before the sandbox ran anything."""
    try:
        with (directory / _RECORD_NAME).open("rb") as file:
            return Record(**json.loads(file.read(_RECORD_BYTES)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


async def sweep(sandboxes: Path, deadline: float) -> int:
    """Destroys every sandbox that has a directory here, and says how many. Raises SandboxFailure past the deadline."""
    directories = _subdirectories(sandboxes)
    await asyncio.gather(*(_destroy_recorded(directory, deadline) for directory in directories))
    return len(directories)


async def _destroy_recorded(directory: Path, deadline: float) -> None:
    record = read_record(directory)
    if record is not None:
        await _kill_recorded(record, deadline)
        if record.cgroups:
            group = Cgroup(record.cgroup_version, {name: Path(path) for name, path in record.cgroups.items()})
            await group.remove(deadline)
    shutil.rmtree(directory)  # after the processes: while it is there, another attempt can find them


async def _kill_recorded(record: Record, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(record.pid)
    except (ProcessLookupError, OverflowError, ValueError):
        return
    try:
        # Compared with the descriptor open: from here on the number cannot come to mean another process.
        if record.boot_id != _boot_id() or record.start_time != _start_time(record.pid):
            return
        kill(pidfd)
        if not await wait_readable(pidfd, deadline):
            raise SandboxFailure(f"process {record.pid} of an earlier daemon's sandbox does not end")
    except FileNotFoundError:  # ended meanwhile
        return
    finally:
        os.close(pidfd)


def _subdirectories(directory: Path) -> list[Path]:
    return [entry for entry in directory.iterdir() if entry.is_dir()]


def _start_time(pid: int) -> int:
    # The command may hold spaces and parentheses of its own; what follows the last one does not.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_TIME_FIELD])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
