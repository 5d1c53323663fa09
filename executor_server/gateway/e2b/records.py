"""The sandboxes, kept in an SQLite file so that a restarted gateway knows them.

Traffic of a sandbox carries no key of the caller, only the sandbox's own access token. The record has the key that
created the sandbox, and the gateway uses it for this traffic. So the file is as secret as the tokens of the
daemon: it has mode 0600 in a directory of mode 0700, and is never served.

The gateway ends a sandbox at its end time, after a restart too. Until then it restarts the idle time of the session
often enough. If no gateway comes back, the session's own limits end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import structlog

from executor_client.aio import AsyncExecutorClient
from executor_client.aio_session import AsyncSession
from executor_client.errors import AuthenticationError, ExecutorClientError, NotFoundError, SessionGone
from executor_client.results import SessionState
from executor_server.core import open_file
from executor_server.core.config import StateDirError
from executor_server.gateway.e2b.errors import refusal_of, sandbox_gone
from executor_server.gateway.errors import Refusal

IDLE_PART = 3
"""The gateway restarts the idle time of a session after a third of it."""
CONCURRENT_MAX = 16
"""Sandboxes that the timer ends or keeps alive at one time."""
RETRY_S = 5.0
"""Seconds until the timer repeats a call that failed."""

_VERSION = 1
_TABLE = """
CREATE TABLE sandboxes (
    sandbox_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    token TEXT NOT NULL,
    access_token TEXT NOT NULL,
    template TEXT NOT NULL,
    create_time REAL NOT NULL,
    end_time REAL NOT NULL,
    idle_time_s REAL NOT NULL,
    traffic_token TEXT NOT NULL,
    metadata TEXT NOT NULL,
    request TEXT NOT NULL
) STRICT, WITHOUT ROWID
"""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Record:
    """A sandbox. Times are seconds since the epoch."""

    sandbox_id: str
    session_id: str
    token: str = field(repr=False)
    """The caller's key."""
    access_token: str = field(repr=False)
    template: str
    create_time: float
    end_time: float
    idle_time_s: float
    """Seconds without use after which the daemon ends the session."""
    traffic_token: str = field(default="", repr=False)
    """The token for its other ports. Empty: who knows the address may use them."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    request: str = field(default="", repr=False)
    """The digest of the request that created it."""


_COLUMNS = tuple(each.name for each in fields(Record))
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM sandboxes"
_REPLACE = f"INSERT OR REPLACE INTO sandboxes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


@dataclass(frozen=True)
class Sandbox:
    """A running sandbox. Requests of this sandbox share the session object."""

    record: Record
    session: AsyncSession


class Sandboxes:
    """The sandboxes of a gateway; one object for the process. As a context manager it owns the file and the timer."""

    def __init__(
        self, path: Path, client: Callable[[str], Awaitable[AsyncExecutorClient]], users: Collection[str] = ()
    ) -> None:
        """`client` returns the client of a caller's key; `users` are further names of the user in each sandbox.

        Raises StateDirError if the file can't be used.
        """
        self._client = client
        self.users = users
        try:
            self._database = open_file(path, _TABLE, _VERSION, synchronous="NORMAL")
            self._records = {each.sandbox_id: each for each in map(_record, self._database.execute(_SELECT))}
        except (OSError, ValueError, sqlite3.Error) as error:
            raise StateDirError(
                f"The gateway's file of sandboxes {path} can't be used: {error}. Move it away: a new one is made, and "
                "the sandboxes in it end when they are idle."
            ) from error
        self._sessions: dict[str, tuple[AsyncExecutorClient, AsyncSession]] = {}
        self._touched: dict[str, float] = {}  # when the idle time of each was restarted last, monotonic
        self._failed: dict[str, float] = {}  # when to try again, monotonic
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._timer = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await asyncio.gather(self._timer, return_exceptions=True)
        self._database.close()

    # Traffic of a sandbox

    def record(self, sandbox_id: str) -> Record:
        """Returns the record of a sandbox, for a caller who is not authenticated. Raises Refusal (502)."""
        record = self.get(sandbox_id)
        if record is None:
            raise sandbox_gone()
        return record

    def running(self) -> list[Record]:
        """Returns the records of the sandboxes whose end time has not come."""
        now = time.time()
        return [each for each in self._records.values() if each.end_time > now]

    async def find(self, sandbox_id: str, token: str | None, *, or_traffic: bool = False) -> Sandbox:
        """Returns a sandbox for traffic with its access token; with `or_traffic`, also with its traffic token.

        Raises Refusal as envd answers: 502 if there is no such sandbox, 401 if the token is not its own.
        """
        record = self.record(sandbox_id)
        may_enter = or_traffic and record.traffic_token and is_same(token, record.traffic_token)
        if not may_enter and not is_same(token, record.access_token):
            raise Refusal(401, "unauthorized access, please provide a valid access token if required")
        return await self.open(record)

    async def find_port(self, sandbox_id: str, traffic_token: str | None) -> Sandbox:
        """Returns a sandbox for traffic to its programs, which needs a token only if the sandbox has a traffic token.

        Raises Refusal: 502 if there is no such sandbox, 403 if the token is not its own.
        """
        record = self.record(sandbox_id)
        if record.traffic_token and not is_same(traffic_token, record.traffic_token):
            raise Refusal(403, "this sandbox takes traffic with its traffic token only: E2b-Traffic-Access-Token")
        return await self.open(record)

    async def open(self, record: Record) -> Sandbox:
        """Returns the sandbox of a record. Raises Refusal."""
        try:
            client = await self._client(record.token)
            known = self._sessions.get(record.sandbox_id)
            if known is None or known[0] is not client:
                session = await client.get_session(record.session_id)
                if session.info.state is SessionState.LOST:
                    await session.close()
                    self._gone(record)
                if record.sandbox_id not in self._records:  # it was ended meanwhile
                    raise sandbox_gone()
                known = self._sessions.get(record.sandbox_id)
                if known is None or known[0] is not client:  # else another request was faster
                    known = self._sessions[record.sandbox_id] = (client, session)
        except SessionGone:
            self._gone(record)
        except ExecutorClientError as error:
            raise refusal_of(error) from error
        return Sandbox(record, known[1])

    async def check(self, sandbox_id: str) -> None:
        """Asks the daemon whether a sandbox runs. Raises Refusal, 502 if it does not."""
        record = self.record(sandbox_id)
        sandbox = await self.open(record)
        try:
            await sandbox.session.refresh()
        except SessionGone:
            self._gone(record)
        except ExecutorClientError as error:
            raise refusal_of(error) from error

    def _gone(self, record: Record) -> NoReturn:
        self.forget(record.sandbox_id)
        raise sandbox_gone()

    # The account

    def get(self, sandbox_id: str) -> Record | None:
        """Returns the record of a sandbox whose end time has not come."""
        record = self._records.get(sandbox_id)
        return record if record is not None and record.end_time > time.time() else None

    def of_sessions(self, session_ids: Mapping[str, object]) -> list[Record]:
        """Returns the running sandboxes of these sessions, oldest first."""
        found = [each for each in self.running() if each.session_id in session_ids]
        return sorted(found, key=lambda record: (record.create_time, record.sandbox_id))

    def keep(self, record: Record) -> None:
        """Writes a new or changed record."""
        self._database.execute(_REPLACE, _row(record))
        self._records[record.sandbox_id] = record
        self._touched.setdefault(record.sandbox_id, time.monotonic())
        self._changed.set()

    def forget(self, sandbox_id: str) -> None:
        """Removes a record whose session has ended. Idempotent."""
        self._database.execute("DELETE FROM sandboxes WHERE sandbox_id = ?", (sandbox_id,))
        self._records.pop(sandbox_id, None)
        self._sessions.pop(sandbox_id, None)
        self._touched.pop(sandbox_id, None)
        self._failed.pop(sandbox_id, None)

    # The timer

    async def _run(self) -> None:
        """Ends sandboxes at their end times and keeps the others alive, until it is cancelled."""
        slots = asyncio.Semaphore(CONCURRENT_MAX)
        while True:
            self._changed.clear()
            due = [record for record in self._records.values() if self._wait_s(record) <= 0]
            if due:
                await asyncio.gather(*(self._serve(record, slots) for record in due))
                continue
            wait_s = min(map(self._wait_s, self._records.values()), default=None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)

    def _wait_s(self, record: Record) -> float:
        """Returns the seconds until the timer must do something for a sandbox."""
        now = time.monotonic()
        again_s = self._failed.get(record.sandbox_id, now) - now
        idle_s = self._touched.get(record.sandbox_id, -math.inf) + record.idle_time_s / IDLE_PART - now
        return max(again_s, min(record.end_time - time.time(), idle_s))

    async def _serve(self, record: Record, slots: asyncio.Semaphore) -> None:
        async with slots:
            is_due = record.end_time <= time.time()
            try:
                is_kept = await (self._end(record) if is_due else self._keep_alive(record))
                if not is_kept and self._records.get(record.sandbox_id) is record:
                    self.forget(record.sandbox_id)
            except Exception as error:  # noqa: BLE001 - the timer goes on with the others
                _log.warning("sandbox_not_served", sandbox_id=record.sandbox_id, is_due=is_due, error=str(error))
                if record.sandbox_id in self._records:
                    self._failed[record.sandbox_id] = time.monotonic() + RETRY_S

    async def _keep_alive(self, record: Record) -> bool:
        """Restarts the idle time of a sandbox. Returns False if it has ended."""
        try:
            session = await (await self._client(record.token)).get_session(record.session_id)
            if session.info.state is not SessionState.LOST:
                await session.keep_alive()
                if record.sandbox_id in self._records:
                    self._touched[record.sandbox_id] = time.monotonic()
                return True
            await session.close()
        except NotFoundError:
            pass
        return False

    async def _end(self, record: Record) -> bool:
        """Ends a sandbox. Returns False; also for a revoked key: the daemon ends the sandbox when it is idle."""
        with contextlib.suppress(NotFoundError, AuthenticationError):
            await (await (await self._client(record.token)).get_session(record.session_id)).close()
        return False


def is_same(given: str | None, token: str) -> bool:
    """Compares tokens in constant time."""
    return hmac.compare_digest((given or "").encode(errors="replace"), token.encode())


def _record(row: tuple[object, ...]) -> Record:
    values = dict(zip(_COLUMNS, row, strict=True))
    values["metadata"] = json.loads(str(values["metadata"]))
    return Record(**values)  # type: ignore[arg-type]  # the table is STRICT


def _row(record: Record) -> tuple[object, ...]:
    return tuple(json.dumps(dict(value)) if isinstance(value, Mapping) else value for value in astuple(record))
