"""The promises of `execute`, whatever the daemon and the connection do."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import grpc
import pytest

from executor_api.limits import OUTPUT_NODES_MAX
from executor_api.v1 import types_pb2 as types
from executor_client import (
    ConnectionLost,
    ExecutionFailed,
    InvalidRequest,
    LimitWarningEvent,
    LogEvent,
    NetworkUsage,
    NotFoundError,
    OpaqueValue,
    Outcome,
    OutputCutEvent,
    ProtocolError,
    QueuedEvent,
    ResourceExhaustedError,
    VariablesState,
)
from tests.support.fake_daemon import Cut, FakeDaemon, Numbered, Refusal, blob, busy, chunks, log, result, value


def test_usage_has_what_went_out_of_the_sandbox(session: Any, daemon: FakeDaemon) -> None:
    network = types.NetworkUsage(connections=2, denied=1, sent_bytes=300, received_bytes=4_000)
    daemon.journal = [result(usage=types.Usage(operations=5, network=network))]
    assert session.execute("x").usage.network == NetworkUsage(2, 1, 300, 4_000)
    daemon.journal = [result(usage=types.Usage(operations=5))]
    assert session.execute("x").usage.network == NetworkUsage()


def test_result_holds_everything_that_was_streamed(session: Any, daemon: FakeDaemon) -> None:
    daemon.journal = [
        types.Event(queued=types.QueuedEvent(ahead=2)),
        log("out\n"),
        log("err\n", types.OUTPUT_STREAM_STDERR),
        types.Event(output_cut=types.OutputCutEvent(omitted_bytes=7)),
        log("end\n"),
        types.Event(limit_warning=types.LimitWarningEvent(limit="operations", used=4, budget=5)),
        result({"a": [1, 2.5]}, generation=3, usage=types.Usage(operations=5, wall_time_s=0.5), policy_fingerprint="f"),
    ]
    seen: list[Any] = []
    got = session.execute("code", on_event=seen.append)
    cut = "\n[... 7 bytes of output left out ...]\n"
    assert seen == [
        QueuedEvent(1, 2),
        LogEvent(2, "stdout", "out\n"),
        LogEvent(3, "stderr", "err\n"),
        OutputCutEvent(4, 7),
        LogEvent(5, "stdout", "end\n"),
        LimitWarningEvent(6, "operations", 4, 5),
    ]
    assert got.logs == f"out\nerr\n{cut}end\n"
    assert (got.stdout, got.stderr, got.omitted_output_bytes) == (f"out\n{cut}end\n", f"err\n{cut}", 7)
    assert (got.outcome, got.output, got.is_final_answer) == (Outcome.SUCCEEDED, {"a": [1, 2.5]}, False)
    assert (got.state, got.generation, got.usage.operations) == (VariablesState.KEPT, 3, 5)
    assert session.generation == 3
    assert got.policy_fingerprint == "f"
    assert daemon.requests[0][1].execution_id == got.execution_id


def test_a_sandbox_that_keeps_no_limit_of_a_steps_value_costs_the_client_little(
    session: Any, daemon: FakeDaemon
) -> None:
    """A million values took seconds of the event loop, which an MCP server's tenants share."""
    most: list[list[object]] = [[] for _ in range(OUTPUT_NODES_MAX - 1)]
    more: list[list[object]] = [*most, [], []]
    for sent in (most, more):
        daemon.journal = [result(sent)]
        got = session.execute("code")
        assert got.succeeded
        assert got.output == sent if sent is most else isinstance(got.output, OpaqueValue)
        assert session.evaluate("code") == sent


def test_failing_program_is_a_result_not_an_exception(session: Any, daemon: FakeDaemon) -> None:
    error = types.ErrorDetail(type="ValueError", message="no", traceback="...", line=3, statement="f()")
    daemon.journal = [result(outcome=types.OUTCOME_EXCEPTION, error=error)]
    got = session.execute("code")
    assert (got.outcome, got.error.type, got.error.line, got.succeeded) == (Outcome.EXCEPTION, "ValueError", 3, False)
    with pytest.raises(ExecutionFailed, match="EXCEPTION: ValueError: no") as failed:
        got.raise_for_outcome()
    assert failed.value.result is got


