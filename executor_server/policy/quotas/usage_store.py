"""The use of tenants on disk, so that neither a restart nor a killed daemon forgives an hour's use.

`usage.db` in the state directory has a row for each tenant and minute. It is separate from the registry because it is
worth less: a damaged registry loses sessions, a damaged file of this kind loses an hour's count, and the log says so.
For the same reason nothing is synced to the disk: a commit survives the end of this process, and after a crash of the
host the file is intact or created again. A row that does not fit its checksum is ignored.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.core import keep_checksums, open_file, put_aside, row_checksum, transaction
from executor_server.core.config import StateDirError

_VERSION = 3
_TABLE = """
CREATE TABLE usage (
    tenant TEXT NOT NULL,
    minute INTEGER NOT NULL,
    cpu_time_s REAL NOT NULL,
    output_bytes INTEGER NOT NULL,
    egress_bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, minute)
) STRICT, WITHOUT ROWID
"""
# The last write for a minute holds.
_COLUMNS = ("tenant", "minute", "cpu_time_s", "output_bytes", "egress_bytes")
_REPLACE = f"INSERT OR REPLACE INTO usage ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MinuteUse:
    """The use of one tenant in one minute."""

    tenant: str
    minute: int  # since the epoch
    cpu_time_s: float
    output_bytes: int
    egress_bytes: int  # sent and received together


class UsageStore:
    """Owns the file. Each call takes microseconds, so it runs in the event loop; failures are logged."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; a damaged one is moved aside. Raises StateDirError when that fails."""
        self._path = path
        try:
            self._database = _opened(path)
        except sqlite3.DatabaseError as error:
            aside = path.with_name(path.name + ".harmed")
            _log.error("usage_damaged", path=str(path), put_aside=str(aside), error=str(error))
            try:
                put_aside(path, aside)
                self._database = _opened(path)
            except (OSError, sqlite3.Error) as failure:
                raise StateDirError(f"The file of tenants' usage {path} can't be used: {failure}.") from error

    def close(self) -> None:
        self._database.close()

    def load(self, from_minute: int) -> list[MinuteUse]:
        """Returns the use from this minute on, in order of time."""
        rows = self._database.execute(
            f"SELECT {', '.join(_COLUMNS)}, checksum FROM usage WHERE minute >= ? ORDER BY minute", (from_minute,)
        )
        found = [(MinuteUse(*row), checksum == row_checksum(*row)) for *row, checksum in rows]
        if not all(fits for _, fits in found):
            _log.error("usage_rejected", path=str(self._path), rows=sum(not fits for _, fits in found))
        return [use for use, fits in found if fits]

    def write(self, used: Sequence[MinuteUse], from_minute: int) -> bool:
        """Writes these minutes and deletes those before `from_minute`. Returns False when that fails."""
        try:
            with transaction(self._database):
                self._database.executemany(_REPLACE, map(vars, used))
                self._database.execute("DELETE FROM usage WHERE minute < ?", (from_minute,))
        except sqlite3.Error as error:
            _log.error("usage_not_written", path=str(self._path), error=str(error))
            return False
        return True


def _opened(path: Path) -> sqlite3.Connection:
    database = open_file(path, _TABLE, _VERSION, synchronous="OFF")
    keep_checksums(database, "usage", _COLUMNS, ("tenant", "minute"))
    return database
