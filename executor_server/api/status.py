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
        policy = self.policy()
        states, of_backend = self.backends(), [session.backend_name for session in sessions]
        memory = _memory_bytes()
        return write(
            admin_pb.GetStatusResponse,
            version=self.version,
            start_time=self.start_time_s,
            draining=self.sessions.draining,
            sessions=len(sessions),
            max_sessions=self.max_sessions,
            busy=sum(session.state == "busy" for session in sessions),
            approvals=self.approvals.waiting_count,
            load=os.getloadavg()[0],
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=memory.get("MemTotal", 0),
            available_memory_bytes=memory.get("MemAvailable", 0),
            pool=[
                write(admin_pb.PoolKind, stats, backend=self._backend_of(spec), image=spec.image)
                for spec, stats in self.pool().items()
            ],
            backends=[
                admin_pb.BackendStatus(
                    backend=name, state=states.get(name, "up"), sessions=of_backend.count(name), images=images
                )
                for name, images in self.images.items()
            ],
            audit=self._audit(),
            policy=pb.PolicyRef(version=policy.version, fingerprint=policy.fingerprint),
            is_front=False,
        )

    def _backend_of(self, spec: SandboxSpec) -> str:
        return next(iter(spec.backends or self.images))

    def _audit(self) -> admin_pb.AuditStatus:
        if self.audit is None:
            return admin_pb.AuditStatus()
        stats, position = self.audit.stats, self.audit.position
        return write(admin_pb.AuditStatus, stats, is_configured=True, last_seq=position.seq, last_hash=position.hash)


def _memory_bytes() -> dict[str, int]:
    """Returns the host's memory by the names of the kernel."""
    lines = (line.split() for line in _MEMORY_FILE.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 2}
