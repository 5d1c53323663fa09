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
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import Context
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakValueDictionary

import structlog

from executor_client.aio import AsyncExecutorClient
from executor_client.aio_session import AsyncSession
from executor_client.errors import AuthenticationError, ExecutorClientError, NotFoundError, SessionGone
from executor_client.results import SessionState
from executor_server.core import open_file
from executor_server.core.config import StateDirError
from executor_server.gateway.e2b.contexts import Contexts
from executor_server.gateway.e2b.errors import sandbox_gone
from executor_server.gateway.errors import Refusal, of_client

if TYPE_CHECKING:
    from executor_server.gateway.e2b.filesystem import Watcher

IDLE_PART = 3
"""The gateway restarts the idle time of a session after a third of it."""
CONCURRENT_MAX = 16
"""Sandboxes that timers end or keep alive at one time."""
RETRY_S = 5.0
"""Seconds until a timer repeats a call that failed."""
DOWNLOADS_MAX = 8
"""Files that are read from one sandbox at one time; others wait. The daemon allows a sandbox 16 transfers."""

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
    """The token for its other ports. Empty: anyone who knows the address may use them."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    request: str = field(default="", repr=False)
    """The digest of the request that created it."""


_COLUMNS = tuple(each.name for each in fields(Record))
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM sandboxes"
_REPLACE = f"INSERT OR REPLACE INTO sandboxes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


class Sandbox:
    """A sandbox that has a record, and the state that its requests share."""

    def __init__(self, record: Record, *, touch_time: float = 0.0) -> None:
        self.record = record
        self.touch_time = touch_time
        """When to restart the idle time of the session, monotonic."""
        self.changed = asyncio.Event()
        """Set when `record` was replaced."""
        self.downloads = asyncio.Semaphore(DOWNLOADS_MAX)
        self.watchers: dict[str, Watcher] = {}
        self.writers: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks for writing to processes, by their ids."""
        self._open: tuple[AsyncExecutorClient, AsyncSession, Contexts] | None = None

    @property
    def session(self) -> AsyncSession:
        """The session, once the sandbox is open."""
        assert self._open is not None
        return self._open[1]

    @property
    def contexts(self) -> Contexts:
        """The contexts of its interpreter, once the sandbox is open."""
        assert self._open is not None
        return self._open[2]

    def is_open(self, client: AsyncExecutorClient) -> bool:
        return self._open is not None and self._open[0] is client

    def open(self, client: AsyncExecutorClient, session: AsyncSession) -> None:
        self._open = client, session, Contexts(session)


