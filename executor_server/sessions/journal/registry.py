"""The registry: the sessions on disk, from which the next daemon recovers them.

`registry.db` in the state directory has a row for each session: its owner, its approved spec, its sandbox and the
secret for connecting to it. `journals/ID/` holds the session's journal. A row is written before the session is handed
out, and removed before its sandbox is destroyed, so a sandbox without a row belongs to no session.

SQLite runs in WAL mode without a sync at each commit. Commits outlive this process; a crash of the host may lose the
last rows, but does not damage the file.

Each row has a checksum, and a row that does not fit it is rejected. Neither a damaged row nor a damaged file stops the
start: a damaged file is put aside and its valid rows are copied. A session without a valid row is lost, and its sandbox
is destroyed; if the rejected row or the journal still has its id, its client gets the reason. A file of another version
is not damaged: if it names sessions, it stops the start with instructions; an empty one is replaced.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from executor_server.core import (
    NO_NETWORK_USE,
    NetworkUsage,
    OtherVersionError,
    Principal,
    SessionSpec,
    keep_checksums,
    open_file,
    put_aside,
    row_checksum,
    transaction,
)
from executor_server.core.config import StateDir, StateDirError
from executor_server.guest.wire.frames import PROTOCOL_VERSION
from executor_server.sessions.journal import segments
from executor_server.sessions.journal.typed_json import as_json, from_json

# Suffix of a session's id in the name of the directory with its processes' journal; no session id can contain it.
_OF_PROCESSES = "+processes"
# Version of the tables and of the journals.
_VERSION = 4
_TABLES = """
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
    network TEXT NOT NULL,
    lost_reason TEXT,
    checksum INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- The leases that hold each session; one without a row is detached.