@pytest.mark.parametrize("after_events", range(4))
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, None])
def test_cut_stream_is_resumed_without_loss_or_repetition(
    session: Any, daemon: FakeDaemon, after_events: int, code: grpc.StatusCode | None
) -> None:
    daemon.journal = [log("1"), log("2"), log("3"), result(42)]
    daemon.cuts = deque([Cut(after_events, code), Cut(0, code), None])
    assert (got := session.execute("code")).logs == "123"
    assert got.output == 42
    opening, *resumed = daemon.requests
    if after_events == 0:
        # Nothing came, so it is not known whether the request did: the same one is made again.
        assert [name for name, _ in resumed] == ["Execute", "Execute"]
        assert all(request == opening[1] for _, request in resumed)
    else:
        assert [name for name, _ in resumed] == ["AttachExecution", "AttachExecution"]
        assert all(request.after_event == after_events for _, request in resumed)
        assert {request.execution_id for _, request in resumed} == {got.execution_id}


def test_daemon_that_stays_away_is_a_lost_connection_after_the_bound(client: Any, daemon: FakeDaemon) -> None:
    session = client.create_session()
    session._transport.timeouts = replace(session._transport.timeouts, reconnect_s=0.2)
    daemon.journal = [log("1"), result()]
    daemon.cuts = deque([Cut(1), *[Cut(0)] * 100])
    with pytest.raises(ConnectionLost) as lost:
        session.execute("code", execution_id="mine")
    assert lost.value.execution_id == "mine"
    assert "CancelExecution" not in daemon.names()


def test_gap_in_the_numbers_is_fetched_again_once(session: Any, daemon: FakeDaemon) -> None:
    daemon.journal = [log("1"), Numbered(3, log("3")), result()]
    with pytest.raises(ProtocolError, match="event 3 came after event 1"):
        session.execute("code")
    assert daemon.names() == ["Execute", "AttachExecution", "CancelExecution"]


@pytest.mark.parametrize(
    "journal",
    {
        "unknown outcome": [result(outcome=99)],
        "no outcome": [result(outcome=types.OUTCOME_UNSPECIFIED)],
        "unknown state of the variables": [result(variables_state=77)],
        "final answer of no call": [result(final_answer_call_id="never-called")],
        "unknown output stream": [log("x", 9)],
        "event of no kind": [types.Event()],
        "warning of an unknown limit": [types.Event(limit_warning=types.LimitWarningEvent(limit="x"))],
        "tool call without id": [types.Event(tool_call=types.ToolCallEvent(name="f"))],
        "payload without content": [result(types.Value())],
        "blob too short": [*chunks("b", b"123"), result(types.Value(packed=blob("b", 4)))],
        "blob never sent": [result(types.Value(packed=blob("never-sent", 4)))],
        "piece too large": [*chunks("b", b"x" * 300_000, piece_bytes=300_000), result()],
        "too many blobs": [event for number in range(65) for event in chunks(f"b{number}", b"x")] + [result()],
    }.items(),
    ids=lambda item: item[0],
)
def test_broken_protocol_is_an_error_and_ends_the_execution(session: Any, daemon: FakeDaemon, journal: Any) -> None:
    daemon.journal = journal[1]
    with pytest.raises(ProtocolError):
        session.execute("code")
    assert daemon.names() == ["Execute", "CancelExecution"]


def test_output_that_cannot_be_decoded_does_not_hide_the_result(session: Any, daemon: FakeDaemon) -> None:
    packed = types.Value(packed=types.Payload(inline=b"garbage"))
    daemon.journal = [log("kept"), result(packed)]
    got = session.execute("code")
    assert (got.outcome, got.logs, type(got.output)) == (Outcome.SUCCEEDED, "kept", OpaqueValue)


