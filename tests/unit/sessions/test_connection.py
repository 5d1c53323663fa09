"""A session whose sandbox rests while it is unused, or whose connection breaks: nothing is lost without a reason."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_api.v1 import types_pb2 as pb
from executor_server.api.to_wire import session_to
from executor_server.backends.channel import GuestChannel
from executor_server.core.errors import PreconditionFailed, Reason, SandboxFailure
from executor_server.core.model import Outcome, OutputMode, ToolSpec
from executor_server.guest.wire.frames import Frame, Kind
from executor_server.guest.wire.messages import BlobDrop
from executor_server.sessions.connection import ConnectionTimes, GuestConnection
from executor_server.sessions.journal.execution import Execution
from executor_server.sessions.session import Session
from executor_server.sessions.shared import SessionSettings
from tests.support.fake_backend import FakeBackend, FakeSandbox
from tests.support.fake_guest import FakeGuest, Network
from tests.support.fake_session import outcome_of, sessions_on
from tests.support.polling import eventually_async
from tests.support.specs import EXECUTION_LIMITS


class Bench:
    """A session whose sandbox can rest, and its guest; `network` is between them where there is one."""

    def __init__(self, session: Session, sandbox: FakeSandbox, channel: GuestChannel) -> None:
        self.session = session
        self.sandbox = sandbox
        self.channel = channel
        self.guest: FakeGuest = sandbox.guest

    @property
    def network(self) -> Network:
        assert self.guest.network is not None
        return self.guest.network

    async def execute(self, execution_id: str = "e") -> Execution:
        return await self.session.execute(execution_id, "1", OutputMode.TRAILING_EXPRESSION, EXECUTION_LIMITS)

    async def is_in(self, state: str) -> bool:
        return bool(await eventually_async(lambda: self.session.state == state))

    async def rest(self) -> None:
        """Lets the session be unused until its sandbox is paused."""
        self.sandbox.pause_idle_s = 0.0
        self.session.check_guest()
        assert await self.is_in("paused")

    async def begin_to_rest(self) -> None:
        """Does the same; but the sandbox is still being paused."""
        self.sandbox.pause_idle_s = 0.0
        self.sandbox.may_pause.clear()
        self.session.check_guest()
        assert await eventually_async(lambda: self.sandbox.pauses)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(tmp_path)
    yield backend
    await backend.close()
    assert await eventually_async(lambda: len(asyncio.all_tasks()) == 1), "a task was left over"


@pytest.fixture
async def make(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[Any]:
    async with sessions_on(backend, tmp_path) as make_session:

        async def make(**settings: Any) -> Bench:
            return Bench(*await make_session(None, SessionSettings(**settings)))

        yield make


@pytest.fixture
async def bench(make: Any) -> Bench:
    bench: Bench = await make()
    return bench


@pytest.fixture
async def far(backend: FakeBackend, make: Any) -> Any:
    """Makes a bench with a network in between."""

    async def far(**settings: Any) -> Bench:
        def prepare(guest: FakeGuest) -> None:
            guest.network = Network(guest)

        backend.prepare = prepare
        bench: Bench = await make(**settings)
        return bench

    return far


# -- resting


async def test_a_session_that_rests_says_so_on_the_wire(bench: Bench) -> None:
    assert session_to(bench.session).state == pb.SESSION_STATE_IDLE
    await bench.rest()
    assert session_to(bench.session).state == pb.SESSION_STATE_PAUSED


async def test_a_session_that_nobody_uses_rests_and_is_left_alone(bench: Bench) -> None:
    await bench.rest()
    for _ in range(3):
        bench.session.check_guest()
    assert (bench.sandbox.pauses, bench.sandbox.wakes) == (1, 0)
    assert bench.session.state == "paused"


async def test_it_rests_though_it_is_asked_for_a_sign_of_life_each_time(make: Any) -> None:
    """Pings are due at every sweep, or more often."""
    bench: Bench = await make(ping_interval_s=0.0)
    await bench.rest()
    assert (bench.sandbox.pauses, bench.session.state) == (1, "paused")


async def test_a_sandbox_that_can_not_rest_never_does(bench: Bench) -> None:
    bench.session.check_guest()
    await asyncio.sleep(0)
    assert (bench.session.state, bench.sandbox.pauses) == ("idle", 0)


async def execute(bench: Bench) -> None:
    execution = await bench.execute()
    assert bench.session.state == "busy"
    await bench.guest.got(Kind.EXECUTE)
    bench.guest.end("e")
    assert (await outcome_of(execution))[1].outcome is Outcome.SUCCEEDED


async def list_files(bench: Bench) -> None:
    bench.guest.on[Kind.FILE_LIST] = lambda asked: bench.guest.done(asked, b"[]", truncated=False)
    assert await bench.session.list_files("") == ([], False)


async def set_variables(bench: Bench) -> None:
    await bench.session.set_variables([("x", b"1")])


async def register_tools(bench: Bench) -> None:
    await bench.session.register_tools([ToolSpec("a", "", (), is_final_answer=False)])


async def upload_blob(bench: Bench) -> None:
    async def data() -> AsyncIterator[bytes]:
        yield b"12"

    assert await bench.session.upload_blob(2, data())


async def hold_to(bench: Bench) -> None:
    await bench.session.hold_to(bench.session.spec)


REQUESTS: list[Callable[[Bench], Coroutine[Any, Any, None]]] = [
    execute,
    list_files,
    set_variables,
    register_tools,
    upload_blob,
    hold_to,
]


@pytest.mark.parametrize("ask", REQUESTS, ids=lambda ask: ask.__name__)
async def test_each_kind_of_request_wakes_it_and_is_answered(bench: Bench, ask: Any) -> None:
    await bench.rest()
    await ask(bench)
    assert bench.sandbox.wakes == 1
    assert await bench.is_in("idle")


async def test_many_requests_at_once_wake_it_once(bench: Bench) -> None:
    await bench.rest()
    bench.sandbox.may_wake.clear()
    asked = [asyncio.create_task(bench.session.set_variables([(f"x{n}", b"1")])) for n in range(5)]
    assert await eventually_async(lambda: bench.sandbox.wakes)
    assert bench.session.state == "idle", "it is not paused any more"
    bench.session.check_guest()
    bench.sandbox.may_wake.set()
    await asyncio.gather(*asked)
    assert (bench.sandbox.pauses, bench.sandbox.wakes) == (1, 1)


async def test_it_rests_again_and_again(bench: Bench) -> None:
    for count in range(1, 4):
        await bench.rest()
        await bench.session.set_variables([("x", b"1")])
        assert (bench.sandbox.pauses, bench.sandbox.wakes) == (count, count)


async def test_what_runs_or_waits_keeps_it_awake(bench: Bench) -> None:
    bench.sandbox.pause_idle_s = 0.0
    execution = await bench.execute()
    await bench.guest.got(Kind.EXECUTE)
    bench.session.check_guest()
    assert bench.session.state == "busy"
    bench.guest.end("e")
    await execution.wait()
    asked = asyncio.create_task(bench.session.list_files(""))
    listing = await bench.guest.got(Kind.FILE_LIST)
    bench.session.check_guest()
    assert not bench.sandbox.pauses
    bench.guest.done(listing, b"[]", truncated=False)
    await asked
    await bench.rest()


async def test_what_the_guest_has_not_acknowledged_keeps_it_awake(bench: Bench) -> None:
    """A caller that waits for delivery would wait until another one wakes the guest."""
    bench.sandbox.pause_idle_s = 0.0
    bench.channel.send(BlobDrop(blob="b"))
    bench.session.check_guest()
    await bench.guest.got(Kind.BLOB_DROP)
    assert not bench.sandbox.pauses


async def test_putting_off_its_end_neither_wakes_it_nor_keeps_it_awake(bench: Bench) -> None:
    bench.session.touch()
    await bench.rest()
    bench.session.touch()
    assert (bench.session.state, bench.sandbox.wakes) == ("paused", 0)


async def test_a_request_while_it_is_being_paused_waits_and_is_served(bench: Bench) -> None:
    await bench.begin_to_rest()
    execution = await bench.execute()
    bench.sandbox.may_pause.set()
    await bench.guest.got(Kind.EXECUTE)
    bench.guest.log("e", "hello")
    bench.guest.end("e")
    assert (await outcome_of(execution))[0] == "hello"
    assert (bench.sandbox.pauses, bench.sandbox.wakes) == (1, 1)


async def test_a_connection_that_breaks_when_the_rest_begins_is_made_again_once(bench: Bench) -> None:
    """It was renewed and hung up at the same time, by two tasks, and the sandbox was paused below the new connection."""
    bench.sandbox.pause_idle_s = 0.0
    bench.session.check_guest()  # the task that hangs up has not run yet
    bench.channel.break_off("the connection broke")
    assert await bench.is_in("paused")
    assert not bench.channel.connected
    bench.sandbox.pause_idle_s = None
    execution = await bench.execute()
    await bench.guest.got(Kind.EXECUTE)
    bench.guest.end("e")
    assert (await outcome_of(execution))[1].outcome is Outcome.SUCCEEDED
    assert (bench.sandbox.pauses, bench.sandbox.wakes) == (1, 1)


@pytest.mark.parametrize("breaks", [False, True], ids=["connected", "broken"])
async def test_a_request_that_comes_when_the_rest_begins_is_served(bench: Bench, breaks: bool) -> None:
    """It was sent, or kept, before the task that hangs up had run; the sandbox was paused below it for good."""
    bench.sandbox.pause_idle_s = 0.0
    bench.session.check_guest()
    if breaks:
        bench.channel.break_off("the connection broke")
    bench.sandbox.pause_idle_s = None
    execution = await bench.execute()
    await bench.guest.got(Kind.EXECUTE)
    bench.guest.end("e")
    assert (await outcome_of(execution))[1].outcome is Outcome.SUCCEEDED


async def test_who_asked_and_went_leaves_it_awake_and_whole(bench: Bench) -> None:
    await bench.rest()
    bench.sandbox.may_wake.clear()
    asked = asyncio.create_task(bench.session.set_variables([("x", b"1")]))
    assert await eventually_async(lambda: bench.sandbox.wakes)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    bench.sandbox.may_wake.set()
    await bench.session.set_variables([("y", b"1")])
    assert bench.session.state == "idle"


async def test_a_sandbox_that_goes_on_running_is_used_and_not_asked_again(bench: Bench) -> None:
    bench.sandbox.pause_idle_s, bench.sandbox.can_pause = 0.0, False
    bench.session.check_guest()
    await bench.guest.got(Kind.HELLO, 2)
    await bench.session.set_variables([("x", b"1")])
    bench.session.check_guest()
    assert (bench.session.state, bench.sandbox.pauses, bench.sandbox.wakes) == ("idle", 1, 0)


async def test_where_nobody_knows_whether_it_was_paused_its_guest_tells(bench: Bench) -> None:
    bench.sandbox.pause_idle_s, bench.sandbox.can_pause = 0.0, SandboxFailure("the cloud has no time")
    bench.sandbox.can_wake = SandboxFailure("the cloud still has no time")
    bench.session.check_guest()
    await bench.guest.got(Kind.HELLO, 2)
    await bench.session.set_variables([("x", b"1")])
    assert bench.session.state == "idle"


async def test_a_sandbox_that_died_instead_of_resting_loses_the_session(bench: Bench) -> None:
    bench.sandbox.pause_idle_s, bench.sandbox.can_pause = 0.0, SandboxFailure("there is no such sandbox")
    bench.sandbox.cause = "it was removed"
    await bench.begin_to_rest()
    await bench.guest.die()
    bench.sandbox.may_pause.set()
    assert await bench.is_in("lost")
    assert bench.session.lost_reason == "it was removed"


async def test_a_sandbox_that_does_not_wake_loses_the_session_with_the_reason(bench: Bench) -> None:
    await bench.rest()
    bench.sandbox.can_wake = SandboxFailure("secret words of the cloud")
    with pytest.raises(PreconditionFailed) as refused:
        await bench.session.set_variables([("x", b"1")])
    assert refused.value.reason is Reason.SESSION_LOST
    assert "could not be woken" in refused.value.message
    assert "secret" not in refused.value.message
    assert await eventually_async(lambda: bench.sandbox.destroyed)


async def test_a_wake_that_hangs_is_given_up_after_its_time(make: Any) -> None:
    bench = await make(connection=ConnectionTimes(wake_s=0.02))
    await bench.rest()
    bench.sandbox.may_wake.clear()
    execution = await bench.execute()
    assert (await outcome_of(execution))[1].outcome is Outcome.LOST
    assert "could not be woken" in bench.session.lost_reason


async def test_a_pause_that_hangs_is_given_up_after_its_time(make: Any) -> None:
    bench = await make(connection=ConnectionTimes(pause_s=0.02))
    await bench.begin_to_rest()
    await bench.session.set_variables([("x", b"1")])
    assert bench.session.state == "idle"


@pytest.mark.parametrize("when", ["pausing", "paused", "waking"])
async def test_it_can_be_closed_at_any_time(bench: Bench, when: str) -> None:
    if when == "pausing":
        await bench.begin_to_rest()
    else:
        await bench.rest()
    if when == "waking":
        bench.sandbox.may_wake.clear()
        execution = await bench.execute()
        assert await eventually_async(lambda: bench.sandbox.wakes)
    await bench.session.close("it was deleted")
    await bench.session.destroy()
    assert bench.sandbox.destroyed
    assert len(asyncio.all_tasks()) == 1, "a task was left over"
    if when == "waking":
        assert (await outcome_of(execution))[1].outcome is Outcome.CANCELLED


# -- a connection that breaks by itself


async def test_a_silent_way_is_made_anew_before_its_guest_is_given_up(far: Any) -> None:
    bench = await far(ping_interval_s=0.0, silence_s=60.0)
    execution = await bench.execute()
    await bench.guest.got(Kind.EXECUTE)
    bench.guest.freeze()
    bench.network.up.clear()
    assert await eventually_async(lambda: bench.session.check_guest() or not bench.channel.connected)
    bench.guest.thaw()
    bench.network.up.set()
    await bench.guest.got(Kind.HELLO, 2)
    bench.guest.end("e")
    assert (await outcome_of(execution))[1].outcome is Outcome.SUCCEEDED


async def test_a_guest_that_stays_silent_on_a_new_way_is_given_up(far: Any) -> None:
    bench = await far(ping_interval_s=0.0, silence_s=60.0)
    bench.network.reconnect_s = 0.05
    bench.guest.freeze()
    assert await eventually_async(lambda: bench.session.check_guest() or bench.session.state == "lost")
    assert "has not answered" in bench.session.lost_reason


async def test_an_attempt_that_is_not_answered_is_followed_by_another(far: Any) -> None:
    bench = await far(connection=ConnectionTimes(answer_s=0.02, first_retry_s=0.01))
    ready, bench.guest.ready = bench.guest.ready, None
    bench.guest.hang_up()
    await bench.guest.got(Kind.HELLO, 3)
    bench.guest.ready = ready
    await bench.session.set_variables([("x", b"1")])
    assert bench.session.state == "idle"


async def test_a_guest_that_lies_on_a_new_way_is_not_tried_again(far: Any) -> None:
    bench = await far()
    bench.guest.ready = {"protocol": 99, "python": "3.11.0", "generation": 1}
    bench.guest.hang_up()
    assert await bench.is_in("lost")
    assert len(bench.guest.of_kind(Kind.HELLO)) == 2


async def break_often(bench: Bench, times: int) -> None:
    for count in range(2, times + 2):
        bench.guest.hang_up()
        await bench.guest.got(Kind.HELLO, count)
        assert await eventually_async(lambda: bench.channel.connected)
        await bench.session.set_variables([("x", b"1")])


async def test_a_network_may_break_often(far: Any) -> None:
    bench = await far()
    await break_often(bench, 20)
    assert bench.session.state == "idle"


async def test_a_network_that_breaks_at_once_each_time_is_given_time(far: Any) -> None:
    """Otherwise the breaks of an hour would be used up within a second."""
    times = ConnectionTimes(first_retry_s=0.001)
    bench = await far(connection=times)
    bench.network.reconnects_max = 9
    begun_s = time.monotonic()
    take = bench.guest.take

    def greet_and_leave(connection: Any, frame: Frame) -> None:
        take(connection, frame)
        bench.guest.hang_up()

    bench.guest.take = greet_and_leave
    bench.guest.hang_up()
    assert await bench.is_in("lost")
    assert time.monotonic() - begun_s > sum(0.001 * 2**fruitless for fruitless in range(9)) / 2


def test_waits_grow_to_their_limit_and_are_never_the_same() -> None:
    waits_s = [ConnectionTimes().wait_s(attempt) for attempt in (1, 3, 10, 10**6)]
    assert 0.1 < waits_s[0] < waits_s[1] < waits_s[2] <= 8.0
    assert 4.0 <= waits_s[3] <= 8.0


async def test_breaks_are_counted_within_their_time_only(far: Any) -> None:
    bench = await far(connection=ConnectionTimes(breaks_window_s=0.0))
    bench.network.reconnects_max = 2
    await break_often(bench, 4)
    assert bench.session.state == "idle"


async def test_the_tokens_of_a_chain_are_used_up_honestly(far: Any) -> None:
    bench = await far()
    bench.network.connections_max = 4
    await break_often(bench, 2)
    bench.guest.hang_up()
    assert await bench.is_in("lost")


# -- both


async def test_a_way_that_breaks_on_waking_is_made_again(far: Any) -> None:
    bench = await far()
    await bench.rest()
    bench.network.up.clear()
    asked = asyncio.create_task(bench.session.set_variables([("x", b"1")]))
    assert await eventually_async(lambda: bench.sandbox.wakes)
    bench.network.up.set()
    await asked
    bench.guest.hang_up()
    await bench.session.set_variables([("y", b"1")])
    assert bench.session.state == "idle"


# -- the listener for the egress proxy


@pytest.fixture
def handed_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The listener of the sandbox, but for its port, which is one of this host."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr("executor_server.backends.channel.listener.LISTENER_ADDRESS", listener.getsockname())
        bench.guest.egress_listener = listener
        yield listener


class Notes:
    """Stands in for the registry; keeps the counts of connections that it should note."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def note_connections(self, session_id: str, count: int) -> None:
        self.counts.append(count)


