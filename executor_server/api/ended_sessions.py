"""The last descriptions of sessions that ended, for operators who ask later why.

`ended.db` in the state directory has them, too, so that they survive a restart. It is worth little: nothing is synced
to the disk, a damaged file is replaced by an empty one, and a row that does not fit its checksum is removed.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.core import open_file, put_aside, row_checksum
from executor_server.core.config import StateDirError

MAX_ENDED = 1024
KEPT_S = 86_400.0

_VERSION = 1
_TABLE = """
CREATE TABLE ended (
    session_id TEXT NOT NULL PRIMARY KEY,
    end_time_s REAL NOT NULL,
    view BLOB NOT NULL,
    checksum INTEGER NOT NULL
) STRICT
"""
_COLUMNS = "session_id, end_time_s, view, checksum"
_INSERT = f"INSERT OR REPLACE INTO ended ({_COLUMNS}) VALUES (?, ?, ?, ?)"
_SELECT = f"SELECT {_COLUMNS} FROM ended ORDER BY end_time_s"

_log = structlog.get_logger(__name__)


class EndedSessions:
    """Owns the file. Each call takes microseconds, so it runs in the event loop; failures are logged."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """Opens or creates the file; a damaged one is moved aside. Raises StateDirError when that fails."""
        self._path = path
        self._now = now
        try:
            self._database, self._views = _opened(path)
        except sqlite3.DatabaseError as error:
            aside = path.with_name(path.name + ".harmed")
            _log.error("ended_sessions_damaged", path=str(path), put_aside=str(aside), error=str(error))
            try:
                put_aside(path, aside)
                self._database, self._views = _opened(path)
            except (OSError, sqlite3.Error) as failure:
                raise StateDirError(f"The file of ended sessions {path} can't be used: {failure}.") from error
        self._counts = Counter(view.owned.tenant for view in self)

    def close(self) -> None:
        self._database.close()

    def __iter__(self) -> Iterator[admin_pb.SessionView]:
        """The one that ended first comes first."""
        return iter(self._views.values())

    def get(self, session_id: str) -> admin_pb.SessionView | None:
        return self._views.get(session_id)

    def add(self, view: admin_pb.SessionView) -> None:
        """Adds a session that ends now, and sets the time in its description."""
        now_s, session_id = self._now(), view.owned.session.session_id
        view.end_time.FromMilliseconds(round(now_s * 1000))
        row = (session_id, now_s, view.SerializeToString())
        self._views[session_id] = view
        self._counts[view.owned.tenant] += 1
        self._write(_INSERT, (*row, row_checksum(*row)))

    def forget(self) -> list[admin_pb.SessionView]:
        """Drops and returns those that are too old; if there are too many, those of the tenant that has the most."""
        forgotten = []
        oldest_s = self._now() - KEPT_S
        while self._views and next(iter(self)).end_time.seconds < oldest_s:
            forgotten.append(self._drop(next(iter(self._views))))
        while len(self._views) > MAX_ENDED:
            ((most, _),) = self._counts.most_common(1)
            forgotten.append(self._drop(next(each for each, view in self._views.items() if view.owned.tenant == most)))
        return forgotten

    def _drop(self, session_id: str) -> admin_pb.SessionView:
        self._write("DELETE FROM ended WHERE session_id = ?", (session_id,))
        dropped = self._views.pop(session_id)
        self._counts[dropped.owned.tenant] -= 1
        if not self._counts[dropped.owned.tenant]:
            del self._counts[dropped.owned.tenant]
        return dropped

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            _log.error("ended_sessions_not_written", path=str(self._path), error=str(error))


def _opened(path: Path) -> tuple[sqlite3.Connection, dict[str, admin_pb.SessionView]]:
    database = open_file(path, _TABLE, _VERSION, synchronous="OFF")
    try:
        views = {}
        for session_id, end_time_s, written, checksum in database.execute(_SELECT).fetchall():
            try:
                if checksum != row_checksum(session_id, end_time_s, written):
                    raise ValueError("it does not fit its checksum")
                views[session_id] = admin_pb.SessionView.FromString(written)
            except (DecodeError, ValueError) as error:
                _log.error("ended_session_rejected", session_id=session_id, path=str(path), error=str(error))
                database.execute("DELETE FROM ended WHERE session_id = ?", (session_id,))
    except BaseException:
        database.close()
        raise
    return database, views