def test_large_output_comes_in_pieces(session: Any, daemon: FakeDaemon) -> None:
    data = bytes(range(256)) * 4096
    packed = value(data).packed.inline
    pieces = chunks("b", packed)
    assert len(pieces) > 3
    daemon.journal = [*pieces, result(types.Value(packed=blob("b", len(packed))))]
    daemon.cuts = deque([Cut(2)])
    assert session.execute("code").output == data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": "x = '\ud800'"}, "not UTF-8"),
        ({"code": "#" * ((1 << 20) + 1)}, "1048577 bytes"),
        ({"code": "1", "output_mode": "all"}, "output_mode"),
        ({"code": "1", "limits": {"wall_time": 3}}, "no such limits: wall_time"),
        ({"code": "1", "limits": {"operations": -1}}, r"limits\.operations"),
        ({"code": "1", "limits": {"wall_time_s": "long"}}, r"limits\.wall_time_s"),
    ],
)
def test_request_that_cannot_be_carried_is_refused_before_it_is_sent(
    session: Any, daemon: FakeDaemon, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        session.execute(**arguments)
    assert daemon.requests == []


def test_refused_execution_is_neither_retried_nor_cancelled(session: Any, daemon: FakeDaemon) -> None:
    daemon.refusals["Execute"].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", "no such session"))
    with pytest.raises(NotFoundError, match="no such session") as refused:
        session.execute("code")
    assert refused.value.reason == "SESSION_NOT_FOUND"
    assert daemon.names() == ["Execute"]


def test_execution_without_room_is_asked_for_again_unchanged(session: Any, daemon: FakeDaemon) -> None:
    full = busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    daemon.refusals["Execute"].extend([full, full])
    daemon.refusals["AttachExecution"].append(full)
    daemon.journal = [log("1"), result(7)]
    daemon.cuts = deque([Cut(1)])
    assert session.execute("code").output == 7
    assert daemon.names() == ["Execute"] * 3 + ["AttachExecution"] * 2
    assert len({request.execution_id for _, request in daemon.requests}) == 1


def test_quota_that_frees_much_later_is_told_at_once(session: Any, daemon: FakeDaemon) -> None:
    daemon.refusals["Execute"].append(busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", seconds=3600))
    with pytest.raises(ResourceExhaustedError) as refused:
        session.execute("code")
    assert (refused.value.reason, refused.value.retry_after_s) == ("QUOTA_EXCEEDED", 3600.001)
    assert daemon.names() == ["Execute"]


def test_exception_out_of_on_event_ends_the_execution(session: Any, daemon: FakeDaemon) -> None:
    def on_event(event: object) -> None:
        raise LookupError("from on_event")

    daemon.journal = [log("1"), result()]
    with pytest.raises(LookupError, match="from on_event"):
        session.execute("code", on_event=on_event)
    assert daemon.names() == ["Execute", "CancelExecution"]


def test_limits_and_mode_of_one_execution_are_sent(session: Any, daemon: FakeDaemon) -> None:
    session.execute("code", execution_id="mine", limits={"wall_time_s": 2}, output_mode="last_statement")
    request = daemon.requests[0][1]
    assert (request.execution_id, request.limits.wall_time_s, request.limits.HasField("operations")) == (
        "mine",
        2,
        False,
    )
    assert request.output_mode == types.OUTPUT_MODE_LAST_STATEMENT


def test_lost_daemon_is_not_waited_for_a_second_time(client: Any, daemon: FakeDaemon) -> None:
    """Leaving `with` after ConnectionLost tries to delete the session, once."""
    session = client.create_session()
    session._transport.timeouts = replace(session._transport.timeouts, reconnect_s=0.1)
    daemon.cuts = deque([Cut(0)] * 100)
    daemon.refusals["DeleteSession"].extend([Refusal(grpc.StatusCode.UNAVAILABLE)] * 100)
    with pytest.raises(ConnectionLost), session:
        session.execute("code")
    assert daemon.names().count("DeleteSession") == 1
