"""The parts of a session's spec that follow from its profile and its request, and the violations of a request.

Pure functions. Each violation names the key of the policy file behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from executor_server.core import (
    AuditRules,
    ExecutionLimits,
    FileRules,
    Limits,
    PolicyRef,
    PortRules,
    ProcessRules,
    RecordRules,
    StateRules,
    ToolRules,
    Violation,
    is_covered,
    is_denied,
)
from executor_server.policy.approvals import ApprovalKind, Wanted
from executor_server.policy.forms import value_of
from executor_server.policy.network import NetworkSummary
from executor_server.policy.packages import PackagesSummary, needs_approval
from executor_server.policy.packages_table import PackagesTable
from executor_server.policy.processes_table import port_range
from executor_server.policy.profile import ImportsTable, Profile, QuotasTable
from executor_server.policy.requested import RequestedLimits
from executor_server.policy.requirement import Requirement
from executor_server.policy.violations import above_ceiling, denied_import, not_allowed, rule_of

_LIMIT_NAMES = tuple(f.name for f in fields(Limits))
_EXECUTION_LIMIT_NAMES = tuple(f.name for f in fields(ExecutionLimits))


@dataclass(frozen=True)
class PolicySummary:
    """The answer to GetPolicy: everything that a client may ask for."""

    policy: PolicyRef
    default_limits: Limits
    max_limits: Limits
    execution_default_limits: ExecutionLimits
    execution_max_limits: ExecutionLimits
    default_imports: tuple[str, ...]
    allowed_imports: tuple[str, ...]
    denied_imports: tuple[str, ...]
    ask_imports: tuple[str, ...]
    workspace_imports: bool
    refused_language: tuple[str, ...]
    images: tuple[str, ...]
    # The backends that run its sessions, the preferred one first.
    backends: tuple[str, ...]
    tools: ToolRules
    files: FileRules
    record: RecordRules
    network: NetworkSummary
    packages: PackagesSummary
    quotas: QuotasTable
    state: StateRules
    processes: ProcessRules
    ports: PortRules
    approval_wait_s: float


def session_limits(profile: Profile, requested: RequestedLimits) -> Limits:
    """The requested limits, and the profile's defaults for the others."""
    asked = {name: getattr(requested, name) for name in _LIMIT_NAMES}
    default = profile.limits.default
    return Limits(**{name: getattr(default, name) if value is None else value for name, value in asked.items()})


def max_limits(profile: Profile) -> Limits:
    return value_of(Limits, profile.limits.max)


def execution_max(profile: Profile, limits: Limits) -> ExecutionLimits:
    """The session's own limits, or lower where the profile has a ceiling for one execution."""
    ceilings = profile.limits.execution_max
    return ExecutionLimits(
        **{name: _least(getattr(limits, name), getattr(ceilings, name)) for name in _EXECUTION_LIMIT_NAMES}
    )


def execution_default(profile: Profile, requested: RequestedLimits, limits: Limits) -> ExecutionLimits:
    """The limits of an execution that asks for none: those requested for its session, else the profile's."""
    ceilings, defaults = execution_max(profile, limits), profile.limits.execution_default
    chosen = {}
    for name in _EXECUTION_LIMIT_NAMES:
        own = None if getattr(requested, name) is not None else getattr(defaults, name)
        chosen[name] = _least(getattr(ceilings, name), own)
    return ExecutionLimits(**chosen)


def _least(value: Any, other: Any) -> Any:
    """The smaller of two numbers of one kind; the first when there is no other."""
    return value if other is None else min(value, other)


def authorized_imports(profile: Profile, asked: Sequence[str]) -> tuple[str, ...]:
    """The defaults and the requested patterns, without those that are denied as a whole. The guest would refuse these
    anyway, but clients should not see them as authorized."""
    patterns = {*profile.imports.default, *asked}
    return tuple(sorted(pattern for pattern in patterns if not is_denied(pattern, profile.imports.denied)))


def rules_of(profile: Profile) -> dict[str, Any]:
    """The rules that a profile alone decides, by their names in a SessionSpec."""
    processes, ports, is_strict = profile.processes, profile.ports, profile.language.preset == "strict"
    allowed_ports = (() if is_strict else ("1-65535",)) if ports.allowed is None else ports.allowed
    return {
        "tools": value_of(ToolRules, profile.tools),
        "approval_wait_s": profile.approvals.wait_s,
        "files": value_of(FileRules, profile.files),
        "record": value_of(RecordRules, profile.record),
        "state": value_of(StateRules, profile.state),
        "processes": value_of(
            ProcessRules, processes, allowed=not is_strict if processes.allowed is None else processes.allowed
        ),
        "ports": value_of(PortRules, ports, allowed=tuple(map(port_range, allowed_ports))),
    }


FORK_SERVERS = ("off", "tenant", "shared")
"""Values of `sandbox.fork_server`, the strictest first."""


def fork_server(profile: Profile) -> str:
    """Returns one of FORK_SERVERS. A strict profile gives each sandbox an address layout and a hash seed of its own."""
    return profile.sandbox.fork_server or ("off" if profile.language.preset == "strict" else "shared")


VIEWS = ("none", "metadata", "content")
"""Values of `audit.view`, the strictest first."""


def audit_rules(profile: Profile) -> AuditRules:
    return value_of(AuditRules, profile.audit)


# ---------------------------------------------------------------------------------------------------------------------
# Violations. `name` is the profile's.


def limit_violations(name: str, profile: Profile, limits: Limits) -> Iterator[Violation]:
    for each in _LIMIT_NAMES:
        value, ceiling = getattr(limits, each), getattr(profile.limits.max, each)
        if value > ceiling:
            yield above_ceiling(f"limits.{each}", value, ceiling, rule_of(name, f"limits.max.{each}"))


def import_violations(name: str, profile: Profile, asked: Sequence[str], denied: Sequence[str]) -> Iterator[Violation]:
    imports = profile.imports
    for pattern in asked:
        if is_denied(pattern, denied):
            yield denied_import("authorized_imports", pattern, denied, name)
        elif not is_covered(pattern, (*imports.default, *imports.allowed, *imports.ask)):
            rule = rule_of(name, "imports.allowed")
            nothing = "nothing more than the defaults"
            yield not_allowed("authorized_imports", pattern, (*imports.allowed, *imports.ask), rule, nothing)


# ---------------------------------------------------------------------------------------------------------------------
# Approvals that a request without violations needs


def imports_to_ask(name: str, imports: ImportsTable, asked: Sequence[str]) -> Iterator[Wanted]:
    """Yields the patterns that stand for a module of `imports.ask`, unless the profile grants them by name."""
    if not imports.ask:
        return
    named = (*imports.default, *(pattern for pattern in imports.allowed if pattern != "*"))
    for pattern in dict.fromkeys(asked):
        overlaps = is_covered(pattern, imports.ask) or any(is_covered(each, (pattern,)) for each in imports.ask)
        if overlaps and not is_covered(pattern, named):
            yield Wanted(ApprovalKind.IMPORT, pattern, rule_of(name, "imports.ask"))


def packages_to_ask(name: str, table: PackagesTable, asked: Sequence[Requirement]) -> Iterator[Wanted]:
    for each in asked:
        if table.ask and needs_approval(table, each):
            yield Wanted(ApprovalKind.PACKAGE, each.text, rule_of(name, "packages.ask"))
