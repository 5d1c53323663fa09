"""Formats a policy for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from executor_client._core.terminal import aligned
from executor_client.results import Limits, NetworkRules, NetworkSecret, PackagesPolicy, Policy, StateRules


def policy_lines(policy: Policy) -> list[str]:
    """Returns a policy as two tables, one line for each row, without terminal control characters."""
    return [*aligned(list(_rules(policy))), "", *aligned(list(_limits(policy)))]


def _rules(policy: Policy) -> Iterator[tuple[str, str]]:
    ref, files = policy.policy, policy.files
    yield "profile", f"{ref.profile}, version {ref.version}, fingerprint {ref.fingerprint}"
    yield "backend", ", else ".join(policy.backends) or policy.backend or "none"
    yield "images", _listed(policy.images)
    yield from _network(policy.network)
    yield from _packages(policy.packages)
    yield "imports", _listed(policy.default_imports)
    yield "  on request", _listed(policy.allowed_imports)
    yield "  never", _listed(policy.denied_imports)
    yield from _asked(policy.ask_imports)
    yield "  workspace", "its modules too" if policy.workspace_imports else "its modules when authorized"
    yield "refused in code", _listed(policy.refused_language)
    yield "tools", f"{_listed(policy.allowed_tools)}; run in: {_listed(policy.tool_placements)}"
    yield from _asked(policy.ask_tools)
    yield "files put", _transfers(files.max_put_bytes, files.max_puts)
    yield "files got", _transfers(files.max_get_bytes, files.max_gets)
    yield "state", _state(policy.state)
    if policy.record not in ("", "none"):
        yield "recorded", f"by the daemon: {policy.record}"
    for name, quota in dataclasses.asdict(policy.quotas).items():
        if quota is not None:
            yield f"quota {name}", _number(quota)


def _network(rules: NetworkRules) -> Iterator[tuple[str, str]]:
    if not rules:
        yield "network", "none"
        return
    yield "network", _listed(rules.default)
    yield "  on request", _listed(rules.allowed)
    yield "  never", _listed(rules.denied)
    yield from _asked(rules.ask)
    for secret in rules.secrets:
        yield "  header", _secret(secret)
    yield (
        "  connections",
        (
            f"{rules.max_connections:,} at a time, {rules.max_new_connections_per_minute:,} new ones in a minute, "
            f"{_number(rules.max_connection_s)} s each"
        ),
    )
    yield "  bytes", f"{rules.max_sent_bytes:,} sent, {rules.max_received_bytes:,} received in a session"


def _asked(patterns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if patterns:
        yield "  after approval", _listed(patterns)


def _secret(secret: NetworkSecret) -> str:
    asked = " ".join(part for part in (", ".join(secret.methods), ", ".join(secret.paths)) if part)
    return f"{secret.header} is set by the daemon for {secret.host}" + (f" ({asked})" if asked else "")


def _packages(packages: PackagesPolicy) -> Iterator[tuple[str, str]]:
    if not packages:
        yield "packages", "those of the image"
        return
    yield "packages", f"those of the image; on request: {_listed(packages.locked or packages.allowed)}"
    yield from _asked(packages.ask)
    if packages.locked:
        yield "  locked", "requesting one installs all of them"
    if packages.auto:
        yield "  auto", "for authorized modules that are missing"
    if packages.exclude_newer_s is not None:
        yield "  at least", f"{_number(packages.exclude_newer_s)} s old"
    most = f"{packages.max_requirements:,} in a session, {packages.max_environment_bytes:,} bytes"
    yield "  at most", most


def _limits(policy: Policy) -> Iterator[tuple[str, ...]]:
    yield "LIMIT", "SESSION", "AT MOST", "EXECUTION", "AT MOST"
    tables = (policy.default_limits, policy.max_limits, policy.execution_default_limits, policy.execution_max_limits)
    for field in dataclasses.fields(Limits):
        yield field.name, *(_number(getattr(table, field.name)) for table in tables)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _transfers(size_bytes: int, count: int | None) -> str:
    return f"{size_bytes:,} bytes each" + ("" if count is None else f", {count:,} in a session")


def _state(rules: StateRules) -> str:
    allowed = [verb for verb, may in (("exported", rules.export), ("restored", rules.restore)) if may]
    savepoints = f"; {rules.savepoints or 'no'} savepoints, {rules.branches or 'no'} branches"
    if not allowed:
        return "neither exported nor restored" + savepoints
    foreign = ", foreign ones too" * rules.allow_foreign
    return f"{' and '.join(allowed)}, {rules.max_bytes:,} bytes each{foreign}{savepoints}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.15g}"
