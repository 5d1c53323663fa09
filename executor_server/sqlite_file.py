"""A file of SQLite that a daemon leaves to the next one: opened or made, refused when harmed, written whole or not.

In WAL mode, so that what is committed outlives the process at once; how much of it outlives the host is for the owner
of the file to say. Whether a file that is refused stops the start or is put aside, too.

SQLite's own check finds a broken tree of pages and no changed value in a row: it keeps no checksum of what is in them.
So tables may have a column for one, which is kept by triggers of our connections, whatever statement changes a row.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
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
        (problem,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
    except BaseException:
        database.close()
        raise
    return database


def put_aside(path: Path, aside: Path) -> None:
    """Moves a file of SQLite and what belongs to it out of the way. Raises OSError."""
    for ending in ("-wal", "-shm", ""):  # the file itself last: it is what a start finds
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + ending).replace(aside.with_name(aside.name + ending))


def row_checksum(*values: object) -> int:
    """Return the checksum of a row's values, as SQLite gives them. CRC-32, as in journal_records.py."""
    return zlib.crc32(repr(values).encode())


def keep_checksums(database: sqlite3.Connection, table: str, columns: Sequence[str], key: Sequence[str]) -> None:
    """From here on each row's `checksum` is that of these columns; one that does not fit is not changed any more.

    The triggers are this connection's own. A row that was changed past them does not fit.
    """
    database.create_function("row_checksum", -1, row_checksum, deterministic=True)
    row, old = ", ".join(columns), ", ".join(f"OLD.{column}" for column in columns)
    this = " AND ".join(f"{column} = NEW.{column}" for column in key)
    kept = f"BEGIN UPDATE {table} SET checksum = row_checksum({row}) WHERE {this}; END"
    misfit = f"SELECT RAISE(ABORT, 'a row does not fit its checksum') WHERE OLD.checksum <> row_checksum({old})"
    database.execute(f"CREATE TEMP TRIGGER {table}_added AFTER INSERT ON main.{table} {kept}")
    database.execute(f"CREATE TEMP TRIGGER {table}_changed AFTER UPDATE OF {row} ON main.{table} {kept}")
    database.execute(f"CREATE TEMP TRIGGER {table}_misfit BEFORE UPDATE OF {row} ON main.{table} BEGIN {misfit}; END")


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
