"""Metrics: their values, their labels, and the endpoint that serves them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from executor_server.core.addresses import AddressError
from executor_server.core.errors import NotFound, PolicyViolation, Reason, Violation, ViolationKind
from executor_server.core.lifecycle.admission import AdmissionController, Answer, StateFacts
from executor_server.core.lifecycle.observer import SessionEnd
from executor_server.core.model import (
    AuditRules,
    FileInfo,
    LimitWarning,
    Outcome,
    Principal,
    Result,
    SandboxSpec,
    SessionFacts,
    ToolCall,
    VariablesState,
)
from executor_server.core.network import EgressConnection, EgressDenial
from executor_server.guest.egress import reasons
from executor_server.policy.audit.log import AuditStats
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, Tenant
from executor_server.policy.profile import Profile, QuotasTable
from executor_server.policy.quotas.quotas import Quotas
from executor_server.sessions.pool.kind import PoolStats
from executor_server.sessions.recorder import RecordingStats
from executor_server.telemetry import endpoint
from executor_server.telemetry.endpoint import MetricsEndpoint, page
from executor_server.telemetry.instruments import OTHER, PREFIX, Names
from executor_server.telemetry.metrics import Metrics
from executor_server.telemetry.sources import DESCRIBED, Sources, SourcesCollector
from executor_server.telemetry.timed_admission import TimedAdmission
from tests.support.specs import POLICY, session_spec

EXECUTE = "/executor_api.v1.ExecutorService/Execute"
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
SUCCEEDED = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1)
SANDBOX = SandboxSpec("base", 2**28, 16, 2**24, 600.0)
AUDIT = AuditStats(records=9, bytes=900, lost_records=2, failures=1, flushes=4, is_failing=True)
STATS = PoolStats(2, 1, 1, 5, 3, 6, 0, 1, 0, 0, 9, 4.5, 0.5)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1.2", backend="local", methods=[EXECUTE])


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(PREFIX + name, labels)


def test_the_network_is_counted_by_reasons_of_a_closed_list(metrics: Metrics) -> None:
    opened = EgressConnection("c1", "a.example", 443, "192.0.2.1", "a.example")
    for _ in range(3):
        metrics.connection_opened(FACTS, "e", opened)
    assert value(metrics, "egress_connections_open") == 3
    for reason in (reasons.ENDED, reasons.BROKEN, "a reason that a program made up"):
        metrics.connection_closed(FACTS, "e", replace(opened, reason=reason))
    assert value(metrics, "egress_connections_open") == 0
    for reason in (reasons.NOT_ALLOWED, reasons.NOT_ALLOWED, "x"):
        metrics.connection_denied(FACTS, "e", EgressDenial("b.example", 443, reason, "no"))
    metrics.denials_uncounted(FACTS, "e", 5)
    metrics.network_moved(FACTS, 10, 20)
    metrics.network_moved(FACTS, 1, 2)
    ended = {reason: value(metrics, "egress_connections_total", reason=reason) for reason in ("ended", "broken", OTHER)}
    assert ended == {"ended": 1, "broken": 1, OTHER: 1}
    denied = {reason: value(metrics, "egress_denied_total", reason=reason) for reason in ("not_allowed", OTHER)}
    assert denied == {"not_allowed": 2, OTHER: 6}
    moved = [value(metrics, "egress_bytes_total", direction=direction) for direction in ("sent", "received")]
    assert moved == [11, 22]


def test_executions_are_counted_by_outcome_and_profile(metrics: Metrics) -> None:
    metrics.execution_started(FACTS, "e1")
    metrics.execution_ended(FACTS, "e1", SUCCEEDED, 0.5)
    assert value(metrics, "executions_total", outcome="succeeded", profile="default") == 1
    assert value(metrics, "execution_seconds_sum", profile="default") == 0.5


def test_every_outcome_can_be_counted(metrics: Metrics) -> None:
    for number, outcome in enumerate(Outcome):
        metrics.execution_started(FACTS, str(number))
        metrics.execution_ended(FACTS, str(number), replace(SUCCEEDED, outcome=outcome), 0.0)
    assert all(value(metrics, "executions_total", outcome=o.value, profile="default") == 1 for o in Outcome)


def test_an_execution_is_queued_until_the_one_before_it_has_ended(metrics: Metrics) -> None:
    for execution_id in ("e1", "e2"):
        metrics.execution_started(FACTS, execution_id)
    assert value(metrics, "phase_seconds_count", phase="queued") == 1
    assert value(metrics, "executions_unfinished") == 2
    metrics.execution_ended(FACTS, "e1", SUCCEEDED, 0.1)
    assert value(metrics, "phase_seconds_count", phase="queued") == 2
    assert value(metrics, "phase_seconds_count", phase="running") == 1
    assert value(metrics, "executions_unfinished") == 1


def test_executions_of_an_ended_session_are_not_waited_for(metrics: Metrics) -> None:
    metrics.execution_started(FACTS, "e1")
    metrics.execution_recovered(FACTS, "e2")
    metrics.session_ended(FACTS, SessionEnd.DELETED)
    assert value(metrics, "executions_unfinished") == 0


def test_sessions_are_counted_by_how_they_began_and_ended(metrics: Metrics) -> None:
    metrics.session_created(FACTS, 0.004)
    metrics.session_created(replace(FACTS, warm=False), 0.3)
    metrics.session_lost(FACTS, "the guest lied")
    metrics.session_ended(FACTS, SessionEnd.EXPIRED)
    metrics.session_ended(FACTS, "something that is in no list")
    assert value(metrics, "sessions_created_total", profile="default", image="base", backend="local", start="cold") == 1
    assert value(metrics, "session_creation_seconds_sum", start="warm") == 0.004
    assert value(metrics, "sessions_lost_total", profile="default") == 1
    assert value(metrics, "sessions_ended_total", profile="default", reason="expired") == 1
    assert value(metrics, "sessions_ended_total", profile="default", reason=OTHER) == 1


def test_the_time_that_a_client_takes_for_a_tool_is_a_phase(metrics: Metrics) -> None:
    metrics.execution_started(FACTS, "e1")
    metrics.tool_called(FACTS, "e1", ToolCall("c1", "search", b""))
    metrics.tool_answered(FACTS, "e1", Answer("c1", 10, failed=True))
    metrics.tool_answered(FACTS, "e1", Answer("never called", 10, failed=False))
    assert value(metrics, "phase_seconds_count", phase="tool") == 1
    assert value(metrics, "tool_answers_total", result="error") == 1


def test_a_word_of_the_guest_never_becomes_a_label(metrics: Metrics) -> None:
    metrics.limit_warned(FACTS, "e1", LimitWarning("operations", 8, 10))
    metrics.limit_warned(FACTS, "e1", LimitWarning("evil\n# TYPE", 8, 10))
    metrics.tool_called(FACTS, "e1", ToolCall("c1", "evil", b""))
    metrics.guest_misbehaved(FACTS, "evil")
    metrics.file_got(FACTS, FileInfo("evil", -5, False, 0.0))
    assert value(metrics, "limit_warnings_total", limit=OTHER) == 1
    assert "evil" not in str(list(metrics.registry.collect()))


def test_a_method_that_is_not_served_never_becomes_a_label(metrics: Metrics) -> None:
    error = NotFound(Reason.SESSION_NOT_FOUND, "no such session")
    metrics.request_refused(None, EXECUTE, error)
    metrics.request_refused(None, "/made/up", error)
    assert value(metrics, "requests_refused_total", reason="SESSION_NOT_FOUND", method="ExecutorService/Execute") == 1
    assert value(metrics, "requests_refused_total", reason="SESSION_NOT_FOUND", method=OTHER) == 1


def test_each_violation_of_a_refused_request_is_counted(metrics: Metrics) -> None:
    violation = Violation("image", ViolationKind.NOT_ALLOWED, "a", "b", "profiles.p.sandbox.images")
    metrics.request_refused(FACTS.owner, EXECUTE, PolicyViolation((violation, violation)))
    assert value(metrics, "policy_violations_total", kind="not_allowed") == 2


def test_readings_of_the_policy_are_counted_by_what_they_found(metrics: Metrics) -> None:
    metrics.policy_changed(policy(), policy())
    metrics.policy_unchanged()
    metrics.policy_refused(policy(), ["default: is missing"])
    assert all(value(metrics, "policy_reloads_total", result=r) == 1 for r in ("changed", "unchanged", "refused"))


def test_names_beyond_a_number_are_not_told_apart() -> None:
    names = Names(most=2)
    assert [names.label(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]


async def test_every_metric_that_is_served_is_described(metrics: Metrics) -> None:
    metrics.registry.register(collector(metrics, {SANDBOX: STATS}))
    described = {entry.name for entry in (*metrics.described, *DESCRIBED)}
    served = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families((await page(metrics.registry)).decode())
    }
    assert {name for name in served if name.startswith(PREFIX)} == described


# ---------------------------------------------------------------------------------------------------------------------
# Gauges, which are read at each request of the page


class Open:
    """The part of a session that the gauges read."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.spec = session_spec(SANDBOX)
        self.backend_name = "local"


