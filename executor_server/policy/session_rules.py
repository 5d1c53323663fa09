"""Checks requests in an approved session: pure decisions, by its spec alone.

So they also hold for a session whose policy was replaced. Each refusal is a PolicyViolation with every violation, as in
decide.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from executor_server.core import (
    ExecutionLimits,
    PolicyViolation,
    SessionSpec,
    ToolSpec,
    Violation,
    ViolationKind,
)
from executor_server.guest.egress.host_names import Target
from executor_server.guest.wire.tools import is_named
from executor_server.policy.approvals import ApprovalKind, Wanted
from executor_server.policy.requested import LIMIT_NAMES, RequestedLimits, check_limits, invalid
from executor_server.policy.violations import above_ceiling, not_allowed, rule_of

_EXECUTION_LIMIT_NAMES = tuple(each.name for each in fields(ExecutionLimits))
_SESSION_LIMIT_NAMES = tuple(name for name in LIMIT_NAMES if name not in _EXECUTION_LIMIT_NAMES)


def execution_limits(spec: SessionSpec, requested: RequestedLimits) -> ExecutionLimits:
    """Returns the limits of one execution. Raises InvalidRequest, PolicyViolation."""
    check_limits(requested)
    for name in _SESSION_LIMIT_NAMES:
        if getattr(requested, name) is not None:
            allowed = ", ".join(_EXECUTION_LIMIT_NAMES)
            raise invalid(f"limits.{name}", f"can't be set for one execution; {allowed} can")
    chosen, violations = {}, []
    for name in _EXECUTION_LIMIT_NAMES:
        value, ceiling = getattr(requested, name), getattr(spec.execution_max, name)
        chosen[name] = getattr(spec.execution_default, name) if value is None else value
        if chosen[name] > ceiling:
            violations.append(_above_execution_max(spec, name, value, ceiling))
    _refuse(violations)
    return ExecutionLimits(**chosen)


def check_tools(spec: SessionSpec, tools: Sequence[ToolSpec]) -> None:
    """Raises PolicyViolation for tools that the session may not have."""
    violations = []
    profile, placements, allowed = spec.policy.profile, spec.tools.placements, spec.tools.allowed
    for index, tool in enumerate(tools):
        if tool.placement not in placements:
            rule = rule_of(profile, "tools.placements")
            violations.append(not_allowed(f"tools[{index}]", tool.placement, placements, rule, "no tools"))
        if not any(is_named(pattern, tool.name) for pattern in (*allowed, *spec.tools.ask)):
            rule = rule_of(profile, "tools.allowed")
            violations.append(not_allowed(f"tools[{index}].name", tool.name, allowed, rule, "no tools"))
        elif tool.placement == "sandbox" and tool_to_ask(spec, tool.name) is not None:
            # Its calls don't pass the daemon.
            rule = rule_of(profile, "tools.ask")
            violations.append(not_allowed(f"tools[{index}]", tool.placement, ["host"], rule))
    _refuse(violations)


def tool_to_ask(spec: SessionSpec, name: str) -> Wanted | None:
    """Returns what a call of this tool needs an approval for; None when it needs none."""
    tools = spec.tools
    if not any(is_named(pattern, name) for pattern in tools.ask):
        return None
    if any(is_named(pattern, name) for pattern in tools.allowed if pattern != "*"):
        return None
    return Wanted(ApprovalKind.TOOL, name, rule_of(spec.policy.profile, "tools.ask"))


def host_to_ask(spec: SessionSpec, host: str, port: int) -> Wanted:
    """Returns what a connection to a host of `network.ask` needs an approval for."""
    return Wanted(ApprovalKind.HOST, str(Target(host, port)), rule_of(spec.policy.profile, "network.ask"))


def check_file_put(spec: SessionSpec, size_bytes: int, puts_so_far: int) -> None:
    """Raises PolicyViolation for a file, or an archive, that may not be put."""
    files = spec.files
    _check_file(spec, "put", (size_bytes, files.max_put_bytes), (puts_so_far, files.max_puts))


def check_file_get(spec: SessionSpec, size_bytes: int, gets_so_far: int) -> None:
    """Raises PolicyViolation for a file, or an archive, that may not be got. 0 bytes: its size isn't known yet."""
    files = spec.files
    _check_file(spec, "get", (size_bytes, files.max_get_bytes), (gets_so_far, files.max_gets))


def check_state_export(spec: SessionSpec) -> None:
    """Raises PolicyViolation when the session's state may not be exported."""
    _check_state(spec, "export", allowed=spec.state.export)


def check_state_restore(spec: SessionSpec) -> None:
    """Raises PolicyViolation when the session may not begin with a state."""
    _check_state(spec, "restore", allowed=spec.state.restore)


def check_savepoint(spec: SessionSpec) -> None:
    """Raises PolicyViolation when the session may have no savepoints."""
    if not spec.state.savepoints:
        _refuse([_denied(spec, "savepoint", "a savepoint", "state.savepoints")])


def check_branch(spec: SessionSpec) -> None:
    """Raises PolicyViolation when the session may try no code."""
    if not spec.state.branches:
        _refuse([_denied(spec, "branch", "a branch", "state.branches")])


def check_process(spec: SessionSpec, *, pty: bool) -> None:
    """Raises PolicyViolation for a process that may not be started."""
    rules = spec.processes
    if not rules.allowed:
        _refuse([_denied(spec, "argv", "a process", "processes.allowed")])
    if pty and not rules.pty:
        _refuse([_denied(spec, "pty", "a terminal", "processes.pty")])


def check_port(spec: SessionSpec, port: int) -> None:
    """Raises PolicyViolation for a port that may not be forwarded."""
    if not spec.ports.allows(port):
        rule = rule_of(spec.policy.profile, "ports.allowed")
        _refuse([not_allowed("port", str(port), spec.ports.written, rule, "no ports")])


def _denied(spec: SessionSpec, field: str, requested: str, key: str) -> Violation:
    return Violation(field, ViolationKind.DENIED, requested, "nothing", rule_of(spec.policy.profile, key))


def _check_state(spec: SessionSpec, verb: str, *, allowed: bool) -> None:
    if not allowed:
        rule = rule_of(spec.policy.profile, f"state.{verb}")
        _refuse([Violation("state", ViolationKind.DENIED, verb, "nothing", rule)])


def _above_execution_max(spec: SessionSpec, name: str, value: float, ceiling: float) -> Violation:
    """Names the rule of the lower ceiling: the profile's for one execution, or what the session itself was granted."""
    if ceiling < getattr(spec.limits, name):
        rule = rule_of(spec.policy.profile, f"limits.execution_max.{name}")
        return above_ceiling(f"limits.{name}", value, ceiling, rule)
    rule = rule_of(spec.policy.profile, f"limits.default.{name}")
    return above_ceiling(f"limits.{name}", value, ceiling, rule, ", as its session")


def _check_file(spec: SessionSpec, verb: str, size: tuple[int, int], count: tuple[int, int | None]) -> None:
    violations = []
    size_bytes, max_bytes = size
    if size_bytes > max_bytes:
        rule = rule_of(spec.policy.profile, f"files.max_{verb}_bytes")
        violations.append(above_ceiling("size_bytes", size_bytes, max_bytes, rule))
    so_far, most = count
    if most is not None and so_far >= most:
        rule = rule_of(spec.policy.profile, f"files.max_{verb}s")
        violations.append(above_ceiling("path", so_far + 1, most, rule))
    _refuse(violations)


def _refuse(violations: Sequence[Violation]) -> None:
    if violations:
        raise PolicyViolation(tuple(violations))
