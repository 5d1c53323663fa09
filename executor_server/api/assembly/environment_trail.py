"""Records the making and removing of environments of packages in the audit log.

Here and not in `policy.audit`, which is below packages and must not know them. Names of packages are bounded by the
policy, and every text and list once more by the form of a record.
"""

from __future__ import annotations

from typing import Any

from executor_server.packages import BuildEnd, EnvironmentObserver
from executor_server.policy.audit import AuditKind, AuditLog


class EnvironmentTrail(EnvironmentObserver):
    """Records each build, with the hash of what was installed, and each removal."""

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
