"""The client follows the executions of a session in one stream, and no caller notices when that ends."""

from __future__ import annotations

import gc
import threading
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_client import AsyncExecutorClient, ExecutorClient, NotFoundError
from executor_client._core import conversation
from executor_client._core.conversation import Dialogue, Ended, Inbox, UseAnotherStream, refused
from executor_client._sync import duplex
from executor_client._sync.tool_calls import ToolPool
from executor_client.errors import ProtocolError
from tests.support.fake_daemon import TOKEN, Answered, Cut, FakeDaemon, Refusal, busy, log, result, tool_call


@pytest.fixture(autouse=True)
def streams(daemon: FakeDaemon) -> None:
    daemon.has_streams = True


def test_grpc_can_be_called_as_the_blocking_client_does() -> None:
    """Otherwise it makes plain calls, and nothing else would say so."""
    with grpc.insecure_channel("unix:/nowhere") as channel:
        assert duplex.can_open(channel)


def test_a_session_opens_one_stream_for_all_its_executions(session: Any, daemon: FakeDaemon) -> None:
    for number in range(5):
        daemon.journal = [log("a"), result(number)]
        assert session.execute(f"{number}").output == number
    assert (daemon.streams, daemon.names()) == (1, ["Execute"] * 5)


def test_each_session_has_a_stream_of_its_own(client: Any, daemon: FakeDaemon) -> None:
    sessions = [client.create_session() for _ in range(3)]
    for each in sessions * 2:
        each.execute("1")
    assert daemon.streams == 3
    for each in sessions:
        each.close()


def test_a_daemon_without_streams_is_asked_once(client: Any, daemon: FakeDaemon) -> None:
    daemon.has_streams = False
    for _ in range(2):
        session = client.create_session()
        session.execute("1")
        while client._transport.channel.conversations.are_served:  # grpc.aio has lost the refusal
            session.execute("1")
        daemon.has_streams = True  # it is not asked again
        session.close()
    assert daemon.streams == 0


def test_an_unused_stream_that_the_daemon_ended_is_opened_again(session: Any, daemon: FakeDaemon) -> None:
    session.execute("1")
    daemon.ends_streams = 1
    session.execute("2")
    assert daemon.streams == 2
    assert daemon.names() == ["Execute", "Execute"]


