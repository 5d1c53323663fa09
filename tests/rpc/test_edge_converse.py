"""A stream of Converse: each message is the call that it stands for, and no message harms another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from executor_api import values
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_server.admission.quotas import Quotas
from executor_server.core.errors import ExecutorError
from executor_server.core.model import Event, Log, Principal, SessionFacts
from executor_server.identity.token_file import TokenFile
from executor_server.identity.tokens import Tokens
from executor_server.lifecycle.observer import Observer
from executor_server.policy.profile import QuotasTable
from executor_server.rpc import auth, calls, conversation, conversations
from executor_server.rpc.fleet.lease_guard import LeaseGuard
from tests.rpc.edge import AUTH, TOKEN, Edge, FakeExecution, refused, serving
from tests.support.polling import eventually_async

TENANT = "local"
EOF: Any = cast("Any", grpc.aio).EOF
VALUE = types.Value(packed=types.Payload(inline=values.encode(1)))
HELLO = (Event(1, Log("stdout", "a")), Event(2, Log("stdout", "b")))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the pauses before refusals to zero."""
    monkeypatch.setattr(calls, "REFUSAL_PAUSE_S", 0.0)
    monkeypatch.setattr(conversation, "REFUSAL_PAUSE_S", 0.0)


class Stream:
    """One stream, and the messages that a client sends in it."""

    def __init__(self, edge: Edge, metadata: Any = AUTH, session_id: str = "s1") -> None:
        self.call = edge.stub.Converse(metadata=metadata)
        self.session_id = session_id
        self.sent = 0

    async def send(self, **message: Any) -> int:
        self.sent += 1
        await self.call.write(pb.ConverseRequest(message_id=self.sent, **message))
        return self.sent

    async def execute(self, execution_id: str = "e", **more: Any) -> int:
        request = pb.ExecuteRequest(session_id=self.session_id, execution_id=execution_id, code="1", **more)
        return await self.send(execute=request)

    async def attach(self, execution_id: str = "e", after: int = 0) -> int:
        request = pb.AttachExecutionRequest(session_id=self.session_id, execution_id=execution_id, after_event=after)
        return await self.send(attach=request)

    async def cancel(self, execution_id: str = "e") -> int:
        return await self.send(cancel=pb.CancelExecutionRequest(session_id=self.session_id, execution_id=execution_id))

    async def answer(self, call_id: str = "c", execution_id: str = "e") -> int:
        request = pb.SubmitToolResultRequest(
            session_id=self.session_id, execution_id=execution_id, call_id=call_id, value=VALUE
        )
        return await self.send(tool_result=request)

    async def next(self) -> pb.ConverseResponse:
        response: pb.ConverseResponse = await self.call.read()
        assert response is not EOF, await self.call.code()
        return response

    async def events(self, count: int) -> list[tuple[int, int]]:
        """The next events, each as the number of its message and its own."""
        found: list[tuple[int, int]] = []
        while len(found) < count:
            response = await self.next()
            found += [(response.message_id, event.number) for event in response.events]
        return found

    async def refusal(self) -> tuple[int, str, str]:
        """The next refusal: the number of its message, code and reason."""
        while True:
            response = await self.next()
            if response.HasField("refusal"):
                return response.message_id, *said(response.refusal)

    async def done(self, count: int = 1) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            found += (await self.next()).done
        return found

    async def end(self) -> tuple[str, str]:
        """Reads to the end of the stream; returns its status and reason."""
        return await refused(self._to_the_end())

    async def ends_well(self) -> None:
        await self._to_the_end()
        assert await self.call.code() is grpc.StatusCode.OK

    async def _to_the_end(self) -> None:
        while await self.call.read() is not EOF:
            pass


def said(refusal: pb.Refusal) -> tuple[str, str]:
    status = status_pb2.Status.FromString(refusal.SerializeToString())
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        detail.Unpack(info)
    assert info.domain == "remote-executor" and status.message
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return code.name, info.reason


