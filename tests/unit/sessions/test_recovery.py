"""Sessions after a daemon that was killed: they go on where they were, or say why they can't. Nothing runs twice."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import NotFound, PreconditionFailed, Reason, ResourceExhausted, SandboxFailure
from executor_server.core.model import Outcome, Principal
from executor_server.guest.wire.frames import Frame, Kind
from executor_server.guest.wire.tokens import CHAIN_LENGTH, chained, is_next
from executor_server.sessions import Session, SessionRequest
from executor_server.sessions.journal.registry import SessionUse
from executor_server.sessions.journal.segments import Segments
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.fake_guest import TOKEN, FakeGuest, Network
from tests.support.fake_session import SessionDaemon, execute, outcome_of, successive_daemons
from tests.support.full_disk import fill_disk, forbid_changes
from tests.support.polling import eventually_async
from tests.support.specs import LIMITS, session_spec

OWNER = Principal("tenant", "name")


class Daemon(SessionDaemon):
    async def create(self, request_id: str = "r", **limits: float) -> Session:
        spec = session_spec(SPEC, replace(LIMITS, **limits), ("math",), labels={"a": "b"})  # type: ignore[arg-type]
        return await self.manager.create(OWNER, SessionRequest(request_id, spec))

    def session(self, name: str) -> Session:
        return self.manager.get(OWNER, name)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts a daemon, after the last one was killed."""
    backend = FakeBackend(tmp_path)
    async with successive_daemons(backend, lambda **settings: Daemon(backend, tmp_path, **settings)) as start:
        yield start


def guest_of(daemon: Daemon, number: int = -1) -> FakeGuest:
    return daemon.backend.made[number].guest


# -- sessions that go on


def knows_tokens(guest: FakeGuest) -> None:
    """The guest takes a token once, as the real one does, and never one that was skipped."""
    state = {"expected": chained(TOKEN, CHAIN_LENGTH)}

    def greet(frame: Frame) -> None:
        shown = bytes.fromhex(frame.head.text("token", 64))
        if is_next(shown, state["expected"]):
            state["expected"] = shown
            guest.greet(frame)
        else:
            guest.hang_up()

    guest.on[Kind.HELLO] = greet


