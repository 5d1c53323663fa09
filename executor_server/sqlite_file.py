"""A file of SQLite that a daemon leaves to the next one: opened or made, refused when harmed, written whole or not.

In WAL mode, so that what is committed outlives the process at once; how much of it outlives the host is for the owner
of the file to say. Whether a file that is refused stops the start or is put aside, too.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Literal


class OtherVersionError(sqlite3.DatabaseError):
    """The file was made by a daemon that writes another `version` of its tables."""

    def __init__(self, version: int, known: int) -> None:
        super().__init__(f"it is of version {version}, and this daemon knows version {known}")
        self.version = version


def open_file(path: Path, tables: str, version: int, *, synchronous: Literal["NORMAL", "OFF"]) -> sqlite3.Connection:
    """Opens it, or makes it with these tables. A statement outside of `transaction` is committed as it is executed.

    Raises OtherVersionError, sqlite3.Error when it is harmed, OSError.
    """
    path.touch(mode=0o600)  # SQLite would make it for everybody to read
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {synchronous}")
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if found == 0 and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            database.executescript(f"BEGIN; {tables}; PRAGMA user_version = {version}; COMMIT;")
        elif found != version:
            raise OtherVersionError(found, version)
        (problem,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
    except BaseException:
        database.close()
        raise
    return database


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All of what is executed within, or, when that or the commit fails, nothing of it."""
    database.execute("BEGIN")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
            database.execute("ROLLBACK")
        raise
