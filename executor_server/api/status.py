"""The state of the daemon itself, for its operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import SandboxSpec
from executor_server.policy import Policy
from executor_server.policy.approvals import Approvals
from executor_server.policy.audit import AuditLog
from executor_server.sessions import SessionManager
from executor_server.sessions.pool import PoolStats

_MEMORY_FILE = Path("/proc/meminfo")


@dataclass(frozen=True)
class DaemonStatus:
    """The parts that the state is read from."""

    version: str
    start_time_s: float
    max_sessions: int
    images: Mapping[str, Sequence[str]]
    """The configured images of each backend, the daemon's own backend first."""
    sessions: SessionManager
    approvals: Approvals
    policy: Callable[[], Policy]
    pool: Callable[[], Mapping[SandboxSpec, PoolStats]]
    backends: Callable[[], Mapping[str, str]]
    """The state of each backend, where several run."""
    audit: AuditLog | None  # None: none is configured

    def read(self) -> admin_pb.GetStatusResponse:
        sessions = self.sessions.list_all()
        states, of_backend = self.backends(), [session.backend_name for session in sessions]
        memory = _memory_bytes()
        status = own_status(self.version, self.start_time_s, self.approvals, self.policy(), self.audit)
        status.draining = self.sessions.draining
        status.sessions, status.max_sessions = len(sessions), self.max_sessions
        status.busy = sum(session.state == "busy" for session in sessions)
        status.load, status.cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
        status.memory_bytes = memory.get("MemTotal", 0)
        status.available_memory_bytes = memory.get("MemAvailable", 0)
        status.pool.extend(
            write(admin_pb.PoolKind, stats, backend=self._backend_of(spec), image=spec.image)
            for spec, stats in self.pool().items()
        )
        status.backends.extend(
            admin_pb.BackendStatus(
                backend=name, state=states.get(name, "up"), sessions=of_backend.count(name), images=images
            )
            for name, images in self.images.items()
        )
        return status

    def _backend_of(self, spec: SandboxSpec) -> str:
        return next(iter(spec.backends or self.images))


def own_status(
    version: str, start_time_s: float, approvals: Approvals, policy: Policy, audit: AuditLog | None
) -> admin_pb.GetStatusResponse:
    """Returns the part of the state that a front has, too. `audit`: None if none is configured."""
    status = admin_pb.GetStatusResponse(
        version=version,
        approvals=approvals.waiting_count,
        policy=pb.PolicyRef(version=policy.version, fingerprint=policy.fingerprint),
        audit=admin_pb.AuditStatus(),
    )
    status.start_time.FromMicroseconds(round(start_time_s * 1_000_000))
    if audit is not None:
        stats, position = audit.stats, audit.position
        status.audit.CopyFrom(
            write(admin_pb.AuditStatus, stats, is_configured=True, last_seq=position.seq, last_hash=position.hash)
        )
    return status


def _memory_bytes() -> dict[str, int]:
    """Returns the host's memory by the names of the kernel."""
    lines = (line.split() for line in _MEMORY_FILE.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 2}
