"""The network of sessions, against a proxy that reports what a test has it report: nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import InvalidRequest, NotFound, Reason, Unavailable
from executor_server.core.lifecycle import AdmissionController, Observer
from executor_server.core.model import Outcome, Principal, SessionFacts
from executor_server.core.network import (
    NO_NETWORK,
    NO_NETWORK_USE,
    EgressConnection,
    EgressDenial,
    NetworkRules,
    NetworkUsage,
)
from executor_server.guest.egress import reasons
from executor_server.guest.wire.frames import Frame, Kind
from executor_server.network.egress import EgressError
from executor_server.sessions import Session, SessionHooks, SessionRequest
from executor_server.sessions import network as network_module
from executor_server.sessions.network import notice_of_denial
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.fake_session import SessionDaemon, execute, outcome_of, successive_daemons
from tests.support.full_disk import allow_changes, fill_disk, forbid_changes
from tests.support.polling import eventually_async
from tests.support.specs import session_spec
from tests.unit.sessions.fake_egress import FakeEgress

OWNER = Principal("tenant", "name")
RULES = NetworkRules(allowed=("a.example", "b.example:443"))


class Notes(Observer):
    """Everything that observers were notified of about networks, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, Any]] = []
        self.misbehaved: list[str] = []

    def connection_opened(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        self.all.append(("opened", execution_id, connection.host))

    def connection_closed(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        self.all.append(("closed", execution_id, connection.reason))

    def connection_denied(self, session: SessionFacts, execution_id: str, denial: EgressDenial) -> None:
        self.all.append(("denied", execution_id, denial.host))

    def denials_uncounted(self, session: SessionFacts, execution_id: str, count: int) -> None:
        self.all.append(("uncounted", execution_id, count))

    def network_moved(self, session: SessionFacts, sent_bytes: int, received_bytes: int) -> None:
        self.all.append(("moved", session.session_id, sent_bytes + received_bytes))

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        self.all.append(("ended", "", ""))

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        self.misbehaved.append(what)


class Windows(AdmissionController):
    """Grants the windows that a test says."""

    def __init__(self) -> None:
        self.window: int | None = None

    def network_window(self, session: SessionFacts) -> int | None:
        return self.window


class Daemon(SessionDaemon):
    """Sessions with a fake egress proxy, which a kill ends too."""

    def __init__(self, backend: FakeBackend, directory: Path, egress: FakeEgress | None = None) -> None:
        self.egress = egress or FakeEgress()
        self.notes, self.windows = Notes(), Windows()
        super().__init__(backend, directory, SessionHooks(self.windows, self.notes, self.egress))

    async def create(self, *, has_network: bool = True, **more: Any) -> Session:
        rules = RULES if has_network else NO_NETWORK
        spec = session_spec(replace(SPEC, egress=has_network), network=rules, **more)
        return await self.manager.create(OWNER, SessionRequest("r", spec))

    def notices(self) -> list[str]:
        return [frame.body.decode() for frame in self.guest.of_kind(Kind.NOTE)]

    async def kill(self) -> None:
        await super().kill()
        for session in self.egress.sessions.values():
            session.listener.close()

    async def close(self) -> None:
        await super().close()
        assert not self.egress.sessions, "a session that has ended is still served"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The listener in each sandbox, but for its port, which is one of this host."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr("executor_server.backends.channel.listener.LISTENER_ADDRESS", listener.getsockname())
        yield listener


@pytest.fixture
async def start(tmp_path: Path, listener: socket.socket) -> AsyncIterator[Any]:
    """Starts a daemon, after the last one was killed."""
    backend = FakeBackend(tmp_path)
    backend.prepare = lambda guest: setattr(guest, "egress_listener", listener)
    async with successive_daemons(backend, functools.partial(Daemon, backend, tmp_path)) as start:
        yield start


@pytest.fixture
async def daemon(start: Any) -> Daemon:
    daemon: Daemon = await start()
    return daemon


# -- beginning


async def test_a_session_with_a_network_is_served_when_it_is_handed_out(daemon: Daemon) -> None:
    session = await daemon.create()
    bound = daemon.egress.sessions[session.session_id]
    assert (bound.rules, bound.used, bound.total_bytes) == (RULES, NO_NETWORK_USE, None)


async def test_the_network_is_opened_while_the_guest_is_configured(daemon: Daemon) -> None:
    """Its prelude may need it, so neither may wait for the other's end."""
    held: list[Frame] = []
    daemon.backend.prepare = lambda guest, prepare=daemon.backend.prepare: (  # type: ignore[misc]
        prepare(guest),
        guest.on.update({Kind.CONFIGURE: held.append}),
    )
    creating = asyncio.ensure_future(daemon.create())
    assert await eventually_async(lambda: daemon.egress.sessions and held)
    daemon.guest.done(held[0])
    assert (await creating).state == "idle"


async def test_a_prelude_that_fails_closes_the_network(daemon: Daemon) -> None:
    daemon.backend.prepare = lambda guest, prepare=daemon.backend.prepare: (  # type: ignore[misc]
        prepare(guest),
        guest.on.update({Kind.CONFIGURE: lambda frame: guest.refuse(frame, "prelude_failed")}),
    )
    with pytest.raises(InvalidRequest):
        await daemon.create()
    assert not daemon.egress.sessions
    assert not daemon.backend.living


async def test_a_session_without_a_network_asks_for_nothing(daemon: Daemon) -> None:
    session = await daemon.create(has_network=False)
    execution = await execute(session)
    daemon.guest.end("e")
    assert (await outcome_of(execution))[1].network == NO_NETWORK_USE
    assert (daemon.egress.binds, daemon.egress.settled) == (0, 0)
    assert not daemon.guest.of_kind(Kind.TAKE_LISTENER)


async def test_a_proxy_that_serves_no_session_makes_creation_unavailable_and_leaves_nothing(daemon: Daemon) -> None:
    daemon.egress.failures = [EgressError("The CA in /secret/path can't be read.")]
    with pytest.raises(Unavailable, match="network") as refused:
        await daemon.create()
    assert refused.value.reason is Reason.BACKEND_UNAVAILABLE
    assert "/secret" not in refused.value.message
    assert not daemon.backend.living
    assert (await daemon.create()).state == "idle"


async def test_a_creation_waits_for_a_proxy_that_is_started_again_but_not_for_ever(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.egress.barrier.clear()
    waiting = asyncio.ensure_future(daemon.create())
    assert await eventually_async(lambda: daemon.egress.binds == 1)
    daemon.egress.barrier.set()
    await daemon.manager.delete(OWNER, (await waiting).session_id)
    monkeypatch.setattr(network_module, "_OPEN_TIME_S", 0.01)
    daemon.egress.barrier.clear()
    with pytest.raises(Unavailable, match="egress proxy"):
        await daemon.create()
    assert not daemon.backend.living


async def test_a_guest_that_hands_out_something_else_is_given_up_with_the_reason(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_server.backends.channel.listener.LISTENER_ADDRESS", ("127.0.0.1", 1))
    with pytest.raises(Unavailable, match="died at once"):
        await daemon.create()
    assert daemon.notes.misbehaved == ["the guest handed out another socket than its listener"]
    assert not daemon.backend.living
    assert daemon.egress.binds == 0


async def test_a_session_that_ends_while_it_is_being_bound_is_released(daemon: Daemon) -> None:
    daemon.egress.barrier.clear()
    creating = asyncio.ensure_future(daemon.create())
    assert await eventually_async(lambda: daemon.egress.binds == 1)
    await daemon.manager.delete_by_request(OWNER, "r")
    daemon.egress.barrier.set()
    with pytest.raises(NotFound):
        await creating
    assert not daemon.egress.sessions


# -- what is counted


async def test_a_result_has_what_its_execution_used_and_no_other(daemon: Daemon) -> None:
    session = await daemon.create()
    daemon.egress.connect(session.session_id)
    daemon.egress.move(session.session_id, 1, 1)  # in the background
    for name, size in (("e1", 10), ("e2", 100)):
        execution = await execute(session, name)
        connection = daemon.egress.connect(session.session_id)
        assert connection is not None
        daemon.egress.connect(session.session_id, "other.example")
        daemon.egress.move(session.session_id, size, 2 * size)
        daemon.egress.end(session.session_id, connection)
        daemon.guest.end(name)
        assert (await outcome_of(execution))[1].network == NetworkUsage(1, 1, size, 2 * size)
    assert session.network.usage == NetworkUsage(3, 2, 111, 221)


async def test_a_result_waits_for_what_the_proxy_has_not_reported_yet(daemon: Daemon) -> None:
    session = await daemon.create()
    execution = await execute(session)
    daemon.egress.connect(session.session_id)
    daemon.egress.move(session.session_id, 10, 20, report=False)
    daemon.guest.end("e")
    assert (await outcome_of(execution))[1].network == NetworkUsage(1, 0, 10, 20)


async def test_what_a_lost_session_used_stands_in_its_result(daemon: Daemon) -> None:
    session = await daemon.create()
    execution = await execute(session)
    daemon.egress.connect(session.session_id)
    daemon.egress.move(session.session_id, 10, 20)
    session.give_up("it caught fire")
    result = (await outcome_of(execution))[1]
    assert (result.outcome, result.network) == (Outcome.LOST, NetworkUsage(1, 0, 10, 20))
    assert await eventually_async(lambda: not daemon.egress.sessions)


async def test_observers_learn_of_each_connection_with_its_execution_and_of_all_before_the_session_ends(
    daemon: Daemon,
) -> None:
    session = await daemon.create()
    background = daemon.egress.connect(session.session_id)
    assert background is not None
    await execute(session)
    daemon.egress.connect(session.session_id, "b.example")
    daemon.egress.connect(session.session_id, "no.example")
    session.network.denials_uncounted(7)
    daemon.egress.end(session.session_id, background)
    daemon.egress.move(session.session_id, 1, 2, report=False)
    await daemon.manager.delete(OWNER, session.session_id)
    assert daemon.notes.all == [
        ("opened", "", "a.example"),
        ("opened", "e", "b.example"),
        ("denied", "e", "no.example"),
        ("uncounted", "e", 7),
        ("closed", "", reasons.ENDED),
        ("moved", session.session_id, 3),
        ("closed", "e", reasons.SESSION_ENDED),
        ("ended", "", ""),
    ]
    assert session.network.usage.denied == 8


async def test_an_administrator_sees_what_is_open_and_what_was_refused_last(daemon: Daemon) -> None:
    session = await daemon.create()
    await execute(session)
    connection = daemon.egress.connect(session.session_id)
    for number in range(100):
        daemon.egress.connect(session.session_id, f"n{number}.example")
    state = session.network.state
    assert [(each.connection, each.execution_id) for each in state.open] == [(connection, "e")]
    assert [denial.host for _, denial in state.denials] == [f"n{number}.example" for number in range(68, 100)]
    assert [(each.host, each.denied) for each in state.hosts] == [
        (f"n{number}.example", 1) for number in range(36, 100)
    ]
    assert state.usage.denied == 100


# -- notices


async def test_notices_of_a_step_are_bounded(daemon: Daemon) -> None:
    session = await daemon.create()
    await execute(session)
    for number in range(1000):
        daemon.egress.connect(session.session_id, f"{number}.example" + "x" * 5000)
    await daemon.guest.got(Kind.NOTE, 21)
    assert "are not listed" in daemon.notices()[-1]
    assert len(daemon.notices()) == 21
    assert max(map(len, daemon.notices())) < 2000


async def test_a_program_learns_why_its_connection_was_closed(daemon: Daemon) -> None:
    session = await daemon.create()
    execution = await execute(session)
    for reason in (reasons.ENDED, reasons.RECEIVED_BYTES):
        connection = daemon.egress.connect(session.session_id)
        assert connection is not None
        daemon.egress.end(session.session_id, connection, reason)
    daemon.guest.log("e", "printed")
    daemon.guest.end("e")
    logs, _ = await outcome_of(execution)
    assert logs.startswith("network: the connection to a.example:443 was closed: ")
    assert "max_received_bytes" in logs
    assert logs.endswith("\nprinted")
    assert not daemon.guest.of_kind(Kind.NOTE), "it could come too late in the guest"


async def test_what_is_reported_while_a_result_waits_stands_in_that_result(daemon: Daemon) -> None:
    session = await daemon.create()
    execution = await execute(session)
    bound = daemon.egress.sessions[session.session_id]
    denial = EgressDenial("no.example", 443, reasons.NOT_ALLOWED, "no.example:443 is refused: not_allowed")
    bound.unreported.append(lambda: bound.sink.connection_denied(denial))
    daemon.guest.end("e")
    logs, result = await outcome_of(execution)
    assert logs == "network: no.example:443 is refused: not_allowed\n"
    assert result.network.denied == 1
    assert not daemon.guest.of_kind(Kind.NOTE)


# -- other rules, and quotas


async def test_rules_that_change_while_a_session_is_bound_are_applied(start: Any) -> None:
    first = await start()
    session = await first.create()
    egress = FakeEgress()
    egress.barrier.clear()
    second = await start(egress)
    assert await eventually_async(lambda: egress.binds == 1)
    again = second.manager.get(OWNER, session.session_id)
    tight = replace(RULES, allowed=())
    await again.hold_to(replace(again.spec, network=tight))
    egress.barrier.set()
    assert await eventually_async(lambda: session.session_id in egress.sessions)
    assert await eventually_async(lambda: egress.sessions[session.session_id].rules == tight)


async def test_a_window_is_renewed_when_half_of_it_is_used(daemon: Daemon) -> None:
    daemon.windows.window = 1000
    session = await daemon.create()
    bound = daemon.egress.sessions[session.session_id]
    assert bound.total_bytes == 1000
    daemon.egress.move(session.session_id, 400, 0)
    assert bound.total_bytes == 1000
    daemon.egress.move(session.session_id, 0, 100)
    assert bound.total_bytes == 1500
    daemon.windows.window = None
    session.network.renew_window()
    assert bound.total_bytes is None


async def test_without_a_window_the_network_is_closed_until_there_is_one_again(daemon: Daemon) -> None:
    daemon.windows.window = 100
    session = await daemon.create()
    bound = daemon.egress.sessions[session.session_id]
    daemon.egress.connect(session.session_id)
    daemon.windows.window = 0
    assert daemon.egress.move(session.session_id, 0, 1000) == 900
    assert bound.exhausted == reasons.TENANT_QUOTA
    assert daemon.notes.all[-1] == ("closed", "", reasons.TENANT_QUOTA)
    assert session.network.state.is_exhausted
    assert daemon.egress.connect(session.session_id) is None
    daemon.windows.window = 50
    session.network.renew_window()
    assert bound.exhausted is None
    assert bound.total_bytes == 150
    assert daemon.egress.connect(session.session_id) is not None


async def test_a_session_that_begins_without_a_window_moves_nothing(daemon: Daemon) -> None:
    daemon.windows.window = 0
    session = await daemon.create()
    bound = daemon.egress.sessions[session.session_id]
    assert (bound.total_bytes, bound.exhausted) == (0, reasons.TENANT_QUOTA)


# -- after another daemon


async def test_the_next_daemon_serves_the_listener_from_what_was_used(start: Any) -> None:
    first = await start()
    session = await first.create()
    execution = await execute(session)
    first.egress.connect(session.session_id)
    first.egress.connect(session.session_id, "no.example")
    first.egress.move(session.session_id, 10, 20)
    await first.manager.sweeper.sweep()
    first.egress.move(session.session_id, 1, 1)  # after the last sweep, so the next daemon doesn't know
    second = await start()
    egress = second.egress
    assert await eventually_async(lambda: session.session_id in egress.sessions)
    assert egress.sessions[session.session_id].used == NetworkUsage(1, 1, 10, 20)
    again = second.manager.get(OWNER, session.session_id)
    execution = again.execution("e")
    egress.connect(session.session_id)
    egress.move(session.session_id, 100, 200)
    second.guest.end("e")
    assert (await outcome_of(execution))[1].network == NetworkUsage(2, 1, 110, 220)
    assert again.network.usage == NetworkUsage(2, 1, 110, 220)
    third = await start()
    assert (await outcome_of(third.manager.get(OWNER, session.session_id).execution("e")))[1].network == NetworkUsage(
        2, 1, 110, 220
    )


async def test_connections_and_what_executions_used_survive_a_kill_before_the_next_sweep(start: Any) -> None:
    first = await start()
    session = await first.create()
    for name in ("e1", "e2"):
        execution = await execute(session, name)
        first.egress.connect(session.session_id)
        first.egress.move(session.session_id, 10, 20)
        first.guest.end(name)
        await execution.wait()
    await execute(session, "e3")
    first.egress.connect(session.session_id)
    second = await start()
    again = second.manager.get(OWNER, session.session_id)
    assert again.network.usage == NetworkUsage(3, 0, 20, 40)
    assert again.executions.journal.state.running["e3"].network == NetworkUsage(1, 0, 0, 0)


async def test_a_result_that_waited_when_the_daemon_was_killed_ends_in_the_next(start: Any) -> None:
    first = await start()
    session = await first.create()
    await execute(session)
    first.egress.connect(session.session_id)
    never = asyncio.Event()
    first.egress.settle = lambda _: never.wait()
    first.guest.end("e")
    assert await eventually_async(lambda: list(session.executions.journal.state.undecided) == ["e"])
    await first.manager.sweeper.sweep()
    second = await start()
    result = (await outcome_of(second.manager.get(OWNER, session.session_id).execution("e")))[1]
    assert (result.outcome, result.network) == (Outcome.SUCCEEDED, NetworkUsage(1, 0, 0, 0))


async def test_a_proxy_that_is_not_there_after_a_restart_costs_no_session(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "_REOPEN_INTERVAL_S", 0.01)
    first = await start()
    session = await first.create()
    egress = FakeEgress()
    egress.failures = [EgressError("not today")] * 3
    second = await start(egress)
    assert await eventually_async(lambda: session.session_id in egress.sessions)
    assert (second.manager.get(OWNER, session.session_id).state, egress.binds) == ("idle", 4)


async def test_a_guest_that_keeps_its_listener_after_a_restart_is_lost(start: Any) -> None:
    first = await start()
    session = await first.create()
    first.guest.egress_listener = None
    second = await start()
    again = second.manager.get(OWNER, session.session_id)
    assert await eventually_async(lambda: again.state == "lost")
    assert "did not hand its listener out" in again.lost_reason


async def test_a_guest_that_tries_to_block_the_proxy_is_lost(daemon: Daemon) -> None:
    session = await daemon.create()
    session.network.listener_misused()
    assert await eventually_async(lambda: session.state == "lost")
    assert "tried to block the egress proxy" in session.lost_reason


async def test_a_full_disk_costs_neither_counts_nor_notices(daemon: Daemon) -> None:
    session = await daemon.create()
    fill_disk(daemon.directory / "journals")
    forbid_changes(daemon.directory / "registry.db")
    execution = await execute(session)
    connection = daemon.egress.connect(session.session_id)
    assert connection is not None
    daemon.egress.move(session.session_id, 10, 20)
    await daemon.manager.sweeper.sweep()
    daemon.egress.end(session.session_id, connection, reasons.TIME_LIMIT)
    daemon.guest.end("e")
    logs, result = await outcome_of(execution)
    assert "max_connection_s" in logs
    assert result.network == NetworkUsage(1, 0, 10, 20)
    allow_changes(daemon.directory / "registry.db")
    await daemon.manager.sweeper.sweep()
    (record,) = daemon.registry.load()
    assert record.network == NetworkUsage(1, 0, 10, 20), "written once there is room again, though nothing has changed"


async def test_use_is_written_when_it_has_changed_and_not_otherwise(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await daemon.create()
    written: list[Any] = []

    def note(used: Any) -> bool:
        written.append(used)
        return True

    monkeypatch.setattr(daemon.registry, "note_network", note)
    for _ in range(3):
        await daemon.manager.sweeper.sweep()
        daemon.egress.move(session.session_id, 1, 1)
        await daemon.manager.sweeper.sweep()
        await daemon.manager.sweeper.sweep()
    assert written == [{session.session_id: NetworkUsage(0, 0, count, count)} for count in (1, 2, 3)]


def test_a_notice_names_the_host_where_the_proxys_sentence_does_not() -> None:
    notice = notice_of_denial(EgressDenial("a.example", 443, reasons.TOO_MANY_NEW, "it made 9 connections"))
    assert notice.text == "a.example:443: it made 9 connections"
    notice = notice_of_denial(EgressDenial("a.example", 443, reasons.DENIED, "a.example:443 is denied"))
    assert notice.text == "a.example:443 is denied"
