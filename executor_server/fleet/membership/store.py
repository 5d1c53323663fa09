"""The front's durable knowledge: its identity, its term, the epochs of its nodes, and the sessions that are lost.

`fleet.db` in the front's state directory. Each write is on the disk when its method returns (WAL with a sync at each
commit), because statements that can't be taken back depend on it. A damaged file or row stops the start: a front that
has forgotten which sessions it reported lost would let them come back. A damaged row of a lost session is the
exception: it is left out, and the session is not found.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from executor_server.core import keep_checksums, open_file, row_checksum, transaction
from executor_server.core.config import StateDirError

MAX_TOMBSTONES = 50_000
"""Lost sessions that are remembered; the oldest are dropped."""
TOMBSTONE_TIME_S = 24 * 3600.0

_VERSION = 2
_TABLES = """
CREATE TABLE front (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    front_id TEXT NOT NULL,
    term INTEGER NOT NULL,
    checksum INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE nodes (
    node TEXT PRIMARY KEY,
    instance TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    lost_epoch INTEGER NOT NULL,
    checksum INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE TABLE tombstones (
    session_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    request_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    lost_unix_s REAL NOT NULL,
    checksum INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX tombstones_by_time ON tombstones (lost_unix_s)
"""
_FRONT = ("one", "front_id", "term")
_NODE = ("node", "instance", "epoch", "lost_epoch")
_TOMBSTONE = ("session_id", "tenant", "request_id", "reason", "lost_unix_s")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FrontStart:
    front_id: str
    term: int


@dataclass(frozen=True)
class StoredNode:
    node: str
    instance: str
    epoch: int
    lost_epoch: int = 0


@dataclass(frozen=True)
class Tombstone:
    """A session that was reported lost, or is about to be."""

    session_id: str
    tenant: str
    request_id: str
    reason: str
    lost_unix_s: float


class FleetStore:
    """Owns the file. The lock of the state directory keeps a second front from it."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises StateDirError."""
        self._path = path
        try:
            self._database = _opened(path)
        except (OSError, sqlite3.Error) as error:
            raise StateDirError(
                f"The front's file {path} can't be used: {error}. It knows which sessions were reported lost; if it "
                "can't be restored, end all nodes of the fleet before you remove it."
            ) from error

    def close(self) -> None:
        self._database.close()

    def begin(self) -> FrontStart:
        """Begins the next term. Raises StateDirError, sqlite3.Error."""
        found = self._rows("front", _FRONT, "")
        start = FrontStart(found[0][1], found[0][2] + 1) if found else FrontStart(secrets.token_hex(16), 1)
        with transaction(self._database):
            self._insert("front", _FRONT, [(1, start.front_id, start.term)])
        return start

    def nodes(self) -> list[StoredNode]:
        """Raises StateDirError when a row does not fit its checksum."""
        return [StoredNode(*row) for row in self._rows("nodes", _NODE, "")]

    def tombstones(self) -> list[Tombstone]:
        """Returns the lost sessions, oldest first."""
        return [Tombstone(*row) for row in self._rows("tombstones", _TOMBSTONE, "ORDER BY lost_unix_s", strict=False)]

    def write_nodes(self, nodes: Sequence[StoredNode], tombstones: Sequence[Tombstone] = ()) -> None:
        """Writes nodes and lost sessions, all or none, and drops the lost sessions beyond the limits."""
        with transaction(self._database):
            self._insert("nodes", _NODE, [(each.node, each.instance, each.epoch, each.lost_epoch) for each in nodes])
            self._insert("tombstones", _TOMBSTONE, [tuple(vars(each).values()) for each in tombstones])
            if tombstones:
                self._prune(tombstones[-1].lost_unix_s)

    def remove_node(self, node: str) -> None:
        self._database.execute("DELETE FROM nodes WHERE node = ?", (node,))

    def remove_tombstone(self, session_id: str) -> None:
        self._database.execute("DELETE FROM tombstones WHERE session_id = ?", (session_id,))

    def _prune(self, now_unix_s: float) -> None:
        self._database.execute("DELETE FROM tombstones WHERE lost_unix_s < ?", (now_unix_s - TOMBSTONE_TIME_S,))
        self._database.execute(
            "DELETE FROM tombstones WHERE session_id IN "
            "(SELECT session_id FROM tombstones ORDER BY lost_unix_s DESC LIMIT -1 OFFSET ?)",
            (MAX_TOMBSTONES,),
        )

    def _insert(self, table: str, columns: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
        marks = ", ".join("?" * len(columns))
        self._database.executemany(
            f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})",
            rows,
        )

    def _rows(self, table: str, columns: Sequence[str], order: str, *, strict: bool = True) -> list[tuple[Any, ...]]:
        rows = self._database.execute(f"SELECT {', '.join(columns)}, checksum FROM {table} {order}").fetchall()
        fitting = [row[:-1] for row in rows if row[-1] == row_checksum(*row[:-1])]
        if len(fitting) < len(rows):
            if strict:
                raise StateDirError(f"The front's file {self._path} is damaged: rows of {table} do not fit.")
            _log.error("tombstones_rejected", path=str(self._path), rows=len(rows) - len(fitting))
        return fitting


def _opened(path: Path) -> sqlite3.Connection:
    database = open_file(path, _TABLES, _VERSION, synchronous="FULL")
    try:
        keep_checksums(database, "front", _FRONT, ("one",))
        keep_checksums(database, "nodes", _NODE, ("node",))
        keep_checksums(database, "tombstones", _TOMBSTONE, ("session_id",))
    except BaseException:
        database.close()
        raise
    return database
