"""What the MCP server keeps for tokens over HTTP: clients of the daemon, few, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from executor_client.aio import AsyncExecutorClient
from executor_client.errors import AuthenticationError
from executor_client.mcp import callers as module
from executor_client.mcp.callers import Callers, TooManyCalls, current_sessions
from executor_client.mcp.sessions import SessionRequest


class FakeDaemon:
    """Its clients by token. It accepts all but "wrong"."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.closed: list[str] = []
        self.has_closed = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    def connect(self, token: str) -> AsyncExecutorClient:
        self.made.append(token)
        return cast(AsyncExecutorClient, FakeClient(self, token))


class FakeClient:
    def __init__(self, daemon: FakeDaemon, token: str) -> None:
        self._daemon = daemon
        self._token = token

    async def get_policy(self) -> Any:
        await self._daemon.answers.wait()
        if self._token.startswith("wrong"):
            raise AuthenticationError("unknown")

    async def close(self) -> None:
        self._daemon.closed.append(self._token)
        self._daemon.has_closed.set()


def callers_of(daemon: FakeDaemon) -> Callers:
    return Callers(daemon.connect, SessionRequest(), sessions_max=4)


async def test_a_token_has_one_client_until_the_server_ends() -> None:
    daemon = FakeDaemon()
    async with callers_of(daemon) as callers:
        async with callers.call("a"):
            first = current_sessions()
            async with asyncio.TaskGroup() as group:
                group.create_task(use(callers, "b"))
        async with callers.call("a"):
            assert current_sessions() is first
    assert (daemon.made, sorted(daemon.closed)) == (["a", "b"], ["a", "b"])


async def use(callers: Callers, token: str) -> None:
    async with callers.call(token):
        pass


async def test_nothing_is_kept_for_a_refused_token() -> None:
    daemon = FakeDaemon()
    async with callers_of(daemon) as callers:
        with pytest.raises(AuthenticationError):
            await use(callers, "wrong")
        await asyncio.sleep(0)
        assert daemon.closed == ["wrong"]


async def test_the_client_that_was_unused_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLERS_MAX", 2)
    daemon = FakeDaemon()
    async with callers_of(daemon) as callers, callers.call("a"):
        for token in "bcb":
            async with asyncio.TaskGroup() as group:
                group.create_task(use(callers, token))
        await asyncio.sleep(0)
        assert (daemon.made, daemon.closed) == (["a", "b", "c", "b"], ["b", "c"])


async def test_an_unused_client_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    daemon = FakeDaemon()
    async with callers_of(daemon) as callers:
        await use(callers, "a")
        async with asyncio.timeout(10), callers.call("b"):
            await daemon.has_closed.wait()
            assert daemon.closed == ["a"]


async def test_there_are_no_more_calls_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLS_MAX", 1)
    async with callers_of(FakeDaemon()) as callers:
        async with callers.call("a"):
            with pytest.raises(TooManyCalls, match="this server serves 1 calls at a time"):
                await use(callers, "b")
        await use(callers, "b")


async def test_a_flood_of_unknown_tokens_takes_no_place_of_known_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNKNOWN_MAX", 2)
    daemon = FakeDaemon()
    async with callers_of(daemon) as callers:
        await use(callers, "known")
        daemon.answers.clear()
        flood = [asyncio.create_task(use(callers, f"wrong-{number}")) for number in range(9)]
        await asyncio.sleep(0)
        known = asyncio.create_task(use(callers, "known"))
        await asyncio.sleep(0)
        daemon.answers.set()
        await known
        ends = await asyncio.gather(*flood, return_exceptions=True)
    assert [type(end) for end in ends] == [AuthenticationError] * 2 + [TooManyCalls] * 7
    assert daemon.made == ["known", "wrong-0", "wrong-1"]
