"""Clients of the daemon: one for each token in use.

A call to the daemon verifies a token before its client is kept. Later the daemon itself refuses calls of a revoked
token. A client without requests is closed when another one needs its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from executor_client.aio import AsyncExecutorClient
from executor_client.errors import AuthenticationError, ResourceExhaustedError

CLIENTS_MAX = 256
REQUESTS_MAX = 256
"""Requests of one token at a time."""
VISITS_MAX = 256
ALL_VISITS_MAX = 512
"""Requests to ports at a time, of one sandbox and of all. Anyone may send them, and they use the token of the sandbox's
owner, whose own requests need other places."""
VERIFICATIONS_MAX = 16
"""Tokens in verification at one time."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{1,4096}=*")


@dataclass(eq=False)
class _Client:
    client: AsyncExecutorClient
    requests: Counter[str] = field(default_factory=Counter)
    """Requests that use it now: those to ports under the id of their sandbox, the owner's under ""."""


class Clients:
    """As a context manager it closes the clients."""

    def __init__(self, connect: Callable[[str], AsyncExecutorClient]) -> None:
        """`connect` makes the client of a token."""
        self._connect = connect
        self._clients: dict[str, _Client] = {}  # the least recently used one first
        self._verifying: dict[str, asyncio.Task[None]] = {}
        self._verifications = asyncio.Semaphore(VERIFICATIONS_MAX)
        self._closing: set[asyncio.Task[None]] = set()
        self._used: ContextVar[list[tuple[_Client, str]]] = ContextVar("used")
        self._visits = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Wraps a request, and keeps the clients that it uses open until its end."""
        used: list[tuple[_Client, str]] = []
        entered = self._used.set(used)
        try:
            yield
        finally:
            self._used.reset(entered)
            for client, visited in used:
                client.requests[visited] -= 1
                client.requests = +client.requests  # drops sandboxes without requests
                self._visits -= bool(visited)

    async def of(self, token: str, visited: str = "") -> AsyncExecutorClient:
        """Returns the client of a token. It stays open until the end of the request.

        `visited` is the id of a sandbox if the request is a visitor's to one of its ports, and not the owner's.

        Raises AuthenticationError for a token that the daemon does not accept, ResourceExhaustedError if too many
        clients are in use or the token or the sandbox has too many requests, and the client's other errors if the
        daemon does not answer.
        """
        if token not in self._clients:
            await self._verified(token)
        found = self._clients.pop(token, None)
        if found is None:  # another token has taken its place meanwhile
            raise _all_in_use()
        self._clients[token] = found
        used = self._used.get(None)
        if used is not None and (found, visited) not in used:
            self._check_room(found.requests[visited], visited)
            found.requests[visited] += 1
            self._visits += bool(visited)
            used.append((found, visited))
        return found.client

    def _check_room(self, requests: int, visited: str) -> None:
        """Raises ResourceExhaustedError if a token, or a sandbox, has this many requests already."""
        if not visited and requests >= REQUESTS_MAX:
            problem = f"the gateway serves {REQUESTS_MAX} requests of a token at a time"
        elif visited and requests >= VISITS_MAX:
            problem = f"the gateway serves {VISITS_MAX} requests to the ports of one sandbox at a time"
        elif visited and self._visits >= ALL_VISITS_MAX:
            problem = f"the gateway serves {ALL_VISITS_MAX} requests to ports of sandboxes at a time"
        else:
            return
        raise ResourceExhaustedError(f"{problem}; try again", retry_after_s=1.0)

    async def _verified(self, token: str) -> None:
        """Requests of one token wait for one verification, which goes on if they are cancelled."""
        verifying = self._verifying.get(token)
        if verifying is None:
            if _TOKEN.fullmatch(token) is None:
                raise AuthenticationError("the token is malformed; pass one made by `executor-server token new`")
            verifying = self._verifying[token] = asyncio.create_task(self._verify(token))
            verifying.add_done_callback(lambda _: self._verifying.pop(token, None))
        await asyncio.shield(verifying)

    async def _verify(self, token: str) -> None:
        async with self._verifications:
            client = self._connect(token)
            try:
                await client.get_policy()
                self._make_room()
            except BaseException:
                await client.close()
                raise
        self._clients[token] = _Client(client)

    def _make_room(self) -> None:
        if len(self._clients) < CLIENTS_MAX:
            return
        unused = next((token for token, each in self._clients.items() if not each.requests.total()), None)
        if unused is None:
            raise _all_in_use()
        self._close(unused)

    def _close(self, token: str) -> None:
        closing = asyncio.create_task(self._clients.pop(token).client.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._verifying.values(), return_exceptions=True)
        for token in list(self._clients):
            self._close(token)
        await asyncio.gather(*self._closing, return_exceptions=True)


def _all_in_use() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the gateway serves {CLIENTS_MAX} tokens at a time, and all are in use; try again", retry_after_s=1.0
    )