def policy() -> Policy:
    profile = Profile(quotas=QuotasTable(sessions=3))
    file = PolicyFile(version="7", default="data", profiles={"data": profile}, tenants={"acme": Tenant()})
    return Policy(file, images=["base"], backend="local", orphan_time_s=600.0)


def collector(metrics: Metrics, pool: dict[SandboxSpec, PoolStats], *states: str) -> SourcesCollector:
    current = policy()
    quotas = Quotas(current.quotas_of)
    for tenant in ("acme", "unlisted"):
        quotas.session_created(replace(FACTS, owner=Principal(tenant, "ci")), 0.0)
    sessions = cast("Any", [Open(state) for state in states])
    return SourcesCollector(metrics, Sources(lambda: sessions, lambda: pool, lambda: current, quotas, AUDIT))


def test_recordings_are_counted_with_the_reasons_for_early_ends(metrics: Metrics) -> None:
    stats = RecordingStats(begun=Counter(full=3), ended_early=Counter(disk=1), kept=2, kept_bytes=500)
    quotas = Quotas(lambda _: QuotasTable())
    metrics.registry.register(
        SourcesCollector(metrics, Sources(list, dict, policy, quotas, None, recordings=lambda: stats))
    )
    assert value(metrics, "recordings") == 2
    assert value(metrics, "recordings_disk_bytes") == 500
    assert value(metrics, "recordings_begun_total", mode="full") == 3
    assert value(metrics, "recordings_cut_total", reason="disk") == 1