class Refusals(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        self.seen.append((method.rpartition("/")[2], error.reason.value))


def facts(session_id: str = "s1") -> SessionFacts:
    return SessionFacts(session_id, Principal(TENANT, "x"), "r", None, None, "fake", "base", False, False, ())  # type: ignore[arg-type]


async def opened(edge: Edge, **execution: Any) -> tuple[Any, Stream]:
    session = await edge.session()
    session.next_execution = FakeExecution(**execution)
    return session, Stream(edge)


# -- what messages do


async def test_an_execution_runs_and_its_events_name_its_message(edge: Edge) -> None:
    session, stream = await opened(edge, events_to_send=HELLO)
    assert await stream.execute() == 1
    assert await stream.events(2) == [(1, 1), (1, 2)]
    assert [asked[:3] for asked in session.asked if asked[0] == "execute"] == [("execute", "e", "1")]
    assert await stream.execute("f") == 2
    assert await stream.events(2) == [(2, 1), (2, 2)]


async def test_what_a_stream_began_a_plain_call_finds_and_the_other_way_round(edge: Edge) -> None:
    _, stream = await opened(edge, events_to_send=HELLO)
    await stream.execute()
    await stream.events(2)
    plain = edge.stub.AttachExecution(
        pb.AttachExecutionRequest(session_id="s1", execution_id="e", after_event=1), metadata=AUTH
    )
    assert [response.event.number async for response in plain] == [2]
    async for _ in edge.stub.Execute(pb.ExecuteRequest(session_id="s1", execution_id="plain", code="1"), metadata=AUTH):
        pass
    message = await stream.attach("plain", after=1)
    assert await stream.events(1) == [(message, 2)]


async def test_a_cancel_overtakes_the_execution_that_it_is_about(edge: Edge) -> None:
    session, stream = await opened(edge, events_to_send=HELLO, stays_open=True)
    await stream.execute()
    await stream.events(2)
    message = await stream.cancel()
    assert await stream.done() == [message]
    assert "cancel" in session.next_execution.asked


async def test_an_answer_is_given_and_reported(edge: Edge) -> None:
    session, stream = await opened(edge, stays_open=True)
    await stream.execute()
    assert await eventually_async(lambda: "e" in session.executions)
    message = await stream.answer()
    assert await stream.done() == [message]
    assert [each[0] for each in session.next_execution.asked] == ["events", "c"]


async def test_many_answers_are_reported_in_few_responses(edge: Edge) -> None:
    session, stream = await opened(edge, stays_open=True)
    await stream.execute()
    assert await eventually_async(lambda: "e" in session.executions)
    messages = [await stream.answer(f"c{number}") for number in range(30)]
    responses = [await stream.next()]
    while sum(len(each.done) for each in responses) < 30:
        responses.append(await stream.next())
    assert sorted(done for each in responses for done in each.done) == messages
    assert len(responses) < 15


async def test_events_that_are_there_together_come_together(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    async def batches(self: FakeExecution, after: int = 0) -> AsyncGenerator[Sequence[Event]]:
        yield HELLO

    monkeypatch.setattr(FakeExecution, "batches", batches)
    _, stream = await opened(edge)
    await stream.execute()
    assert [event.number for event in (await stream.next()).events] == [1, 2]


# -- refusals


async def test_a_refused_message_ends_no_other(edge: Edge) -> None:
    _, stream = await opened(edge, events_to_send=HELLO, stays_open=True)
    await stream.execute()
    await stream.events(2)
    foreign = await stream.attach("of-nobody")
    assert await stream.refusal() == (foreign, "NOT_FOUND", "EXECUTION_NOT_FOUND")
    foreign = await stream.cancel("of-nobody")
    assert await stream.refusal() == (foreign, "NOT_FOUND", "EXECUTION_NOT_FOUND")
    foreign = await stream.answer(execution_id="of-nobody")
    assert await stream.refusal() == (foreign, "NOT_FOUND", "EXECUTION_NOT_FOUND")
    wrong = await stream.execute("not an id")
    assert await stream.refusal() == (wrong, "INVALID_ARGUMENT", "INVALID_FIELD")
    more = await stream.execute("more", limits=types.Limits(wall_time_s=1e9))
    assert await stream.refusal() == (more, "PERMISSION_DENIED", "POLICY_VIOLATION")
    last = await stream.attach("e", after=1)
    assert await stream.events(1) == [(last, 2)]


async def test_refused_messages_are_reported_as_the_calls_they_stand_for(tmp_path: Path) -> None:
    refusals = Refusals()
    async with serving(tmp_path, observer=refusals) as edge:
        _, stream = await opened(edge)
        for message in (stream.attach("of-nobody"), stream.execute("not an id"), stream.cancel("of-nobody")):
            await message
            await stream.refusal()
    assert refusals.seen == [
        ("AttachExecution", "EXECUTION_NOT_FOUND"),
        ("Execute", "INVALID_FIELD"),
        ("CancelExecution", "EXECUTION_NOT_FOUND"),
    ]


@pytest.mark.parametrize("inside", [False, True])
async def test_a_message_with_an_unknown_field_is_refused_by_its_number(edge: Edge, inside: bool) -> None:
    await edge.session()
    call = edge.raw("Converse", "stream_stream")(metadata=AUTH)
    unknown = b"\xfa\x3e\x01x"
    request = pb.ExecuteRequest(session_id="s1", execution_id="e", code="1").SerializeToString()
    request += unknown if inside else b""
    message = pb.ConverseRequest(message_id=1).SerializeToString() + b"\x12" + bytes([len(request)]) + request
    await call.write(message + (b"" if inside else unknown))
    response = pb.ConverseResponse.FromString(await call.read())
    assert (response.message_id, *said(response.refusal)) == (1, "INVALID_ARGUMENT", "INVALID_FIELD")
    good = pb.ExecuteRequest(session_id="s1", execution_id="e", code="1")
    await call.write(pb.ConverseRequest(message_id=2, execute=good).SerializeToString())
    await call.done_writing()
    assert await call.read() == EOF
    assert edge.sessions.sessions["s1"].executions.keys() == {"e"}


async def test_a_message_of_another_session_is_refused(edge: Edge) -> None:
    await edge.session("other")
    _, stream = await opened(edge, events_to_send=HELLO)
    await stream.execute()
    await stream.events(2)
    stream.session_id = "other"
    message = await stream.execute("f")
    assert await stream.refusal() == (message, "INVALID_ARGUMENT", "INVALID_FIELD")
    assert edge.sessions.sessions["other"].executions == {}


async def test_a_message_that_asks_for_nothing_is_refused(edge: Edge) -> None:
    _, stream = await opened(edge)
    await stream.execute()
    message = await stream.send()
    assert await stream.refusal() == (message, "INVALID_ARGUMENT", "INVALID_FIELD")


async def test_numbers_that_do_not_rise_end_the_stream(edge: Edge) -> None:
    _, stream = await opened(edge, stays_open=True)
    await stream.execute()
    stream.sent = 0
    await stream.execute("f")
    assert await stream.end() == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_malformed_message_ends_the_stream(edge: Edge) -> None:
    await edge.session()
    call = edge.raw("Converse", "stream_stream")(metadata=AUTH)
    await call.write(b"\xff\xff")
    assert await refused(call) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_message_that_is_too_large_ends_the_stream(edge: Edge) -> None:
    _, stream = await opened(edge)
    await stream.send(execute=pb.ExecuteRequest(session_id="s1", execution_id="e", code=" " * (5 << 20)))
    assert (await stream.end())[0] == "RESOURCE_EXHAUSTED"


async def test_a_stream_without_a_first_message_ends(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = edge.stub.Converse(metadata=AUTH)
    await empty.done_writing()
    assert await refused(empty) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    monkeypatch.setattr(conversation, "FIRST_MESSAGE_TIME_S", 0.01)
    assert await refused(edge.stub.Converse(metadata=AUTH)) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_session_that_is_not_there_ends_the_stream(edge: Edge) -> None:
    await edge.session()
    stream = Stream(edge, session_id="nowhere")
    await stream.execute()
    assert await stream.end() == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_a_bug_of_ours_costs_one_message_and_says_nothing(edge: Edge) -> None:
    session, stream = await opened(edge, events_to_send=HELLO)
    session.raises = RuntimeError("/home/somebody")
    message = await stream.execute()
    response = await stream.next()
    assert response.message_id == message and said(response.refusal) == ("INTERNAL", "INTERNAL")
    assert "somebody" not in str(response)
    session.raises = None
    again = await stream.execute()
    assert await stream.events(2) == [(again, 1), (again, 2)]


# -- who calls


async def test_a_message_of_a_caller_that_is_no_longer_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the stream ends for the same reason."""
    monkeypatch.setattr(auth, "CHECK_INTERVAL_S", 1e6)
    file = TokenFile(tmp_path / "tokens.json")
    record, token = file.new("acme", "ci")
    metadata = (("authorization", f"Bearer {token}"),)
    refusals = Refusals()
    async with serving(tmp_path, tokens=Tokens(TOKEN, file), observer=refusals) as edge:
        await edge.stub.CreateSession(pb.CreateSessionRequest(request_id="s1"), metadata=metadata)
        stream = Stream(edge, metadata)
        session = edge.sessions.sessions["s1"]
        session.next_execution = FakeExecution(HELLO)
        await stream.execute()
        await stream.events(2)
        file.revoke(record.id)
        await edge.server._authentication._callers.refresh()
        message = await stream.execute("f")
        assert await stream.refusal() == (message, "UNAUTHENTICATED", "UNAUTHENTICATED")
        assert session.executions.keys() == {"e"}
        edge.server._authentication.cut_off_strangers()
        assert await stream.end() == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert refusals.seen == [("Execute", "UNAUTHENTICATED"), ("Converse", "UNAUTHENTICATED")]


# -- quotas


@asynccontextmanager
async def limited(directory: Path, **limits: int) -> AsyncIterator[tuple[Edge, Quotas]]:
    quotas = Quotas(lambda _: QuotasTable.model_validate(limits))
    async with serving(directory, quotas=quotas) as edge:
        yield edge, quotas


async def test_an_idle_stream_counts_as_no_open_call_and_an_execution_as_one(tmp_path: Path) -> None:
    async with limited(tmp_path, calls=2) as (edge, quotas):
        session, stream = await opened(edge, events_to_send=HELLO)
        await stream.execute()
        await stream.events(2)
        assert await eventually_async(lambda: quotas.use_of(TENANT).calls == 0)
        session.next_execution = FakeExecution(HELLO, stays_open=True)
        for name in ("f", "g"):
            await stream.execute(name)
            await stream.events(2)
        assert quotas.use_of(TENANT).calls == 2
        message = await stream.execute("h")
        assert await stream.refusal() == (message, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert session.executions.keys() == {"e", "f", "g"}
        stream.call.cancel()
        assert await eventually_async(lambda: quotas.use_of(TENANT).calls == 0)


async def test_messages_above_the_rate_wait_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BURST_S", 0.0)
    async with limited(tmp_path, calls_per_second=20) as (edge, _):
        _, stream = await opened(edge, events_to_send=HELLO)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for number in range(5):
            await stream.execute(f"e{number}")
        await stream.events(10)
        assert loop.time() - began_s >= 4 / 20


async def test_messages_that_are_refused_wait_their_turn_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "BURST_S", 0.0)
    async with limited(tmp_path, calls_per_second=20) as (edge, _):
        _, stream = await opened(edge, events_to_send=HELLO)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await stream.execute()
        await stream.events(2)
        stream.session_id = "other"
        for send in (stream.send, stream.answer, stream.execute, stream.attach):
            await send()
        for _ in range(4):
            assert (await stream.refusal())[1:] == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert loop.time() - began_s >= 4 / 20


async def test_no_message_is_read_while_those_that_wait_for_their_turn_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "BURST_S", 0.0)
    monkeypatch.setattr(conversation, "MAX_UNADMITTED_BYTES", 1000)
    unadmitted: list[int] = []
    begin = conversation.Conversation._begin

    def noted(self: Any, *args: Any, **more: Any) -> None:
        unadmitted.append(self._unadmitted_bytes)
        begin(self, *args, **more)

    monkeypatch.setattr(conversation.Conversation, "_begin", noted)
    async with limited(tmp_path, calls_per_second=20) as (edge, _):
        _, stream = await opened(edge, events_to_send=HELLO)
        for number in range(6):
            await stream.send(execute=pb.ExecuteRequest(session_id="s1", execution_id=f"e{number}", code=" " * 600))
        await stream.events(12)
    assert len(unadmitted) == 6 and max(unadmitted) <= 1000


# -- bad clients


async def test_nothing_is_kept_of_a_message_that_is_refused(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client need not read, and it can be 4 MiB large."""
    begun: list[Any] = []
    begin = conversation.Conversation._begin

    def kept(self: Any, taken: Any, **more: Any) -> None:
        begun.append((taken.problem, taken.request))
        begin(self, taken, **more)
        begun.append(taken)

    _, stream = await opened(edge, events_to_send=HELLO)
    await stream.execute()
    await stream.events(2)
    monkeypatch.setattr(conversation.Conversation, "_begin", kept)
    await stream.cancel("of-nobody")
    await stream.refusal()
    assert begun[0][0] is None and begun[1].request is None
    stream.session_id = "other"
    await stream.answer()
    await stream.refusal()
    assert begun[2][0] is not None and begun[2][1] is None


async def test_a_stream_whose_first_message_names_no_session_ends(edge: Edge) -> None:
    await edge.session()
    stream = Stream(edge)
    await stream.send()
    assert await stream.end() == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_executions_above_the_bound_are_refused(edge: Edge) -> None:
    session, stream = await opened(edge, stays_open=True)
    for number in range(conversation.MAX_FOLLOWED):
        await stream.execute(f"e{number}")
    message = await stream.execute("one-more")
    assert await stream.refusal() == (message, "RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert "one-more" not in session.executions
    cancel = await stream.cancel("e3")
    assert await stream.done() == [cancel]


async def test_a_client_that_never_reads_holds_back_its_own_execution_only(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    async def endless(self: FakeExecution, after: int = 0) -> AsyncGenerator[Sequence[Event]]:
        nonlocal taken
        while True:
            taken += 1
            yield (Event(taken, Log("stdout", "x" * 100_000)),)

    monkeypatch.setattr(FakeExecution, "batches", endless)
    session, stream = await opened(edge)
    await stream.execute()
    seen = -1
    while taken != seen or taken == 0:  # it has stopped: neither side takes more
        seen = taken
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.2)
    assert taken < 200, "gRPC's own buffers, and not more"
    await stream.cancel()
    assert await eventually_async(lambda: "cancel" in session.next_execution.asked)
    await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH)
    stream.call.cancel()


async def test_a_flood_of_refused_messages_is_read_no_faster_than_it_is_answered(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = conversation.Conversation._begin

    def counted(self: Any, request: Any, *args: Any, **more: Any) -> None:
        begun.append(self._beside)
        begin(self, request, *args, **more)

    monkeypatch.setattr(conversation.Conversation, "_begin", counted)
    _, stream = await opened(edge)
    await stream.execute()

    async def flood() -> None:
        for _ in range(2000):
            await stream.cancel("of-nobody")

    flooding = asyncio.create_task(flood())
    for _ in range(500):
        assert (await stream.refusal())[2] == "EXECUTION_NOT_FOUND"
    flooding.cancel()
    assert max(begun) <= conversation.MAX_BESIDE
    stream.call.cancel()


async def test_no_message_is_read_for_a_while_after_a_refusal_of_the_handler(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of such messages a second made the calls of other tenants hang for seconds."""
    taken: list[Any] = []
    take = conversation.Conversation._taken

    def counted(*args: Any) -> Any:
        taken.append(args)
        return take(*args)

    monkeypatch.setattr(conversation.Conversation, "_taken", counted)
    monkeypatch.setattr(conversation, "REFUSAL_PAUSE_S", 60.0)
    _, stream = await opened(edge)
    await stream.execute()
    await stream.cancel("of-nobody")
    assert (await stream.refusal())[2] == "EXECUTION_NOT_FOUND"
    read = len(taken)
    await stream.cancel("of-nobody")
    await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH)
    assert len(taken) == read
    stream.call.cancel()


async def test_a_client_that_has_sent_all_gets_the_rest_of_its_events(edge: Edge) -> None:
    _, stream = await opened(edge, events_to_send=HELLO)
    await stream.execute()
    await stream.call.done_writing()
    assert await stream.events(2) == [(1, 1), (1, 2)]
    await stream.ends_well()


async def test_a_client_that_disappears_leaves_its_execution_and_nothing_else(edge: Edge) -> None:
    session, stream = await opened(edge, events_to_send=HELLO, stays_open=True)
    await stream.execute()
    await stream.events(2)
    stream.call.cancel()
    await asyncio.wait_for(session.next_execution.closed.wait(), 10)
    assert "cancel" not in session.next_execution.asked
    assert await eventually_async(lambda: not edge.sessions.conversations._open)


# -- unused streams


async def test_an_unused_stream_ends_well(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "SWEEP_S", 0.01)
    _, stream = await opened(edge, events_to_send=HELLO)
    await stream.execute()
    await stream.events(2)
    monkeypatch.setattr(conversations, "IDLE_S", 0.01)
    await stream.ends_well()


class Full:
    """The context of a stream whose client does not read: there is never room for a response."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def write(self, response: pb.ConverseResponse) -> None:
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def test_a_stream_that_does_not_read_its_refusals_is_unused(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "SWEEP_S", 0.01)
    _, stream = await opened(edge, events_to_send=HELLO)
    await stream.execute()
    await stream.events(2)
    (served,) = edge.sessions.conversations._open
    served._context = cast("Any", Full(served._context))
    stream.session_id = "other"
    for _ in range(conversation.MAX_BESIDE + 1):
        await stream.answer()
    assert await eventually_async(lambda: served._beside == conversation.MAX_BESIDE)
    monkeypatch.setattr(conversation, "END_GRACE_S", 0.01)
    monkeypatch.setattr(conversations, "IDLE_S", 0.01)
    await stream.ends_well()
    assert not edge.sessions.conversations._open


async def test_a_stream_with_an_execution_is_not_unused(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "SWEEP_S", 0.01)
    _, stream = await opened(edge, events_to_send=HELLO, stays_open=True)
    other = Stream(edge)
    await stream.execute()
    await stream.events(2)
    monkeypatch.setattr(conversations, "IDLE_S", 0.01)
    await other.cancel()
    await other.ends_well()
    assert not stream.call.done()
    stream.call.cancel()


@pytest.mark.parametrize("bound", ["MAX_PER_SESSION", "MAX_PER_TENANT", "MAX_IN_ALL"])
async def test_the_longest_unused_stream_gives_way_and_a_used_one_never(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(conversations, bound, 2)
    session, used = await opened(edge, events_to_send=HELLO, stays_open=True)
    await used.execute()
    await used.events(2)
    session.next_execution = FakeExecution(HELLO)
    idle = Stream(edge)
    await idle.execute("f")
    await idle.events(2)
    third = Stream(edge)
    session.next_execution = FakeExecution(HELLO, stays_open=True)
    await third.execute("g")
    assert await third.events(2) == [(1, 1), (1, 2)]
    await idle.ends_well()
    fourth = Stream(edge)
    if bound == "MAX_PER_SESSION":  # else it is refused before its first message, which may not find it any more
        await fourth.execute("h")
    assert await fourth.end() == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert "h" not in session.executions
    for stream in (used, third):
        stream.call.cancel()


# -- the end of a session, of the daemon, of a lease


async def test_the_end_of_a_session_ends_its_streams_with_the_reason(edge: Edge) -> None:
    _, stream = await opened(edge, events_to_send=HELLO)
    (await edge.session("other")).next_execution = FakeExecution(HELLO)
    other = Stream(edge, session_id="other")
    for each in (stream, other):
        await each.execute()
        await each.next()
    edge.sessions.conversations.session_ended(facts(), "the session was deleted")
    assert await stream.end() == ("NOT_FOUND", "SESSION_NOT_FOUND")
    assert "was deleted" in await stream.call.details()
    assert not other.call.done()
    edge.sessions.conversations.session_lost(facts("other"), "the sandbox died")
    assert await other.end() == ("FAILED_PRECONDITION", "SESSION_LOST")


async def test_what_a_session_said_last_comes_before_the_end_of_its_stream(edge: Edge) -> None:
    session, stream = await opened(edge, stays_open=True)
    await stream.execute()
    assert await eventually_async(lambda: "e" in session.executions)
    edge.sessions.conversations.session_lost(facts(), "the sandbox died")
    await stream.call.done_writing()
    assert not stream.call.done()
    session.next_execution.stays_open = False
    session.next_execution.may_end.set()
    assert await stream.end() == ("FAILED_PRECONDITION", "SESSION_LOST")


async def test_a_daemon_that_stops_waits_for_no_unused_stream(edge: Edge) -> None:
    _, stream = await opened(edge, events_to_send=HELLO)
    await stream.execute()
    await stream.events(2)
    edge.sessions.conversations.close()
    await stream.ends_well()
    late = Stream(edge)
    await late.execute()
    assert await late.end() == ("UNAVAILABLE", "DRAINING")


async def test_a_node_without_a_lease_takes_no_message(tmp_path: Path) -> None:
    lease = [True]
    guard = LeaseGuard(lambda: lease[0])
    async with serving(tmp_path, guards=(guard,)) as edge:
        session, stream = await opened(edge, events_to_send=HELLO)
        await stream.execute()
        await stream.events(2)
        lease[0] = False
        await stream.execute("f")
        assert await stream.end() == ("UNAVAILABLE", "NODE_FENCED")
        assert session.executions.keys() == {"e"}
        lease[0] = True
        again = Stream(edge)
        session.next_execution = FakeExecution(HELLO, stays_open=True)
        await again.execute("g")
        await again.events(2)
        guard.cut()
        assert await again.end() == ("UNAVAILABLE", "NODE_FENCED")
