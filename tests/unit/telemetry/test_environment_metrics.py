"""The making, use and removal of environments is counted, under labels that no client can choose."""

from __future__ import annotations

from prometheus_client import generate_latest

from executor_server.packages import BuildEnd, EnvironmentUse, Lock
from executor_server.telemetry.metrics import Metrics

USE = EnvironmentUse("acme", "local", "base", ("hostile-name",))
LOCK = Lock("numpy==2.5.5\n", "cpython-3.12.4", "x86_64-manylinux_2_39", "0.13.9", ("numpy==2.5.5",))


def lines(metrics: Metrics) -> set[str]:
    """Returns the samples of environments that are not 0."""
    page = generate_latest(metrics.registry).decode().splitlines()
    ours = (line.removeprefix("remote_executor_") for line in page if line.startswith("remote_executor_environment"))
    return {line for line in ours if not line.endswith(" 0.0")}


def test_builds_requests_and_removals_are_counted() -> None:
    metrics = Metrics(version="1", backend="local", methods=())
    environments = metrics.environments
    environments.environment_missed(USE)
    environments.build_started(USE)
    environments.build_ended(BuildEnd(USE, LOCK, "made", took_s=2.0, size_bytes=1000, error=""))
    environments.environment_hit(USE, LOCK.environment_id)
    environments.environment_hit(USE, LOCK.environment_id)
    environments.build_ended(BuildEnd(USE, None, "timed out", took_s=600.0, size_bytes=0, error="it took too long"))
    environments.build_ended(BuildEnd(USE, LOCK, "reused", took_s=0.1, size_bytes=1000, error=""))
    environments.environment_evicted(LOCK.environment_id, 1000, "to make room")
    found = lines(metrics)
    for line in (
        'environment_requests_total{result="miss"} 1.0',
        'environment_requests_total{result="hit"} 2.0',
        'environment_builds_total{outcome="made"} 1.0',
        'environment_builds_total{outcome="timed_out"} 1.0',
        'environment_builds_total{outcome="reused"} 1.0',
        'environment_build_seconds_count{outcome="made"} 1.0',
        'environment_build_seconds_sum{outcome="timed_out"} 600.0',
        "environment_built_bytes_total 1000.0",
        "environments_evicted_total 1.0",
        "environment_evicted_bytes_total 1000.0",
    ):
        assert line in found
    assert not any(word in line for line in found for word in ("hostile", "acme", "env-", "numpy"))