def test_sessions_are_read_by_state(metrics: Metrics) -> None:
    metrics.registry.register(collector(metrics, {}, "idle", "busy", "busy"))
    assert value(metrics, "sessions", state="busy", profile="default", backend="local") == 2


def test_the_states_of_several_backends_are_told(metrics: Metrics) -> None:
    sources = Sources(
        list, dict, policy, Quotas(lambda _: QuotasTable()), None, lambda: {"docker": "down", "e2b": "up"}
    )
    metrics.registry.register(SourcesCollector(metrics, sources))
    assert value(metrics, "backend_state", backend="docker", state="down") == 1
    assert value(metrics, "backend_state", backend="docker", state="up") is None
    assert value(metrics, "backend_state", backend="e2b", state="up") == 1


def test_the_policy_in_force_is_told(metrics: Metrics) -> None:
    metrics.registry.register(collector(metrics, {}))
    assert value(metrics, "policy_info", version="7", fingerprint=policy().fingerprint) == 1


def test_only_tenants_that_the_policy_lists_are_named(metrics: Metrics) -> None:
    metrics.registry.register(collector(metrics, {}))
    assert value(metrics, "tenant_use", tenant="acme", quota="sessions") == 1
    assert value(metrics, "tenant_quota", tenant="acme", quota="sessions") == 3
    assert value(metrics, "tenant_use", tenant="unlisted", quota="sessions") is None


def test_kinds_of_one_image_are_summed(metrics: Metrics) -> None:
    metrics.registry.register(collector(metrics, {SANDBOX: STATS, replace(SANDBOX, processes=8): STATS}))
    assert value(metrics, "pool_depth", image="base") == 2
    assert value(metrics, "pool_hits_total", image="base") == 10


def test_counts_of_a_kind_that_is_kept_no_more_stay(metrics: Metrics) -> None:
    pool = {SANDBOX: STATS}
    metrics.registry.register(collector(metrics, pool))
    assert value(metrics, "pool_hits_total", image="base") == 5
    pool.clear()
    pool[replace(SANDBOX, policy="another")] = replace(STATS, hits=1)
    assert value(metrics, "pool_hits_total", image="base") == 6


def test_an_audit_log_that_fails_is_told(metrics: Metrics) -> None:
    metrics.registry.register(collector(metrics, {}))
    assert value(metrics, "audit_failing") == 1
    assert value(metrics, "audit_lost_records_total") == 2


# ---------------------------------------------------------------------------------------------------------------------
# Timed admission


async def test_a_refusal_behind_the_clock_passes_and_is_timed(metrics: Metrics) -> None:
    class No(AdmissionController):
        async def execution(self, *_: Any) -> Any:
            raise NotFound(Reason.QUOTA_EXCEEDED, "no")

    with pytest.raises(NotFound):
        await TimedAdmission(No(), metrics).execution(FACTS, "e1", "1", cast("Any", None))
    assert value(metrics, "phase_seconds_count", phase="admission") == 1


async def test_the_wait_for_a_turn_is_a_phase_and_what_it_is_for_is_not(metrics: Metrics) -> None:
    async with TimedAdmission(AdmissionController(), metrics).creation_turn("acme"):
        assert value(metrics, "phase_seconds_count", phase="creation_queue") == 1


# ---------------------------------------------------------------------------------------------------------------------
# The endpoint


@asynccontextmanager
async def serving(metrics: Metrics) -> AsyncIterator[tuple[str, int]]:
    endpoint = MetricsEndpoint(metrics, "127.0.0.1:0")
    host, _, port = (await endpoint.start()).rpartition(":")
    try:
        yield host, int(port)
    finally:
        await endpoint.close()