async def test_a_disk_that_is_full_through_several_restarts_costs_no_idle_session(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of shown tokens was not written, so the second daemon showed one that the guest had seen."""
    daemon = await start()
    daemon.backend.prepare = knows_tokens
    before = await daemon.create()
    await execute(before)
    await guest_of(daemon).got(Kind.EXECUTE)
    guest_of(daemon).end("e")
    await before.execution("e").wait()
    forbid_changes(daemon.directory / "registry.db")

    def full(*_: object) -> None:
        raise AssertionError("a record was written, which costs the journal on a full disk")

    monkeypatch.setattr(Segments, "append", full)
    for _ in range(3):
        daemon = await start()
        session = daemon.session(before.session_id)
        assert session.state == "idle", session.lost_reason
        assert session.execution("e").done


async def test_a_guest_that_refuses_every_token_is_given_up(start: Any) -> None:
    first = await start()
    session = await first.create()
    guest = guest_of(first)
    guest.on[Kind.HELLO] = lambda _: guest.hang_up()
    second = await start()
    assert second.session(session.session_id).state == "lost"
    assert 1 < len(guest.of_kind(Kind.HELLO)) < 50


async def rest(daemon: Daemon, session: Session) -> None:
    """Lets a session be unused until its sandbox is paused."""
    sandbox = daemon.backend.made[-1]
    sandbox.pause_idle_s = 0.0
    session.check_guest()
    assert await eventually_async(lambda: session.state == "paused")
    sandbox.pause_idle_s = 60.0


async def test_a_session_that_rests_is_woken_by_a_restart(start: Any) -> None:
    first = await start()
    before = await first.create()
    await rest(first, before)
    second = await start()
    after = second.session(before.session_id)
    assert after.state == "idle"
    await after.set_variables([("x", b"1")])


async def test_a_session_that_rests_and_can_not_be_woken_by_a_restart_is_lost(start: Any) -> None:
    first = await start()
    before = await first.create()
    await rest(first, before)
    first.backend.made[-1].can_wake = SandboxFailure("secret words of the cloud")
    second = await start()
    after = second.session(before.session_id)
    assert after.state == "lost"
    assert "could not be woken" in after.lost_reason
    assert "secret" not in after.lost_reason


async def test_a_session_that_rests_ends_in_time_and_is_not_woken_for_it(start: Any) -> None:
    daemon = await start()
    session = await daemon.create(idle_time_s=0.01)
    await rest(daemon, session)
    assert await eventually_async(lambda: session.expired)
    await daemon.manager.sweeper.sweep()
    assert await eventually_async(lambda: daemon.backend.made[-1].destroyed)
    assert (daemon.backend.made[-1].destroyed, daemon.backend.made[-1].wakes) == (1, 0)


async def test_a_network_that_is_cut_during_a_restart_costs_no_session(start: Any) -> None:
    first = await start()
    first.backend.prepare = cross_a_network
    before = await first.create()
    execution = await execute(before)
    network = guest_of(first).network
    assert network is not None
    network.up.clear()
    guest_of(first).log("e", "meanwhile")
    asyncio.get_running_loop().call_later(0.1, network.up.set)
    second = await start(recovery_s=0.0)
    after = second.session(before.session_id)
    guest_of(second).end("e")
    assert (await outcome_of(after.execution(execution.execution_id)))[0] == "meanwhile"


def cross_a_network(guest: FakeGuest) -> None:
    guest.network = Network(guest)


async def test_a_session_is_the_same_after_a_restart(start: Any) -> None:
    first = await start()
    before = await first.create()
    second = await start()
    after = second.session(before.session_id)
    assert after is not before
    for what in ("owner", "spec", "warm", "python_version", "create_time_s", "backend_name", "generation", "state"):
        assert getattr(after, what) == getattr(before, what), what
    assert abs(after.expire_time_s - before.expire_time_s) < 1.0
    assert await second.create() is after, "the same request, the same session"
    assert second.backend.asked == 1


async def test_an_execution_that_ended_while_nobody_listened_has_its_result(start: Any) -> None:
    first = await start()
    session = await first.create()
    await execute(session, "e1")
    await execute(session, "e2")
    guest = guest_of(first)
    await guest.got(Kind.EXECUTE, 2)
    await first.kill()
    guest.end("e1")
    guest.end("e2", generation=2, variables="reset")
    second = await start()
    after = second.session(session.session_id)
    for name in ("e1", "e2"):
        assert (await outcome_of(after.execution(name)))[1].outcome is Outcome.SUCCEEDED
    assert (after.generation, after.state) == (2, "idle")
    third = await start()
    assert (await outcome_of(third.session(session.session_id).execution("e1")))[1].outcome is Outcome.SUCCEEDED


async def test_answers_to_what_the_dead_daemon_asked_are_nobody_s(start: Any) -> None:
    first = await start()
    session = await first.create()
    guest = guest_of(first)
    guest.on[Kind.FILE_LIST] = lambda _: None
    asking = asyncio.create_task(session.list_files(""))
    asked = await guest.got(Kind.FILE_LIST)
    await first.kill()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    guest.done(asked, b'["nonsense"]')
    second = await start()
    guest.on[Kind.FILE_LIST] = lambda frame: guest.done(frame, b"[]", truncated=False)
    assert await second.session(session.session_id).list_files("") == ([], False)


async def test_numbers_that_were_let_go_and_not_written_down_are_not_asked_for(start: Any) -> None:
    """DONE of a request has a number but no record; once acknowledged, the guest does not keep it."""
    first = await start()
    session = await first.create()
    for _ in range(3):
        await session.register_tools([])
    guest = guest_of(first)
    await guest.got(Kind.REGISTER_TOOLS, 3)
    second = await start()
    after = second.session(session.session_id)
    execution = await execute(after)
    guest.end("e")
    assert (await outcome_of(execution))[1].outcome is Outcome.SUCCEEDED


async def test_what_killed_the_interpreter_is_found_out_by_the_next_daemon(start: Any) -> None:
    first = await start()
    session = await first.create()
    first.backend.made[0].oom_kills = asyncio.Event().wait
    await execute(session)
    guest_of(first).end("e", outcome="crashed", variables="reset", generation=2, oom_suspect=True)
    assert await eventually_async(lambda: session.executions.journal.state.undecided)
    del first.backend.made[0].oom_kills
    first.backend.made[0].kills = 1
    second = await start()
    result = (await outcome_of(second.session(session.session_id).execution("e")))[1]
    assert result.outcome is Outcome.OUT_OF_MEMORY


async def test_recovered_sessions_count(start: Any) -> None:
    first = await start(max_sessions=1)
    session = await first.create()
    second = await start(max_sessions=1)
    with pytest.raises(ResourceExhausted):
        await second.create("another")
    await second.manager.delete(OWNER, session.session_id)
    await second.create("another")


# -- sessions that can't go on


async def lost(daemon: Daemon, before: Session, reason: str) -> Session:
    session = daemon.session(before.session_id)
    assert session.state == "lost"
    assert reason in session.lost_reason
    assert await eventually_async(lambda: not daemon.backend.living)
    return session


async def test_a_sandbox_that_is_gone_leaves_what_had_finished_and_loses_what_ran(start: Any) -> None:
    first = await start()
    session = await first.create()
    await execute(session, "e1")
    guest_of(first).log("e1", "text")
    guest_of(first).end("e1")
    await outcome_of(await execute(session, "e1"))
    await execute(session, "e2")
    await first.kill()
    await first.backend.made[0].destroy()
    for _ in range(2):
        daemon = await start()
        after = await lost(daemon, session, "its sandbox was gone")
        assert (await outcome_of(after.execution("e1")))[0] == "text"
        result = (await outcome_of(after.execution("e2")))[1]
        assert (result.outcome, result.error and result.error.message) == (Outcome.LOST, after.lost_reason)
        with pytest.raises(PreconditionFailed) as refused:
            await execute(after, "e3")
        assert refused.value.reason is Reason.SESSION_LOST
        assert await daemon.create() is after


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda daemon: setattr(guest_of(daemon), "ready", None), "not ready within"),
        (lambda daemon: setattr(guest_of(daemon), "ready", {"protocol": 1}), "protocol"),
        (lambda daemon: setattr(daemon.backend, "name", "another"), "is of backend fake"),
    ],
)
async def test_a_guest_that_cannot_be_spoken_to_loses_the_session(start: Any, harm: Any, reason: str) -> None:
    first = await start()
    session = await first.create()
    await first.kill()
    harm(first)
    await lost(await start(recovery_s=0.05), session, reason)


async def test_a_dead_guest_says_what_its_backend_knows(start: Any) -> None:
    first = await start()
    session = await first.create()
    await first.kill()
    guest_of(first).ready = None
    first.backend.made[0].cause = "its container was removed"
    await lost(await start(recovery_s=0.05), session, "its container was removed")


async def test_a_guest_of_another_version_is_not_asked(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await start()
    session = await first.create()
    monkeypatch.setattr("executor_server.sessions.recovery.PROTOCOL_VERSION", 99)
    await lost(await start(), session, "another version")


async def test_a_journal_that_could_not_be_written_is_a_reason(start: Any, tmp_path: Path) -> None:
    first = await start()
    session = await first.create()
    fill_disk(tmp_path / "journals")
    execution = await execute(session)
    guest_of(first).end("e")
    assert (await outcome_of(execution))[1].outcome is Outcome.SUCCEEDED
    await lost(await start(), session, "could not be written")


async def test_a_guest_that_lies_at_once_is_lost(start: Any) -> None:
    first = await start()
    session = await first.create()
    await first.kill()
    guest_of(first).log("nobody", "x")
    second = await start()
    assert await eventually_async(lambda: second.session(session.session_id).state == "lost")
    await lost(second, session, "broke the protocol")


# -- sessions that end


async def test_sandboxes_of_nobody_are_destroyed_and_sessions_that_were_deleted_do_not_come_back(start: Any) -> None:
    first = await start()
    session = await first.create()
    await first.backend.create(SPEC)
    await first.manager.delete(OWNER, session.session_id)
    assert len(first.backend.living) == 1
    second = await start()
    assert not second.backend.living
    with pytest.raises(NotFound):
        second.session(session.session_id)
    assert await second.create() is not session


async def test_a_session_that_expired_meanwhile_ends_at_once(start: Any, tmp_path: Path) -> None:
    first = await start()
    session = await first.create(session_time_s=0.01)
    kept = await first.create("kept")
    assert await eventually_async(lambda: session.expire_time_s < time.time())
    second = await start()
    assert [each.session_id for each in second.manager.list(OWNER)] == [kept.session_id]
    assert len(second.backend.living) == 1
    assert [path.name for path in (tmp_path / "journals").iterdir()] == [kept.session_id]


async def test_the_idle_time_goes_on_over_a_restart(start: Any) -> None:
    first = await start()
    session = await first.create(idle_time_s=100.0)
    first.registry.note_use([SessionUse(session.session_id, session.create_time_s - 200.0, 1, 0, 0)])
    assert (await start()).manager.list(OWNER) == []


async def test_guests_that_do_not_answer_cost_others_nothing(start: Any) -> None:
    """The time to recover is for all: sessions behind a tenant's silent guests were lost for these."""
    first = await start(max_sessions=41)
    for number in range(40):
        await first.create(f"silent {number}")
    alive = await first.create("alive")
    for sandbox in first.backend.made[:40]:
        sandbox.guest.ready = None
    second = await start(recovery_s=1.5)
    assert second.session(alive.session_id).state == "idle"


async def test_a_bug_with_one_session_does_not_cost_the_others(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await start()
    one, other = await first.create("one"), await first.create("other")
    resume = Session.resume

    async def resume_or_break(session: Session, deadline_s: float) -> None:
        if session.session_id == one.session_id:
            raise RuntimeError("a bug of ours")
        await resume(session, deadline_s)

    monkeypatch.setattr(Session, "resume", resume_or_break)
    second = await start()
    assert second.session(one.session_id).lost_reason == "an internal error of the daemon"
    assert second.session(other.session_id).state == "idle"


async def test_a_session_whose_row_is_damaged_is_lost_and_no_other_is(start: Any, tmp_path: Path) -> None:
    """Its owner is unknown, so any caller with the id gets the reason; its sandbox is destroyed with other unowned ones."""
    first = await start()
    damaged, whole = await first.create("r1"), await first.create("r2")
    await first.kill()
    with sqlite3.connect(tmp_path / "registry.db") as database:
        changed = "UPDATE sessions SET tenant = 'victim' WHERE session_id = ?"
        database.execute(changed, (damaged.session_id,))
    database.close()
    second = await start()
    assert [session.session_id for session in second.manager.list_all()] == [whole.session_id]
    assert second.session(whole.session_id).state == "idle"
    with pytest.raises(PreconditionFailed, match="its row in the registry was damaged") as refused:
        second.session(damaged.session_id)
    assert refused.value.reason is Reason.SESSION_LOST
    await second.manager.delete(OWNER, damaged.session_id)
    with pytest.raises(NotFound):
        second.session(damaged.session_id)
