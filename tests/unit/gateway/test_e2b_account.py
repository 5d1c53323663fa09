"""Requests about one sandbox of E2B's protocol that overtake each other, over a daemon that has only sessions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from executor_client.errors import SessionGone
from executor_client.results import Limits, SessionState
from executor_server.core.config import GatewaySection
from executor_server.gateway.e2b.records import Sandboxes
from executor_server.gateway.e2b.sandboxes import rest_app
from executor_server.gateway.errors import Refusal

KEY = {"X-API-Key": "key"}
POLICY = SimpleNamespace(
    images=("base",), allowed_imports=(), max_limits=Limits(session_time_s=3600), network=SimpleNamespace(default=())
)
LIMITS = Limits(session_time_s=3600, idle_time_s=3600)


@dataclass
class FakeSession:
    """A session that can be ended. `sessions` are those that there are."""

    session_id: str
    sessions: dict[str, FakeSession]
    info: Any = field(default_factory=lambda: SimpleNamespace(limits=LIMITS, state=SessionState.IDLE, network=()))

    async def close(self) -> None:
        self.sessions.pop(self.session_id, None)


@dataclass
class FakeClient:
    """A client of the daemon, and all of its sessions."""

    sessions: dict[str, FakeSession] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    before_answer: Callable[[], Awaitable[None]] | None = None
    """Called once, between the daemon's answer to the next GetSession and its arrival."""

    async def get_policy(self) -> Any:
        return POLICY

    async def create_session(self, *_: object, **__: object) -> FakeSession:
        session = FakeSession(f"s{next(self.numbers)}", self.sessions)
        self.sessions[session.session_id] = session
        return session

    async def get_session(self, session_id: str) -> FakeSession:
        found = self.sessions.get(session_id)
        before_answer, self.before_answer = self.before_answer, None
        if before_answer is not None:
            await before_answer()
        if found is None:
            raise SessionGone("there is no such session")
        return found


@dataclass
class Account:
    daemon: FakeClient
    sandboxes: Sandboxes
    http: httpx.AsyncClient

    async def create(self) -> str:
        headers = {"Idempotency-Key": "once"}
        answer = await self.http.post("/v2/sandboxes", json={"templateID": "base"}, headers=headers)
        assert answer.status_code == 201
        return str(answer.json()["sandboxID"])

    async def delete(self, sandbox_id: str) -> None:
        assert (await self.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 204


@pytest.fixture
async def account(tmp_path: Path) -> AsyncIterator[Account]:
    daemon = FakeClient()

    async def client(_key: str, _visited: str = "") -> Any:
        return daemon

    async with contextlib.AsyncExitStack() as stack:
        sandboxes = await stack.enter_async_context(Sandboxes(tmp_path / "sandboxes.db", client))
        app = rest_app(GatewaySection(), cast("Any", SimpleNamespace(of=client)), sandboxes)
        transport = httpx.ASGITransport(cast("Any", app))
        http = httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=KEY)
        yield Account(daemon, sandboxes, await stack.enter_async_context(http))


@pytest.mark.parametrize("when", ["while the body arrives", "while the daemon answers"])
@pytest.mark.parametrize("path", ["timeout", "refreshes", "connect"])
async def test_a_sandbox_that_is_deleted_during_another_request_stays_deleted(
    account: Account, path: str, when: str
) -> None:
    """The other request wrote the record again, and its caller got a success."""
    sandbox_id = await account.create()

    async def body() -> AsyncIterator[bytes]:
        if when == "while the body arrives":
            await account.delete(sandbox_id)
        yield b'{"timeout": 60}' if path != "refreshes" else b"{}"

    if when == "while the daemon answers":
        account.daemon.before_answer = lambda: account.delete(sandbox_id)
    answer = await account.http.post(f"/sandboxes/{sandbox_id}/{path}", content=body())
    assert account.sandboxes.get(sandbox_id) is None
    assert answer.status_code == 404


async def test_a_sandbox_is_deleted_by_one_of_two_callers(account: Account) -> None:
    sandbox_id = await account.create()
    account.daemon.before_answer = lambda: account.delete(sandbox_id)
    assert (await account.http.delete(f"/sandboxes/{sandbox_id}")).status_code == 404


async def test_traffic_that_finds_its_sandbox_gone_leaves_the_next_one_with_its_id(account: Account) -> None:
    sandbox_id = await account.create()
    (session,) = account.daemon.sessions.values()
    await session.close()

    async def again() -> None:
        assert await account.create() == sandbox_id

    account.daemon.before_answer = again
    with pytest.raises(Refusal):
        await account.sandboxes.open(account.sandboxes.known(sandbox_id))
    assert account.sandboxes.get(sandbox_id) is not None
