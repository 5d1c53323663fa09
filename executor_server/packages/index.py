"""The requests with their locks, and the last uses of environments.

All of it can be recreated, so a damaged file is moved aside and replaced by an empty one. A row that does not fit its
checksum is dropped, and its request is resolved again.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import structlog

from executor_server.backends import Target
from executor_server.core import OtherVersionError, PackagesSpec, keep_checksums, open_file, put_aside, row_checksum
from executor_server.packages.lock import Lock

MAX_REQUESTS = 2_000
MAX_REQUESTERS = 64  # remembered tenants of one environment
_DROPPED_AT_ONCE = 100

_VERSION = 2
_TABLES = """
CREATE TABLE requests (
    request TEXT PRIMARY KEY, lock TEXT NOT NULL, resolved_s REAL NOT NULL, checksum INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE uses (
    environment_id TEXT NOT NULL, requester TEXT NOT NULL, used_s REAL NOT NULL, checksum INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (environment_id, requester)
);
"""
_COLUMNS = {
    "requests": (("request", "lock", "resolved_s"), ("request",)),
    "uses": (("environment_id", "requester", "used_s"), ("environment_id", "requester")),
}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Request:
    """The requested packages, and the image. Equal requests share one environment until their lock is due."""

    packages: PackagesSpec
    target: Target

    @property
    def name(self) -> str:
        """The request as JSON, its key in the index."""
        return _name_of(self)


@lru_cache(maxsize=4096)
def _name_of(request: Request) -> str:
    return json.dumps({"packages": asdict(request.packages), "target": asdict(request.target)}, sort_keys=True)


@dataclass(frozen=True)
class Asked:
    """A request for an administrator's list."""

    requirements: tuple[str, ...]
    image: str  # "backend/image"

    @classmethod
    def read(cls, name: str) -> Asked:
        """Raises ValueError, TypeError, KeyError."""
        values = json.loads(name)
        target = values["target"]
        return cls(tuple(map(str, values["packages"]["requirements"])), f"{target['backend']}/{target['image']}")


@dataclass(frozen=True)
class Answer:
    """The lock of a request."""

    lock: Lock
    resolved_s: float  # when it was resolved, in seconds since the epoch

    @cached_property
    def environment_id(self) -> str:
        return self.lock.environment_id


class Index:
    """For the event loop: each call is one small transaction or a look-up in memory."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Blocks. Raises OSError, sqlite3.Error if not even a new one can be created."""
        self._path = path
        try:
            self._database = _opened(path)
            self._load()
        except sqlite3.DatabaseError as error:
            with suppress(AttributeError, sqlite3.Error):
                self._database.close()
            problem = "of_another_version" if isinstance(error, OtherVersionError) else "damaged"
            aside = path.with_name(f"{path.name}.{problem}")
            _log.error(f"environment_index_{problem}", path=str(path), put_aside=str(aside), error=str(error))
            put_aside(path, aside)
            self._database = _opened(path)
            self._load()

    def close(self) -> None:
        self._database.close()

    def find(self, request: Request) -> Answer | None:
        return self._answers.get(request.name)

    def requests_of(self, environment_id: str) -> list[Asked]:
        """Returns the requests that an environment answers."""
        names = [name for name, answer in self._answers.items() if answer.environment_id == environment_id]
        return [Asked.read(name) for name in names]

    def note_answer(self, request: Request, lock: Lock, resolved_s: float) -> None:
        """Notes that a request was resolved to this lock."""
        self._answers[request.name] = Answer(lock, resolved_s)
        written = json.dumps(asdict(lock))
        self._write("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, 0)", request.name, written, resolved_s)
        if len(self._answers) > MAX_REQUESTS:
            self._drop_oldest()

    def used_s(self, environment_id: str) -> float:
        """Returns the time of an environment's last use, in seconds since the epoch; 0 if unknown."""
        return max(self._uses.get(environment_id, {}).values(), default=0.0)

    def used_s_by(self, environment_id: str, requester: str) -> float:
        """Returns the same for one tenant."""
        return self._uses.get(environment_id, {}).get(requester, 0.0)

    def requesters_of(self, environment_id: str) -> list[str]:
        """Returns the tenants that used it, the most recent first."""
        uses = self._uses.get(environment_id, {})
        return [requester for requester in sorted(uses, key=uses.__getitem__, reverse=True) if requester]

    def note_use(self, environment_id: str, requester: str, used_s: float) -> None:
        uses = self._uses.setdefault(environment_id, {})
        if requester not in uses and len(uses) >= MAX_REQUESTERS:
            oldest = min(uses, key=uses.__getitem__)
            del uses[oldest]
            self._write("DELETE FROM uses WHERE environment_id = ? AND requester = ?", environment_id, oldest)
        uses[requester] = used_s
        self._write("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, 0)", environment_id, requester, used_s)

    def forget_uses(self, environment_id: str) -> None:
        """Forgets the users of a removed environment. Its requests keep their lock."""
        if self._uses.pop(environment_id, None) is not None:
            self._write("DELETE FROM uses WHERE environment_id = ?", environment_id)

    # -----------------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._uses: dict[str, dict[str, float]] = {}
        for name, lock, resolved_s in self._rows("requests"):
            try:
                Asked.read(name)
                self._answers[name] = Answer(Lock.read(json.loads(lock)), float(resolved_s))
            except (ValueError, TypeError, KeyError) as error:
                _log.error("environment_request_rejected", request=name, error=str(error))
        for environment_id, requester, used_s in self._rows("uses"):
            self._uses.setdefault(environment_id, {})[requester] = float(used_s)

    def _rows(self, table: str) -> list[tuple[Any, ...]]:
        """Returns the valid rows; removes the others."""
        columns, _ = _COLUMNS[table]
        rows = self._database.execute(f"SELECT rowid, {', '.join(columns)}, checksum FROM {table}").fetchall()
        fitting = []
        for rowid, *row, checksum in rows:
            if checksum == row_checksum(*row):
                fitting.append(tuple(row))
            else:
                _log.error("environment_row_rejected", table=table)
                self._database.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
        return fitting

    def _drop_oldest(self) -> None:
        """Forgets the requests that were resolved first."""
        for name in sorted(self._answers, key=lambda name: self._answers[name].resolved_s)[:_DROPPED_AT_ONCE]:
            del self._answers[name]
            self._write("DELETE FROM requests WHERE request = ?", name)

    def _write(self, statement: str, *values: object) -> None:
        """Executes a statement. A failure is logged; a later daemon then resolves again."""
        try:
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            _log.error("environment_index_not_written", path=str(self._path), error=str(error))


def _opened(path: Path) -> sqlite3.Connection:
    database = open_file(path, _TABLES, _VERSION, synchronous="NORMAL")
    for table, (columns, key) in _COLUMNS.items():
        keep_checksums(database, table, columns, key)
    return database
