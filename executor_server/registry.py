"""The registry: which sessions there are, on disk, so that the daemon that comes after a killed one knows them.

`registry.db` in the state directory has a row for each session: whose it is, what was approved for it, its sandbox and
the secret of the way there. Beside it, in `journals/ID/`, lies the session's tape. A row is written before the session
is handed out and removed before its sandbox is destroyed, so what has no row belongs to nobody.

SQLite in WAL mode without a sync at each commit: what is committed outlives this process, and a crash of the host may
lose the last rows but never harms the file. A file that is harmed nevertheless stops the start, with what to do: going
on with an empty one would leave running sessions to be destroyed in silence.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import structlog

from executor_server import tape
from executor_server.guest.frames import PROTOCOL_VERSION
from executor_server.model import Principal, SessionSpec
from executor_server.sqlite_file import OtherVersionError, open_file, transaction
from executor_server.state_dir import StateDir, StateDirError

# Of the tables and of the tapes.
_VERSION = 2
_TABLE = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    principal TEXT NOT NULL,
    request_id TEXT NOT NULL,
    spec TEXT NOT NULL,
    backend TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    token BLOB NOT NULL,
    protocol INTEGER NOT NULL,
    python_version TEXT NOT NULL,
    warm INTEGER NOT NULL,
    create_time_s REAL NOT NULL,
    connections INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    last_used_s REAL NOT NULL,
    puts INTEGER NOT NULL,
    gets INTEGER NOT NULL,
    lost_reason TEXT
) STRICT, WITHOUT ROWID
"""

# Which leases hold which sessions; a session without a row is detached. A table of its own, made where it is missing: a
# registry of an earlier daemon has none, and an earlier daemon that finds one goes on without.
_HOLDERS = """
CREATE TABLE IF NOT EXISTS holders (
    session_id TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    PRIMARY KEY (session_id, lease_id)
) STRICT, WITHOUT ROWID
"""

# Named as the fields of SessionRecord.
_COLUMNS = (
    "session_id, tenant, principal, request_id, spec, backend, sandbox_id, token, protocol, python_version, warm, "
    "create_time_s, connections, generation, last_used_s, puts, gets, lost_reason"
)
_INSERT_HOLDER = "INSERT OR IGNORE INTO holders (session_id, lease_id) VALUES (?, ?)"
_INSERT = f"INSERT INTO sessions ({_COLUMNS}) VALUES (:{_COLUMNS.replace(', ', ', :')})"

_LEASE_ID = re.compile(r"[0-9a-f]{32}")
# An id is also the name of a directory, which is removed whole.
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_log = structlog.get_logger(__name__)


class RegistryError(Exception):
    """Nothing could be written down. Internal: its text may name host paths."""


@dataclass(frozen=True)
class SessionRecord:
    """A session as it is written down."""

    session_id: str
    owner: Principal
    request_id: str
    spec: SessionSpec
    backend: str
    sandbox_id: str
    token: bytes
    python_version: str
    warm: bool
    create_time_s: float
    connections: int  # to its guest, that may have been begun
    generation: int = 1
    last_used_s: float = 0.0
    puts: int = 0  # files put and got
    gets: int = 0
    lost_reason: str | None = None
    protocol: int = PROTOCOL_VERSION  # that its guest speaks


@dataclass(frozen=True)
class SessionUse:
    """What changes as a session is used."""

    session_id: str
    last_used_s: float
    generation: int
    puts: int
    gets: int