def connection_of(bench: Bench, notes: Notes) -> GuestConnection:
    registry: Any = notes
    return GuestConnection(bench.session, bench.sandbox, bench.channel, registry, ConnectionTimes())


async def test_a_token_is_noted_before_it_is_shown_and_never_shown_again(
    bench: Bench, handed_out: socket.socket
) -> None:
    """A daemon that is killed in between must not have shown a token that the next one shows again."""
    notes = Notes()

    def refuse_once(_frame: Frame) -> None:
        assert notes.counts == [2]
        del bench.guest.on[Kind.TAKE_LISTENER]
        bench.guest.hang_up_on_newest()

    bench.guest.on[Kind.TAKE_LISTENER] = refuse_once
    taken = await connection_of(bench, notes).take_listener()
    assert isinstance(taken, socket.socket)
    with taken:
        assert taken.getsockname() == handed_out.getsockname()
    assert notes.counts == [2, 3]
    first, second = (frame.head.text("token") for frame in bench.guest.of_kind(Kind.TAKE_LISTENER))
    assert first != second
    assert (await bench.execute()) is not None, "the session's own connection goes on"


async def test_a_guest_that_keeps_its_listener_is_given_up(bench: Bench) -> None:
    with pytest.raises(SandboxFailure, match="did not hand its listener out"):
        await connection_of(bench, Notes()).take_listener()
    assert len(bench.guest.of_kind(Kind.TAKE_LISTENER)) == 3
    assert bench.session.state == "idle"
