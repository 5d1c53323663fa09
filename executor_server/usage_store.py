"""What tenants have used, on disk, so that neither a restart nor a killed daemon forgives an hour's use.

`usage.db` in the state directory has a row for each tenant and minute. It is a file of its own, and not a table of the
registry, because the two are worth different things: with a registry that is harmed sessions are lost; here it is an
hour's count, and said so. For the same reason nothing is ever forced to the disk: what is
committed outlives this process, and after a crash of the host the file is whole or begun anew. A row that does not fit
its checksum counts for nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.sqlite_file import keep_checksums, open_file, put_aside, row_checksum, transaction
from executor_server.state_dir import StateDirError

# Of the table.
_VERSION = 2
_TABLE = """
CREATE TABLE usage (
    tenant TEXT NOT NULL,
    minute INTEGER NOT NULL,
    cpu_time_s REAL NOT NULL,
    output_bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, minute)
) STRICT, WITHOUT ROWID
"""
# The last that is written of a minute holds.
_REPLACE = "INSERT OR REPLACE INTO usage (tenant, minute, cpu_time_s, output_bytes) VALUES (?, ?, ?, ?)"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MinuteUse:
    """What a tenant used in one minute."""

    tenant: str
    minute: int  # since the epoch
    cpu_time_s: float
    output_bytes: int


class UsageStore:
    """Owns the file. Everything takes microseconds, so it is done in the event loop; what fails is logged."""

    def __init__(self, path: Path) -> None:
        """Opens it, or makes it; one that can't be used is put aside. Raises StateDirError when that can't be done."""
        self._path = path
        try:
            self._database = _opened(path)
        except sqlite3.DatabaseError as error:
            aside = path.with_name(path.name + ".harmed")
            _log.error("usage_begun_anew", path=str(path), put_aside=str(aside), error=str(error))
            try:
                put_aside(path, aside)
                self._database = _opened(path)
            except (OSError, sqlite3.Error) as failure:
                raise StateDirError(f"The file of tenants' usage {path} can't be used: {failure}.") from error

    def close(self) -> None:
        self._database.close()

    def load(self, from_minute: int) -> list[MinuteUse]:
        """What was used from this minute on, in its order."""
        rows = self._database.execute(
            "SELECT tenant, minute, cpu_time_s, output_bytes, checksum FROM usage WHERE minute >= ? ORDER BY minute",
            (from_minute,),
        )
        found = [(MinuteUse(*row), checksum == row_checksum(*row)) for *row, checksum in rows]
        if not all(fits for _, fits in found):
            _log.error("usage_not_believed", path=str(self._path), rows=sum(not fits for _, fits in found))
        return [use for use, fits in found if fits]

    def write(self, used: Sequence[MinuteUse], from_minute: int) -> bool:
        """Writes these minutes down as they are now, and lets go of those before; false when that was not possible."""
        try:
            with transaction(self._database):
                rows = ((each.tenant, each.minute, each.cpu_time_s, each.output_bytes) for each in used)
                self._database.executemany(_REPLACE, rows)
                self._database.execute("DELETE FROM usage WHERE minute < ?", (from_minute,))
        except sqlite3.Error as error:
            _log.error("usage_not_written", path=str(self._path), error=str(error))
            return False
        return True


def _opened(path: Path) -> sqlite3.Connection:
    database = open_file(path, _TABLE, _VERSION, synchronous="OFF")
    keep_checksums(database, "usage", ("tenant", "minute", "cpu_time_s", "output_bytes"), ("tenant", "minute"))
    return database
