"""Processes that outlive their starter, known by more than their number.

Process numbers are reused. So a pid file also has the start time of the process and the boot, and a process is
signalled or adopted only if all three match.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_PID_FILE_BYTES = 4096
POLL_S = 0.02

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME_FIELD = 19  # in /proc/PID/stat, counted from the field after the name


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of this machine. `start_time` is in ticks since the boot."""

    pid: int
    start_time: int
    boot_id: str

    @property
    def is_alive(self) -> bool:
        """True until the process has ended; a zombie has ended."""
        return identity_of(self.pid) == self

    def send(self, number: int) -> bool:
        """Sends a signal to the process; False when it has ended. A later process with the same pid can't get it."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive:
                return False
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
            return True
        finally:
            os.close(descriptor)

    def wait(self, time_s: float) -> bool:
        """Waits for the end of a process that need not be our child; False when it is alive after `time_s`."""
        deadline = time.monotonic() + time_s
        while self.is_alive:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True


def identity_of(pid: int) -> ProcessIdentity | None:
    """Returns the identity of a process that runs; None for one that has ended."""
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return ProcessIdentity(pid, int(fields[_START_TIME_FIELD]), _BOOT_ID.read_text().strip())


def stat_fields(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat after the name, which may hold any character; None without a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def session_members(session: int) -> list[ProcessIdentity]:
    """Returns the processes of a session (setsid) that run."""
    found: list[ProcessIdentity] = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        fields = stat_fields(pid)
        if fields is not None and int(fields[3]) == session and (identity := identity_of(pid)) is not None:
            found.append(identity)
    return found


def read_pid_file(path: Path) -> ProcessIdentity | None:
    """Returns the process that the file names, if it runs; otherwise None, also for a malformed file."""
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(MAX_PID_FILE_BYTES))
        identity = ProcessIdentity(int(fields["pid"]), int(fields["start_time"]), str(fields["boot_id"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return identity if identity.pid > 0 and identity.is_alive else None


def write_pid_file(path: Path, identity: ProcessIdentity) -> None:
    """Writes the file, whole or not at all."""
    write_whole(path, json.dumps(asdict(identity)).encode() + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read. A concurrent reader gets the old content or the new."""
    staged = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds the lock of a pid file, so that one process at a time starts or ends what the file names."""
    descriptor = os.open(
        path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