class Registry:
    """Owns the database. Everything takes microseconds, so it is done in the event loop."""

    def __init__(self, state_dir: StateDir) -> None:
        """Opens it, or makes it. Raises StateDirError when it is harmed, or another version's."""
        self._path = state_dir.registry_path
        self._journals = state_dir.journals_path
        self._unforgotten: set[str] = set()
        self._journals.mkdir(mode=0o700, exist_ok=True)
        try:
            self._database = open_file(self._path, _TABLE, _VERSION, synchronous="NORMAL")
            self._database.execute(_HOLDERS)
        except OtherVersionError as error:
            raise StateDirError(
                f"The registry of sessions {self._path} is of version {error.version}, and this daemon knows version "
                f"{_VERSION}: start the daemon that made it and stop it in order, or move the file away."
            ) from error
        except sqlite3.Error as error:
            raise StateDirError(
                f"The registry of sessions {self._path} can't be used: {error}. To start without the sessions that it "
                "names, which end then, move it away."
            ) from error

    def close(self) -> None:
        self._database.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def load(self) -> list[SessionRecord]:
        """All sessions, oldest first. Removes the tapes of those that there are no more. Raises StateDirError."""
        try:
            cursor = self._database.execute(f"SELECT {_COLUMNS} FROM sessions ORDER BY create_time_s, session_id")
            names = [column[0] for column in cursor.description]
            records = [_record(dict(zip(names, row, strict=True))) for row in cursor]
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error
        known = {record.session_id for record in records}
        for journal in self._journals.iterdir():
            if journal.name not in known:
                tape.remove(journal)
        return records

    def _unreadable(self, error: Exception) -> StateDirError:
        return StateDirError(
            f"The registry of sessions {self._path} can't be read: {error}. To start without the sessions that it "
            "names, which end then, move it away."
        )

    def holders(self) -> dict[str, list[str]]:
        """Which leases hold which sessions. Removes those of sessions that there are no more. Raises StateDirError."""
        held: dict[str, list[str]] = {}
        try:
            self._database.execute("DELETE FROM holders WHERE session_id NOT IN (SELECT session_id FROM sessions)")
            for session_id, lease_id in self._database.execute("SELECT session_id, lease_id FROM holders"):
                if not _LEASE_ID.fullmatch(lease_id):
                    raise ValueError("a lease id that is none")
                held.setdefault(session_id, []).append(lease_id)
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self._unreadable(error) from error
        return held

    def tape_of(self, session_id: str) -> tape.Tape:
        """The tape of a session, to be begun or to be read."""
        return tape.Tape(self._journals / session_id, session_id)

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, record: SessionRecord, lease_id: str | None = None) -> None:
        """Writes a session down, with the lease that holds it, if any. Raises RegistryError."""
        written = _written(record.spec)
        row = {**vars(record), "tenant": record.owner.tenant, "principal": record.owner.name}
        try:
            with transaction(self._database):
                self._database.execute(_INSERT, {**row, "spec": json.dumps(written)})
                if lease_id is not None:
                    self._database.execute(_INSERT_HOLDER, (record.session_id, lease_id))
        except sqlite3.Error as error:
            raise RegistryError(f"{self._path}: {error}") from error

    def forget(self, session_id: str) -> None:
        """A session is no more, or is about to end. What can't be removed now is removed with `note_use`, later."""
        self._unforgotten.add(session_id)
        self._forget_rest()

    def _forget_rest(self) -> None:
        for session_id in list(self._unforgotten):
            if not self._try("DELETE FROM sessions WHERE session_id = ?", [(session_id,)]):
                return
            self._try("DELETE FROM holders WHERE session_id = ?", [(session_id,)])
            self._unforgotten.discard(session_id)
            tape.remove(self._journals / session_id)

    # What follows is of use to a later daemon, and the session goes on without it.

    def note_lost(self, session_id: str, reason: str) -> None:
        """A session has lost its sandbox."""
        self._try("UPDATE sessions SET lost_reason = ? WHERE session_id = ?", [(reason, session_id)])

    def note_connections(self, session_id: str, count: int) -> None:
        """The guest may have been shown so many tokens."""
        self._try("UPDATE sessions SET connections = ? WHERE session_id = ?", [(count, session_id)])

    def note_spec(self, session_id: str, spec: SessionSpec) -> None:
        """Another spec has been approved for it."""
        written = json.dumps(_written(spec))
        self._try("UPDATE sessions SET spec = ? WHERE session_id = ?", [(written, session_id)])

    def note_holder(self, session_id: str, lease_id: str) -> None:
        """One more lease holds it."""
        self._try(_INSERT_HOLDER, [(session_id, lease_id)])

    def note_let_go(self, session_id: str, lease_id: str) -> None:
        """A lease does not hold it any more, and others do."""
        self._try("DELETE FROM holders WHERE session_id = ? AND lease_id = ?", [(session_id, lease_id)])

    def note_use(self, used: Sequence[SessionUse]) -> None:
        """Of sessions that may have been used since the last time."""
        rows = [(use.last_used_s, use.generation, use.puts, use.gets, use.session_id) for use in used]
        self._try("UPDATE sessions SET last_used_s = ?, generation = ?, puts = ?, gets = ? WHERE session_id = ?", rows)
        self._forget_rest()

    def _try(self, statement: str, rows: Sequence[tuple[object, ...]]) -> bool:
        try:
            if len(rows) == 1:
                self._database.execute(statement, rows[0])
            else:
                with transaction(self._database):
                    self._database.executemany(statement, rows)
        except sqlite3.Error as error:
            _log.error("registry_not_written", path=str(self._path), error=str(error))
            return False
        return True


# ---------------------------------------------------------------------------------------------------------------------
# From a row to values. It is our own file; still, a value of another type is found here and not somewhere later.


def _record(row: Mapping[str, Any]) -> SessionRecord:
    """Raises ValueError, KeyError, TypeError."""
    if not _SESSION_ID.fullmatch(row["session_id"]):
        raise ValueError("a session id that is none")
    simple = {name: row[name] for name in row.keys() - {"tenant", "principal", "spec", "warm"}}
    record: SessionRecord = _value(
        SessionRecord,
        {
            **simple,
            "owner": {"tenant": row["tenant"], "name": row["principal"]},
            "spec": json.loads(row["spec"]),
            "warm": bool(row["warm"]),
        },
    )
    return record


def _written(value: Any) -> Any:
    """A dataclass as the objects of JSON. `asdict` would copy every string of it, and takes ten times as long."""
    if is_dataclass(value):
        return {name: _written(each) for name, each in vars(value).items()}
    return value


def _value(kind: Any, value: Any) -> Any:
    """The value of this type that was written as `value`: dataclasses as objects, tuples as arrays."""
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} where {kind.__name__} was written")
        return kind(**{name: _value(types[name], each) for name, each in value.items()})
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], each) for each in value)
    if origin is UnionType:
        return None if value is None else _value(arguments[0], value)
    if not isinstance(value, (float, int) if origin is float else origin):
        raise ValueError(f"a {type(value).__name__} where {kind} was written")
    return value
