"""OpenTelemetry traces: calls, and under them the executions that they begin.

An execution is a span of its own, begun by the Execute call and ended by the execution's end, however many calls follow
it meanwhile; each tool call, and each connection to the network, is a span below it. The parent of a call is the span
in the client's `traceparent`, so a client's trace continues to the execution. Nothing but an id is taken from there,
and a malformed one is ignored. A command is a span, too, which ends with its process.

Executions, tool calls and commands have the attributes of OpenTelemetry's GenAI conventions (version 1.41.0, in
development) and of OpenInference, so that viewers of agents' traces show them as steps and tools.

Attributes have names from a closed list. They hold ids, names, constants of ours, and the hosts that were reached, but
never code, values or output.

Spans are sent through a bounded queue, by a thread of the exporter. While the collector accepts none, they are dropped,
and nothing waits; the log has one message each time that this begins. The SDK is an extra and takes a while to import:
only this module imports it, and a daemon without `tracing.endpoint` never imports this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from executor_server.core import (
    EgressConnection,
    EgressDenial,
    LimitWarning,
    Outcome,
    ProcessFacts,
    ProcessResult,
    Result,
    SessionFacts,
    ToolCall,
)
from executor_server.core.lifecycle import Answer, Observer, RunningQueue

QUEUE_SPANS = 4096
"""Spans that wait for the exporter; more are dropped."""
BATCH_SPANS = 512
BATCH_INTERVAL_S = 2.0
EXPORT_TIME_S = 5.0
FLUSH_TIME_S = 3.0
"""Seconds that a stopping daemon waits for the last spans to be sent."""
MAX_TOOL_SPANS = 128
"""Spans of tool calls in one execution, which may make any number of calls."""
MAX_CONNECTION_SPANS = 128
"""Spans of connections that one execution made. Some outlast it, so those that are open are bounded, too."""
MAX_OPEN_CONNECTION_SPANS = 4096
MAX_OPEN_COMMAND_SPANS = 4096
MAX_TRACESTATE_CHARS = 512
MAX_TOOL_NAME_CHARS = 128

_TRACEPARENT_CHARS = 55
_OTLP_PATH = "/v1/traces"
# Outcomes that point to a problem of the daemon and not of the program.
_FAULTS = frozenset((Outcome.CRASHED, Outcome.LOST))
# gRPC statuses that are errors of the server, by OpenTelemetry's conventions.
_SERVER_FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))
_PROPAGATOR = TraceContextTextMapPropagator()

_log = structlog.get_logger(__name__)


@dataclass
class _Traced:
    """An execution that has not ended."""

    span: Span
    tools: dict[str, Span] = field(default_factory=dict)
    tool_spans: int = 0  # ever begun
    connection_spans: int = 0


class Tracing(Observer):
    """Makes spans of what happens. `close` sends the rest, within FLUSH_TIME_S."""

    def __init__(self, exporter: SpanExporter, *, service_name: str, version: str, sample_ratio: float) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: version}),
            span_limits=SpanLimits(max_span_attribute_length=256, max_events=64, max_links=4),
            shutdown_on_exit=False,  # `close` does it, within a bound
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=QUEUE_SPANS,
                max_export_batch_size=BATCH_SPANS,
                schedule_delay_millis=BATCH_INTERVAL_S * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("executor_server", version)
        self._unfinished = RunningQueue(_begin)
        self._connections: dict[tuple[str, str], Span] = {}  # by session and connection
        self._commands: dict[tuple[str, str], Span] = {}  # by session and process

    async def close(self) -> None:
        """Sends the spans that wait, and drops what is left after FLUSH_TIME_S."""
        loop = asyncio.get_running_loop()
        flushed = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the waiter
                loop.call_soon_threadsafe(flushed.set)

        # A daemon thread, because the interpreter waits at exit for threads of the loop's executor.
        threading.Thread(target=shut_down, name="tracing-flush", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_TIME_S):
                await flushed.wait()
        except TimeoutError:
            _log.warning("spans_left_behind", waited_s=FLUSH_TIME_S)

    # -- calls ---------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[Span]:
        """Makes the call that is being served the current span. `method` is its gRPC path."""
        service, _, name = method.strip("/").rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        with self._tracer.start_as_current_span(
            method.strip("/"),
            context=remote_parent(metadata),
            kind=SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,  # its text may hold what a client sent
            set_status_on_exception=False,
        ) as span:
            yield span

    def end_call(self, span: Span, code: str) -> None:
        """Records the gRPC status that a call ended with, by its name."""
        span.set_attribute("rpc.grpc.status", code)
        if code in _SERVER_FAULTS:
            span.set_status(StatusCode.ERROR, code)

    # -- what happens below ----------------------------------------------------------------------------------------

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        trace.get_current_span().set_attributes(
            {**_facts(session), "executor.warm": session.warm, "executor.creation_s": took_s}
        )

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        for traced in self._unfinished.forget(session.session_id):
            _end(traced)

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        # This runs in the task of the call that began it, so the current span is that call's.
        self._start(session, execution_id, None, recovered=False)

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        # The trace of the call that began it ended with the earlier daemon.
        self._start(session, execution_id, Context(), recovered=True)

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        traced = self._unfinished.end(session.session_id, execution_id)
        if traced is None:
            return
        usage = result.usage
        traced.span.set_attributes(
            {
                "executor.outcome": result.outcome.value,
                "executor.variables_state": result.variables_state.value,
                "executor.generation": result.generation,
                "executor.operations": usage.operations,
                "executor.wall_time_s": usage.wall_time_s,
                "executor.cpu_time_s": usage.cpu_time_s,
                "executor.peak_memory_bytes": usage.peak_memory_bytes,
                "executor.output_bytes": usage.output_bytes,
                "executor.connections": result.network.connections,
                "executor.sent_bytes": result.network.sent_bytes,
                "executor.received_bytes": result.network.received_bytes,
            }
        )
        if result.outcome is not Outcome.SUCCEEDED:
            traced.span.set_attribute("error.type", result.outcome.value)
        if result.outcome in _FAULTS:
            traced.span.set_status(StatusCode.ERROR, result.outcome.value)
        _end(traced)

    def limit_warned(self, session: SessionFacts, execution_id: str, warning: LimitWarning) -> None:
        traced = self._unfinished.get(session.session_id, execution_id)
        if traced is not None:
            traced.span.add_event("limit_warning", {"executor.limit": warning.limit})

    def tool_called(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        traced = self._unfinished.get(session.session_id, execution_id)
        if traced is None or traced.tool_spans >= MAX_TOOL_SPANS:
            return
        traced.tool_spans += 1
        # The name comes out of the sandbox and may be anything.
        name = call.name if call.name.isidentifier() and len(call.name) <= MAX_TOOL_NAME_CHARS else "?"
        traced.tools[call.call_id] = self._tracer.start_span(
            "tool_call",
            context=trace.set_span_in_context(traced.span, Context()),
            attributes={
                **_as_tool(name, "TOOL"),
                "gen_ai.tool.call.id": call.call_id,
                "executor.tool": name,
                "executor.call_id": call.call_id,
            },
        )

    def tool_answered(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        traced = self._unfinished.get(session.session_id, execution_id)
        span = traced.tools.pop(answer.call_id, None) if traced is not None else None
        if span is not None:
            span.set_attribute("executor.tool_failed", answer.failed)
            span.end()

    def process_started(self, session: SessionFacts, process: ProcessFacts) -> None:
        if len(self._commands) < MAX_OPEN_COMMAND_SPANS:  # as for executions, the current span is the call's
            attributes = {**_facts(session), **_as_tool("command", "TOOL"), "executor.process_id": process.process_id}
            self._commands[session.session_id, process.process_id] = self._tracer.start_span(
                "command", attributes=attributes
            )

    def process_ended(self, session: SessionFacts, process_id: str, result: ProcessResult) -> None:
        span = self._commands.pop((session.session_id, process_id), None)
        if span is None:
            return
        span.set_attributes(
            {
                "executor.outcome": result.outcome.value,
                "executor.wall_time_s": result.wall_time_s,
                "executor.cpu_time_s": result.cpu_time_s,
                "executor.peak_memory_bytes": result.peak_memory_bytes,
                "executor.output_bytes": result.output_bytes,
            }
        )
        if result.exit_code is not None:
            span.set_attribute("process.exit.code", result.exit_code)
        if result.exit_code != 0:
            span.set_attribute("error.type", str(result.exit_code) if result.exit_code else result.outcome.value)
        span.end()

    def connection_opened(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        traced = self._unfinished.get(session.session_id, execution_id)
        if (
            traced is None
            or traced.connection_spans >= MAX_CONNECTION_SPANS
            or len(self._connections) >= MAX_OPEN_CONNECTION_SPANS
        ):
            return
        traced.connection_spans += 1
        self._connections[session.session_id, connection.connection_id] = self._tracer.start_span(
            "connection",
            context=trace.set_span_in_context(traced.span, Context()),
            kind=SpanKind.CLIENT,
            attributes={
                "server.address": connection.host,
                "server.port": connection.port,
                "executor.rule": connection.rule,
                **({"network.peer.address": connection.address} if connection.address else {}),
            },
        )

    def connection_closed(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        span = self._connections.pop((session.session_id, connection.connection_id), None)
        if span is not None:
            span.set_attribute("executor.reason", connection.reason)
            if connection.sent_bytes is not None and connection.received_bytes is not None:
                span.set_attribute("executor.sent_bytes", connection.sent_bytes)
                span.set_attribute("executor.received_bytes", connection.received_bytes)
            span.end()

    def connection_denied(self, session: SessionFacts, execution_id: str, denial: EgressDenial) -> None:
        traced = self._unfinished.get(session.session_id, execution_id)
        if traced is not None:  # the SDK bounds the events of a span
            traced.span.add_event("connection_denied", {"executor.reason": denial.reason})

    def _start(self, session: SessionFacts, execution_id: str, context: Context | None, *, recovered: bool) -> None:
        attributes: Mapping[str, str | bool] = {
            **_facts(session),
            **_as_tool("python", "CHAIN"),
            "executor.execution_id": execution_id,
            "executor.recovered": recovered,
        }
        span = self._tracer.start_span("execution", context=context, attributes=attributes)
        if not self._unfinished.add(session.session_id, execution_id, _Traced(span)):
            span.end()


def make_tracing(endpoint: str, *, service_name: str, version: str, sample_ratio: float) -> Tracing:
    """Returns tracing that sends to a collector by OTLP over HTTP; an endpoint without a path gets the usual one."""
    # The SDK's own loggers would repeat every failure, with addresses; LoggedExporter logs each change once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _OTLP_PATH
    exporter = LoggedExporter(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIME_S))
    return Tracing(exporter, service_name=service_name, version=version, sample_ratio=sample_ratio)


class LoggedExporter(SpanExporter):
    """Logs when spans begin to be lost, and when they arrive again. Runs in the exporter's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0
        self._failing_s: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._failing_s is not None:
                failed_s = round(time.monotonic() - self._failing_s, 1)
                _log.warning("spans_arrive_again", lost_spans=self._lost, failed_s=failed_s)
            self._lost, self._failing_s = 0, None
        else:
            if self._failing_s is None:
                _log.warning("spans_lost", spans=len(spans), detail="the collector of tracing.endpoint takes none")
                self._failing_s = time.monotonic()
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def remote_parent(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """Returns the caller's span context; an empty one if it sent none, several, or a malformed one."""
    said = [(key, value) for key, value in metadata if key in ("traceparent", "tracestate") and isinstance(value, str)]
    carrier: Mapping[str, str] = dict(said)
    parent = carrier.get("traceparent", "")
    if len(carrier) != len(said) or len(parent) != _TRACEPARENT_CHARS:
        return Context()
    state = carrier.get("tracestate", "")
    if len(state) > MAX_TRACESTATE_CHARS:
        carrier = {"traceparent": parent}
    return _PROPAGATOR.extract(carrier, Context())


def _facts(session: SessionFacts) -> dict[str, str]:
    return {
        "executor.session_id": session.session_id,
        "executor.tenant": session.owner.tenant,
        "executor.profile": session.policy.profile,
        "executor.policy_version": session.policy.version,
        "executor.policy_fingerprint": session.policy.fingerprint,
        "executor.backend": session.backend,
        "executor.image": session.image,
    }


def _as_tool(name: str, kind: str) -> dict[str, str]:
    """Returns a tool's attributes for viewers; OpenInference's kind is TOOL, or CHAIN if it calls tools."""
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "openinference.span.kind": kind,
        "tool.name": name,
    }


def _begin(traced: _Traced) -> None:
    """Starts the span of an execution that left the queue."""
    traced.span.add_event("running")


def _end(traced: _Traced) -> None:
    for span in traced.tools.values():
        span.end()  # no answer came
    traced.span.end()
