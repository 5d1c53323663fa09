"""The callers of the HTTP server: for each token a client of the daemon, which authenticates every request.

The server knows no tokens. Calls with one token share a client and so a connection to the daemon. The client is closed
when the daemon refuses the token, when it was unused for IDLE_S, or when CALLERS_MAX others were used since. Only
UNKNOWN_MAX requests with new tokens are authenticated at a time, so that a flood of wrong tokens takes no places of
known callers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from executor_client.aio import AsyncExecutorClient
from executor_client.errors import AuthenticationError
from executor_client.mcp.sessions import SessionRequest, Sessions
from executor_client.mcp.tenant_sessions import TenantSessions

CALLERS_MAX = 256
CALLS_MAX = 64
"""Requests at a time, all callers together."""
CALLS_OF_CALLER_MAX = 16
UNKNOWN_MAX = 16
"""Requests at a time with tokens that the daemon has not accepted yet."""
IDLE_S = 300.0
END_TIMEOUT_S = 5.0
"""Seconds that cancelled calls have to end their work at the daemon when the server stops."""

_current: ContextVar[Sessions] = ContextVar("current")


def current_sessions() -> Sessions:
    """Returns the sessions of the running call's caller."""
    return _current.get()


class TooManyCalls(Exception):
    """A limit of calls is reached. The message is for the caller."""


@dataclass
class _Caller:
    client: AsyncExecutorClient
    sessions: Sessions
    accepted: bool = False
    calls: int = 0
    idle_since: float = 0.0


class Callers:
    """Clients by token. Leaving the context manager waits for calls that are ending, and closes the clients."""

    def __init__(
        self, connect: Callable[[str], AsyncExecutorClient], request: SessionRequest, *, sessions_max: int
    ) -> None:
        """`connect` makes the client of a token."""
        self._connect = connect
        self._request = request
        self._sessions_max = sessions_max
        self._callers: dict[str, _Caller] = {}  # in order of use, the most recent one last
        self._calls: set[asyncio.Task[object]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def call(self, token: str) -> AsyncIterator[None]:
        """Wraps a request with this token. In it, `current_sessions` returns the caller's sessions.

        Raises TooManyCalls, AuthenticationError for a token that the daemon does not accept, and the client's other
        errors if the daemon does not answer.
        """
        task = asyncio.current_task()
        assert task is not None
        self._check_number(self._callers.get(token))
        caller = self._caller(token)
        caller.calls += 1
        self._calls.add(task)
        entered = _current.set(caller.sessions)
        try:
            await caller.client.get_policy()
            caller.accepted = True
            yield
        except AuthenticationError:
            caller.accepted = False
            raise
        finally:
            _current.reset(entered)
            self._calls.discard(task)
            caller.calls -= 1
            caller.idle_since = asyncio.get_running_loop().time()
            if not caller.accepted and not caller.calls:
                self._close(token)

    def _check_number(self, caller: _Caller | None) -> None:
        unknown = sum(each.calls for each in self._callers.values() if not each.accepted)
        if (caller is None or not caller.accepted) and unknown >= UNKNOWN_MAX:
            raise TooManyCalls(f"this server authenticates {UNKNOWN_MAX} new tokens at a time")
        if len(self._calls) - unknown >= CALLS_MAX:
            raise TooManyCalls(f"this server serves {CALLS_MAX} calls at a time")
        if caller is not None and caller.calls >= CALLS_OF_CALLER_MAX:
            raise TooManyCalls(f"this server serves {CALLS_OF_CALLER_MAX} calls of a token at a time")

    def _caller(self, token: str) -> _Caller:
        caller = self._callers.pop(token, None)
        if caller is None:
            client = self._connect(token)
            caller = _Caller(client, TenantSessions(client, self._request, sessions_max=self._sessions_max))
        self._callers[token] = caller
        unused = [each for each, other in self._callers.items() if not other.calls and other is not caller]
        for each in unused[: max(0, len(self._callers) - CALLERS_MAX)]:
            self._close(each)
        return caller

    def _close(self, token: str) -> None:
        caller = self._callers.pop(token, None)
        if caller is not None:
            closing = asyncio.create_task(caller.client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close_idle(self) -> None:
        """Closes unused clients, until it is cancelled."""
        while True:
            await asyncio.sleep(IDLE_S / 10)
            before = asyncio.get_running_loop().time() - IDLE_S
            for token, caller in list(self._callers.items()):
                if not caller.calls and caller.idle_since < before:
                    self._close(token)

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.create_task(self.close_idle())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._sweeper.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=END_TIMEOUT_S)
        for token in list(self._callers):
            self._close(token)
        await asyncio.gather(self._sweeper, *self._closing, return_exceptions=True)