class Sandboxes:
    """The sandboxes of a gateway; one object for the process. As a context manager it owns the file and the timers."""

    def __init__(
        self, path: Path, client: Callable[[str, str], Awaitable[AsyncExecutorClient]], users: Collection[str] = ()
    ) -> None:
        """`users` are further names of the user in each sandbox.

        `client` returns the client of a key for a request of its owner, or for a visitor of the sandbox with this id.

        Raises StateDirError if the file can't be used.
        """
        self._client = client
        self.users = users
        try:
            self._database = open_file(path, _TABLE, _VERSION, synchronous="NORMAL")
            self._sandboxes = {each.sandbox_id: Sandbox(each) for each in map(_record, self._database.execute(_SELECT))}
        except (OSError, ValueError, sqlite3.Error) as error:
            raise StateDirError(
                f"The gateway's file of sandboxes {path} can't be used: {error}. Move it away: a new one is made, and "
                "the sandboxes in it end when they are idle."
            ) from error
        self._timers: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)

    async def __aenter__(self) -> Self:
        for sandbox in self._sandboxes.values():
            self._start_timer(sandbox)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        await asyncio.gather(*self._timers, return_exceptions=True)
        self._database.close()

    # Traffic of a sandbox

    def known(self, sandbox_id: str) -> Sandbox:
        """Returns a sandbox, for a caller who is not authenticated. Raises Refusal (502)."""
        sandbox = self.get(sandbox_id)
        if sandbox is None:
            raise sandbox_gone()
        return sandbox

    def running(self) -> list[Sandbox]:
        """Returns the sandboxes whose end time has not come."""
        now = time.time()
        return [each for each in self._sandboxes.values() if each.record.end_time > now]

    async def find(self, sandbox_id: str, token: str | None, *, or_traffic: bool = False) -> Sandbox:
        """Returns a sandbox for traffic with its access token; with `or_traffic`, also with its traffic token.

        Raises Refusal as envd answers: 502 if there is no such sandbox, 401 if the token is not its own.
        """
        sandbox = self.known(sandbox_id)
        traffic_token = sandbox.record.traffic_token
        may_enter = or_traffic and traffic_token and is_same(token, traffic_token)
        if not may_enter and not is_same(token, sandbox.record.access_token):
            raise Refusal(401, "unauthorized access, please provide a valid access token if required")
        return await self.open(sandbox)

    async def find_port(self, sandbox_id: str, traffic_token: str | None) -> Sandbox:
        """Returns a sandbox for traffic to its programs, which needs a token only if the sandbox has a traffic token.

        Raises Refusal: 502 if there is no such sandbox, 403 if the token is not its own.
        """
        sandbox = self.known(sandbox_id)
        if sandbox.record.traffic_token and not is_same(traffic_token, sandbox.record.traffic_token):
            raise Refusal(403, "this sandbox takes traffic with its traffic token only: E2b-Traffic-Access-Token")
        return await self.open(sandbox, by_visitor=True)

    async def open(self, sandbox: Sandbox, *, anew: bool = False, by_visitor: bool = False) -> Sandbox:
        """Opens the session of a sandbox; with `anew`, always asks the daemon for it. Raises Refusal.

        `by_visitor`: for a request that anyone may send. It takes no place of the owner's requests.
        """
        record = sandbox.record
        try:
            client = await self._client(record.token, record.sandbox_id if by_visitor else "")
            if anew or not sandbox.is_open(client):
                session = await client.get_session(record.session_id)
                if session.info.state is SessionState.LOST:
                    await session.close()
                    self.forget(record)
                if self._sandboxes.get(record.sandbox_id) is not sandbox:  # lost, or ended meanwhile
                    raise sandbox_gone()
                if not sandbox.is_open(client):  # else another request was faster
                    sandbox.open(client, session)
        except SessionGone:
            self.forget(record)
            raise sandbox_gone() from None
        except ExecutorClientError as error:
            raise of_client(error) from error
        return sandbox

    # The account

    def get(self, sandbox_id: str) -> Sandbox | None:
        """Returns a sandbox whose end time has not come."""
        sandbox = self._sandboxes.get(sandbox_id)
        return sandbox if sandbox is not None and sandbox.record.end_time > time.time() else None

    def keep(self, record: Record) -> None:
        """Writes a new or changed record."""
        self._database.execute(_REPLACE, _row(record))
        sandbox = self._sandboxes.get(record.sandbox_id)
        if sandbox is None or sandbox.record.session_id != record.session_id:  # an Idempotency-Key can reuse an id
            sandbox = Sandbox(record, touch_time=time.monotonic() + record.idle_time_s / IDLE_PART)
            self._sandboxes[record.sandbox_id] = sandbox
            self._start_timer(sandbox)
        sandbox.record = record
        sandbox.changed.set()

    def forget(self, record: Record) -> None:
        """Removes a record whose session has ended, unless a later session has its id. Idempotent."""
        sandbox = self._sandboxes.get(record.sandbox_id)
        if sandbox is None or sandbox.record.session_id != record.session_id:
            return
        self._database.execute("DELETE FROM sandboxes WHERE sandbox_id = ?", (record.sandbox_id,))
        del self._sandboxes[record.sandbox_id]
        sandbox.changed.set()

    # The timers

    def _start_timer(self, sandbox: Sandbox) -> None:
        # In a context of its own: the clients that it uses are not those of the request that starts it.
        timer = asyncio.create_task(self._tend(sandbox), context=Context())
        self._timers.add(timer)
        timer.add_done_callback(self._timers.discard)

    async def _tend(self, sandbox: Sandbox) -> None:
        """Keeps a sandbox alive, and ends it at its end time."""
        while self._sandboxes.get(sandbox.record.sandbox_id) is sandbox:
            record = sandbox.record
            sandbox.changed.clear()
            wait_s = min(record.end_time - time.time(), sandbox.touch_time - time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sandbox.changed.wait(), wait_s)
                continue
            is_due = record.end_time <= time.time()
            try:
                async with self._slots:
                    if sandbox.changed.is_set():  # while this waited
                        continue
                    if await self._is_kept(record, is_due=is_due):
                        sandbox.touch_time = time.monotonic() + record.idle_time_s / IDLE_PART
                    else:
                        self.forget(record)
            except Exception as error:  # noqa: BLE001 - it is repeated
                _log.warning("sandbox_not_served", sandbox_id=record.sandbox_id, is_due=is_due, error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _is_kept(self, record: Record, *, is_due: bool) -> bool:
        """Restarts the idle time of a sandbox, or ends it if it is due. Returns False if it has ended."""
        try:
            session = await (await self._client(record.token, "")).get_session(record.session_id)
            if is_due or session.info.state is SessionState.LOST:
                await session.close()
                return False
            await session.keep_alive()
        except NotFoundError:
            return False
        except AuthenticationError:
            if not is_due:
                raise
            return False  # the key is revoked: the daemon ends the sandbox when it is idle
        return True


def is_same(given: str | None, token: str) -> bool:
    """Compares tokens in constant time."""
    return hmac.compare_digest((given or "").encode(errors="replace"), token.encode())


def _record(row: tuple[object, ...]) -> Record:
    values = dict(zip(_COLUMNS, row, strict=True))
    values["metadata"] = json.loads(str(values["metadata"]))
    return Record(**values)  # type: ignore[arg-type]  # the table is STRICT


def _row(record: Record) -> tuple[object, ...]:
    return tuple(json.dumps(dict(value)) if isinstance(value, Mapping) else value for value in astuple(record))
