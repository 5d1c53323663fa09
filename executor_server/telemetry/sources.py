"""Metrics that are read from the daemon's parts at each scrape, and kept nowhere.

Runs in the event loop, where the parts belong. Names of tenants are labels only where the policy lists them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from executor_server.backends.local import ForkServerStats
from executor_server.core import SandboxSpec
from executor_server.packages import Statistics
from executor_server.policy import Policy
from executor_server.policy.audit import AuditStats
from executor_server.policy.quotas import Quotas
from executor_server.sessions import RecordingStats, Session
from executor_server.sessions.pool import PoolStats
from executor_server.telemetry.instruments import PREFIX, Described, Names
from executor_server.telemetry.metrics import Metrics

SESSIONS = Described(
    f"{PREFIX}sessions",
    "gauge",
    ("state", "profile", "backend"),
    "Sessions; `state`: `idle`, `busy`, `paused` or `lost`.",
)
BACKENDS = Described(
    f"{PREFIX}backend_state",
    "gauge",
    ("backend", "state"),
    "If several backends run: 1 for the state of each, which is `up`, `full` or `down`.",
)
POLICY = Described(
    f"{PREFIX}policy_info", "gauge", ("version", "fingerprint"), "1; its labels say which policy is in force."
)
TENANT_USE = Described(
    f"{PREFIX}tenant_use",
    "gauge",
    ("tenant", "quota"),
    "Current and past use of a tenant that the policy lists, by quota.",
)
TENANT_QUOTA = Described(
    f"{PREFIX}tenant_quota",
    "gauge",
    ("tenant", "quota"),
    "Quotas of a tenant that the policy lists.",
)
POOL_GAUGES = {
    "size": "Warm sandboxes that the pool should have.",
    "depth": "Warm sandboxes in the pool.",
    "making": "Sandboxes being created for the pool.",
}
POOL_COUNTERS = {
    "hits": "Sessions that got a warm sandbox.",
    "misses": "Sessions of a pooled kind that needed a new sandbox.",
    "made": "Sandboxes created for the pool.",
    "failed": "Failed attempts to create a sandbox for the pool.",
    "lost": "Warm sandboxes that died.",
    "outdated": "Warm sandboxes discarded: image, guest or policy changed, or a better one was ready.",
    "closed": "Warm sandboxes that ended with the pool.",
    "ready_count": "Sandboxes that became ready, for the pool or for a session.",
    "ready_time_sum_s": "Seconds that they took to become ready.",
}
# Fields of quotas.TenantUse by the name of their quota.
_USED = {
    "sessions": "sessions",
    "executions": "executions",
    "calls": "calls",
    "creations_per_minute": "creations_in_last_minute",
    "cpu_time_s_per_hour": "cpu_time_s_in_last_hour",
    "output_bytes_per_hour": "output_bytes_in_last_hour",
    "egress_bytes_per_hour": "egress_bytes_in_last_hour",
}
_POOL_NAMES = {"ready_count": "ready", "ready_time_sum_s": "ready_seconds"}

ENVIRONMENT_GAUGES = {
    "environments": ("environments", "Package environments."),
    "environments_in_use": ("in_use", "Package environments in use."),
    "environments_building": ("building", "Package environments being built."),
    "environments_queued": ("queued", "Package environments waiting to be built."),
    "environments_disk_bytes": ("total_bytes", "Bytes on disk of environments, cache and builds."),
}
AUDIT_FAILING = Described(f"{PREFIX}audit_failing", "gauge", (), "1 while the audit log can't be written, else 0.")
AUDIT_COUNTERS = {
    "records": "Records written to the audit log.",
    "bytes": "Bytes written to the audit log.",
    "lost_records": "Records that could not be written.",
    "failures": "Times that writing the audit log began to fail.",
    "flushes": "Times that the audit log was synced to disk.",
}

RECORDINGS = Described(f"{PREFIX}recordings", "gauge", (), "Recordings of sessions that are kept.")
RECORDINGS_BYTES = Described(f"{PREFIX}recordings_disk_bytes", "gauge", (), "Bytes on disk of recordings.")
RECORDINGS_BEGUN = Described(
    f"{PREFIX}recordings_begun_total", "counter", ("mode",), "Sessions whose recording began; `mode`: as in the policy."
)
RECORDINGS_CUT = Described(
    f"{PREFIX}recordings_cut_total",
    "counter",
    ("reason",),
    "Recordings that ended before their sessions; `reason`: `disk` (it can't be written), `slow` (the disk was slower"
    " than the session), `size`, `policy` or `internal`.",
)

FORKED = Described(
    f"{PREFIX}fork_server_sandboxes_total", "counter", (), "Sandboxes forked by the local backend's fork server."
)
NOT_FORKED = Described(
    f"{PREFIX}fork_server_fallbacks_total",
    "counter",
    ("reason",),
    "Sandboxes made by bubblewrap although the policy allows the fork server; `reason`: `rare` (the pool keeps"
    " none of this kind), `starting`, `failing`, `failed`, `silent`, `unverified` or `unsupported`.",
)

DESCRIBED = (
    SESSIONS,
    BACKENDS,
    POLICY,
    TENANT_USE,
    TENANT_QUOTA,
    *(Described(f"{PREFIX}pool_{name}", "gauge", ("image",), text) for name, text in POOL_GAUGES.items()),
    *(
        Described(f"{PREFIX}pool_{_POOL_NAMES.get(name, name)}_total", "counter", ("image",), text)
        for name, text in POOL_COUNTERS.items()
    ),
    *(Described(f"{PREFIX}{name}", "gauge", (), text) for name, (_, text) in ENVIRONMENT_GAUGES.items()),
    RECORDINGS,
    RECORDINGS_BYTES,
    RECORDINGS_BEGUN,
    RECORDINGS_CUT,
    FORKED,
    NOT_FORKED,
    AUDIT_FAILING,
    *(Described(f"{PREFIX}audit_{name}_total", "counter", (), text) for name, text in AUDIT_COUNTERS.items()),
)


@dataclass(frozen=True)
class Sources:
    """The parts that are read."""

    sessions: Callable[[], Iterable[Session]]
    pool: Callable[[], Mapping[SandboxSpec, PoolStats]]
    policy: Callable[[], Policy]
    quotas: Quotas
    audit: AuditStats | None  # None: there is no audit log
    backends: Callable[[], Mapping[str, str]] = dict  # their states, where several run
    environments: Callable[[], Statistics] = Statistics
    fork_server: Callable[[], ForkServerStats] = ForkServerStats
    recordings: Callable[[], RecordingStats] = RecordingStats


class SourcesCollector(Collector):
    """Reads the parts, for a registry."""

    def __init__(self, metrics: Metrics, sources: Sources) -> None:
        self._profiles = metrics.profiles
        self._images = metrics.images
        self._tenants = Names()
        self._sources = sources
        # Counts of kinds that the pool no longer keeps: a counter must not fall.
        self._last: dict[SandboxSpec, PoolStats] = {}
        self._retired: dict[str, Counter[str]] = defaultdict(Counter)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield self._sessions()
        yield self._backends()
        yield from self._pool()
        yield self._policy()
        yield from self._quotas()
        statistics = self._sources.environments()
        for name, (field, text) in ENVIRONMENT_GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", text, value=getattr(statistics, field))
        yield from self._fork_server()
        yield from _recordings(self._sources.recordings())
        if self._sources.audit is not None:
            yield from _audit(self._sources.audit)

    def _sessions(self) -> Metric:
        counts = Counter(
            (session.state, self._profiles.label(session.spec.policy.profile), session.backend_name)
            for session in self._sources.sessions()
        )
        family = _gauge(SESSIONS)
        for labels, count in counts.items():
            family.add_metric(labels, count)
        return family

    def _backends(self) -> Metric:
        family = _gauge(BACKENDS)
        for backend, state in self._sources.backends().items():
            family.add_metric((backend, state), 1)
        return family

    def _fork_server(self) -> Iterator[Metric]:
        stats = self._sources.fork_server()
        yield CounterMetricFamily(FORKED.name.removesuffix("_total"), FORKED.meaning, value=stats.made)
        fallbacks = CounterMetricFamily(
            NOT_FORKED.name.removesuffix("_total"), NOT_FORKED.meaning, labels=NOT_FORKED.labels
        )
        for reason, count in stats.fallbacks.items():
            fallbacks.add_metric((reason,), count)
        yield fallbacks

    def _policy(self) -> Metric:
        policy = self._sources.policy()
        family = _gauge(POLICY)
        family.add_metric((policy.version, policy.fingerprint), 1)
        return family

    def _pool(self) -> Iterator[Metric]:
        stats = dict(self._sources.pool())
        for spec in self._last.keys() - stats.keys():
            self._retired[self._images.label(spec.image)].update(_counts(self._last[spec]))
        self._last = stats
        now: dict[str, Counter[str]] = defaultdict(Counter)
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for image, retired in self._retired.items():
            sums[image].update(retired)
        for spec, each in stats.items():
            image = self._images.label(spec.image)
            now[image].update({name: getattr(each, name) for name in POOL_GAUGES})
            sums[image].update(_counts(each))
        for name, text in POOL_GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}pool_{name}", text, labels=("image",))
            for image, values in now.items():
                gauge.add_metric((image,), values[name])
            yield gauge
        for name, text in POOL_COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}pool_{_POOL_NAMES.get(name, name)}", text, labels=("image",))
            for image, values in sums.items():
                counter.add_metric((image,), values[name])
            yield counter

    def _quotas(self) -> Iterator[Metric]:
        policy, quotas = self._sources.policy(), self._sources.quotas
        uses, allowed = _gauge(TENANT_USE), _gauge(TENANT_QUOTA)
        for tenant in quotas.tenants():
            if not policy.lists(tenant) or self._tenants.label(tenant) != tenant:
                continue
            use, quota = quotas.use_of(tenant), policy.quotas_of(tenant)
            for name, used in _USED.items():
                uses.add_metric((tenant, name), getattr(use, used))
                if (most := getattr(quota, name)) is not None:
                    allowed.add_metric((tenant, name), most)
        yield uses
        yield allowed


def _recordings(stats: RecordingStats) -> Iterator[Metric]:
    for described, value in ((RECORDINGS, stats.kept), (RECORDINGS_BYTES, stats.kept_bytes)):
        gauge = _gauge(described)
        gauge.add_metric((), value)
        yield gauge
    for described, counts in ((RECORDINGS_BEGUN, stats.begun), (RECORDINGS_CUT, stats.ended_early)):
        counter = CounterMetricFamily(described.name.removesuffix("_total"), described.meaning, labels=described.labels)
        for label, count in counts.items():
            counter.add_metric((label,), count)
        yield counter


def _audit(stats: AuditStats) -> Iterator[Metric]:
    failing = _gauge(AUDIT_FAILING)
    failing.add_metric((), stats.is_failing)
    yield failing
    for name, text in AUDIT_COUNTERS.items():
        yield CounterMetricFamily(f"{PREFIX}audit_{name}", text, value=getattr(stats, name))


def _gauge(described: Described) -> GaugeMetricFamily:
    return GaugeMetricFamily(described.name, described.meaning, labels=described.labels)


def _counts(stats: PoolStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in POOL_COUNTERS}
