"""The parts that watch what happens: the audit log, metrics, traces. Each of them may be switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executor_server.api import OWN_METHODS, Wrapper, call_tracing, load_tracing, metering
from executor_server.api.assembly.settings import audit_files, audit_settings
from executor_server.core import Principal
from executor_server.core.config import Config
from executor_server.core.lifecycle import Observer, pass_on
from executor_server.packages import BuildEnd, EnvironmentObserver
from executor_server.policy import Policy, PolicyListener
from executor_server.policy.approvals import ApprovalObserver
from executor_server.policy.audit import AuditKind, AuditLog, AuditTrail, ConnectionTrail, FleetTrail
from executor_server.policy.identity import Tokens
from executor_server.telemetry import Metrics, MetricsEndpoint, Sources, SourcesCollector

if TYPE_CHECKING:
    from executor_server.telemetry.tracing import Tracing


class EnvironmentTrail(EnvironmentObserver):
    """Records environments in the audit log: each build, with the hash of what was installed, and each removal.

    The policy bounds the names of packages, and the form of a record bounds every text and list once more.
    """

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    def build_ended(self, end: BuildEnd) -> None:
        fields: dict[str, Any] = {
            "tenant": end.use.requester,
            "backend": end.use.backend,
            "image": end.use.image,
            "packages": end.use.requirements,
            "outcome": end.label,
            "took_s": round(end.took_s, 6),
        }
        if end.lock is not None:
            fields |= {
                "environment": end.lock.environment_id,
                "lock_sha256": end.lock.sha256,
                "interpreter": end.lock.interpreter,
                "platform": end.lock.platform,
                "pins": end.lock.pins,
                "pin_count": len(end.lock.pins),
            }
        if end.size_bytes:
            fields["bytes"] = end.size_bytes
        if end.error:
            fields["error"] = end.error
        self._log.write(AuditKind.ENVIRONMENT_BUILT, fields)

    def environment_evicted(self, environment_id: str, freed_bytes: int, reason: str) -> None:
        fields = {"environment": environment_id, "bytes": freed_bytes, "reason": reason}
        self._log.write(AuditKind.ENVIRONMENT_REMOVED, fields)


@dataclass(frozen=True)
class Watchers:
    """The parts that watch; None for each that is switched off."""

    log: AuditLog | None
    trail: AuditTrail | None
    connections: ConnectionTrail | None
    environments: EnvironmentTrail | None
    fleet: FleetTrail | None
    metrics: Metrics | None
    tracing: Tracing | None

    @classmethod
    def build(cls, config: Config, version: str, backend: str) -> Watchers:
        """Raises ConfigError when the configuration asks for traces and their package is missing."""
        log = AuditLog(audit_files(config), audit_settings(config)) if config.audit.enabled else None
        return cls(
            log=log,
            trail=AuditTrail(log) if log is not None else None,
            connections=ConnectionTrail(log) if log is not None else None,
            environments=EnvironmentTrail(log) if log is not None else None,
            fleet=FleetTrail(log) if log is not None else None,
            metrics=(
                Metrics(version=version, backend=backend, methods=OWN_METHODS)
                if config.metrics.listen is not None
                else None
            ),
            tracing=load_tracing(config.tracing, version),
        )

    async def start(
        self, stack: AsyncExitStack, tokens: Tokens | None, policy: Policy, version: str, backend: str
    ) -> None:
        """Opens the audit log and records the start of the daemon as its first record. Raises AuditDirError."""
        if self.log is not None and self.trail is not None:
            stack.push_async_callback(self.log.close)
            await self.log.start()
            if tokens is not None:
                tokens.listen(self.trail.tokens_changed)
            self.trail.daemon_started(
                version=version, backend=backend, policy=policy.fingerprint, policy_version=policy.version
            )
        if self.tracing is not None:
            stack.push_async_callback(self.tracing.close)

    async def serve_metrics(self, stack: AsyncExitStack, listen: str | None, sources: Sources | None) -> None:
        """Serves the metrics page, where it is configured; a front has no `sources`. Raises AddressError."""
        if self.metrics is None or listen is None:
            return
        if sources is not None:
            self.metrics.registry.register(SourcesCollector(self.metrics, sources))
        endpoint = MetricsEndpoint(self.metrics, listen)
        stack.push_async_callback(endpoint.close)
        await endpoint.start()

    def observers(self) -> list[Observer]:
        """Returns the observers of events in sessions."""
        watching = (self.trail, self.connections, self.metrics, self.tracing)
        return [each for each in watching if each is not None]

    def environment_observers(self) -> list[EnvironmentObserver]:
        """Returns the observers of environments that are made, used and removed."""
        metrics = self.metrics.environments if self.metrics is not None else None
        return [each for each in (self.environments, metrics) if each is not None]

    def approval_observer(self) -> ApprovalObserver:
        """Returns one observer of approvals; it notifies the parts that record and count them."""
        observer, metrics = ApprovalObserver(), self.metrics.approvals if self.metrics is not None else None
        pass_on(observer, ApprovalObserver, [each for each in (self.trail, metrics) if each is not None])
        return observer

    def admin_called(self, principal: Principal, method: str, target: str) -> None:
        """Records a call of an administrator, if there is an audit log."""
        if self.trail is not None:
            self.trail.admin_called(principal, method, target)

    def wrappers(self) -> list[Wrapper]:
        """Returns the wrappers of each call, the outermost first."""
        around = [] if self.tracing is None else [call_tracing(self.tracing)]
        return around if self.metrics is None else [*around, metering(self.metrics)]


class PolicyListeners(PolicyListener):
    """Passes news of the policy on: first to the parts that count and record it, then to the part that applies it."""

    def __init__(self, listeners: Sequence[PolicyListener | None]) -> None:
        self._listeners = [each for each in listeners if each is not None]
        self._follow: Callable[[Policy], None] | None = None

    def on_change(self, follow: Callable[[Policy], None]) -> None:
        """Sets the callback that applies another policy; must be called before the store begins to watch its file."""
        self._follow = follow

    def policy_changed(self, before: Policy, now: Policy) -> None:
        for each in self._listeners:
            each.policy_changed(before, now)
        if self._follow is not None:
            self._follow(now)

    def policy_unchanged(self) -> None:
        for each in self._listeners:
            each.policy_unchanged()

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        for each in self._listeners:
            each.policy_refused(current, problems)
