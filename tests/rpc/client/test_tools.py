"""Host tools: answered while `execute` runs, once each, with the caller's own objects and context."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from typing import Any

import grpc
import pytest

from executor_api import values
from executor_api.v1 import types_pb2 as types
from executor_client import NotFoundError, Tool, UnavailableError
from tests.support.fake_daemon import Answered, Cut, FakeDaemon, Refusal, log, result, tool_call
from tests.support.polling import eventually

NOTE: contextvars.ContextVar[str] = contextvars.ContextVar("NOTE", default="unset")


def refuse_answer(daemon: FakeDaemon, refusal: Refusal) -> None:
    """Refuses the next answer."""
    daemon.refusals["SubmitToolResult"].append(refusal)


def answer(daemon: FakeDaemon, call_id: str = "call-1") -> Any:
    """The value that a call was answered with, or its error as (type, message)."""
    (request,) = daemon.answers[call_id]
    if request.WhichOneof("answer") == "error":
        return request.error.type, request.error.message
    payload = request.value.packed
    return values.decode(payload.inline or daemon.blobs[payload.blob.blob_id])


def run_tool(session: Any, daemon: FakeDaemon, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what the program gets when it calls the function as a tool."""
    session.register_tools({"tool": function})
    daemon.journal = [tool_call("tool", *args, **kwargs), Answered(), result()]
    session.execute("code")
    return answer(daemon)


def test_tool_gets_the_programs_arguments_and_the_program_its_result(session: Any, daemon: FakeDaemon) -> None:
    assert run_tool(session, daemon, lambda *args, **kwargs: [args, kwargs], 1, b="c") == [(1,), {"b": "c"}]


def test_large_tool_result_travels_as_a_blob(session: Any, daemon: FakeDaemon) -> None:
    assert run_tool(session, daemon, lambda: b"x" * 1_000_000) == b"x" * 1_000_000
    assert "UploadBlob" in daemon.names()


def test_a_tool_that_changes_its_argument_is_warned_of(
    session: Any, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(rows: list[int]) -> int:
        rows.append(1)
        return len(rows)

    assert run_tool(session, daemon, fill, []) == 1
    assert eventually(lambda: "the host tool 'tool' changed an argument" in caplog.text)


class CustomError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises(error: BaseException) -> Any:
    def tool() -> None:
        raise error

    return tool


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (raises(ValueError("bad\ud800")), (), ("ValueError", "bad\\ud800")),
        (raises(CustomError()), (), ("CustomError", "(the error has no text)")),
        (raises(ValueError("x" * 99_999)), (), ("ValueError", "x" * 10_000)),
        (threading.Lock, (), ("TypeError", "the tool's result cannot be sent to the sandbox")),
        (lambda a: a, (), ("TypeError", "missing 1 required positional argument")),
    ],
)
def test_error_of_a_tool_is_the_programs_by_type_and_message(
    session: Any, daemon: FakeDaemon, function: Any, args: tuple[Any, ...], expected: tuple[str, str]
) -> None:
    kind, message = run_tool(session, daemon, function, *args)
    assert kind.rpartition(".")[2] == expected[0]
    assert expected[1] in message and len(message) <= 10_000


def test_unknown_tool_and_undecodable_arguments_are_errors_of_the_call(session: Any, daemon: FakeDaemon) -> None:
    garbage = types.Value(packed=types.Payload(inline=b"garbage"))
    not_a_call = types.Value(packed=types.Payload(inline=values.encode([1, 2])))
    session.register_tools({"known": lambda: None})
    daemon.journal = [
        tool_call("unknown", call_id="a"),
        types.Event(tool_call=types.ToolCallEvent(call_id="b", name="known", arguments=garbage)),
        types.Event(tool_call=types.ToolCallEvent(call_id="c", name="known", arguments=not_a_call)),
        *map(Answered, "abc"),
        result(),
    ]
    session.execute("code")
    assert [answer(daemon, call_id)[0] for call_id in "abc"] == ["NameError", "ValueError", "TypeError"]


def test_calls_run_side_by_side(session: Any, daemon: FakeDaemon) -> None:
    together = threading.Barrier(4, timeout=10)
    session.register_tools({"meet": together.wait})
    daemon.journal = [*[tool_call("meet", call_id=call_id) for call_id in "abcd"], *map(Answered, "abcd"), result()]
    session.execute("code")
    assert {answer(daemon, call_id) for call_id in "abcd"} == {0, 1, 2, 3}


def test_events_go_on_while_a_tool_runs(session: Any, daemon: FakeDaemon) -> None:
    printed = threading.Event()
    daemon.journal = [tool_call("wait"), log("printed"), Answered(), result()]
    session.register_tools({"wait": lambda: printed.wait(10)})
    session.execute("code", on_event=lambda event: printed.set() if getattr(event, "text", "") else None)
    assert answer(daemon) is True


