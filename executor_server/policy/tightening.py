"""Holds a running session to a newer policy.

Limits, imports, hosts and language rules become the stricter of both policies, so grants are never widened. Rules about
tools, files, processes, ports, states and the audit log are not grants: the new policy's apply. The sandbox does not
change.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from executor_server.core import (
    LANGUAGE_RULES,
    SANDBOX_LIMIT_NAMES,
    ExecutionLimits,
    Limits,
    SandboxSpec,
    SessionSpec,
    covered_by_both,
    is_denied,
)
from executor_server.policy.backend_choice import BackendChoice
from executor_server.policy.grants import (
    FORK_SERVERS,
    audit_rules,
    execution_max,
    fork_server,
    imports_to_ask,
    max_limits,
    rules_of,
)
from executor_server.policy.network import tightened_network
from executor_server.policy.packages import why_packages_must_go
from executor_server.policy.profile import Profile
from executor_server.policy.violations import number

AnyLimits = TypeVar("AnyLimits", Limits, ExecutionLimits)


def why_sandbox_must_go(
    profile: Profile, choice: BackendChoice, sandbox: SandboxSpec, backend: str, *, own_index: bool
) -> str | None:
    """Returns why a running sandbox, which can't be changed, is no longer allowed; None if it is."""
    if backend not in choice.backends_of(profile):
        return f"the policy does not allow the {backend} backend any more"
    if sandbox.image not in choice.images_of(profile, backend):
        return f"the policy does not allow the image {sandbox.image} any more"
    for name in SANDBOX_LIMIT_NAMES:
        has, ceiling = getattr(sandbox, name), getattr(profile.limits.max, name)
        if has > ceiling:
            return f"its sandbox has {name} {number(has)}, and the policy now allows at most {number(ceiling)}"
    cpus = profile.limits.cpus
    if cpus is not None and (sandbox.cpus is None or sandbox.cpus > cpus):
        return f"its sandbox may use more processors than the {number(cpus)} that the policy now allows"
    had, may_have = sandbox.fork_server.partition(":")[0], fork_server(profile)
    if FORK_SERVERS.index(had) > FORK_SERVERS.index(may_have):
        return f"its sandbox may come from a fork server, and the policy now says {may_have!r}"
    if sandbox.packages is not None:
        return why_packages_must_go(profile.packages, sandbox.packages, own_index=own_index)
    return None


def tightened_to(profile: Profile, spec: SessionSpec) -> SessionSpec:
    """Returns the spec held to the profile; the caller replaces its references to the policy."""
    limits = _at_most(spec.limits, max_limits(profile))
    most = _at_most(spec.execution_max, execution_max(profile, limits))
    denied = tuple(sorted({*spec.denied_imports, *profile.imports.denied}))
    imports = covered_by_both(spec.authorized_imports, (*profile.imports.default, *profile.imports.allowed))
    imports = tuple(pattern for pattern in imports if not is_denied(pattern, denied))
    to_ask = {each.what for each in imports_to_ask("", profile.imports, imports)}  # approved ones are asked for again
    refused = {*spec.refused_language, *profile.language.refused}
    return replace(
        spec,
        limits=limits,
        execution_max=most,
        execution_default=_at_most(spec.execution_default, most),
        authorized_imports=tuple(pattern for pattern in imports if pattern not in to_ask),
        denied_imports=denied,
        workspace_imports=spec.workspace_imports and profile.imports.workspace,
        refused_language=tuple(rule for rule in LANGUAGE_RULES if rule in refused),
        network=tightened_network(profile, spec.network),
        audit=audit_rules(profile),
        **rules_of(profile),
    )


def _at_most(limits: AnyLimits, ceilings: AnyLimits) -> AnyLimits:
    return replace(limits, **{f.name: min(getattr(limits, f.name), getattr(ceilings, f.name)) for f in fields(limits)})
