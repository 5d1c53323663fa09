"""The policy: what a client may have. Pure decisions, made in one place.

`Policy.decide` turns a request into an approved SessionSpec or refuses it with every violation listed; it never grants
less than was asked for in silence, and never more. Nothing else in the daemon makes a SandboxSpec, so a backend can't
be handed anything that was not decided here.

A refusal is a PolicyViolation, each of whose violations names the key of the policy file behind it. What means nothing
is refused before, as an InvalidRequest (requested.py). What a session may do once it is there is in session_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from executor_server.backend_choice import BackendChoice
from executor_server.config import PoolSection
from executor_server.errors import ExecutorError, PolicyViolation, Violation, ViolationKind
from executor_server.import_patterns import covered_by_both, is_covered, is_denied
from executor_server.model import (
    LANGUAGE_RULES,
    AuditRules,
    ExecutionLimits,
    FileRules,
    Limits,
    PolicyRef,
    Principal,
    SandboxSpec,
    SessionSpec,
    StateRules,
    ToolRules,
)
from executor_server.policy_file import PolicyFile, Profile, QuotasTable
from executor_server.refusals import above_ceiling, listed, not_allowed, number, rule_of, shortened
from executor_server.requested import RequestedLimits, RequestedSession, check_imports, check_request, invalid
from executor_server.settings import ConfigError


@dataclass(frozen=True)
class WarmSandboxes:
    """So many sandboxes of one spec, to be kept ready."""

    spec: SandboxSpec
    size: int


@dataclass(frozen=True)
class PolicySummary:
    """What a client may ask for, as GetPolicy tells it."""

    policy: PolicyRef
    default_limits: Limits
    max_limits: Limits
    execution_default: ExecutionLimits
    execution_max: ExecutionLimits
    default_imports: tuple[str, ...]
    allowed_imports: tuple[str, ...]
    denied_imports: tuple[str, ...]
    refused_language: tuple[str, ...]
    images: tuple[str, ...]
    backends: tuple[str, ...]  # that run its sessions, the preferred one first
    tools: ToolRules
    files: FileRules
    network: str
    quotas: QuotasTable
    state: StateRules


# Half of what a guest takes: a session may be given more from time to time, and never so much that its guest refuses.
MAX_AUTHORIZED_IMPORTS = 1024

_LIMIT_NAMES = tuple(f.name for f in fields(Limits))
_EXECUTION_LIMIT_NAMES = tuple(f.name for f in fields(ExecutionLimits))
_SANDBOX_LIMIT_NAMES = ("memory_bytes", "processes", "disk_bytes", "max_files")

# A token outlives its tenant's profile, and must not give more calls than one that has a profile.
NO_PROFILE_QUOTAS = QuotasTable(calls=4, calls_per_second=10)


class Policy:
    """One version of the policy file, for one daemon: its backend with its images, and those that run beside it."""

    def __init__(
        self,
        file: PolicyFile,
        *,
        images: Sequence[str],
        backend: str,
        orphan_time_s: float,
        other_images: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`other_images`: names of images, by the backend that runs beside the daemon's own."""
        self._file = file
        self._choice = BackendChoice({backend: images, **(other_images or {})})
        self._orphan_time_s = orphan_time_s
        self.version = file.version
        self.fingerprint = file.fingerprint
        self._profile_fingerprints = {name: profile.fingerprint for name, profile in file.profiles.items()}
        self._certificates = {text: name for name, tenant in file.tenants.items() for text in tenant.certificates}
        self._uids = {uid: name for name, tenant in file.tenants.items() for uid in tenant.uids}

    # -- who may have what

    def decide(self, principal: Principal, request: RequestedSession) -> SessionSpec:
        """The approved session. Raises InvalidRequest or PolicyViolation."""
        check_request(request)
        return self._decide(self._profile_of(principal.tenant), request)

    def authorize_imports(self, principal: Principal, spec: SessionSpec, imports: Sequence[str]) -> SessionSpec:
        """The spec of a session that runs, with more modules authorized. Its sandbox stays as it is.

        A module that was denied when the session was made stays denied in it. Raises InvalidRequest, PolicyViolation.
        """
        authorized = tuple(sorted({*spec.authorized_imports, *imports}))
        check_imports(imports)
        if len(authorized) > MAX_AUTHORIZED_IMPORTS:
            problem = f"would make it more than {MAX_AUTHORIZED_IMPORTS:,} patterns in one session"
            raise invalid("authorized_imports", problem)
        name, profile = self._profile_of(principal.tenant)
        denied = tuple(sorted({*spec.denied_imports, *profile.imports.denied}))
        violations = tuple(_import_violations(name, profile, imports, denied))
        if violations:
            raise PolicyViolation(violations)
        return replace(spec, authorized_imports=authorized, denied_imports=denied)

    def tenant_of_certificate(self, names: Sequence[str], fingerprint: str) -> tuple[str, bool] | None:
        """Whose client certificate that is, and whether it may make admin calls.

        Nobody's where its names are those of several tenants: none of them can be meant.
        """
        owners = {self._certificates[text] for text in (*names, f"sha256:{fingerprint}") if text in self._certificates}
        if len(owners) != 1:
            return None
        (tenant,) = owners
        return tenant, self._file.tenants[tenant].admin

    def tenant_of_uid(self, uid: int) -> tuple[str, bool] | None:
        """Who a user of this host is, and whether it may make admin calls."""
        tenant = self._uids.get(uid)
        return None if tenant is None else (tenant, self._file.tenants[tenant].admin)

    def quotas_of(self, tenant: str) -> QuotasTable:
        """What a tenant may use. One whom the policy does not know may only come to be told so."""
        name = self.profile_name(tenant)
        return self._file.profiles[name].quotas if name is not None else NO_PROFILE_QUOTAS

    @property
    def tenants(self) -> Set[str]:
        """Those that the file names."""
        return self._file.tenants.keys()

    def lists(self, tenant: str) -> bool:
        """Whether the file names this tenant, so that there is a bounded number of such."""
        return tenant in self._file.tenants

    def profile_name(self, tenant: str) -> str | None:
        """The profile that holds for a tenant; None when the policy refuses it."""
        known = self._file.tenants.get(tenant)
        return known.profile if known is not None and known.profile is not None else self._file.default

    def describe(self, principal: Principal) -> PolicySummary:
        """Raises PolicyViolation when there is no profile for who asks."""
        name, profile = self._profile_of(principal.tenant)
        limits = _limits(profile, RequestedLimits())
        return PolicySummary(
            policy=self._ref(name),
            default_limits=limits,
            max_limits=Limits(**profile.limits.max.model_dump()),
            execution_default=_execution_default(profile, RequestedLimits(), limits),
            execution_max=_execution_max(profile, Limits(**profile.limits.max.model_dump())),
            default_imports=_authorized(profile, ()),
            allowed_imports=profile.imports.allowed,
            denied_imports=profile.imports.denied,
            refused_language=profile.language.refused,
            images=self._choice.images_of(profile),
            backends=self._choice.backends_of(profile),
            tools=_tool_rules(profile),
            files=_file_rules(profile),
            network="none",
            quotas=profile.quotas,
            state=_state_rules(profile),
        )

    def warm_sandboxes(self, pool: PoolSection) -> tuple[WarmSandboxes, ...]:
        """The sandboxes to have ready: those named, else those of sessions that ask for nothing special.

        Raises ConfigError for those that no session could get.
        """
        if not pool.warm:
            name = self._file.default
            if name is None or not self._can_serve(self._file.profiles[name]):
                return ()
            spec = self._decide((name, self._file.profiles[name]), RequestedSession())
            return (WarmSandboxes(spec.sandbox, pool.size),)
        warm, problems = [], []
        for index, entry in enumerate(pool.warm):
            limits = RequestedLimits(
                memory_bytes=entry.memory_bytes,
                processes=entry.processes,
                disk_bytes=entry.disk_bytes,
                max_files=entry.max_files,
            )
            request = RequestedSession(image=entry.image, limits=limits)
            name = entry.profile or self._file.default
            if name not in self._file.profiles:
                problems.append(f"pool.warm.{index}.profile: there is no such profile (it is {name!r})")
                continue
            try:
                check_request(request)
                spec = self._decide((name, self._file.profiles[name]), request)
                warm.append(WarmSandboxes(spec.sandbox, entry.size))
            except ExecutorError as refusal:
                problems.append(f"pool.warm.{index}: {refusal.message} (it is {entry.image!r})")
        if problems:
            raise ConfigError(problems)
        return tuple(warm)

    # -- when it takes the place of another

    def on_reload(self, principal: Principal, spec: SessionSpec) -> Literal["keep", "tighten", "end"]:
        """What becomes of a session that runs when this policy comes into force. One without a profile ends.

        One whose profile says what it said before is kept, whatever else of the policy has changed.
        """
        name = self.profile_name(principal.tenant)
        if name is None:
            return "end"
        profile = self._file.profiles[name]
        unchanged = (name, self._profile_fingerprints[name]) == (spec.policy.profile, spec.profile_fingerprint)
        return "keep" if unchanged else profile.on_reload

    def tightened(self, principal: Principal, spec: SessionSpec, backend: str) -> SessionSpec | str:
        """A session of that backend held to this policy, or why that can't be done. Its sandbox stays as it is.

        What was granted is never widened: limits, imports and language rules are the stricter of both. Rules about
        tools, files and the audit log are not grants, so they are this policy's.
        """
        name = self.profile_name(principal.tenant)
        if name is None:
            return "the policy has no profile for its tenant any more"
        profile = self._file.profiles[name]
        reason = self._why_sandbox_must_go(profile, spec.sandbox, backend)
        if reason is not None:
            return reason
        limits = _at_most(spec.limits, Limits(**profile.limits.max.model_dump()))
        execution_max = _at_most(spec.execution_max, _execution_max(profile, limits))
        denied = tuple(sorted({*spec.denied_imports, *profile.imports.denied}))
        imports = covered_by_both(spec.authorized_imports, (*profile.imports.default, *profile.imports.allowed))
        refused = {*spec.refused_language, *profile.language.refused}
        return replace(
            spec,
            limits=limits,
            execution_max=execution_max,
            execution_default=_at_most(spec.execution_default, execution_max),
            authorized_imports=tuple(pattern for pattern in imports if not is_denied(pattern, denied)),
            denied_imports=denied,
            refused_language=tuple(rule for rule in LANGUAGE_RULES if rule in refused),
            tools=_tool_rules(profile),
            files=_file_rules(profile),
            audit=_audit_rules(profile),
            state=_state_rules(profile),
            policy=self._ref(name),
            profile_fingerprint=self._profile_fingerprints[name],
        )

    def _why_sandbox_must_go(self, profile: Profile, sandbox: SandboxSpec, backend: str) -> str | None:
        """What a sandbox was made with can't be changed while it runs."""
        if backend not in self._choice.backends_of(profile):
            return f"the policy does not allow the {backend} backend any more"
        if sandbox.image not in self._choice.images_of(profile, backend):
            return f"the policy does not allow the image {sandbox.image} any more"
        for name in _SANDBOX_LIMIT_NAMES:
            has, ceiling = getattr(sandbox, name), getattr(profile.limits.max, name)
            if has > ceiling:
                return f"its sandbox has {name} {number(has)}, and the policy allows at most {number(ceiling)} now"
        cpus = profile.limits.cpus
        if cpus is not None and (sandbox.cpus is None or sandbox.cpus > cpus):
            return f"its sandbox may use more processors than the {number(cpus)} that the policy allows now"
        return None

    # -- deciding

    def _profile_of(self, tenant: str) -> tuple[str, Profile]:
        name = self.profile_name(tenant)
        if name is None:
            violation = Violation("tenant", ViolationKind.NOT_ALLOWED, tenant, "a tenant that is listed", "default")
            raise PolicyViolation((violation,))
        return name, self._file.profiles[name]

    def _decide(self, named: tuple[str, Profile], request: RequestedSession) -> SessionSpec:
        name, profile = named
        self._choice.check_image(profile, request)
        limits = _limits(profile, request.limits)
        execution_max = _execution_max(profile, limits)
        violations = (
            *self._choice.violations(name, profile, request),
            *_sandbox_violations(name, request),
            *_limit_violations(name, profile, limits),
            *_import_violations(name, profile, request.authorized_imports, profile.imports.denied),
        )
        if violations:
            raise PolicyViolation(violations)
        image = request.image or self._choice.images_of(profile, request.backend)[0]
        return SessionSpec(
            sandbox=SandboxSpec(
                image=image,
                memory_bytes=limits.memory_bytes,
                processes=limits.processes,
                disk_bytes=limits.disk_bytes,
                orphan_time_s=self._orphan_time_s,
                cpus=profile.limits.cpus,
                may_pull=profile.sandbox.pull_images,
                policy=self.fingerprint,
                backends=self._choice.order_for(profile, image, request.backend),
                max_files=limits.max_files,
            ),
            limits=limits,
            execution_default=_execution_default(profile, request.limits, limits),
            execution_max=execution_max,
            authorized_imports=_authorized(profile, request.authorized_imports),
            denied_imports=tuple(sorted(set(profile.imports.denied))),
            refused_language=profile.language.refused,
            tools=_tool_rules(profile),
            files=_file_rules(profile),
            audit=_audit_rules(profile),
            state=_state_rules(profile),
            policy=self._ref(name),
            profile_fingerprint=self._profile_fingerprints[name],
            prelude=request.prelude,
            labels=dict(request.labels),
        )

    def _ref(self, profile: str) -> PolicyRef:
        return PolicyRef(profile, self.version, self.fingerprint)

    def _can_serve(self, profile: Profile) -> bool:
        return bool(self._choice.backends_of(profile) and self._choice.images_of(profile))


