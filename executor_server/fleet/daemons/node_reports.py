"""Builds the reports of a node: its sessions and those being made, its backends, its load, its tenants' use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from executor_server.api.assembly.parts import Parts
from executor_server.backends import Backend
from executor_server.core import SessionFacts
from executor_server.core.config import Config
from executor_server.core.lifecycle import Observer
from executor_server.fleet.daemons.node_control import NodeControl
from executor_server.fleet.membership import (
    MAX_NODE_SESSIONS,
    MAX_NODE_TENANTS,
    NodeBackend,
    NodeReport,
    NodeSession,
    TenantUse,
    WarmKind,
    node_of,
)
from executor_server.policy.quotas import Quotas
from executor_server.sessions import Session
from executor_server.sessions.pool import BackendSet

MAX_ENDED = MAX_NODE_SESSIONS // 2
"""Ids of ended sessions that are kept for the next report."""


class EndedSessions(Observer):
    """Collects the ids of sessions that end.

    A session that is created and ended between two reports is in the list of neither. The front knows it from its
    creation, and would count it for ever.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._ids: set[str] = set()

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        # A session of an earlier name of the node ends at the start. The number is limited because nothing takes the
        # ids without a link; the next link begins with a full report.
        if node_of(session.session_id) == self._node and len(self._ids) < MAX_ENDED:
            self._ids.add(session.session_id)

    def take(self) -> set[str]:
        """Returns the ids since the last call."""
        ids, self._ids = self._ids, set()
        return ids


class NodeReports:
    """Builds reports; each lists the changes of sessions since the report before."""

    def __init__(self, config: Config, parts: Parts, control: NodeControl, ended: EndedSessions) -> None:
        self._ended = ended
        self._config = config
        self._parts = parts
        self._control = control
        self._images = _images_of(config)
        self._states = _states_of(parts.backend)
        self._reported: Mapping[str, NodeSession] = {}
        self._sequence = 0

    def build(self, epoch: int, *, full: bool) -> NodeReport:
        parts, control = self._parts, self._control
        now = {session.session_id: _session_of(session) for session in parts.sessions.list_all()}
        before: Mapping[str, NodeSession] = {} if full else self._reported
        self._reported = now
        self._sequence += 1
        return NodeReport(
            sequence=self._sequence,
            epoch=epoch,
            max_sessions=self._config.sessions.max_sessions,
            draining=parts.sessions.draining,
            control_fingerprint=control.fingerprint,
            control_problem=control.problem,
            load=_load(),
            backends=self._backends(),
            warm=self._warm(),
            full=full,
            opened=tuple(each for session_id, each in now.items() if before.get(session_id) != each),
            closed=tuple((before.keys() | self._ended.take()) - now.keys()),
            creating=tuple(NodeSession("", *request) for request in parts.sessions.requests_under_way()),
            tenants=self._tenants(),
        )

    def _backends(self) -> tuple[NodeBackend, ...]:
        states = self._states()
        return tuple(
            NodeBackend(name, ready=states.get(name, "up") == "up", images=images)
            for name, images in self._images.items()
        )

    def _warm(self) -> dict[WarmKind, int]:
        warm: dict[WarmKind, int] = {}
        for spec, stats in self._parts.pool.stats().items():
            if stats.depth and spec.packages is None:  # the front can't know which environment a request will have
                kind = WarmKind(next(iter(spec.backends), self._config.server.backend), spec.image, spec.egress)
                warm[kind] = warm.get(kind, 0) + stats.depth
        return warm

    def _tenants(self) -> dict[str, TenantUse]:
        quotas = self._parts.quotas
        return {tenant: _use_of(quotas, tenant) for tenant in quotas.tenants()[:MAX_NODE_TENANTS]}


def _session_of(session: Session) -> NodeSession:
    return NodeSession(session.session_id, session.owner.tenant, session.record.request_id, session.state == "lost")


def _use_of(quotas: Quotas, tenant: str) -> TenantUse:
    use = quotas.use_of(tenant)
    return TenantUse(
        executions=use.executions,
        cpu_time_s=use.cpu_time_s_in_last_hour,
        output_bytes=use.output_bytes_in_last_hour,
        egress_bytes=use.egress_bytes_in_last_hour,
        creations=use.creations_in_last_minute,
    )


def _load() -> float:
    """Returns the runnable processes for each processor, as an average of the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _images_of(config: Config) -> dict[str, tuple[str, ...]]:
    images = {"local": [*config.local.images], "docker": [*config.docker.images], "e2b": [*config.e2b.images]}
    return {name: tuple(images[name]) for name in config.server.backends}


def _states_of(backend: Backend) -> Callable[[], Mapping[str, str]]:
    return backend.states if isinstance(backend, BackendSet) else dict