def test_tool_sees_the_callers_context(session: Any, daemon: FakeDaemon) -> None:
    token = NOTE.set("from the caller")
    try:
        assert run_tool(session, daemon, NOTE.get) == "from the caller"
    finally:
        NOTE.reset(token)


def test_final_answer_is_the_hosts_own_object(session: Any, daemon: FakeDaemon) -> None:
    answer_object = threading.Lock()  # nothing that could travel
    session.register_tools({"final": Tool(lambda: answer_object, is_final_answer=True)})
    daemon.journal = [tool_call("final"), Answered(), result(final_answer_call_id="call-1")]
    got = session.execute("code")
    assert got.output is answer_object
    assert got.is_final_answer
    assert answer(daemon) is None


def test_call_is_answered_once_across_reconnections(session: Any, daemon: FakeDaemon) -> None:
    runs: list[int] = []
    session.register_tools({"tool": lambda: runs.append(1)})
    daemon.journal = [tool_call("tool"), log("waiting"), tool_call("tool"), Answered(), result()]
    daemon.cuts = deque([Cut(1), Cut(1), Cut(0)])
    refuse_answer(daemon, Refusal(grpc.StatusCode.UNAVAILABLE))
    session.execute("code")
    assert runs == [1]
    assert len(daemon.answers["call-1"]) == 1


def test_answer_that_arrived_before_its_confirmation_was_lost_is_fine(session: Any, daemon: FakeDaemon) -> None:
    refuse_answer(daemon, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TOOL_CALL_ANSWERED"))
    session.register_tools({"tool": lambda: 1})
    daemon.journal = [tool_call("tool"), result(5)]
    assert session.execute("code").output == 5


def test_value_that_the_daemon_refuses_becomes_an_error_of_the_call(session: Any, daemon: FakeDaemon) -> None:
    refuse_answer(daemon, Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LARGE", "too large"))
    kind, message = run_tool(session, daemon, lambda: 1)
    assert kind == "RuntimeError" and "too large" in message


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (Refusal(grpc.StatusCode.UNAVAILABLE, "BACKEND_UNAVAILABLE", "gone"), UnavailableError),
        (Refusal(grpc.StatusCode.NOT_FOUND, "TOOL_CALL_NOT_FOUND", "gone"), NotFoundError),
    ],
)
def test_answer_that_cannot_be_given_ends_the_execution(
    session: Any, daemon: FakeDaemon, refusal: Refusal, error: type[Exception]
) -> None:
    """Else the program would wait for it, and `execute` for the program."""
    refuse_answer(daemon, refusal)
    session.register_tools({"tool": lambda: 1})
    daemon.journal = [tool_call("tool"), Answered(), result()]
    with pytest.raises(error, match="gone"):
        session.execute("code")
    assert "CancelExecution" in daemon.names()


class StopTheRun(BaseException):
    pass


def test_tool_can_stop_the_whole_execution(session: Any, daemon: FakeDaemon) -> None:
    session.register_tools({"tool": raises(StopTheRun())})
    daemon.journal = [tool_call("tool"), Answered(), result()]
    with pytest.raises(StopTheRun):
        session.execute("code")
    assert "CancelExecution" in daemon.names()
    assert not daemon.answers["call-1"]


def test_tool_of_an_ended_execution_is_left_alone(session: Any, daemon: FakeDaemon) -> None:
    release = threading.Event()
    session.register_tools({"slow": lambda: release.wait(10)})
    daemon.journal = [tool_call("slow"), result(outcome=types.OUTCOME_TIMEOUT)]
    session.execute("code")
    release.set()


@pytest.mark.parametrize("client", ["sync"], indirect=True)
@pytest.mark.parametrize("use", ["execute", "set_variables", "get_variables", "register_tools"])
def test_tool_that_would_wait_for_itself_is_told_so(session: Any, daemon: FakeDaemon, use: str) -> None:
    uses = {
        "execute": lambda: session.execute("1"),
        "set_variables": lambda: session.set_variables({"a": 1}),
        "get_variables": lambda: session.get_variables(),
        "register_tools": lambda: session.register_tools({}),
    }
    kind, message = run_tool(session, daemon, uses[use])
    assert kind.endswith(".ReentrantExecution") and use in message
    session.execute("1")


def test_stubs_are_described_from_signature_and_docstring(session: Any, daemon: FakeDaemon) -> None:
    def search(query: str, page: int) -> str:
        """Searches."""
        return query * page

    session.register_tools({"search": search, "optional": lambda a, b=1: None, "final": Tool(print, "d", ("x",), True)})
    specs = {spec.name: spec for spec in daemon.requests[0][1].tools}
    assert (specs["search"].description, list(specs["search"].parameters)) == ("Searches.", ["query", "page"])
    assert list(specs["optional"].parameters) == []
    assert (list(specs["final"].parameters), specs["final"].is_final_answer) == (["x"], True)
