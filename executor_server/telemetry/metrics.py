"""Metrics for Prometheus: counters and histograms that are updated as things happen.

Metrics is an Observer and a PolicyListener: each update costs microseconds, and none can fail. Gauges that can be read
from the daemon's parts at any moment (sessions, pool, quotas) are read at each scrape (sources.py).

Labels are our own constants, and names that an operator chose. No client's text becomes a label, and the number of an
operator's names is bounded, so that endless reloads don't make endless series.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector

from executor_server.core import (
    EgressConnection,
    EgressDenial,
    ExecutorError,
    FileInfo,
    Limits,
    LimitWarning,
    PolicyViolation,
    PortUse,
    Principal,
    ProcessFacts,
    ProcessResult,
    Result,
    SessionFacts,
    ToolCall,
)
from executor_server.core.lifecycle import Answer, Observer, RunningQueue, SessionEnd, StateFacts
from executor_server.guest.egress import reasons
from executor_server.policy import Policy, PolicyListener
from executor_server.telemetry.approval_metrics import ApprovalMetrics
from executor_server.telemetry.environment_metrics import EnvironmentMetrics
from executor_server.telemetry.fleet_metrics import FleetMetrics
from executor_server.telemetry.instruments import OTHER, Book, Names

MAX_METHODS = 64

_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)

_LIMIT_NAMES = frozenset(Limits.__dataclass_fields__)


@dataclass
class _Running:
    """An execution that has not ended: when it was accepted and began, and when each open tool call was made."""

    known_s: float
    began_s: float | None = None
    calls: dict[str, float] = field(default_factory=dict)


class Metrics(Observer, PolicyListener):
    """Counts what happens, in a registry of its own: the library's global registry is not used."""

    def __init__(self, *, version: str, backend: str, methods: Collection[str]) -> None:
        """`methods`: the calls that are served, by their gRPC paths."""
        assert len(methods) <= MAX_METHODS, "methods are ours, and few"
        self.registry = CollectorRegistry(auto_describe=False)
        self.profiles = Names()
        self.images = Names()
        self._methods = {method: method.strip("/").rpartition(".")[2] for method in methods}
        self._unfinished = RunningQueue(self._begin)
        book = Book(self.registry)
        self._make_session_instruments(book)
        self._make_network_instruments(book)
        self._make_service_instruments(book)
        self.environments = EnvironmentMetrics(book)
        self.fleet = FleetMetrics(book)
        self.approvals = ApprovalMetrics(book, time.time)
        self.described = tuple(book.entries)
        self._build.labels(version, platform.python_version(), backend).set(1)
        ProcessCollector(registry=self.registry)

    def _make_session_instruments(self, book: Book) -> None:
        self._build = book.gauge("build_info", "1; its labels say what runs.", "version", "python", "backend")
        self._created = book.counter(
            "sessions_created",
            "Created sessions; `start`: `warm` from the pool, or `cold`.",
            "profile",
            "image",
            "backend",
            "start",
        )
        self._creation = book.histogram("session_creation_seconds", "Duration of session creation.", "start")
        self._recovered = book.counter("sessions_recovered", "Recovered sessions of an earlier daemon.", "profile")
        self._lost = book.counter("sessions_lost", "Sessions that lost their sandbox.", "profile")
        self._ended = book.counter(
            "sessions_ended", "Sessions that ended; `reason`: `other` is another policy.", "profile", "reason"
        )
        self._executions = book.counter("executions", "Executions that ended.", "outcome", "profile")
        self._execution = book.histogram("execution_seconds", "Duration of executions, waiting included.", "profile")
        self._waiting = book.gauge("executions_unfinished", "Waiting and running executions.")
        self._phase = book.histogram(
            "phase_seconds",
            "Where time goes. `admission`: quotas and audit before an effect; `creation_queue`: waiting to have a"
            " sandbox made; `queued`: behind earlier executions of the session; `first_event`: from an Execute call"
            " to the first event written; `running`: from the start of an execution to its end; `tool`: for a client's"
            " answer to a tool call.",
            "phase",
        )
        self._warnings = book.counter("limit_warnings", "Warnings of a nearly spent budget.", "limit")
        self._tool_calls = book.counter("tool_calls", "Tool calls sent to clients.", "profile")
        self._tool_answers = book.counter(
            "tool_answers", "Answers of clients to tool calls: a `value` or an `error`.", "result"
        )
        self._files = book.counter("files_got", "Files and archives read from sessions.", "profile")
        self._file_bytes = book.counter("files_got_bytes", "Bytes of files and archives read from sessions.", "profile")
        self._processes = book.counter("processes", "Processes that ended.", "outcome", "profile")
        self._running_processes = book.gauge("processes_running", "Running processes.")
        self._process_bytes = book.counter(
            "process_output_bytes", "Bytes that processes printed, omitted ones included.", "profile"
        )
        self._ports = book.counter("port_connections", "Ended connections to ports of sandboxes.", "profile")
        self._port_bytes = book.counter(
            "port_bytes", "Bytes over such connections; `way`: `received` or `sent` by the program.", "way", "profile"
        )
        self._states = book.counter("states", "States of sessions; `way`: `exported` or `restored`.", "way", "profile")
        self._state_bytes = book.counter("state_bytes", "Bytes of exported and restored states.", "way", "profile")

    def _make_network_instruments(self, book: Book) -> None:
        self._connections = book.counter("egress_connections", "Ended connections of sandboxes, by reason.", "reason")
        self._open_connections = book.gauge("egress_connections_open", "Open connections of sandboxes.")
        self._egress_bytes = book.counter(
            "egress_bytes", "Bytes over the network; `direction`: `sent` or `received` by sandboxes.", "direction"
        )
        self._egress_denied = book.counter(
            "egress_denied",
            "Refused connections and requests of sandboxes; `other`: too fast to report one by one.",
            "reason",
        )

    def _make_service_instruments(self, book: Book) -> None:
        self._misbehaved = book.counter(
            "guest_protocol_violations", "Messages from sandboxes that violated the protocol."
        )
        self._refused = book.counter("requests_refused", "Calls refused.", "reason", "method")
        self._violations = book.counter("policy_violations", "Violations in requests that the policy refused.", "kind")
        self._reloads = book.counter(
            "policy_reloads",
            "Reloads of the policy: `changed`, `unchanged`, or `refused` as invalid.",
            "result",
        )
        self._calls = book.histogram("rpc_seconds", "Duration of calls, streams to their end.", "method")
        self._call_ends = book.counter("rpc_ended", "Ended calls, by gRPC status.", "method", "code")
        self._open_calls = book.gauge("rpc_open", "Open calls and streams.", "method")
        self._lag = book.histogram(
            "event_loop_lag_seconds",
            "Lag of the daemon's event loop.",
            buckets=_LAG_SECONDS,
        )

    # -- sessions ------------------------------------------------------------------------------------------------

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        start = "warm" if session.warm else "cold"
        image = self.images.label(session.image)
        self._created.labels(self._profile(session), image, session.backend, start).inc()
        self._creation.labels(start).observe(took_s)

    def session_recovered(self, session: SessionFacts) -> None:
        self._recovered.labels(self._profile(session)).inc()

    def session_lost(self, session: SessionFacts, reason: str) -> None:
        self._lost.labels(self._profile(session)).inc()

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        label = reason.name.lower() if isinstance(reason, SessionEnd) else OTHER
        self._ended.labels(self._profile(session), label).inc()
        self._waiting.dec(len(self._unfinished.forget(session.session_id)))

    # -- executions ----------------------------------------------------------------------------------------------

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        self._await(session, execution_id)

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        self._await(session, execution_id)

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        profile = self._profile(session)
        self._executions.labels(result.outcome.value, profile).inc()
        self._execution.labels(profile).observe(took_s)
        ended = self._unfinished.end(session.session_id, execution_id)
        if ended is not None:
            self._waiting.dec()
            if ended.began_s is not None:
                self.note_phase("running", time.monotonic() - ended.began_s)

    def limit_warned(self, session: SessionFacts, execution_id: str, warning: LimitWarning) -> None:
        self._warnings.labels(warning.limit if warning.limit in _LIMIT_NAMES else OTHER).inc()

    def tool_called(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        self._tool_calls.labels(self._profile(session)).inc()
        running = self._unfinished.get(session.session_id, execution_id)
        if running is not None:
            running.calls[call.call_id] = time.monotonic()

    def tool_answered(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        self._tool_answers.labels("error" if answer.failed else "value").inc()
        running = self._unfinished.get(session.session_id, execution_id)
        called_s = running.calls.pop(answer.call_id, None) if running is not None else None
        if called_s is not None:
            self.note_phase("tool", time.monotonic() - called_s)

    def file_got(self, session: SessionFacts, file: FileInfo) -> None:
        profile = self._profile(session)
        self._files.labels(profile).inc()
        self._file_bytes.labels(profile).inc(max(file.size_bytes, 0))

    def process_started(self, session: SessionFacts, process: ProcessFacts) -> None:
        self._running_processes.inc()

    def process_recovered(self, session: SessionFacts, process: ProcessFacts) -> None:
        self._running_processes.inc()

    def process_ended(self, session: SessionFacts, process_id: str, result: ProcessResult) -> None:
        profile = self._profile(session)
        self._running_processes.dec()
        self._processes.labels(result.outcome.value, profile).inc()
        self._process_bytes.labels(profile).inc(result.output_bytes)

    def port_closed(self, session: SessionFacts, use: PortUse) -> None:
        profile = self._profile(session)
        self._ports.labels(profile).inc()
        self._port_bytes.labels("received", profile).inc(use.received_bytes)
        self._port_bytes.labels("sent", profile).inc(use.sent_bytes)

    def state_exported(self, session: SessionFacts, state: StateFacts) -> None:
        self._states.labels("exported", self._profile(session)).inc()
        self._state_bytes.labels("exported", self._profile(session)).inc(state.size_bytes)

    def state_restored(self, session: SessionFacts, state: StateFacts) -> None:
        self._states.labels("restored", self._profile(session)).inc()
        self._state_bytes.labels("restored", self._profile(session)).inc(state.size_bytes)

    def connection_opened(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        self._open_connections.inc()

    def connection_closed(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        self._open_connections.dec()
        self._connections.labels(connection.reason if connection.reason in reasons.ENDS else OTHER).inc()

    def connection_denied(self, session: SessionFacts, execution_id: str, denial: EgressDenial) -> None:
        self._egress_denied.labels(denial.reason if denial.reason in reasons.REFUSALS else OTHER).inc()

    def denials_uncounted(self, session: SessionFacts, execution_id: str, count: int) -> None:
        self._egress_denied.labels(OTHER).inc(count)

    def network_moved(self, session: SessionFacts, sent_bytes: int, received_bytes: int) -> None:
        self._egress_bytes.labels("sent").inc(sent_bytes)
        self._egress_bytes.labels("received").inc(received_bytes)

    def _await(self, session: SessionFacts, execution_id: str) -> None:
        if self._unfinished.add(session.session_id, execution_id, _Running(time.monotonic())):
            self._waiting.inc()

    def _begin(self, running: _Running) -> None:
        running.began_s = time.monotonic()
        self.note_phase("queued", running.began_s - running.known_s)

    # -- refusals, protocol violations, the policy -------------------------------------------------------------------

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        self._misbehaved.inc()

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        self._refused.labels(error.reason.value, self._method(method)).inc()
        if isinstance(error, PolicyViolation):
            for violation in error.violations:
                self._violations.labels(violation.kind.value.lower()).inc()

    def policy_changed(self, before: Policy, now: Policy) -> None:
        self._reloads.labels("changed").inc()

    def policy_unchanged(self) -> None:
        self._reloads.labels("unchanged").inc()

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        self._reloads.labels("refused").inc()

    # -- calls and the loop --------------------------------------------------------------------------------------

    def call_began(self, method: str) -> None:
        self._open_calls.labels(self._method(method)).inc()

    def call_ended(self, method: str, code: str, took_s: float) -> None:
        """`code` is the name of a gRPC status."""
        label = self._method(method)
        self._open_calls.labels(label).dec()
        self._call_ends.labels(label, code).inc()
        self._calls.labels(label).observe(took_s)

    def note_phase(self, phase: str, took_s: float) -> None:
        """`phase` is one of the labels that `phase_seconds` lists."""
        self._phase.labels(phase).observe(took_s)

    def note_lag(self, lag_s: float) -> None:
        self._lag.observe(lag_s)

    def _profile(self, session: SessionFacts) -> str:
        return self.profiles.label(session.policy.profile)

    def _method(self, method: str) -> str:
        return self._methods.get(method, OTHER)
