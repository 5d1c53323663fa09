"""Metrics and traces of calls, at the real edge: by method, status and time, and in the client's trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from executor_api.v1 import executor_service_pb2 as pb
from executor_server.api.handlers import OWN_METHODS
from executor_server.api.meter import metering
from executor_server.api.tracing import call_tracing
from executor_server.core.model import Event, Log, Outcome, Result, VariablesState
from executor_server.telemetry.instruments import PREFIX
from executor_server.telemetry.metrics import Metrics
from executor_server.telemetry.tracing import Tracing
from tests.rpc.edge import AUTH, FakeExecution, refused, serving
from tests.support.polling import eventually_async

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = ("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")
EVENTS = (Event(1, Log("stdout", "hello")), Event(2, Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1)))
EXECUTE = pb.ExecuteRequest(session_id="s1", execution_id="e1", code="print('secret')")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1", backend="local", methods=OWN_METHODS)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(PREFIX + name, labels)


async def spans_of(tracing: Tracing, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """The finished spans. To be asked after the server has stopped: a call's answer may arrive before its span ends."""
    await tracing.close()
    return list(exporter.get_finished_spans())


async def test_calls_are_counted_by_method_and_status(tmp_path: Path, metrics: Metrics) -> None:
    async with serving(tmp_path, wrappers=(metering(metrics),)) as edge:
        await edge.session()
        missing = edge.stub.GetSession(pb.GetSessionRequest(session_id="none"), metadata=AUTH)
        assert (await refused(missing))[0] == "NOT_FOUND"
    assert value(metrics, "rpc_ended_total", method="ExecutorService/CreateSession", code="OK") == 1
    assert value(metrics, "rpc_ended_total", method="ExecutorService/GetSession", code="NOT_FOUND") == 1
    assert value(metrics, "rpc_seconds_count", method="ExecutorService/GetSession") == 1


async def test_a_stream_is_open_until_its_caller_leaves(tmp_path: Path, metrics: Metrics) -> None:
    async with serving(tmp_path, wrappers=(metering(metrics),)) as edge:
        session = await edge.session()
        session.next_execution = FakeExecution(events_to_send=EVENTS[:1], stays_open=True)
        stream = edge.stub.Execute(EXECUTE, metadata=AUTH)
        assert (await stream.read()).event.log.text == "hello"
        assert value(metrics, "rpc_open", method="ExecutorService/Execute") == 1
        # Counted once the event is sent, which its reader may know first.
        assert await eventually_async(lambda: value(metrics, "phase_seconds_count", phase="first_event") == 1)
        stream.cancel()
        assert await eventually_async(
            lambda: value(metrics, "rpc_ended_total", method="ExecutorService/Execute", code="CANCELLED") == 1
        )
        assert value(metrics, "rpc_open", method="ExecutorService/Execute") == 0


async def test_methods_that_do_not_exist_are_not_counted(tmp_path: Path, metrics: Metrics) -> None:
    async with serving(tmp_path, wrappers=(metering(metrics),)) as edge:
        for name in ("A", "B"):
            assert (await refused(edge.raw(name)(b"", metadata=AUTH)))[0] == "UNIMPLEMENTED"
    assert "UNIMPLEMENTED" not in str(list(metrics.registry.collect()))


async def test_our_own_failure_is_counted_as_such(tmp_path: Path, metrics: Metrics) -> None:
    async with serving(tmp_path, wrappers=(metering(metrics),)) as edge:
        edge.sessions.raises = RuntimeError("a bug")
        call = edge.stub.CreateSession(pb.CreateSessionRequest(request_id="r"), metadata=AUTH)
        assert (await refused(call))[0] == "INTERNAL"
    assert value(metrics, "rpc_ended_total", method="ExecutorService/CreateSession", code="INTERNAL") == 1


async def test_the_clients_trace_goes_through_calls_and_streams(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, service_name="t", version="1", sample_ratio=1.0)
    async with serving(tmp_path, wrappers=(call_tracing(tracing),)) as edge:
        session = await edge.session()
        session.next_execution = FakeExecution(events_to_send=EVENTS)
        assert len([event async for event in edge.stub.Execute(EXECUTE, metadata=(*AUTH, TRACEPARENT))]) == 2
        attach = pb.AttachExecutionRequest(session_id="s1", execution_id="e1", after_event=1)
        assert len([event async for event in edge.stub.AttachExecution(attach, metadata=(*AUTH, TRACEPARENT))]) == 1
    spans = await spans_of(tracing, exporter)
    traces = {span.name.rpartition("/")[2]: f"{span.context.trace_id:032x}" for span in spans}
    assert traces.keys() == {"CreateSession", "Execute", "AttachExecution"}
    assert traces["Execute"] == traces["AttachExecution"] == TRACE_ID != traces["CreateSession"]


@pytest.mark.parametrize(
    ("raises", "code", "fault"), [(None, "NOT_FOUND", False), (RuntimeError("secret"), "INTERNAL", True)]
)
async def test_a_span_says_how_its_call_ended(tmp_path: Path, raises: Any, code: str, fault: bool) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, service_name="t", version="1", sample_ratio=1.0)
    async with serving(tmp_path, wrappers=(call_tracing(tracing),)) as edge:
        if raises is not None:
            edge.sessions.raises = raises
            call = edge.stub.CreateSession(pb.CreateSessionRequest(request_id="r"), metadata=AUTH)
        else:
            call = edge.stub.GetSession(pb.GetSessionRequest(session_id="none"), metadata=AUTH)
        assert (await refused(call))[0] == code
    (span,) = await spans_of(tracing, exporter)
    assert span.attributes is not None and span.attributes["rpc.grpc.status"] == code
    assert (span.status.status_code is StatusCode.ERROR) is fault
    assert "secret" not in span.to_json()


async def test_a_call_that_is_denied_leaves_no_span(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, service_name="t", version="1", sample_ratio=1.0)
    async with serving(tmp_path, wrappers=(call_tracing(tracing),)) as edge:
        denied = edge.stub.ListSessions(pb.ListSessionsRequest(), metadata=(TRACEPARENT,))
        assert (await refused(denied))[0] == "UNAUTHENTICATED"
    assert await spans_of(tracing, exporter) == []
