"""Admission is asked before something happens in a session, and the observer notified after it: always."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import (
    ExecutorError,
    NotFound,
    PolicyViolation,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from executor_server.core.lifecycle.admission import Answer
from executor_server.core.model import FileRules, LimitWarning, Outcome, Principal, Result, ToolRules, ToolSpec
from executor_server.guest.wire.frames import Frame, Kind
from executor_server.sessions import Session, SessionHooks, SessionRequest
from executor_server.sessions.journal.execution import ToolFailure
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.fake_guest import FakeGuest
from tests.support.fake_session import SessionDaemon, execute, result_of, successive_daemons
from tests.support.polling import eventually_async, is_full
from tests.support.specs import session_spec
from tests.unit.sessions.watching import CLOSED_TEXT, FakeAdmission, Witness

OWNER = Principal("tenant", "name")
FILE = {"path": "f", "size": 2, "directory": False, "modified": 1.0}
OPEN = session_spec(SPEC)


class Daemon(SessionDaemon):
    def __init__(self, backend: FakeBackend, directory: Path) -> None:
        self.admission, self.witness = FakeAdmission(), Witness()
        super().__init__(backend, directory, SessionHooks(self.admission, self.witness))

    async def create(self, request_id: str = "r", **rules: Any) -> Session:
        return await self.manager.create(OWNER, SessionRequest(request_id, replace(OPEN, **rules)))


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[[], Any]]:
    backend = FakeBackend(tmp_path)
    async with successive_daemons(backend, lambda: Daemon(backend, tmp_path)) as start:
        yield start


@pytest.fixture
async def daemon(start: Any) -> Daemon:
    daemon: Daemon = await start()
    return daemon


def call_tool(guest: FakeGuest, call_id: str = "c1", name: str = "tool") -> None:
    guest.say(Kind.TOOL_CALL, {"id": "e", "call": call_id, "name": name}, b"arguments")


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def read(parts: Any) -> list[Any]:
    async with aclosing(parts) as items:
        return [item async for item in items]


# -- sessions


async def test_a_session_is_asked_for_and_told_of_once_however_often_its_request_comes(daemon: Daemon) -> None:
    daemon.admission.slow.add("creation_turn")
    creations = [asyncio.create_task(daemon.create()) for _ in range(3)]
    assert await eventually_async(lambda: "creation_turn" in daemon.admission.names())
    assert daemon.backend.asked == 0, "a sandbox was made out of turn"
    assert daemon.admission.reserved == 1
    daemon.admission.opened.set()
    (session,) = set(await asyncio.gather(*creations))
    assert await daemon.create() is session
    assert daemon.admission.names() == ["session", "creation_turn"]
    assert daemon.witness.notified == [("session_created", session.session_id)]
    assert (daemon.admission.reserved, daemon.admission.turns) == (0, 0)


async def test_a_session_that_is_refused_or_fails_is_not_there_and_gives_back_its_place(daemon: Daemon) -> None:
    daemon.admission.closed.add("session")
    with pytest.raises(Unavailable, match=CLOSED_TEXT):
        await daemon.create()
    assert daemon.backend.asked == 0
    daemon.admission.closed.clear()
    daemon.backend.failures = 1
    with pytest.raises(Unavailable):
        await daemon.create()
    assert (daemon.admission.reserved, daemon.admission.turns, daemon.witness.notified) == (0, 0, [])
    await daemon.create()


async def test_a_kept_sandbox_is_taken_without_a_turn(tmp_path: Path, daemon: Daemon) -> None:
    from executor_server.policy.decide import WarmSandboxes

    pool = daemon.pool
    pool.keep_ready([WarmSandboxes(SPEC, 1)])
    assert await is_full(pool)
    await daemon.create()
    await pool.close()
    assert "creation_turn" not in daemon.admission.names()


# -- executions


async def test_an_execution_is_asked_for_before_the_guest_hears_of_it_and_told_of_at_its_ends(daemon: Daemon) -> None:
    session = await daemon.create()
    daemon.admission.slow.add("execution")
    beginning = asyncio.create_task(execute(session))
    assert await eventually_async(lambda: "execution" in daemon.admission.names())
    assert daemon.guest.of_kind(Kind.EXECUTE) == []
    daemon.admission.opened.set()
    execution = await beginning
    assert daemon.admission.reserved == 0
    daemon.guest.end("e")
    await execution.wait()
    assert await eventually_async(lambda: len(daemon.witness.notified) == 3)
    assert daemon.witness.notified[1:] == [("execution_started", "e"), ("execution_ended", "e", Outcome.SUCCEEDED)]
    assert await execute(session) is execution, "and not asked for again"
    assert daemon.admission.names().count("execution") == 1


async def test_of_two_calls_that_wait_with_one_id_one_runs(daemon: Daemon) -> None:
    session = await daemon.create()
    daemon.admission.slow.add("execution")
    calls = [asyncio.create_task(execute(session)) for _ in range(2)]
    assert await eventually_async(lambda: daemon.admission.names().count("execution") == 2)
    daemon.admission.opened.set()
    assert len(set(await asyncio.gather(*calls))) == 1
    await daemon.guest.got(Kind.EXECUTE)
    assert daemon.witness.names().count("execution_started") == 1
    assert daemon.admission.reserved == 0


async def test_a_session_that_ends_while_admission_is_asked_begins_nothing(daemon: Daemon) -> None:
    session = await daemon.create()
    daemon.admission.slow.add("execution")
    beginning = asyncio.create_task(execute(session))
    assert await eventually_async(lambda: "execution" in daemon.admission.names())
    await daemon.manager.delete(OWNER, session.session_id)
    daemon.admission.opened.set()
    with pytest.raises(PreconditionFailed):
        await beginning
    assert daemon.admission.reserved == 0
    assert "execution_started" not in daemon.witness.names()


async def test_the_ends_of_executions_are_told_before_their_session_s(daemon: Daemon) -> None:
    session = await daemon.create()
    await execute(session)
    await daemon.manager.kill(session.session_id)
    assert daemon.witness.notified[-2:] == [
        ("execution_ended", "e", Outcome.CANCELLED),
        ("session_ended", "an administrator ended the session"),
    ]


async def test_a_warning_and_a_lie_are_told(daemon: Daemon) -> None:
    session = await daemon.create()
    await execute(session)
    daemon.guest.say(Kind.LIMIT_WARNING, {"id": "e", "limit": "operations", "used": 8, "budget": 10})
    daemon.guest.say(Kind.LOG, {"id": "nobody", "stream": "stdout"})
    assert await eventually_async(lambda: session.state == "lost")
    assert ("limit_warned", LimitWarning("operations", 8, 10)) in daemon.witness.notified
    assert daemon.witness.names().count("guest_misbehaved") == 1
    assert daemon.witness.names().count("session_lost") == 1


async def test_executions_that_are_stopped_say_why_and_others_go_on(daemon: Daemon) -> None:
    session, other = await daemon.create("r1"), await daemon.create("r2")
    first, guest = await execute(session), daemon.backend.made[0].guest
    await execute(other)
    daemon.manager.stop_executions(lambda facts: facts.session_id == session.session_id, "the disk is full")
    await guest.got(Kind.CANCEL)
    guest.end("e", outcome="cancelled")
    result = await result_of(first)
    assert result.error is not None
    assert (result.outcome, result.error.message) == (Outcome.CANCELLED, "the disk is full")
    assert daemon.backend.made[1].guest.of_kind(Kind.CANCEL) == []


# -- tools


async def test_a_tool_call_is_asked_for_before_a_client_hears_of_it(daemon: Daemon) -> None:
    session = await daemon.create()
    execution = await execute(session)
    daemon.admission.closed.add("tool_call")
    call_tool(daemon.guest)
    await daemon.guest.got(Kind.CANCEL)
    daemon.guest.end("e", outcome="cancelled")
    assert [type(event.kind) async for event in execution.events()] == [Result]
    result = await result_of(execution)
    assert result.error is not None
    assert (result.outcome, result.error.message) == (Outcome.CANCELLED, CLOSED_TEXT)
    assert "tool_called" not in daemon.witness.names()
    with pytest.raises(ExecutorError):
        await session.submit_tool_result("e", "c1", b"")


async def test_a_tool_that_the_session_may_not_have_is_never_called(daemon: Daemon) -> None:
    """Registration checks the registered tools; a hostile guest can call others."""
    execution = await execute(await daemon.create(tools=ToolRules(("host",), ("web_*",))))
    call_tool(daemon.guest, "c1", "web_search")
    call_tool(daemon.guest, "c2", "shell")
    await daemon.guest.got(Kind.CANCEL)
    daemon.guest.end("e", outcome="cancelled")
    error = (await result_of(execution)).error
    assert error is not None and "shell" in error.message
    assert [what for what in daemon.witness.notified if what[0] == "tool_called"] == [("tool_called", "web_search")]


async def test_an_answer_is_asked_for_and_counts_once(daemon: Daemon) -> None:
    session = await daemon.create()
    await execute(session)
    call_tool(daemon.guest)
    assert await eventually_async(lambda: "tool_called" in daemon.witness.names())
    daemon.admission.slow.add("tool_answer")
    answers = [
        asyncio.create_task(session.submit_tool_result("e", "c1", answer))
        for answer in (ToolFailure("ValueError", "né"), b"value")
    ]
    assert await eventually_async(lambda: daemon.admission.names().count("tool_answer") == 2)
    assert daemon.guest.of_kind(Kind.TOOL_RESULT) == []
    daemon.admission.opened.set()
    first, second = await asyncio.gather(*answers, return_exceptions=True)
    assert first is None
    assert isinstance(second, PreconditionFailed) and second.reason is Reason.TOOL_CALL_ANSWERED
    await daemon.guest.got(Kind.TOOL_RESULT)
    answered = [what for what in daemon.witness.notified if what[0] == "tool_answered"]
    assert answered == [("tool_answered", Answer("c1", len("né".encode()), failed=True))]


# -- the other requests

REQUESTS: dict[str, Callable[[Session], Any]] = {
    "tools": lambda session: session.register_tools([ToolSpec("t", "", (), False)]),
    "set": lambda session: session.set_variables([("x", b"1")]),
    "get": lambda session: read(session.get_variables(["x"])),
    "file_put": lambda session: session.put_file("f", 0, nothing()),
    "file_get": lambda session: read(session.get_file("f")),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_nothing_goes_into_or_out_of_a_sandbox_that_was_not_asked_for(daemon: Daemon, name: str) -> None:
    session = await daemon.create()
    before = len(daemon.guest.received)
    daemon.admission.closed.add(name)
    with pytest.raises(Unavailable, match=CLOSED_TEXT):
        await REQUESTS[name](session)
    assert len(daemon.guest.received) == before
    await daemon.manager.delete(OWNER, session.session_id)
    asked = len(daemon.admission.asked)
    with pytest.raises(PreconditionFailed):
        await REQUESTS[name](session)
    assert len(daemon.admission.asked) == asked, "it was asked for what could not be"


# -- files


def serve_files(guest: FakeGuest) -> None:
    def give(asked: Frame) -> None:
        op = asked.head.integer("op")
        if asked.head.text("path") == "none":
            guest.refuse(asked, "file_not_found")
        else:
            guest.say(Kind.FILE_CHUNK, {"op": op, "file": FILE})
            guest.say(Kind.FILE_CHUNK, {"op": op}, b"ab")
            guest.done(asked)

    guest.on[Kind.FILE_GET] = give
    guest.on[Kind.FILE_PUT] = lambda asked: guest.done(asked, file=FILE)


async def test_files_are_counted_where_the_policy_says_how_many(daemon: Daemon) -> None:
    session = await daemon.create(files=FileRules(max_put_bytes=10, max_get_bytes=20, max_puts=1, max_gets=1))
    serve_files(daemon.guest)
    with pytest.raises(PolicyViolation, match="size_bytes"):
        await session.put_file("f", 11, nothing())
    with pytest.raises(NotFound):
        await read(session.get_file("none"))
    await session.put_file("f", 0, nothing())
    await read(session.get_file("f"))
    assert daemon.witness.notified[-1] == ("file_got", "f")
    assert daemon.guest.of_kind(Kind.FILE_GET)[-1].head.integer("max_bytes") == 20
    with pytest.raises(PolicyViolation, match="path"):
        await session.put_file("f", 0, nothing())
    with pytest.raises(PolicyViolation, match="path"):
        await read(session.get_file("f"))


async def test_the_last_file_can_be_put_once(daemon: Daemon) -> None:
    session = await daemon.create(files=FileRules(max_puts=1))
    serve_files(daemon.guest)
    daemon.admission.slow.add("file_put")
    daemon.admission.opened.set()
    put = await asyncio.gather(*(session.put_file("f", 0, nothing()) for _ in range(3)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in put) == ["FileInfo", "PolicyViolation", "PolicyViolation"]


async def test_a_restart_does_not_forget_how_many_files_there_were(start: Any) -> None:
    first = await start()
    session = await first.create(files=FileRules(max_puts=1))
    serve_files(first.guest)
    await session.put_file("f", 0, nothing())
    first.registry.note_use([session.use])
    second = await start()
    with pytest.raises(PolicyViolation):
        await second.manager.get(OWNER, session.session_id).put_file("f", 0, nothing())


# -- after a restart


async def test_what_is_recovered_is_told_of_before_anything_that_happens_to_it(start: Any) -> None:
    first = await start()
    session = await first.create()
    await execute(session)
    await first.guest.got(Kind.EXECUTE)
    await first.kill()
    first.guest.end("e")  # while no daemon is there
    second = await start()
    await second.manager.get(OWNER, session.session_id).execution("e").wait()
    assert await eventually_async(lambda: len(second.witness.notified) == 3)
    assert second.witness.notified == [
        ("session_recovered", session.session_id),
        ("execution_recovered", "e"),
        ("execution_ended", "e", Outcome.SUCCEEDED),
    ]


async def test_a_lost_session_is_told_of_by_the_daemon_that_lost_it(start: Any) -> None:
    first = await start()
    await first.create()
    await first.backend.made[0].destroy()
    assert await eventually_async(lambda: "session_lost" in first.witness.names())
    second = await start()
    assert second.witness.notified == []
