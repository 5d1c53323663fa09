"""The status of a front, which includes that of its nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import Message

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api.status import own_status
from executor_server.policy import Policy
from executor_server.policy.approvals import Approvals
from executor_server.policy.audit import AuditLog

_MAX_KINDS = 256
_MAX_IMAGES = 1024
# Backends with the same name are shown as one; its state is the first of these that any of them has.
_STATES = ("down", "full", "up")


@dataclass(frozen=True)
class FrontStatus:
    """The parts of the status that the front has itself."""

    version: str
    start_time_s: float
    approvals: Approvals
    policy: Callable[[], Policy]
    audit: AuditLog | None  # None: none is configured

    def merged(self, nodes: Iterable[admin_pb.GetStatusResponse]) -> admin_pb.GetStatusResponse:
        """Adds up the nodes' sessions, hosts, pools and backends. Version, policy and audit log are the front's."""
        status = own_status(self.version, self.start_time_s, self.approvals, self.policy(), self.audit)
        status.is_front = True
        pool: dict[tuple[str, str], admin_pb.PoolKind] = {}
        backends: dict[str, admin_pb.BackendStatus] = {}
        for node in nodes:
            names = ("sessions", "max_sessions", "busy", "load", "cpus", "memory_bytes", "available_memory_bytes")
            _add(status, node, names)
            for kind in node.pool[:_MAX_KINDS]:
                key = (kind.backend, kind.image)
                total = pool.setdefault(key, admin_pb.PoolKind(backend=kind.backend, image=kind.image))
                _add(total, kind, ("size", "depth", "making"))
            for backend in node.backends[:_MAX_KINDS]:
                name = backend.backend
                merged = backends.setdefault(name, admin_pb.BackendStatus(backend=name, state="up"))
                _add(merged, backend, ("sessions",))
                merged.state = next((each for each in _STATES if each in (merged.state, backend.state)), "up")
                merged.images[:] = sorted({*merged.images, *backend.images})[:_MAX_IMAGES]
        status.pool.extend(pool.values())
        status.backends.extend(backends.values())
        return status


def _add(total: Message, more: Message, names: Iterable[str]) -> None:
    """Adds these fields. A node may send any number: a sum too large for the field becomes its maximum."""
    for name in names:
        most = 2**63 if name.endswith("_bytes") else 2**32 - 1
        number = getattr(more, name)
        if math.isfinite(number):
            setattr(total, name, min(getattr(total, name) + number, most))
