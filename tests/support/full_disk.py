"""Files of this process that can no longer be written, as on a full disk."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path


def fill_disk(directory: Path) -> None:
    """Lets every write to a file in `directory` that this process has open fail for want of room."""
    full_fd = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for fd in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            if _path_of(fd).is_relative_to(directory):
                os.dup2(full_fd, fd, inheritable=False)
    finally:
        os.close(full_fd)


def _path_of(fd: int) -> Path:
    try:
        return Path(f"/proc/self/fd/{fd}").readlink()
    except FileNotFoundError:  # the descriptor of the listing itself
        return Path()


def forbid_changes(registry: Path) -> None:
    """Lets every later change of the sessions in this registry fail; reading goes on, in later daemons too."""
    with contextlib.closing(sqlite3.connect(registry, isolation_level=None)) as database:
        for change in ("INSERT", "UPDATE", "DELETE"):
            database.execute(
                f"CREATE TRIGGER no_{change} BEFORE {change} ON sessions BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
            )


def allow_changes(registry: Path) -> None:
    """Undoes `forbid_changes`."""
    with contextlib.closing(sqlite3.connect(registry, isolation_level=None)) as database:
        for change in ("INSERT", "UPDATE", "DELETE"):
            database.execute(f"DROP TRIGGER no_{change}")