CREATE TABLE holders (
    session_id TEXT NOT NULL,
    lease_id TEXT NOT NULL,
    checksum INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (session_id, lease_id)
) STRICT, WITHOUT ROWID
"""

# Named as the fields of SessionRecord.
_COLUMNS = (
    "session_id, tenant, principal, request_id, spec, backend, sandbox_id, token, protocol, python_version, warm, "
    "create_time_s, connections, generation, last_used_s, puts, gets, network, lost_reason"
)
_SELECT = f"SELECT {_COLUMNS}, checksum FROM sessions ORDER BY create_time_s, session_id"
_INSERT_HOLDER = "INSERT OR IGNORE INTO holders (session_id, lease_id) VALUES (?, ?)"
_INSERT = f"INSERT INTO sessions ({_COLUMNS}) VALUES (:{_COLUMNS.replace(', ', ', :')})"

_LEASE_ID = re.compile(r"[0-9a-f]{32}")
# An id is also the name of a directory, which is removed with its content.
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_DAMAGED = "its row in the registry was damaged"
_OTHER_VERSION = "a daemon of another version wrote its row in the registry, and this one can't read it"
_UNKNOWN = "the daemon was killed, and the registry has no row of it"

_log = structlog.get_logger(__name__)


class RegistryError(Exception):
    """The registry could not be written. Internal: the text may name host paths."""


@dataclass(frozen=True)
class SessionRecord:
    """A session in the registry."""

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
    connections: int  # to its guest so far, including one that is about to begin
    generation: int = 1
    last_used_s: float = 0.0
    puts: int = 0  # files put into the session
    gets: int = 0
    network: NetworkUsage = NO_NETWORK_USE  # so far
    lost_reason: str | None = None
    protocol: int = PROTOCOL_VERSION  # the version that its guest speaks


@dataclass(frozen=True)
class SessionUse:
    """The values of a session that change with its use."""

    session_id: str
    last_used_s: float
    generation: int
    puts: int
    gets: int


class Registry:
    """Owns the database. Each call takes microseconds, so it runs in the event loop."""

    def __init__(self, state_dir: StateDir) -> None:
        """Opens or creates the file; a damaged one is put aside.

        Raises StateDirError for one of another version that names sessions.
        """
        self._path = state_dir.registry_path
        self._journals = state_dir.journals_path
        self._unforgotten: set[str] = set()
        self._unremoved: deque[str] = deque()  # sessions without a row whose journals may exist
        self.rejected: dict[str, str] = {}  # ids of sessions that were not recovered, and why
        self._is_damaged = False
        self._journals.mkdir(mode=0o700, exist_ok=True)
        try:
            self._database = self._opened()
        except OtherVersionError as error:
            if _names_sessions(self._path):
                raise StateDirError(
                    f"The registry {self._path} has version {error.version} and names sessions, but this daemon "
                    f"reads version {_VERSION}. Start the daemon that wrote it and stop it with SIGTERM, or move the "
                    "file away; both end these sessions."
                ) from error
            try:
                put_aside(self._path, self._path.with_name(f"{self._path.name}.version-{error.version}"))
                self._database = self._opened()
            except (OSError, sqlite3.Error) as failure:
                raise self._unusable(failure) from error
        except sqlite3.OperationalError as error:  # locked or unreadable, which does not mean damaged
            raise self._unusable(error) from error
        except sqlite3.DatabaseError as error:
            self._replace_file(error)

    def _opened(self) -> sqlite3.Connection:
        database = open_file(self._path, _TABLES, _VERSION, synchronous="NORMAL")
        keep_checksums(database, "sessions", _COLUMNS.split(", "), ["session_id"])
        keep_checksums(database, "holders", ["session_id", "lease_id"], ["session_id", "lease_id"])
        return database

    def _unusable(self, error: Exception) -> StateDirError:
        return StateDirError(
            f"The registry of sessions {self._path} can't be used: {error}. Check that its disk has room and can "
            "be read. To end its sessions and start without them, move it away."
        )

    def _replace_file(self, error: sqlite3.Error) -> None:
        """Creates a new file with the valid rows of the damaged one. Raises StateDirError."""
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns()}")
        try:
            put_aside(self._path, aside)
            self._database = self._opened()
            rows = _salvaged(aside)
            with transaction(self._database):
                self._database.executemany(_INSERT, rows)
        except (OSError, sqlite3.Error) as failure:
            raise self._unusable(failure) from error
        self._is_damaged = True
        _log.error(
            "registry_damaged", path=str(self._path), put_aside=str(aside), kept_sessions=len(rows), error=str(error)
        )

    def close(self) -> None:
        self._database.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def load(self) -> list[SessionRecord]:
        """Returns the sessions with valid rows, oldest first; removes other journals. Raises StateDirError."""
        try:
            rows = self._rows()
        except sqlite3.OperationalError as error:
            raise self._unusable(error) from error
        except sqlite3.DatabaseError as error:
            self._database.close()
            self._replace_file(error)
            rows = self._rows()
        records = []
        for row, fits in rows:
            try:
                if not fits:
                    raise ValueError("it does not fit its checksum")
                records.append(_record(row))
            except (ValueError, KeyError, TypeError) as error:
                self._is_damaged |= not fits
                self._reject(row["session_id"], _OTHER_VERSION if fits else _DAMAGED, error)
        known = {record.session_id for record in records}
        for journal in self._journals.iterdir():
            session_id = journal.name.removesuffix(_OF_PROCESSES)
            if session_id in known:
                continue
            if session_id != journal.name:
                segments.remove(journal)
            else:
                # The daemon was killed while it created or ended the session. Or the row was in the write-ahead log
                # after a damaged part, which SQLite ignores without an error.
                self.rejected.setdefault(journal.name, _DAMAGED if self._is_damaged else _UNKNOWN)
                _log.warning("journal_without_session", session_id=journal.name, is_registry_damaged=self._is_damaged)
                segments.remove(journal)
        return records

    def _rows(self) -> list[tuple[dict[str, Any], bool]]:
        """Returns all rows, each with True if it fits its checksum."""
        names = _COLUMNS.split(", ")
        rows = self._database.execute(_SELECT).fetchall()
        return [(dict(zip(names, row, strict=True)), checksum == row_checksum(*row)) for *row, checksum in rows]

    def _reject(self, session_id: str, reason: str, error: Exception) -> None:
        """Removes a row and remembers its id only; even its owner is untrusted."""
        self.rejected[session_id] = reason
        _log.error("session_rejected", session_id=session_id, path=str(self._path), error=str(error))
        self._try("DELETE FROM sessions WHERE session_id = ?", [(session_id,)])

    def holders(self) -> dict[str, list[str]]:
        """Returns the leases that hold each session; removes those of ended sessions. Raises StateDirError.

        An invalid row is removed, too, since its lease is unknown. If it was the only one, the session counts as
        detached and ends when unused, not as one whose client has ended.
        """
        held: dict[str, list[str]] = {}
        try:
            self._database.execute("DELETE FROM holders WHERE session_id NOT IN (SELECT session_id FROM sessions)")
            rows = self._database.execute("SELECT session_id, lease_id, checksum FROM holders").fetchall()
            for session_id, lease_id, checksum in rows:
                if checksum == row_checksum(session_id, lease_id) and _LEASE_ID.fullmatch(lease_id):
                    held.setdefault(session_id, []).append(lease_id)
                else:
                    _log.error("holder_rejected", session_id=session_id, path=str(self._path))
                    self.note_released(session_id, lease_id)
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        return held

    def segments_of(self, session_id: str) -> segments.Segments:
        """Returns the segments of a session, for writing or reading."""
        return segments.Segments(self._journals / session_id, session_id)

    def process_segments_of(self, session_id: str) -> segments.Segments:
        """Returns the segments of a session's processes."""
        return segments.Segments(self._journals / f"{session_id}{_OF_PROCESSES}", session_id)

    def has_process_segments(self, session_id: str) -> bool:
        """True if the session has a journal of processes."""
        return (self._journals / f"{session_id}{_OF_PROCESSES}").exists()

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, record: SessionRecord, lease_id: str | None = None) -> None:
        """Writes a session, and the lease that holds it, if any. Raises RegistryError."""
        row = {
            **vars(record),
            "tenant": record.owner.tenant,
            "principal": record.owner.name,
            "spec": as_json(record.spec),
            "network": as_json(record.network),
        }
        try:
            with transaction(self._database):
                self._database.execute(_INSERT, row)
                if lease_id is not None:
                    self._database.execute(_INSERT_HOLDER, (record.session_id, lease_id))
        except sqlite3.Error as error:
            raise RegistryError(f"{self._path}: {error}") from error

    def forget(self, session_id: str) -> None:
        """Removes an ended session; `remove_journals` must follow. After a failure, `note_use` retries."""
        self._unforgotten.add(session_id)
        self._forget_rest()

    def _forget_rest(self) -> None:
        for session_id in list(self._unforgotten):
            if not self._try("DELETE FROM sessions WHERE session_id = ?", [(session_id,)]):
                return
            self._try("DELETE FROM holders WHERE session_id = ?", [(session_id,)])
            self._unforgotten.discard(session_id)
            self._unremoved.append(session_id)

    def remove_journals(self) -> None:
        """Removes the journals of forgotten sessions. Blocks; call it in a thread."""
        with contextlib.suppress(IndexError):  # another thread may have taken the last
            while self._unremoved:
                session_id = self._unremoved.popleft()
                segments.remove(self._journals / session_id)
                segments.remove(self._journals / f"{session_id}{_OF_PROCESSES}")

    # The notes below are for a later daemon only: a failure to write one is logged, and the session goes on.

    def note_lost(self, session_id: str, reason: str) -> None:
        """Notes that a session has lost its sandbox."""
        self._try("UPDATE sessions SET lost_reason = ? WHERE session_id = ?", [(reason, session_id)])

    def note_connections(self, session_id: str, count: int) -> None:
        """Notes how many tokens may have been sent to the guest."""
        self._try("UPDATE sessions SET connections = ? WHERE session_id = ?", [(count, session_id)])

    def note_spec(self, session_id: str, spec: SessionSpec) -> None:
        """Notes a session's new approved spec."""
        self._try("UPDATE sessions SET spec = ? WHERE session_id = ?", [(as_json(spec), session_id)])

    def note_holder(self, session_id: str, lease_id: str) -> None:
        """Notes a further lease that holds a session."""
        self._try(_INSERT_HOLDER, [(session_id, lease_id)])

    def note_released(self, session_id: str, lease_id: str) -> None:
        """Notes that a lease no longer holds a session, which has others."""
        self._try("DELETE FROM holders WHERE session_id = ? AND lease_id = ?", [(session_id, lease_id)])

    def note_use(self, used: Sequence[SessionUse]) -> bool:
        """Notes the use of sessions, and retries failed removals. Returns False if the use could not be noted."""
        rows = [(use.last_used_s, use.generation, use.puts, use.gets, use.session_id) for use in used]
        statement = "UPDATE sessions SET last_used_s = ?, generation = ?, puts = ?, gets = ? WHERE session_id = ?"
        noted = not rows or self._try(statement, rows)
        if self._unforgotten:
            self._forget_rest()
            self.remove_journals()
        return noted

    def note_network(self, used: Mapping[str, NetworkUsage]) -> bool:
        """Notes the network usage of sessions, for their limits in a later daemon. Returns False on failure."""
        rows = [(as_json(usage), session_id) for session_id, usage in used.items()]
        return self._try("UPDATE sessions SET network = ? WHERE session_id = ?", rows)

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