def _sandbox_violations(name: str, request: RequestedSession) -> Iterator[Violation]:
    for host in request.network:
        rule = rule_of(name, "sandbox.network")
        yield Violation("network", ViolationKind.UNSUPPORTED, host, "none", rule)
    for package in request.packages:
        rule = rule_of(name, "sandbox.install_packages")
        yield Violation("packages", ViolationKind.UNSUPPORTED, package, "none", rule)


def _limits(profile: Profile, requested: RequestedLimits) -> Limits:
    asked = {name: getattr(requested, name) for name in _LIMIT_NAMES}
    default = profile.limits.default
    return Limits(**{name: getattr(default, name) if value is None else value for name, value in asked.items()})


def _execution_max(profile: Profile, limits: Limits) -> ExecutionLimits:
    """The session's own limits, or lower where the profile has a ceiling for one execution."""
    ceilings = profile.limits.execution_max
    return ExecutionLimits(
        **{name: _least(getattr(limits, name), getattr(ceilings, name)) for name in _EXECUTION_LIMIT_NAMES}
    )


def _execution_default(profile: Profile, requested: RequestedLimits, limits: Limits) -> ExecutionLimits:
    """What was asked for the session is meant for each of its executions; else what the profile says of one."""
    ceilings, defaults = _execution_max(profile, limits), profile.limits.execution_default
    chosen = {}
    for name in _EXECUTION_LIMIT_NAMES:
        own = None if getattr(requested, name) is not None else getattr(defaults, name)
        chosen[name] = _least(getattr(ceilings, name), own)
    return ExecutionLimits(**chosen)


