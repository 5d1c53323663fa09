"""The caller's trace goes with every call, where the caller traces."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from tests.support.fake_daemon import Answered, Cut, FakeDaemon, log, result, tool_call


@pytest.fixture
def tracer() -> Iterator[trace.Tracer]:
    provider = TracerProvider()
    yield provider.get_tracer("test")
    provider.shutdown()


def traceparent(span: trace.Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_every_call_carries_the_current_span(client: Any, daemon: FakeDaemon, tracer: trace.Tracer) -> None:
    with tracer.start_as_current_span("run") as span:
        session = client.create_session()
        session.register_tools({"tool": lambda: b"x" * 600_000})
        session.list_files()
        daemon.journal = [tool_call("tool"), Answered(), result()]
        session.execute("code")
        session.close()
    assert {"CreateSession", "Execute", "UploadBlob", "SubmitToolResult", "DeleteSession"} <= set(daemon.names())
    assert {sent.get("traceparent") for sent in daemon.metadata} == {traceparent(span)}


@pytest.mark.parametrize("client", ["sync"], indirect=True)
def test_streams_of_one_execution_stay_in_the_trace_of_the_first(
    session: Any, daemon: FakeDaemon, tracer: trace.Tracer
) -> None:
    daemon.metadata.clear()
    daemon.journal = [log("1"), log("2"), result()]
    daemon.cuts = deque([Cut(1), Cut(1)])
    with tracer.start_as_current_span("run") as span, ExitStack() as later:
        session.execute("code", on_event=lambda _: later.enter_context(tracer.start_as_current_span("another")))
    assert daemon.names() == ["Execute", "AttachExecution", "AttachExecution"]
    assert [sent.get("traceparent") for sent in daemon.metadata] == [traceparent(span)] * 3


def test_state_of_the_trace_travels_too(client: Any, daemon: FakeDaemon) -> None:
    context = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState([("a", "b")]))
    with trace.use_span(trace.NonRecordingSpan(context)):
        client.get_policy()
    assert daemon.metadata[-1]["tracestate"] == "a=b"


def test_without_a_span_nothing_is_said_of_traces(
    client: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.get_policy()
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    client.get_policy()
    assert all("traceparent" not in sent for sent in daemon.metadata)
    assert "opentelemetry.trace" not in sys.modules, "it is not loaded for our sake"
