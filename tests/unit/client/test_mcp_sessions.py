"""The sessions of an MCP connection, on a fake client whose creations of sessions wait for the test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from executor_client import (
    AsyncExecutorClient,
    EnvironmentInfo,
    ErrorDetail,
    ExecutionResult,
    ExecutorClientError,
    NotFoundError,
    Outcome,
    PolicyViolationError,
    SessionGone,
    UnavailableError,
    VariablesState,
    Violation,
)
from executor_client.mcp import sessions as module
from executor_client.mcp.sessions import ConnectionSessions, SessionRefused, SessionRequest


class FakeSession:
    """Answers `execute` with the test's answer; without one, the execution runs until it is cancelled."""

    def __init__(self) -> None:
        self.generation = 1
        self.answer: ExecutionResult | ExecutorClientError | None = None
        self.started = asyncio.Event()
        self.cancelled = False
        self.closings = 0
        self.closing: ExecutorClientError | None = None
        self.refused: tuple[str, ...] = ()
        self.authorized: list[list[str]] = []

    async def execute(self, code: str, **options: Any) -> ExecutionResult:
        self.started.set()
        if isinstance(self.answer, ExecutorClientError):
            raise self.answer
        if self.answer is not None:
            return self.answer
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # The real session notifies the daemon, which takes more than one turn of the event loop.
            for _ in range(3):
                await asyncio.sleep(0)
            self.cancelled = True
            raise
        raise AssertionError

    async def authorize_imports(self, patterns: list[str]) -> None:
        self.authorized.append(patterns)
        if "*" in self.refused:
            raise UnavailableError("no daemon there")
        if refused := [each for each in patterns if each in self.refused]:
            violations = tuple(Violation("authorized_imports", "DENIED", each, "", "") for each in refused)
            raise PolicyViolationError("refused", violations=violations)

    async def close(self) -> None:
        self.closings += 1
        if self.closing is not None:
            raise self.closing


class FakeClient:
    def __init__(self) -> None:
        self.barrier = asyncio.Event()
        self.barrier.set()
        self.asked: list[str] = []
        self.made: list[FakeSession] = []
        self.problem: ExecutorClientError | None = None
        self.refused: tuple[str, ...] = ()

    async def create_session(
        self,
        image: str | None,
        imports: tuple[str, ...],
        limits: object,
        *,
        labels: Mapping[str, str],
        network: tuple[str, ...],
        packages: tuple[str, ...],
    ) -> FakeSession:
        self.asked.append(labels["name"])
        self.network = network
        self.packages = packages
        await self.barrier.wait()
        if self.problem is not None:
            raise self.problem
        self.made.append(FakeSession())
        self.made[-1].refused = self.refused
        return self.made[-1]

    async def prepare_environment(self, packages: tuple[str, ...], image: str | None) -> EnvironmentInfo:
        return EnvironmentInfo("env-1", ("polars==1",), 1, ("polars", "secret"))


@pytest.fixture
async def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
async def sessions(client: FakeClient) -> ConnectionSessions:
    return ConnectionSessions(cast(AsyncExecutorClient, client), SessionRequest(), sessions_max=2)


def ended(**fields: Any) -> ExecutionResult:
    made = {"outcome": Outcome.SUCCEEDED, "state": VariablesState.KEPT, "generation": 1, **fields}
    return ExecutionResult(execution_id="e", **made)


async def test_sessions_ask_for_the_hosts_that_the_command_was_given(client: FakeClient) -> None:
    request = SessionRequest(network=("pypi.org:443",))
    await ConnectionSessions(cast(AsyncExecutorClient, client), request, sessions_max=2).get("a", make=True)
    assert client.network == ("pypi.org:443",)


async def test_the_modules_of_packages_are_authorized_as_far_as_the_policy_allows(client: FakeClient) -> None:
    request = SessionRequest(packages=("polars",))
    client.refused = ("secret.*",)
    await ConnectionSessions(cast(AsyncExecutorClient, client), request, sessions_max=2).get("a", make=True)
    assert client.packages == ("polars",)
    assert client.made[0].authorized == [["polars.*", "secret.*"], ["polars.*"]]


async def test_a_session_whose_modules_can_not_be_authorized_is_ended(client: FakeClient) -> None:
    request = SessionRequest(packages=("polars",))
    client.refused = ("*",)
    with pytest.raises(UnavailableError):
        await ConnectionSessions(cast(AsyncExecutorClient, client), request, sessions_max=2).get("a", make=True)
    assert client.made[0].closings == 1


