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

_Sample = tuple[tuple[str, ...], float]


def _gauge(name: str, meaning: str, *labels: str) -> Described:
    return Described(f"{PREFIX}{name}", "gauge", labels, meaning)


def _counter(name: str, meaning: str, *labels: str) -> Described:
    return Described(f"{PREFIX}{name}_total", "counter", labels, meaning)


SESSIONS = _gauge("sessions", "Sessions; `state`: `idle`, `busy`, `paused` or `lost`.", "state", "profile", "backend")
BACKENDS = _gauge(
    "backend_state",
    "If several backends run: 1 for the state of each, which is `up`, `full` or `down`.",
    "backend",
    "state",
)
POLICY = _gauge("policy_info", "1; its labels say which policy is in force.", "version", "fingerprint")
TENANT_USE = _gauge(
    "tenant_use", "Current and past use of a tenant that the policy lists, by quota.", "tenant", "quota"
)
TENANT_QUOTA = _gauge("tenant_quota", "Quotas of a tenant that the policy lists.", "tenant", "quota")
# By the fields of PoolStats.
POOL_GAUGES = {
    "size": _gauge("pool_size", "Warm sandboxes that the pool should have.", "image"),
    "depth": _gauge("pool_depth", "Warm sandboxes in the pool.", "image"),
    "making": _gauge("pool_making", "Sandboxes being created for the pool.", "image"),
}
POOL_COUNTERS = {
    "hits": _counter("pool_hits", "Sessions that got a warm sandbox.", "image"),
    "misses": _counter("pool_misses", "Sessions of a pooled kind that needed a new sandbox.", "image"),
    "made": _counter("pool_made", "Sandboxes created for the pool.", "image"),
    "failed": _counter("pool_failed", "Failed attempts to create a sandbox for the pool.", "image"),
    "lost": _counter("pool_lost", "Warm sandboxes that died.", "image"),
    "outdated": _counter(
        "pool_outdated", "Warm sandboxes discarded: image, guest or policy changed, or a better one was ready.", "image"
    ),
    "closed": _counter("pool_closed", "Warm sandboxes that ended with the pool.", "image"),
    "ready_count": _counter("pool_ready", "Sandboxes that became ready, for the pool or for a session.", "image"),
    "ready_time_sum_s": _counter("pool_ready_seconds", "Seconds that they took to become ready.", "image"),
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
# By the fields of packages.Statistics.
ENVIRONMENTS = {
    "environments": _gauge("environments", "Package environments."),
    "in_use": _gauge("environments_in_use", "Package environments in use."),
    "building": _gauge("environments_building", "Package environments being built."),
    "queued": _gauge("environments_queued", "Package environments waiting to be built."),
    "total_bytes": _gauge("environments_disk_bytes", "Bytes on disk of environments, cache and builds."),
}
RECORDINGS = _gauge("recordings", "Recordings of sessions that are kept.")
RECORDINGS_BYTES = _gauge("recordings_disk_bytes", "Bytes on disk of recordings.")
RECORDINGS_BEGUN = _counter("recordings_begun", "Sessions whose recording began; `mode`: as in the policy.", "mode")
RECORDINGS_CUT = _counter(
    "recordings_cut",
    "Recordings that ended before their sessions; `reason`: `disk` (it can't be written), `slow` (the disk was slower"
    " than the session), `size`, `policy` or `internal`.",
    "reason",
)
FORKED = _counter("fork_server_sandboxes", "Sandboxes forked by the local backend's fork server.")
NOT_FORKED = _counter(
    "fork_server_fallbacks",
    "Sandboxes made by bubblewrap although the policy allows the fork server; `reason`: `rare` (the pool keeps"
    " none of this kind), `starting`, `failing`, `failed`, `silent`, `unverified` or `unsupported`.",
    "reason",
)
# By the attributes of AuditStats.
AUDIT = {
    "is_failing": _gauge("audit_failing", "1 while the audit log can't be written, else 0."),
    "records": _counter("audit_records", "Records written to the audit log."),
    "bytes": _counter("audit_bytes", "Bytes written to the audit log."),
    "lost_records": _counter("audit_lost_records", "Records that could not be written."),
    "failures": _counter("audit_failures", "Times that writing the audit log began to fail."),
    "flushes": _counter("audit_flushes", "Times that the audit log was synced to disk."),
}

DESCRIBED = (
    SESSIONS,
    BACKENDS,
    POLICY,
    TENANT_USE,
    TENANT_QUOTA,
    *POOL_GAUGES.values(),
    *POOL_COUNTERS.values(),
    *ENVIRONMENTS.values(),
    RECORDINGS,
    RECORDINGS_BYTES,
    RECORDINGS_BEGUN,
    RECORDINGS_CUT,
    FORKED,
    NOT_FORKED,
    *AUDIT.values(),
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
        sources, policy = self._sources, self._sources.policy()
        yield _family(SESSIONS, self._sessions().items())
        yield _family(BACKENDS, ((labels, 1) for labels in sources.backends().items()))
        yield from self._pool()
        yield _family(POLICY, [((policy.version, policy.fingerprint), 1)])
        yield from self._quotas(policy)
        yield from _fields(ENVIRONMENTS, sources.environments())
        recordings, forks = sources.recordings(), sources.fork_server()
        yield _family(RECORDINGS, [((), recordings.kept)])
        yield _family(RECORDINGS_BYTES, [((), recordings.kept_bytes)])
        yield _family(RECORDINGS_BEGUN, _by_one_label(recordings.begun))
        yield _family(RECORDINGS_CUT, _by_one_label(recordings.ended_early))
        yield _family(FORKED, [((), forks.made)])
        yield _family(NOT_FORKED, _by_one_label(forks.fallbacks))
        if sources.audit is not None:
            yield from _fields(AUDIT, sources.audit)

    def _sessions(self) -> Counter[tuple[str, ...]]:
        return Counter(
            (session.state, self._profiles.label(session.spec.policy.profile), session.backend_name)
            for session in self._sources.sessions()
        )

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
        for described, values in ((POOL_GAUGES, now), (POOL_COUNTERS, sums)):
            for name, each_described in described.items():
                yield _family(each_described, [((image,), counts[name]) for image, counts in values.items()])

    def _quotas(self, policy: Policy) -> Iterator[Metric]:
        quotas = self._sources.quotas
        uses: list[_Sample] = []
        allowed: list[_Sample] = []
        for tenant in quotas.tenants():
            if not policy.lists(tenant) or self._tenants.label(tenant) != tenant:
                continue
            use, quota = quotas.use_of(tenant), policy.quotas_of(tenant)
            for name, used in _USED.items():
                uses.append(((tenant, name), getattr(use, used)))
                if (most := getattr(quota, name)) is not None:
                    allowed.append(((tenant, name), most))
        yield _family(TENANT_USE, uses)
        yield _family(TENANT_QUOTA, allowed)


def _family(described: Described, samples: Iterable[_Sample]) -> Metric:
    kind = GaugeMetricFamily if described.kind == "gauge" else CounterMetricFamily
    family = kind(described.name.removesuffix("_total"), described.meaning, labels=described.labels)
    for labels, number in samples:
        family.add_metric(labels, number)
    return family


def _fields(described: Mapping[str, Described], stats: object) -> Iterator[Metric]:
    """Returns a metric without labels for each of these fields."""
    return (_family(each, [((), getattr(stats, name))]) for name, each in described.items())


def _by_one_label(counts: Mapping[str, int]) -> Iterator[_Sample]:
    return (((label,), count) for label, count in counts.items())


def _counts(stats: PoolStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in POOL_COUNTERS}