def test_a_stream_that_is_refused_for_want_of_room_costs_one_plain_call(session: Any, daemon: FakeDaemon) -> None:
    daemon.stream_refusals.append(busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    session.execute("1")
    session.execute("2")
    assert (daemon.streams, daemon.names()) == (2, ["Execute", "Execute"])


def test_a_stream_that_breaks_is_opened_again_and_the_execution_attached_to(session: Any, daemon: FakeDaemon) -> None:
    daemon.journal = [log("a"), log("b"), result()]
    daemon.cuts.append(Cut(1))
    assert session.execute("1").logs == "ab"
    assert (daemon.streams, daemon.names()) == (2, ["Execute", "AttachExecution"])


def test_the_end_of_the_session_is_what_the_caller_learns(session: Any, daemon: FakeDaemon) -> None:
    session.execute("1")
    daemon.refusals["Execute"].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", "it has ended"))
    with pytest.raises(NotFoundError, match="it has ended"):
        session.execute("2")


def test_answers_go_in_the_stream_and_large_ones_by_plain_calls(session: Any, daemon: FakeDaemon) -> None:
    session.register_tools({"small": lambda: 1, "large": lambda: "x" * 1_000_000})
    daemon.journal = [
        tool_call("small", call_id="c1"),
        Answered("c1"),
        tool_call("large", call_id="c2"),
        Answered("c2"),
        result(),
    ]
    session.execute("small(); large()")
    assert len(daemon.blobs) == 1
    assert daemon.names().count("SubmitToolResult") == 2


def test_an_answer_that_was_lost_with_its_stream_is_given_again(session: Any, daemon: FakeDaemon) -> None:
    """The stream breaks before the answer is confirmed; the daemon says that it has it, or takes it."""
    session.register_tools({"tool": lambda: 1})
    daemon.journal = [tool_call("tool"), Answered(), result()]
    daemon.cuts.append(Cut(1))
    assert session.execute("tool()").outcome
    assert [each.value.packed.inline != b"" for each in daemon.answers["call-1"]] == [True]


@pytest.mark.parametrize("error", [ProtocolError("no room"), RuntimeError("no room")])
def test_a_refused_answer_that_no_thread_can_give_again_ends_the_execution(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The thread that reads leaves the stream then, for which it needs the lock."""
    submit, submitted = ToolPool.submit, 0

    def once(self: ToolPool, work: Any) -> None:
        nonlocal submitted
        submitted += 1
        if submitted > 1:
            raise error
        submit(self, work)

    monkeypatch.setattr(ToolPool, "submit", once)
    daemon.refusals["SubmitToolResult"].append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"))
    daemon.journal = [tool_call("tool"), Answered(), result()]
    with ExecutorClient(daemon.address, token=TOKEN) as client, client.create_session() as session:
        session.register_tools({"tool": lambda: 1})
        with pytest.raises(type(error), match="no room"):
            session.execute("tool()")
    assert submitted == 2


def test_executions_of_several_threads_share_the_stream(daemon: FakeDaemon) -> None:
    daemon.journal = [log("a"), log("b"), result(7)]
    with ExecutorClient(daemon.address, token=TOKEN) as client, client.create_session() as session:
        outputs: list[Any] = []

        def run() -> None:
            for _ in range(10):
                outputs.append(session.execute("1").output)

        threads = [threading.Thread(target=run) for _ in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert outputs == [7] * 60
        assert daemon.streams == 1


def test_no_thread_is_left_or_needed_for_a_stream(daemon: FakeDaemon) -> None:
    with ExecutorClient(daemon.address, token=TOKEN) as client, client.create_session() as session:
        session.execute("1")
        before = threading.active_count()
        session.execute("2")
        assert threading.active_count() == before


def test_the_stream_of_a_collected_session_is_closed_by_the_next_one(daemon: FakeDaemon) -> None:
    with ExecutorClient(daemon.address, token=TOKEN) as client:
        session = client.create_session()
        session.execute("1")
        conversations = client._transport.channel.conversations
        assert len(conversations._open) == 1
        del session
        gc.collect()
        other = client.create_session()
        other.execute("1")
        assert len(conversations._open) == 1
        other.close()
        assert not conversations._open


async def test_tasks_of_closed_sessions_and_clients_end(daemon: FakeDaemon) -> None:
    client = AsyncExecutorClient(daemon.address, token=TOKEN)
    first, second = await client.create_session(), await client.create_session()
    for each in (first, second):
        await each.execute("1")
    conversations = client._transport.channel.conversations
    assert len(conversations._open) == 2
    readers = [each._reader for each in conversations._open]
    await first.close()
    await client.close()
    assert not conversations._open and all(reader.done() for reader in readers)


# -- the inbox of an execution


def _response(message_id: int, *numbers: int) -> pb.ConverseResponse:
    events = [types.Event(number=number, log=types.LogEvent(text="x" * 100)) for number in numbers]
    return pb.ConverseResponse(message_id=message_id, events=events)


def _inbox(dialogue: Dialogue) -> Inbox:
    return dialogue.follow(pb.ExecuteRequest(session_id="s", execution_id="e"), ())[0]


def test_an_inbox_above_its_bound_is_given_up_for_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "INBOX_BYTES_MAX", 150)
    dialogue = Dialogue()
    inbox = _inbox(dialogue)
    dialogue.take(_response(1, 1))
    assert not inbox.is_full
    dialogue.take(_response(1, 2))
    assert inbox.is_full
    inbox.overflow()
    dialogue.take(_response(1, 3))
    assert [inbox.take().number for _ in range(2)] == [1, 2]
    left = inbox.take_end()
    assert isinstance(left, UseAnotherStream) and left.plain


def test_a_refusal_of_a_stream_that_grpc_has_lost_is_learned_by_a_plain_call() -> None:
    """grpc.aio loses one that comes while a message is written. An INTERNAL of the daemon has a reason."""
    dialogue = Dialogue()
    unanswered, answered = _inbox(dialogue), _inbox(dialogue)
    dialogue.take(_response(answered.message_id, 1))
    end = Ended(grpc.StatusCode.INTERNAL.value[0], "Internal error from Core", ())
    dialogue.end(end)
    left = unanswered.take_end()
    assert isinstance(left, UseAnotherStream) and left.plain
    assert answered.take_end() is end
    of_daemon = pb.Refusal(code=13)
    of_daemon.details.add().Pack(error_details_pb2.ErrorInfo(reason="INTERNAL", domain="remote-executor"))
    assert not conversation.is_no_stream(refused(of_daemon))


def test_what_comes_for_an_execution_that_was_left_is_dropped() -> None:
    dialogue = Dialogue()
    inbox = _inbox(dialogue)
    dialogue.answer(inbox, pb.SubmitToolResultRequest(), lambda: None)
    dialogue.leave(inbox)
    assert dialogue.take(_response(1, 1)) is None
    dialogue.end(None)
    assert dialogue.take_lost() == [] and not inbox.events


def test_a_confirmed_answer_is_not_given_again_and_another_one_is() -> None:
    dialogue = Dialogue()
    inbox = _inbox(dialogue)
    lost: list[int] = []
    for number in (2, 3, 4):
        dialogue.answer(inbox, pb.SubmitToolResultRequest(), lambda number=number: lost.append(number))  # type: ignore[misc]
    dialogue.take(pb.ConverseResponse(done=[2]))
    dialogue.take(pb.ConverseResponse(message_id=3, refusal=pb.Refusal(code=9)))
    assert lost == [], "not by the dialogue, which may be used with a lock held"
    dialogue.end(None)
    for on_lost in dialogue.take_lost():
        on_lost()
    assert lost == [3, 4] and dialogue.take_lost() == []