def _names_sessions(path: Path) -> bool:
    """Returns False for a registry without sessions; True if it has some or can't be read."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute("SELECT 1 FROM sessions").fetchone() is not None
    except sqlite3.Error:
        return True


def _salvaged(path: Path) -> list[dict[str, Any]]:
    """Returns the readable rows of a damaged file that fit their checksums."""
    names, rows = _COLUMNS.split(", "), []
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as database:
        for *row, checksum in database.execute(f"SELECT {_COLUMNS}, checksum FROM sessions"):
            if checksum == row_checksum(*row):
                rows.append(dict(zip(names, row, strict=True)))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# From a row to values. A value of a wrong type is found here, not later where it is used.


def _record(row: Mapping[str, Any]) -> SessionRecord:
    """Reads a row. Raises ValueError, KeyError, TypeError."""
    if not _SESSION_ID.fullmatch(row["session_id"]):
        raise ValueError("an invalid session id")
    simple = {name: row[name] for name in row.keys() - {"tenant", "principal", "spec", "network", "warm"}}
    record: SessionRecord = from_json(
        SessionRecord,
        {
            **simple,
            "owner": {"tenant": row["tenant"], "name": row["principal"]},
            "spec": json.loads(row["spec"]),
            "network": json.loads(row["network"]),
            "warm": bool(row["warm"]),
        },
    )
    return record
