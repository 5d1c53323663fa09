"""The record of a sandbox's parts on the host, through which the next daemon of the state directory finds them.

Each sandbox has a directory of its own that only the daemon's user can enter. It holds the socket of the guest and a
record: the sandbox's first process and bubblewrap's, if that made it, with their start times (process ids are reused),
its control groups, its user and its fingerprint. The record is written before the sandbox runs anything, so a sandbox
without a complete record never ran.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_server.backends.local.cgroups import Cgroup

_RECORD_NAME = "record.json"
_RECORD_BYTES = 65_536
_PARENT_FIELD, _START_TIME_FIELD = 4 - 3, 22 - 3  # in /proc/PID/stat, counted after the command's closing parenthesis


@dataclass(frozen=True)
class ProcessRecord:
    """A process, identified so that no other process can have the same values."""

    pid: int
    start_time: int  # in clock ticks since boot
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """Reads /proc. Raises FileNotFoundError or ProcessLookupError when there is no such process."""
        return cls(pid, int(_stat(pid)[_START_TIME_FIELD]), Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def _stat(pid: int) -> list[str]:
    # The command may contain spaces and parentheses; the fields after its last parenthesis do not.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    """Reads /proc. Raises FileNotFoundError or ProcessLookupError when there is no such process."""
    return int(_stat(pid)[_PARENT_FIELD])


def open_recorded(recorded: ProcessRecord) -> int | None:
    """Opens a pidfd of the recorded process; None when it has ended, even if another one has its id."""
    try:
        pidfd = os.pidfd_open(recorded.pid)
    except (ProcessLookupError, OverflowError):
        return None
    try:
        same = ProcessRecord.of(recorded.pid) == recorded
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        same = False
    except BaseException:
        os.close(pidfd)
        raise
    if not same:
        os.close(pidfd)
        return None
    return pidfd


@dataclass(frozen=True)
class Record:
    sandbox_id: str
    fingerprint: str
    first: ProcessRecord
    monitor: ProcessRecord | None  # bubblewrap, the parent of the first; None for a sandbox of a fork server
    host_uid: int | None
    cgroup: Cgroup | None
    fork_server: str = ""  # id of its fork server; the sandbox ends with that one's first process


def write_record(directory: Path, record: Record) -> None:
    cgroup = record.cgroup
    values = {
        "sandbox_id": record.sandbox_id,
        "fingerprint": record.fingerprint,
        "boot_id": record.first.boot_id,
        "pid": record.first.pid,
        "start_time": record.first.start_time,
        **_values_of_monitor(record.monitor),
        "fork_server": record.fork_server,
        "host_uid": record.host_uid,
        "cgroup_version": cgroup.version if cgroup else None,
        "cgroups": {name: str(path) for name, path in cgroup.directories.items()} if cgroup else {},
    }
    fd = os.open(directory / _RECORD_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(values, file)


def remove_record(directory: Path) -> None:
    (directory / _RECORD_NAME).unlink(missing_ok=True)


def read_record(directory: Path) -> Record | None:
    """Returns the record; None when there is no complete one: the daemon died before the sandbox ran anything."""
    try:
        with (directory / _RECORD_NAME).open("rb") as file:
            record = _record_from(json.loads(file.read(_RECORD_BYTES)))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return record if record.sandbox_id == directory.name else None


def _record_from(values: dict[str, Any]) -> Record:
    """Raises ValueError, TypeError or KeyError for anything that `write_record` would not have written."""
    host_uid = values["host_uid"]
    return Record(
        sandbox_id=_text(values["sandbox_id"]),
        fingerprint=_text(values["fingerprint"]),
        first=_process_from(values, ""),
        monitor=_process_from(values, "monitor_") if "monitor_pid" in values else None,
        host_uid=None if host_uid is None else _count(host_uid),
        cgroup=_cgroup_from(values),
        fork_server=_text(values["fork_server"]) if values.get("fork_server") else "",
    )


def _values_of_monitor(monitor: ProcessRecord | None) -> dict[str, int]:
    return {} if monitor is None else {"monitor_pid": monitor.pid, "monitor_start_time": monitor.start_time}


def _process_from(values: dict[str, Any], prefix: str) -> ProcessRecord:
    return ProcessRecord(
        _count(values[f"{prefix}pid"]), _count(values[f"{prefix}start_time"]), _text(values["boot_id"])
    )


def _cgroup_from(values: dict[str, Any]) -> Cgroup | None:
    directories = {_text(name): Path(_text(path)) for name, path in dict(values["cgroups"]).items()}
    # Every process in these groups is going to be killed: a group of another service must never be among them.
    if not all(path.is_absolute() and path.name.endswith(f"-{values['sandbox_id']}") for path in directories.values()):
        raise ValueError("a control group that is not the sandbox's")
    return Cgroup(_count(values["cgroup_version"]), directories) if directories else None


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text")
    return value


def _count(value: object) -> int:
    """Checks that it is an integer above zero: no recorded number can be 0."""
    if type(value) is not int or value <= 0:
        raise ValueError("not a number above zero")
    return value
