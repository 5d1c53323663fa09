"""Spans: their parents, their attributes, and that no request waits for them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from executor_server.api.tracing import load_tracing
from executor_server.core.config.config import TracingSection
from executor_server.core.config.key_types import ConfigError
from executor_server.core.lifecycle.admission import Answer
from executor_server.core.lifecycle.observer import SessionEnd
from executor_server.core.model import (
    AuditRules,
    LimitWarning,
    Outcome,
    Principal,
    Result,
    SessionFacts,
    ToolCall,
    Usage,
    VariablesState,
)
from executor_server.core.network import EgressConnection, EgressDenial, NetworkUsage
from executor_server.telemetry import tracing as module
from executor_server.telemetry.tracing import LoggedExporter, Tracing, make_tracing, remote_parent
from tests.support.otlp import attributes, collecting
from tests.support.specs import POLICY

EXECUTE = "/executor_api.v1.ExecutorService/Execute"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
FACTS = SessionFacts(
    session_id="s1",
    request_id="r1",
    owner=Principal("acme", "ci"),
    policy=POLICY,
    audit=AuditRules(),
    backend="local",
    image="base",
    warm=True,
)
SUCCEEDED = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1, usage=Usage(operations=7, cpu_time_s=0.25))


class Traced:
    """Tracing into memory."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter, service_name="t", version="1", sample_ratio=sample_ratio)

    async def spans(self) -> dict[str, ReadableSpan]:
        """All that were ended, by name; tracing is over then."""
        await self.tracing.close()
        return {span.name.rpartition("/")[2]: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def traced() -> Traced:
    return Traced()


def under(parent: ReadableSpan, child: ReadableSpan) -> bool:
    return child.parent is not None and child.parent.span_id == parent.context.span_id


OPENED = EgressConnection("c1", "api.example", 443, "192.0.2.1", "*.example")
CLOSED = replace(OPENED, sent_bytes=10, received_bytes=20, reason="ended", secret_used="Authorization")


async def test_a_connection_that_a_step_made_is_a_span_below_its_execution(traced: Traced) -> None:
    tracing = traced.tracing
    tracing.execution_started(FACTS, "e1")
    tracing.connection_opened(FACTS, "", replace(OPENED, connection_id="background"))
    tracing.connection_opened(FACTS, "e1", OPENED)
    tracing.connection_denied(FACTS, "e1", EgressDenial("secret-text.example", 443, "not_allowed", "message"))
    tracing.execution_ended(FACTS, "e1", replace(SUCCEEDED, network=NetworkUsage(1, 1, 10, 20)), 1.0)
    tracing.connection_closed(FACTS, "e1", CLOSED)  # it outlasted the step
    tracing.connection_closed(FACTS, "", replace(CLOSED, connection_id="background"))
    spans = await traced.spans()
    assert under(spans["execution"], spans["connection"])
    assert spans["connection"].kind is SpanKind.CLIENT
    assert dict(spans["connection"].attributes or {}) == {
        "server.address": "api.example",
        "server.port": 443,
        "network.peer.address": "192.0.2.1",
        "executor.rule": "*.example",
        "executor.sent_bytes": 10,
        "executor.received_bytes": 20,
        "executor.reason": "ended",
    }
    assert (spans["execution"].attributes or {})["executor.received_bytes"] == 20
    (_, denied) = spans["execution"].events
    assert (denied.name, dict(denied.attributes or {})) == ("connection_denied", {"executor.reason": "not_allowed"})


async def test_spans_of_connections_are_bounded(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_CONNECTION_SPANS", module.MAX_CONNECTION_SPANS + 10)
    for name in ("e1", "e2"):
        session = replace(FACTS, session_id=name)
        traced.tracing.execution_started(session, name)
        for number in range(1000):
            traced.tracing.connection_opened(session, name, replace(OPENED, connection_id=f"c{number}"))
    assert len(traced.tracing._connections) == module.MAX_CONNECTION_SPANS + 10
    for name in ("e1", "e2"):
        for number in range(1000):
            session = replace(FACTS, session_id=name)
            traced.tracing.connection_closed(session, name, replace(CLOSED, connection_id=f"c{number}"))
    assert not traced.tracing._connections
    await traced.spans()


async def test_the_clients_span_is_the_parent_of_the_call_and_so_of_the_execution(traced: Traced) -> None:
    with traced.tracing.call(EXECUTE, [("traceparent", TRACEPARENT)]):
        traced.tracing.execution_started(FACTS, "e1")
    traced.tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    spans = await traced.spans()
    call, execution = spans["Execute"], spans["execution"]
    assert call.parent is not None and f"{call.parent.span_id:016x}" == PARENT_ID
    assert call.kind is SpanKind.SERVER
    assert under(call, execution)
    assert f"{execution.context.trace_id:032x}" == TRACE_ID


async def test_an_execution_says_who_what_and_how_it_ended(traced: Traced) -> None:
    traced.tracing.execution_started(FACTS, "e1")
    traced.tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    said = (await traced.spans())["execution"].attributes
    assert said is not None
    assert {key: said[f"executor.{key}"] for key in ("session_id", "execution_id", "tenant", "profile", "outcome")} == {
        "session_id": "s1",
        "execution_id": "e1",
        "tenant": "acme",
        "profile": "default",
        "outcome": "succeeded",
    }
    assert said["executor.policy_fingerprint"] == POLICY.fingerprint
    assert said["executor.operations"] == 7


async def test_an_execution_outlives_the_call_that_began_it(traced: Traced) -> None:
    with traced.tracing.call(EXECUTE, ()):
        traced.tracing.execution_started(FACTS, "e1")
    assert not get_current_span().is_recording()
    traced.tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    spans = await traced.spans()
    ended = spans["execution"].end_time, spans["Execute"].end_time
    assert ended[0] is not None and ended[1] is not None and ended[0] >= ended[1]


async def test_a_queued_execution_says_when_its_turn_came(traced: Traced) -> None:
    for execution_id in ("e1", "e2"):
        traced.tracing.execution_started(FACTS, execution_id)
    traced.tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    traced.tracing.execution_ended(FACTS, "e2", replace(SUCCEEDED, outcome=Outcome.LOST), 0.1)
    second = (await traced.spans())["execution"]
    assert [event.name for event in second.events] == ["running"]
    assert second.status.status_code is StatusCode.ERROR


async def test_tool_calls_are_spans_below_the_execution(traced: Traced) -> None:
    traced.tracing.execution_started(FACTS, "e1")
    traced.tracing.tool_called(FACTS, "e1", ToolCall("c1", "search", b"secret arguments"))
    traced.tracing.tool_answered(FACTS, "e1", Answer("c1", 3, failed=False))
    traced.tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    spans = await traced.spans()
    assert under(spans["execution"], spans["tool_call"])
    attributes = dict(spans["tool_call"].attributes or {})
    assert {key: value for key, value in attributes.items() if key.startswith("executor.")} == {
        "executor.tool": "search",
        "executor.call_id": "c1",
        "executor.tool_failed": False,
    }
    assert attributes["gen_ai.tool.call.id"] == "c1"
    assert "secret" not in str(attributes)


@pytest.mark.parametrize("name", ["\x1b[31m", "x" * 4096, "", "a b"])
async def test_a_tool_name_that_is_none_is_not_told(traced: Traced, name: str) -> None:
    traced.tracing.execution_started(FACTS, "e1")
    traced.tracing.tool_called(FACTS, "e1", ToolCall("c1", name, b""))
    traced.tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    said = (await traced.spans())["tool_call"].attributes
    assert said is not None and said["executor.tool"] == "?"


async def test_a_program_that_calls_without_end_makes_a_bounded_number_of_spans(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOOL_SPANS", 2)
    traced.tracing.execution_started(FACTS, "e1")
    for number in range(4):
        traced.tracing.tool_called(FACTS, "e1", ToolCall(f"c{number}", "search", b""))
        traced.tracing.tool_answered(FACTS, "e1", Answer(f"c{number}", 3, failed=False))
    await traced.tracing.close()
    assert len(traced._exporter.get_finished_spans()) == 2


async def test_a_recovered_execution_has_a_trace_of_its_own(traced: Traced) -> None:
    with traced.tracing.call(EXECUTE, [("traceparent", TRACEPARENT)]):
        traced.tracing.execution_recovered(FACTS, "e1")
    traced.tracing.limit_warned(FACTS, "e1", LimitWarning("operations", 8, 10))
    traced.tracing.session_ended(FACTS, SessionEnd.DELETED)
    execution = (await traced.spans())["execution"]
    assert execution.parent is None
    assert execution.attributes is not None and execution.attributes["executor.recovered"] is True
    assert [event.name for event in execution.events] == ["running", "limit_warning"]


async def test_what_a_handler_raises_does_not_leave_with_its_span(traced: Traced) -> None:
    with pytest.raises(ValueError), traced.tracing.call(EXECUTE, ()) as span:
        traced.tracing.end_call(span, "INTERNAL")
        raise ValueError("what a client sent")
    call = (await traced.spans())["Execute"]
    assert not call.events and call.status.description == "INTERNAL"


async def test_a_client_that_does_not_sample_is_heeded(traced: Traced) -> None:
    with traced.tracing.call(EXECUTE, [("traceparent", TRACEPARENT[:-1] + "0")]):
        traced.tracing.execution_started(FACTS, "e1")
    traced.tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    assert await traced.spans() == {}


async def test_a_client_that_samples_is_recorded_whatever_the_ratio() -> None:
    traced = Traced(sample_ratio=0.0)
    with traced.tracing.call(EXECUTE, [("traceparent", TRACEPARENT)]):
        pass
    with traced.tracing.call("/executor_api.v1.ExecutorService/GetPolicy", ()):
        pass
    assert list(await traced.spans()) == ["Execute"]


@pytest.mark.parametrize(
    "metadata",
    [
        [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)],
        [("traceparent", TRACEPARENT.upper())],
        [("traceparent", f"00-{'0' * 32}-{PARENT_ID}-01")],
        [("traceparent", f"00-{TRACE_ID}-{'0' * 16}-01")],
        [("traceparent", f"ff-{TRACE_ID}-{PARENT_ID}-01")],
        [("traceparent", TRACEPARENT + "-" + "x" * 10_000)],
        [("traceparent", "x" * 55)],
        [("traceparent", "")],
        [("traceparent", TRACEPARENT.encode())],
        [],
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_parent_is_none(metadata: Any) -> None:
    assert not get_current_span(remote_parent(metadata)).get_span_context().is_valid


@pytest.mark.parametrize("state", ["x" * 10_000, "=,=", "\x00"])
def test_a_malformed_state_costs_the_state_alone(state: str) -> None:
    context = get_current_span(remote_parent([("traceparent", TRACEPARENT), ("tracestate", state)])).get_span_context()
    assert f"{context.trace_id:032x}" == TRACE_ID and not context.trace_state


# ---------------------------------------------------------------------------------------------------------------------
# Where they go


class Stuck(SpanExporter):
    """A collector that never answers."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.released.wait()
        return SpanExportResult.FAILURE


async def test_spans_reach_a_collector_over_http() -> None:
    with collecting() as collector:
        tracing = make_tracing(collector.endpoint, service_name="mine", version="1.2", sample_ratio=1.0)
        with tracing.call(EXECUTE, [("traceparent", TRACEPARENT)]):
            tracing.execution_started(FACTS, "e1")
        tracing.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
        await tracing.close()
    assert collector.paths == ["/v1/traces"]
    assert (collector.resource["service.name"], collector.resource["service.version"]) == ("mine", "1.2")
    (execution,) = collector.named("execution")
    assert execution.trace_id.hex() == TRACE_ID
    assert attributes(execution)["executor.outcome"] == "succeeded"


async def test_an_endpoint_with_a_path_is_taken_as_it_is() -> None:
    with collecting() as collector:
        tracing = make_tracing(f"{collector.endpoint}/other", service_name="t", version="1", sample_ratio=1.0)
        with tracing.call(EXECUTE, ()):
            pass
        await tracing.close()
    assert collector.paths == ["/other"]


async def test_a_stuck_collector_holds_up_the_stop_for_a_bounded_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_TIME_S", 0.01)
    stuck = Stuck()
    tracing = Tracing(stuck, service_name="t", version="1", sample_ratio=1.0)
    with tracing.call(EXECUTE, ()):
        pass
    try:
        await tracing.close()
    finally:
        stuck.released.set()
    assert await asyncio.to_thread(stuck.called.wait, 10)


async def test_spans_that_find_the_queue_full_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_SPANS", 8)
    monkeypatch.setattr(module, "BATCH_SPANS", 4)
    stuck = Stuck()
    tracing = Tracing(stuck, service_name="t", version="1", sample_ratio=1.0)
    try:
        for _ in range(1000):
            with tracing.call(EXECUTE, ()):
                pass
    finally:
        stuck.released.set()
    await tracing.close()


def test_what_a_dead_collector_costs_is_logged_once_each_time() -> None:
    class Flaky(SpanExporter):
        answers = iter([False, False, True, True, False])

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS if next(self.answers) else SpanExportResult.FAILURE

    exporter = LoggedExporter(Flaky())
    with structlog.testing.capture_logs() as logged:
        for _ in range(5):
            exporter.export([])
    assert [line["event"] for line in logged] == ["spans_lost", "spans_arrive_again", "spans_lost"]


def test_an_sdk_that_is_missing_is_a_wrong_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "executor_server.telemetry.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: needs .*pip install 'remote-executor\[otel\]'"):
        load_tracing(TracingSection(endpoint="http://127.0.0.1:4318"), "1")


def test_nothing_is_traced_unless_it_is_configured() -> None:
    assert load_tracing(TracingSection(), "1") is None
