"""Files of SQLite: what is written together is there together, and what is not ours is refused."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.core.sqlite_file import OtherVersionError, open_file, transaction

# A child without its parent is found at the commit only.
TABLES = """
CREATE TABLE parent (id INTEGER PRIMARY KEY) STRICT;
CREATE TABLE child (parent INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED) STRICT
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    database = open_file(path, TABLES, 3, synchronous="OFF")
    database.execute("PRAGMA foreign_keys = ON")
    yield database
    database.close()


def parents(path: Path) -> list[int]:
    """As another process sees them."""
    other = open_file(path, TABLES, 3, synchronous="OFF")
    found = [parent for (parent,) in other.execute("SELECT id FROM parent")]
    other.close()
    return found


def test_nothing_of_what_fails_is_written(database: sqlite3.Connection, path: Path) -> None:
    with pytest.raises(sqlite3.IntegrityError), transaction(database):
        database.execute("INSERT INTO parent VALUES (1)")
        database.execute("INSERT INTO parent VALUES (1)")
    assert parents(path) == []


def test_a_commit_that_fails_does_not_keep_back_what_follows(database: sqlite3.Connection, path: Path) -> None:
    """A transaction left open would take in all later statements, and lose them with the process."""
    with pytest.raises(sqlite3.IntegrityError), transaction(database):
        database.execute("INSERT INTO child VALUES (9)")
    database.execute("INSERT INTO parent VALUES (2)")
    assert parents(path) == [2]


def test_another_version_is_refused_and_said(database: sqlite3.Connection, path: Path) -> None:
    with pytest.raises(OtherVersionError, match="of version 3, and this daemon knows version 4") as refused:
        open_file(path, TABLES, 4, synchronous="OFF")
    assert refused.value.version == 3


def test_tables_of_nobody_known_are_refused(path: Path) -> None:
    """A database without a version is made only where there is none at all."""
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (id INTEGER)")
    other.close()
    with pytest.raises(OtherVersionError):
        open_file(path, TABLES, 3, synchronous="OFF")


def test_nobody_else_can_read_it(database: sqlite3.Connection, path: Path) -> None:
    database.execute("INSERT INTO parent VALUES (1)")
    for each in path.parent.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600, each
