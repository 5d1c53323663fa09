"""Approved specs for tests of what is below the policy."""

from __future__ import annotations

from typing import Any

from executor_server.core.model import ExecutionLimits, Limits, PolicyRef, SandboxSpec, SessionSpec
from executor_server.policy.requested import RequestedLimits

LIMITS = Limits(1.0, 1.0, 1000, 2**28, 16, 1000, 2**24, 600.0, 3600.0, 10**9)
EXECUTION_LIMITS = RequestedLimits(wall_time_s=1.0, cpu_time_s=1.0, operations=1000, output_bytes=1000)
POLICY = PolicyRef("default", "1", "0" * 16)


def session_spec(
    sandbox: SandboxSpec, limits: Limits = LIMITS, imports: tuple[str, ...] = (), prelude: str = "", **more: Any
) -> SessionSpec:
    """A session whose executions may have what it has."""
    most = ExecutionLimits(limits.wall_time_s, limits.cpu_time_s, limits.operations, limits.output_bytes)
    return SessionSpec(sandbox, limits, most, most, imports, prelude, POLICY, **more)
