"""Explanations and differences of policies as text, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

from executor_server.core import NetworkRules, PackagesSpec, SessionSpec
from executor_server.policy.explain.diff import Change
from executor_server.policy.explain.explanation import Explanation, Place, Refusal


def answer_lines(explanation: Explanation, tenant: str, paths: tuple[str, str]) -> Iterator[str]:
    """What is granted, or refused and why. `paths`: those of the policy and of the configuration."""
    who = f"tenant {tenant}, {profile_text(explanation)}"
    if explanation.granted is not None:
        yield f"granted to {who}" + (", after approvals:" if explanation.approvals else "")
        yield from refusal_lines(explanation.approvals, paths)
        yield from _spec_lines(explanation.granted)
        return
    yield f"refused to {who}"
    yield from refusal_lines(explanation.refusals, paths)


def _spec_lines(spec: SessionSpec) -> Iterator[str]:
    granted = asdict(replace(spec, sandbox=replace(spec.sandbox, packages=None)))
    for key in ("sandbox", "limits", "execution_default", "execution_max", "tools", "files", "audit"):
        yield f"  {key}: " + ", ".join(f"{name} {value}" for name, value in granted[key].items() if value is not None)
    yield f"  authorized_imports: {', '.join(spec.authorized_imports) or 'none'}"
    yield f"  denied_imports: {', '.join(spec.denied_imports) or 'none'}"
    yield f"  workspace_imports: {'without being authorized' if spec.workspace_imports else 'when authorized'}"
    yield f"  refused_language: {', '.join(spec.refused_language) or 'none'}"
    yield from _network_lines(spec.network)
    yield f"  packages: {_packages_text(spec.sandbox.packages)}"


def _packages_text(packages: PackagesSpec | None) -> str:
    if packages is None:
        return "those of the image"
    newest = "" if packages.exclude_newer_s is None else f", at least {packages.exclude_newer_s:,.0f} s old"
    which = ", ".join(packages.requirements) or f"all of {packages.lock_file} (sha256 {packages.lock_sha256})"
    return f"{which}{newest}, at most {packages.max_environment_bytes:,} bytes"


def _network_lines(network: NetworkRules) -> Iterator[str]:
    yield f"  network: {', '.join(network.allowed) or 'none'}"
    if not network.any:
        return
    if network.ask:
        yield f"  network.ask: {', '.join(network.ask)}"
    yield f"  denied_network: {', '.join(network.denied) or 'none'}"
    for secret in network.secrets:
        yield f"  network.secrets: {secret.header} for {secret.host}, " + ", ".join(
            f"{name} {' '.join(chosen) or 'all'}"
            for name, chosen in (("methods", secret.methods), ("paths", secret.paths))
        )
    listed = {name: value for name, value in asdict(network).items() if not isinstance(value, tuple)}
    yield "  network: " + ", ".join(f"{name} {value}" for name, value in listed.items())


def profile_text(explanation: Explanation) -> str:
    if not explanation.lineage:
        return "which has no profile"
    first, *others = explanation.lineage
    return f"profile {first}" + "".join(f", which extends {name}" for name in others)


def refusal_lines(refusals: Iterable[Refusal], paths: tuple[str, str]) -> Iterator[str]:
    """Each refusal with the line behind it. `paths`: those of the policy and of the configuration."""
    for refusal in refusals:
        kind = f" ({refusal.violation.kind.value})" if refusal.violation is not None else ""
        yield f"  {refusal.message}{kind}"
        yield f"    {_place_text(refusal.place, paths)}"


def _place_text(place: Place, paths: tuple[str, str]) -> str:
    if place.line is None:
        return place.advice
    return f"{paths[place.is_in_config]}:{place.line.number}: {place.line.text}    # {place.advice}"


def change_text(change: Change) -> str:
    """One difference of two policies."""
    direction = f"    {change.direction}" if change.direction else ""
    return f"{change.key}: {change.old} → {change.new}{direction}"