async def test_calls_that_come_at_once_get_the_same_session(client: FakeClient, sessions: ConnectionSessions) -> None:
    client.barrier.clear()
    calls = [asyncio.create_task(sessions.get("a", make=True)) for _ in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    client.barrier.set()
    (cancelled, first, second) = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert first is second and client.asked == ["a"]


async def test_a_session_that_could_not_be_created_is_created_at_the_next_call(
    client: FakeClient, sessions: ConnectionSessions
) -> None:
    client.problem = UnavailableError("no daemon there")
    with pytest.raises(UnavailableError):
        await sessions.get("a", make=True)
    client.problem = None
    assert (await sessions.get("a", make=True)).name == "a"


async def test_a_session_that_could_not_be_made_does_not_hide_the_others(
    client: FakeClient, sessions: ConnectionSessions
) -> None:
    """It fails while the list is being made, and is removed one turn of the event loop later."""
    client.barrier.clear()
    making = asyncio.create_task(sessions.get("a", make=True))
    for _ in range(2):
        await asyncio.sleep(0)
    client.problem = UnavailableError("no daemon there")
    client.barrier.set()
    assert await asyncio.create_task(sessions.described()) == []
    with pytest.raises(UnavailableError):
        await making


async def test_only_the_default_session_is_made_by_looking_into_it(sessions: ConnectionSessions) -> None:
    with pytest.raises(SessionRefused, match="there is no session 'a'; there are none"):
        await sessions.get("a", make=False)
    assert (await sessions.get("default", make=False)).name == "default"


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "../a", "a/b", "é", "-a", "a\n", "a" * 65, "a" * 10**6, "\0", "\ud800"]
)
async def test_odd_names_are_refused_in_a_short_sentence(
    client: FakeClient, sessions: ConnectionSessions, name: str
) -> None:
    with pytest.raises(SessionRefused, match="not a session name") as refused:
        await sessions.get(name, make=True)
    assert len(str(refused.value)) < 400 and str(refused.value).isprintable()
    assert client.asked == []


async def test_there_are_no_more_sessions_than_allowed(client: FakeClient, sessions: ConnectionSessions) -> None:
    client.barrier.clear()
    calls = [asyncio.create_task(sessions.get(name, make=True)) for name in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(SessionRefused, match="at most 2 sessions; existing: a, b"):
        await sessions.get("c", make=True)
    client.barrier.set()
    await asyncio.gather(*calls)
    await sessions.close("a")
    assert (await sessions.get("c", make=True)).name == "c"


@pytest.mark.parametrize(
    "answer",
    [
        SessionGone("there is no such session", reason="SESSION_NOT_FOUND"),
        ended(outcome=Outcome.LOST, state=VariablesState.LOST, error=ErrorDetail("Lost", "there is no such session")),
    ],
    ids=["refused", "lost"],
)
async def test_a_lost_session_is_said_at_each_call_until_it_is_reset(
    client: FakeClient, sessions: ConnectionSessions, answer: ExecutionResult | ExecutorClientError
) -> None:
    named = await sessions.get("a", make=True)
    client.made[0].answer = answer
    if isinstance(answer, ExecutionResult):
        assert await named.run("1") == (answer, False)  # the result reports the loss itself
    for _ in range(2):
        with pytest.raises(SessionRefused, match=r"'a' is gone, .*: there is no such session\. reset_session starts"):
            await (await sessions.get("a", make=True)).run("1")
    assert len(client.made) == 1
    assert await sessions.reset("a") is not named
    assert client.made[0].closings == 1, "a lost session counts until it is deleted"
    client.made[1].answer = ended()
    assert (await (await sessions.get("a", make=True)).run("1"))[0].succeeded


async def test_a_refusal_that_says_nothing_of_the_session_leaves_it_as_it_is(
    client: FakeClient, sessions: ConnectionSessions
) -> None:
    named = await sessions.get("a", make=True)
    client.made[0].answer = NotFoundError("there is no such file", reason="FILE_NOT_FOUND")
    with pytest.raises(NotFoundError):
        await named.run("1")
    assert not named.lost


async def test_a_cancelled_call_waits_until_its_execution_is_cancelled(
    client: FakeClient, sessions: ConnectionSessions
) -> None:
    named = await sessions.get("a", make=True)
    call = asyncio.create_task(named.run("1"))
    await client.made[0].started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert client.made[0].cancelled


async def test_an_interpreter_that_was_replaced_between_two_calls_is_said(
    client: FakeClient, sessions: ConnectionSessions
) -> None:
    named = await sessions.get("a", make=True)
    said = []
    for generation in (1, 2, 2, 5):
        client.made[0].answer = ended(generation=generation)
        said.append((await named.run("1"))[1])
    assert said == [False, True, False, True]


async def test_a_session_that_is_closed_while_it_is_being_made_is_ended_when_it_is(
    client: FakeClient, sessions: ConnectionSessions
) -> None:
    client.barrier.clear()
    getting = asyncio.create_task(sessions.get("a", make=True))
    await asyncio.sleep(0)
    closing = asyncio.create_task(sessions.close("a"))
    await asyncio.sleep(0)
    client.barrier.set()
    await asyncio.gather(getting, closing)
    assert client.made[0].closings == 1
    with pytest.raises(SessionRefused, match="it was closed"):
        await getting.result().run("1")


async def test_the_end_ends_all_sessions_also_those_being_made_and_those_that_resist(
    client: FakeClient, sessions: ConnectionSessions, caplog: pytest.LogCaptureFixture
) -> None:
    async with sessions:
        await sessions.get("a", make=True)
        client.made[0].closing = UnavailableError("no daemon there")
        client.barrier.clear()
        getting = asyncio.create_task(sessions.get("b", make=True))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(client.barrier.set)
    await getting
    assert [each.closings for each in client.made] == [1, 1]
    assert "a session could not be ended" in caplog.text and "no daemon there" in caplog.text


async def test_the_end_does_not_wait_for_ever(
    client: FakeClient, sessions: ConnectionSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.01)
    async with sessions:
        client.barrier.clear()
        getting = asyncio.create_task(sessions.get("a", make=True))
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await getting
