"""SQLite files that outlive the daemon: opened or created, refused when damaged, written in transactions.

WAL mode makes a commit survive the end of the process; the owner of the file chooses how much survives a crash of the
host, and whether a refused file stops the start or is moved aside.

SQLite's integrity check finds a broken tree of pages, but no changed value in a row: rows have no checksum. So tables
may have a column for one. Triggers of our connections keep it up to date, whatever statement changes a row.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal


class OtherVersionError(sqlite3.DatabaseError):
    """The file has another `version` of its tables than this daemon writes."""

    def __init__(self, version: int, known: int) -> None:
        super().__init__(f"it is of version {version}, and this daemon knows version {known}")
        self.version = version


def open_file(
    path: Path, tables: str, version: int, *, synchronous: Literal["FULL", "NORMAL", "OFF"]
) -> sqlite3.Connection:
    """Opens the file, or creates it with these tables. A statement outside of `transaction` commits at once.

    Raises OtherVersionError, sqlite3.Error when the file is damaged, OSError.
    """
    path.touch(mode=0o600)  # SQLite would create it readable by every user
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
    """Moves a SQLite file aside, with its WAL and shared memory. Raises OSError."""
    for ending in ("-wal", "-shm", ""):  # the file itself last: a start looks for that one
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + ending).replace(aside.with_name(aside.name + ending))


def row_checksum(*values: object) -> int:
    """Returns the CRC-32 of a row's values, as SQLite gives them."""
    return zlib.crc32(repr(values).encode())


def keep_checksums(database: sqlite3.Connection, table: str, columns: Sequence[str], key: Sequence[str]) -> None:
    """Maintains each row's `checksum` over these columns, and refuses to change a row whose checksum does not fit.

    The triggers belong to this connection. A row that was changed by any other means does not fit.
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
    """Applies all statements of the block, or none when one of them or the commit fails."""
    database.execute("BEGIN")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # the first error is the one to report
            database.execute("ROLLBACK")
        raise