async def ask(address: tuple[str, int], request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> bytes:
    """The answer; empty when the connection is closed without one."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_scrape_gets_the_text_format(metrics: Metrics) -> None:
    async with serving(metrics) as address:
        head, _, body = (await ask(address)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"text/plain; version=" in head
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {f"{PREFIX}build_info", f"{PREFIX}executions", "process_open_fds"} <= families


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics?name=x HTTP/1.1\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b"400"),
    ],
    ids=["another path", "a query", "another method", "TLS", "a head that is too long"],
)
async def test_requests_get_what_they_deserve(metrics: Metrics, request_bytes: bytes, status: bytes) -> None:
    async with serving(metrics) as address:
        answer = await ask(address, request_bytes)
    # The kernel may drop the answer with what was not read of a request.
    assert answer.split(b" ")[1:2] == [status] or (not answer and len(request_bytes) > endpoint.MAX_REQUEST_BYTES)


async def test_a_silent_scraper_is_let_go(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_TIME_S", 0.01)
    async with serving(metrics) as address:
        assert await ask(address, b"GET /met") == b""


async def test_scrapers_who_fill_the_endpoint_keep_nobody_else(metrics: Metrics) -> None:
    async with serving(metrics) as address:
        silent = [await asyncio.open_connection(*address) for _ in range(endpoint.MAX_CONNECTIONS)]
        assert await ask(address) == b""
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()


async def test_scrapes_that_come_together_share_one_page(metrics: Metrics) -> None:
    collected = []

    class Counting:
        def collect(self) -> Any:
            collected.append(1)
            yield GaugeMetricFamily("counting", "", value=1)

        def describe(self) -> Any:
            return ()

    metrics.registry.register(cast("Any", Counting()))
    async with serving(metrics) as address:
        answers = await asyncio.gather(*(ask(address) for _ in range(8)))
    assert len(collected) == 1
    assert all(b"counting 1.0" in answer for answer in answers)


async def test_a_collector_that_breaks_costs_one_scrape(metrics: Metrics) -> None:
    class Broken:
        def __init__(self) -> None:
            self.broken = True

        def collect(self) -> Any:
            if self.broken:
                raise RuntimeError("broken")
            return ()

        def describe(self) -> Any:
            return ()

    broken = Broken()
    metrics.registry.register(cast("Any", broken))
    async with serving(metrics) as address:
        assert await ask(address) == b""
        broken.broken = False
        assert b"200 OK" in await ask(address)


async def test_an_address_in_use_is_a_sentence(metrics: Metrics) -> None:
    async with serving(metrics) as (host, port):
        with pytest.raises(AddressError, match=f"Can't listen on 127.0.0.1:{port} for metrics: it is in use"):
            await MetricsEndpoint(metrics, f"{host}:{port}").start()


@pytest.mark.parametrize(("listen", "warned"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
async def test_an_address_that_other_machines_reach_is_warned_of(metrics: Metrics, listen: str, warned: bool) -> None:
    endpoint = MetricsEndpoint(metrics, listen)
    with structlog.testing.capture_logs() as logged:
        await endpoint.start()
    await endpoint.close()
    assert ("metrics_exposed" in [line["event"] for line in logged]) is warned


@pytest.mark.parametrize("listen", ["9464", ":9464", "unix:/tmp/metrics", "127.0.0.1:99999", ""])
def test_what_is_no_host_and_port_is_refused(metrics: Metrics, listen: str) -> None:
    with pytest.raises(AddressError):
        MetricsEndpoint(metrics, listen)


async def test_a_page_that_is_made_in_steps_is_what_is_made_at_once(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PIECE_SAMPLES", 3)
    for outcome in Outcome:
        metrics.execution_ended(FACTS, "e1", replace(SUCCEEDED, outcome=outcome), 0.1)
    in_steps = (await page(metrics.registry)).decode()
    at_once = generate_latest(metrics.registry).decode()
    assert _without_process(in_steps) == _without_process(at_once)


def _without_process(text: str) -> list[str]:
    """Lines that are the same however soon one looks again."""
    return [line for line in text.splitlines() if "process_" not in line]


async def test_an_empty_registry_is_an_empty_page() -> None:
    assert await page(CollectorRegistry()) == b""


def test_states_are_counted_by_the_way_they_go(metrics: Metrics) -> None:
    state = StateFacts("0" * 64, 100, 1, 1)
    metrics.state_exported(FACTS, state)
    metrics.state_restored(FACTS, state)
    metrics.state_restored(FACTS, state)
    for connection, number in (("exported", 1), ("restored", 2)):
        labels = {"way": connection, "profile": FACTS.policy.profile}
        assert metrics.registry.get_sample_value(f"{PREFIX}states_total", labels) == number
        assert metrics.registry.get_sample_value(f"{PREFIX}state_bytes_total", labels) == 100 * number
