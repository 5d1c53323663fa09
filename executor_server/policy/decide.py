"""The policy: what a client may have. Its decisions are pure and made in one place.

`Policy.decide` turns a request into an approved SessionSpec, or refuses it with every violation listed. It never grants
more, and never silently grants less. Nothing else in the daemon makes a SandboxSpec, so backends get only what was
decided here.

A refusal is a PolicyViolation. A request that no policy could grant is an InvalidRequest (requested.py). Decisions
about running sessions are in session_rules.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from executor_server.core import (
    SANDBOX_LIMIT_NAMES,
    ExecutorError,
    PolicyRef,
    PolicyViolation,
    Principal,
    SandboxSpec,
    SessionSpec,
    Violation,
    ViolationKind,
)
from executor_server.core.config import ConfigError, PoolSection
from executor_server.policy.approvals import ApprovalRequired, Wanted
from executor_server.policy.backend_choice import BackendChoice
from executor_server.policy.file import PolicyFile
from executor_server.policy.grants import (
    PolicySummary,
    audit_rules,
    authorized_imports,
    execution_default,
    execution_max,
    fork_server,
    import_violations,
    imports_to_ask,
    limit_violations,
    max_limits,
    packages_to_ask,
    rules_of,
    session_limits,
)
from executor_server.policy.identity import TenantRights
from executor_server.policy.network import (
    able_to_serve,
    asking_violations,
    network_rules,
    network_summary,
    network_violations,
    secret_violations,
)
from executor_server.policy.packages import (
    package_violations,
    packages_spec,
    packages_summary,
    with_found,
)
from executor_server.policy.profile import Profile, QuotasTable
from executor_server.policy.requested import (
    RequestedLimits,
    RequestedSession,
    check_imports,
    check_packages,
    check_request,
    invalid,
)
from executor_server.policy.requirement import read_requirement
from executor_server.policy.tightening import tightened_to, why_sandbox_must_go
from executor_server.policy.violations import rule_of, with_advice


@dataclass(frozen=True)
class WarmSandboxes:
    """A number of sandboxes of one spec, to be kept ready."""

    spec: SandboxSpec
    size: int


# Half of what a guest accepts: a session may get more patterns later, but never more than its guest accepts.
MAX_AUTHORIZED_IMPORTS = 1024

# A token may outlive its tenant's profile. It must not allow more calls then than one with a profile.
NO_PROFILE_QUOTAS = QuotasTable(calls=4, calls_per_second=10)


class Policy:
    """One version of the policy file, for one daemon with its backends and images."""

    def __init__(
        self,
        file: PolicyFile,
        *,
        images: Sequence[str],
        backend: str,
        orphan_time_s: float,
        other_images: Mapping[str, Sequence[str]] | None = None,
        secrets: Collection[str] | None = None,
        own_index: bool = False,
    ) -> None:
        """`other_images`: image names of the daemon's other backends. `secrets`: names of the configured secrets; None
        if unknown, then all that the policy names. `own_index`: the daemon is configured with an index of its own."""
        self._file = file
        self._choice = BackendChoice({backend: images, **(other_images or {})})
        self._orphan_time_s = orphan_time_s
        self._secrets = secrets
        self._own_index = own_index
        self._is_built_in = file.is_built_in
        self.version = file.version
        self.fingerprint = file.fingerprint
        self._profile_fingerprints = {name: profile.fingerprint for name, profile in file.profiles.items()}
        self._certificates = {text: name for name, tenant in file.tenants.items() for text in tenant.certificates}
        self._uids = {uid: name for name, tenant in file.tenants.items() for uid in tenant.uids}
        # Looked up for each call.
        self._quotas = {tenant: self._quotas_in(self.profile_name(tenant)) for tenant in file.tenants}
        self._default_quotas = self._quotas_in(file.default)
        # By profile: most sessions request the same as the one before.
        self._last_decided: dict[str, tuple[str, RequestedSession, SessionSpec]] = {}

    @property
    def file(self) -> PolicyFile:
        """The file that it was made from."""
        return self._file

    # -- tenants

    @property
    def tenants(self) -> Set[str]:
        """The tenants that the file names."""
        return self._file.tenants.keys()

    def lists(self, tenant: str) -> bool:
        """True for a tenant that the file names; only the number of these is bounded."""
        return tenant in self._file.tenants

    def tenant_of_certificate(self, names: Sequence[str], fingerprint: str) -> TenantRights | None:
        """The tenant of a client certificate, with its rights.

        None when no tenant claims its names, or when several do: any of them could be meant.
        """
        owners = {self._certificates[text] for text in (*names, f"sha256:{fingerprint}") if text in self._certificates}
        if len(owners) != 1:
            return None
        (tenant,) = owners
        return self._rights(tenant)

    def tenant_of_uid(self, uid: int) -> TenantRights | None:
        """The tenant of a user of this host, with its rights."""
        tenant = self._uids.get(uid)
        return None if tenant is None else self._rights(tenant)

    def _rights(self, tenant: str) -> TenantRights:
        return TenantRights(tenant, self._file.tenants[tenant].admin, self._file.tenants[tenant].roles)

    def profile_name(self, tenant: str) -> str | None:
        """The profile that holds for a tenant; None when the policy refuses it."""
        known = self._file.tenants.get(tenant)
        return known.profile if known is not None and known.profile is not None else self._file.default

    def quotas_of(self, tenant: str) -> QuotasTable:
        """The tenant's quotas. A tenant without a profile gets just enough calls to read its refusals."""
        return self._quotas.get(tenant, self._default_quotas)

    def _quotas_in(self, profile: str | None) -> QuotasTable:
        return self._file.profiles[profile].quotas if profile is not None else NO_PROFILE_QUOTAS

    @property
    def grants_network(self) -> bool:
        """True when some session may have a network."""
        return any(profile.network.has_hosts for profile in self._file.profiles.values())

    @property
    def locks(self) -> dict[str, bytes]:
        """The contents of the lock files that it was read with, by the paths in the policy."""
        locks = (profile.packages.lock for profile in self._file.profiles.values())
        return {str(lock.path): lock.content for lock in locks if lock is not None}

    # -- sessions

    def decide(self, principal: Principal, request: RequestedSession, approved: Collection[Wanted] = ()) -> SessionSpec:
        """Returns the approved session; `approved` are the approvals that it has.

        Raises InvalidRequest or PolicyViolation; if only approvals are missing, the violation is ApprovalRequired.
        """
        name, profile = self._profile_of(principal.tenant)
        last = self._last_decided.get(name)
        if last is not None and last[0] == principal.tenant and last[1] == request:
            return last[2]
        check_request(request)
        spec = self._decide(name, profile, request, principal.tenant, approved)
        if not approved:
            self._last_decided[name] = (principal.tenant, request, spec)
        return spec

    def with_packages(self, spec: SessionSpec, modules: Sequence[str]) -> SessionSpec | None:
        """Returns the spec of a new session with packages for authorized modules that its image lacks.

        None if there is nothing to add: `packages.auto` is off, the profile grants no package with these modules, or
        another policy approved the session.
        """
        profile = self._file.profiles.get(spec.policy.profile)
        if profile is None or spec.policy.fingerprint != self.fingerprint or not profile.packages.auto:
            return None
        names = dict.fromkeys(name for module in modules for name in _authorized_below(module, spec))
        packages = with_found(profile.packages, spec.sandbox.packages, names, own_index=self._own_index)
        return None if packages is None else replace(spec, sandbox=replace(spec.sandbox, packages=packages))

    def authorize_imports(
        self, principal: Principal, spec: SessionSpec, imports: Sequence[str], approved: Collection[Wanted] = ()
    ) -> SessionSpec:
        """Returns the spec of a running session with more modules authorized; its sandbox does not change.

        A module that was denied when the session was created stays denied in it. Raises as `decide`.
        """
        check_imports(imports)
        authorized = tuple(sorted({*spec.authorized_imports, *imports}))
        if len(authorized) > MAX_AUTHORIZED_IMPORTS:
            problem = f"would exceed the limit of {MAX_AUTHORIZED_IMPORTS:,} patterns in one session"
            raise invalid("authorized_imports", problem)
        name, profile = self._profile_of(principal.tenant)
        denied = tuple(sorted({*spec.denied_imports, *profile.imports.denied}))
        violations = tuple(import_violations(name, profile, imports, denied))
        if violations:
            raise PolicyViolation(violations)
        new = [pattern for pattern in imports if pattern not in spec.authorized_imports]
        _require_approved(profile, imports_to_ask(name, profile.imports, new), approved)
        return replace(spec, authorized_imports=authorized, denied_imports=denied)

    def describe(self, principal: Principal) -> PolicySummary:
        """Returns what the caller may request. Raises PolicyViolation if it has no profile."""
        name, profile = self._profile_of(principal.tenant)
        limits = session_limits(profile, RequestedLimits())
        return PolicySummary(
            policy=self._ref(name),
            default_limits=limits,
            max_limits=max_limits(profile),
            execution_default_limits=execution_default(profile, RequestedLimits(), limits),
            execution_max_limits=execution_max(profile, max_limits(profile)),
            default_imports=authorized_imports(profile, ()),
            allowed_imports=profile.imports.allowed,
            denied_imports=profile.imports.denied,
            ask_imports=profile.imports.ask,
            workspace_imports=profile.imports.workspace,
            refused_language=profile.language.refused,
            images=self._choice.images_of(profile),
            backends=self._choice.backends_of(profile),
            network=network_summary(profile),
            packages=packages_summary(profile.packages, own_index=self._own_index),
            quotas=profile.quotas,
            **rules_of(profile),
        )

    def check_recording_fetch(self, principal: Principal) -> None:
        """Raises PolicyViolation if the caller may not fetch the recordings of its sessions."""
        name, profile = self._profile_of(principal.tenant)
        if not profile.record.fetch:
            rule = rule_of(name, "record.fetch")
            raise PolicyViolation((Violation("session_id", ViolationKind.DENIED, "its recording", "nothing", rule),))

    def warm_sandboxes(self, pool: PoolSection) -> tuple[WarmSandboxes, ...]:
        """Returns the sandboxes to keep ready: the named ones, else those of default sessions.

        Raises ConfigError for sandboxes that no session could get.
        """
        if not pool.warm:
            name = self._file.default
            if name is None or not self._can_serve(self._file.profiles[name]):
                return ()
            try:
                spec = self._decide(name, self._file.profiles[name], RequestedSession())
            except PolicyViolation:  # its default hosts can't be served: `unserved` says why
                return ()
            return (WarmSandboxes(spec.sandbox, pool.size),)
        warm, problems = [], []
        for index, entry in enumerate(pool.warm):
            name = entry.profile or self._file.default
            if name not in self._file.profiles:
                problems.append(f"pool.warm.{index}.profile: no profile {name!r}")
                continue
            limits = entry.model_dump(include=set(SANDBOX_LIMIT_NAMES))
            request = RequestedSession(
                image=entry.image, limits=RequestedLimits(**limits), packages=tuple(entry.packages)
            )
            try:
                check_request(request)
                spec = self._decide(name, self._file.profiles[name], request)
            except ExecutorError as refusal:
                problems.append(f"pool.warm.{index}: {refusal.message} (it is {entry.image!r})")
                continue
            if entry.network and not self._file.profiles[name].network.has_hosts:
                problems.append(f"pool.warm.{index}.network: the profile {name!r} grants no hosts")
            warm.append(WarmSandboxes(replace(spec.sandbox, egress=spec.network.any or entry.network), entry.size))
        if problems:
            raise ConfigError(problems)
        return tuple(warm)

    # -- sessions that were created under an earlier policy

    def on_reload(self, principal: Principal, spec: SessionSpec) -> Literal["keep", "tighten", "end"]:
        """Decides on a running session when this policy comes into force; a session without a profile ends.

        A session whose profile is unchanged is kept.
        """
        name = self.profile_name(principal.tenant)
        if name is None:
            return "end"
        unchanged = (name, self._profile_fingerprints[name]) == (spec.policy.profile, spec.profile_fingerprint)
        return "keep" if unchanged else self._file.profiles[name].on_reload

    def tightened(self, principal: Principal, spec: SessionSpec, backend: str) -> SessionSpec | str:
        """Returns a session of that backend held to this policy (tightening.py), or why that can't be done."""
        name = self.profile_name(principal.tenant)
        if name is None:
            return "the policy has no profile for its tenant any more"
        profile = self._file.profiles[name]
        reason = why_sandbox_must_go(profile, self._choice, spec.sandbox, backend, own_index=self._own_index)
        if reason is not None:
            return reason
        fingerprint = self._profile_fingerprints[name]
        return replace(tightened_to(profile, spec), policy=self._ref(name), profile_fingerprint=fingerprint)

    # -- deciding

    def _profile_of(self, tenant: str) -> tuple[str, Profile]:
        name = self.profile_name(tenant)
        if name is None:
            violation = Violation("tenant", ViolationKind.NOT_ALLOWED, tenant, "a tenant that is listed", "default")
            raise PolicyViolation((violation,))
        return name, self._file.profiles[name]

    def _decide(
        self,
        name: str,
        profile: Profile,
        request: RequestedSession,
        tenant: str | None = None,
        approved: Collection[Wanted] = (),
    ) -> SessionSpec:
        """Without a tenant, returns what every tenant of the profile could get; see `_fork_server`."""
        self._choice.check_image(profile, request)
        limits = session_limits(profile, request.limits)
        network = network_rules(profile, request.network)
        backends = self._choice.order_for(profile, request)
        asked = check_packages(request.packages)
        packages = tuple(package_violations(name, profile.packages, asked, own_index=self._own_index))
        hosts = tuple(network_violations(name, profile, request.network))
        if self._is_built_in:
            packages = with_advice(packages, lambda text: read_requirement(text).name)
            hosts = with_advice(hosts)
        violations = (
            *self._choice.violations(name, profile, request),
            *hosts,
            *secret_violations(name, network.secrets, self._secrets, backends),
            *asking_violations(name, network, backends),
            *packages,
            *limit_violations(name, profile, limits),
            *import_violations(name, profile, request.authorized_imports, profile.imports.denied),
        )
        if violations:
            raise PolicyViolation(violations)
        to_ask = (
            *packages_to_ask(name, profile.packages, asked),
            *imports_to_ask(name, profile.imports, request.authorized_imports),
        )
        _require_approved(profile, to_ask, approved)
        return SessionSpec(
            sandbox=SandboxSpec(
                image=self._choice.image_for(profile, request),
                **{each: getattr(limits, each) for each in SANDBOX_LIMIT_NAMES},
                orphan_time_s=self._orphan_time_s,
                cpus=profile.limits.cpus,
                may_pull=profile.sandbox.pull_images,
                policy=self.fingerprint,
                backends=able_to_serve(network, backends),
                egress=network.any,
                packages=packages_spec(profile.packages, asked),
                fork_server=_fork_server(profile, tenant),
            ),
            limits=limits,
            execution_default=execution_default(profile, request.limits, limits),
            execution_max=execution_max(profile, limits),
            authorized_imports=authorized_imports(profile, request.authorized_imports),
            denied_imports=tuple(sorted(set(profile.imports.denied))),
            workspace_imports=profile.imports.workspace,
            refused_language=profile.language.refused,
            audit=audit_rules(profile),
            **rules_of(profile),
            network=network,
            policy=self._ref(name),
            profile_fingerprint=self._profile_fingerprints[name],
            prelude=request.prelude,
            labels=dict(request.labels),
            name=request.name,
            env_names=request.env_names,
        )

    def _ref(self, profile: str) -> PolicyRef:
        return PolicyRef(profile, self.version, self.fingerprint)

    def _can_serve(self, profile: Profile) -> bool:
        return bool(self._choice.backends_of(profile) and self._choice.images_of(profile))


def _require_approved(profile: Profile, wanted: Iterable[Wanted], approved: Collection[Wanted]) -> None:
    """Raises ApprovalRequired for those that are not approved."""
    missing = tuple(each for each in wanted if each not in approved)
    if missing:
        raise ApprovalRequired(missing, profile.approvals.wait_s)


def _fork_server(profile: Profile, tenant: str | None) -> str:
    """The value for a SandboxSpec. A warm sandbox has no tenant yet, so it can't come from a tenant's fork server."""
    value = fork_server(profile)
    if value != "tenant":
        return value
    return "off" if tenant is None else f"tenant:{tenant}"


def _authorized_below(module: str, spec: SessionSpec) -> list[str]:
    """Returns the authorized modules below a module, or the module: "google.cloud.storage" tells more than "google"."""
    below = [each.removesuffix(".*") for each in spec.authorized_imports if each.startswith(f"{module}.")]
    return below or [module]