def _least(value: Any, other: Any) -> Any:
    """The smaller of two numbers of one kind; the first when there is no other."""
    return value if other is None else min(value, other)


AnyLimits = TypeVar("AnyLimits", Limits, ExecutionLimits)


def _at_most(limits: AnyLimits, ceilings: AnyLimits) -> AnyLimits:
    return replace(limits, **{f.name: min(getattr(limits, f.name), getattr(ceilings, f.name)) for f in fields(limits)})


def _authorized(profile: Profile, asked: Sequence[str]) -> tuple[str, ...]:
    """What is denied as a whole is not said to be authorized, though the guest would refuse it anyway."""
    patterns = {*profile.imports.default, *asked}
    return tuple(sorted(pattern for pattern in patterns if not is_denied(pattern, profile.imports.denied)))


def _tool_rules(profile: Profile) -> ToolRules:
    return ToolRules(placements=profile.tools.placements, allowed=profile.tools.allowed)


def _file_rules(profile: Profile) -> FileRules:
    return FileRules(**profile.files.model_dump())


def _state_rules(profile: Profile) -> StateRules:
    return StateRules(**profile.state.model_dump())


def _audit_rules(profile: Profile) -> AuditRules:
    return AuditRules(**profile.audit.model_dump())


def _limit_violations(name: str, profile: Profile, limits: Limits) -> Iterator[Violation]:
    for each in _LIMIT_NAMES:
        value, ceiling = getattr(limits, each), getattr(profile.limits.max, each)
        if value > ceiling:
            yield above_ceiling(f"limits.{each}", value, ceiling, rule_of(name, f"limits.max.{each}"))


def _import_violations(name: str, profile: Profile, asked: Sequence[str], denied: Sequence[str]) -> Iterator[Violation]:
    imports = profile.imports
    for pattern in asked:
        if is_denied(pattern, denied):
            allowed = f"nothing of {listed(denied, '')}"
            rule = rule_of(name, "imports.denied")
            yield Violation("authorized_imports", ViolationKind.DENIED, pattern, shortened(allowed), rule)
        elif not is_covered(pattern, imports.allowed) and not is_covered(pattern, imports.default):
            rule = rule_of(name, "imports.allowed")
            nothing = "nothing more than the defaults"
            yield not_allowed("authorized_imports", pattern, imports.allowed, rule, nothing)
