"""What the audit log says, and in which fields: one function for each kind of record.

AuditTrail is told of what has happened; what is about to happen is written by admission.py, in the same words. Of code,
values and files there are hashes, names and sizes, never contents, but for code where the profile wants it. Text of
clients and sandboxes is bounded here or in audit_chain.py.

Refusals are the one thing that a client can have as many of as it likes, so they are bounded: of each tenant's the
first of every minute are written down one by one and the others counted; those of callers that nobody knows are only
counted, but for the first.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from executor_server.audit import AuditLog
from executor_server.audit_chain import AuditKind, clipped
from executor_server.errors import ExecutorError, PolicyViolation
from executor_server.gate import StateFacts
from executor_server.model import (
    BlobRef,
    ExecutionLimits,
    FileInfo,
    LimitWarning,
    Outcome,
    Payload,
    Principal,
    Result,
    SessionFacts,
    SessionSpec,
    ShippedTool,
    ToolSource,
    ToolSpec,
)
from executor_server.observer import Observer
from executor_server.policies import PolicyListener
from executor_server.policy import Policy
from executor_server.tokens import TokenNews

REFUSALS_WINDOW_S = 60.0
REFUSALS_IN_FULL = 30
"""Of one tenant in one window."""

# Of one window; the others are counted together.
_MAX_TENANTS = 1024
_MAX_SORTS = 64
_OTHERS = "(others)"
_MESSAGE_CHARS = 256
_SHORT_CHARS = 128

_LIMIT_OF = {
    Outcome.OPERATION_LIMIT: "operations",
    Outcome.TIMEOUT: "wall_time_s",
    Outcome.CPU_LIMIT: "cpu_time_s",
    Outcome.OUT_OF_MEMORY: "memory_bytes",
    Outcome.OUTPUT_LIMIT: "output_bytes",
}


# ---------------------------------------------------------------------------------------------------------------------
# Who, and in what


def of_principal(principal: Principal) -> dict[str, Any]:
    return {"tenant": principal.tenant, "principal": principal.name}


def of_session(session: SessionFacts) -> dict[str, Any]:
    return {
        **of_principal(session.owner),
        "session": session.session_id,
        "policy": session.policy.fingerprint,
    }


def of_execution(session: SessionFacts, execution_id: str) -> dict[str, Any]:
    return {
        **of_principal(session.owner),
        "session": session.session_id,
        "execution": clipped(execution_id, _SHORT_CHARS),
        "policy": session.policy.fingerprint,
    }


# ---------------------------------------------------------------------------------------------------------------------
# What is about to happen


def of_request(principal: Principal, request_id: str, spec: SessionSpec) -> dict[str, Any]:
    """All that is granted to a session, with as much of its prelude as the profile says of code."""
    prelude, recorded = spec.prelude.encode("utf-8", "surrogatepass"), spec.audit.code if spec.prelude else "none"
    fields = {
        **of_principal(principal),
        "request": clipped(request_id, _SHORT_CHARS),
        "policy": spec.policy.fingerprint,
        "policy_version": spec.policy.version,
        "profile": spec.policy.profile,
        "image": spec.sandbox.image,
        "limits": asdict(spec.limits),
        "execution_max": asdict(spec.execution_max),
        "imports": spec.authorized_imports,
        "denied_imports": spec.denied_imports,
        "refused_language": spec.refused_language,
        "tool_placements": spec.tools.placements,
        "tool_names": spec.tools.allowed,
        "files": {name: most for name, most in asdict(spec.files).items() if most is not None},
        "state": asdict(spec.state),
        "code_recorded": spec.audit.code,
        "fail_closed": spec.audit.fail_closed,
        "prelude_bytes": len(prelude),
        "labels": [f"{key}={value}" for key, value in spec.labels.items()],
    }
    if recorded != "none":
        fields["prelude_sha256"] = hashlib.sha256(prelude).hexdigest()
    if recorded == "full":
        fields["code"] = spec.prelude
    return fields


def of_code(session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits) -> dict[str, Any]:
    """An execution, with as much of its code as the profile says."""
    source = code.encode("utf-8", "surrogatepass")
    fields = {**of_execution(session, execution_id), "limits": dict(vars(limits)), "code_bytes": len(source)}
    if session.audit.code != "none":
        fields["code_sha256"] = hashlib.sha256(source).hexdigest()
    if session.audit.code == "full":
        fields["code"] = code
    return fields


def of_names(names: Sequence[str]) -> dict[str, Any]:
    return {"count": len(names), "names": [clipped(name, _SHORT_CHARS) for name in names[:_MAX_SORTS]]}


def of_state(state: StateFacts) -> dict[str, Any]:
    """A session's state: which, how large, and whose it was."""
    return {
        "state_sha256": state.sha256,
        "bytes": state.size_bytes,
        "variables": state.variables,
        "files": state.files,
        "foreign": state.is_foreign,
        "from_session": clipped(state.from_session, _SHORT_CHARS),
    }


def of_tools(session: SessionFacts, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Tools that are registered; of those that are shipped what they are made of, by size and digest."""
    shipped = [_of_shipped(session, tool.name, tool.shipped) for tool in tools if tool.shipped is not None]
    return {**of_names([tool.name for tool in tools]), "shipped_count": len(shipped), "shipped": shipped[:_MAX_SORTS]}


def _of_shipped(session: SessionFacts, name: str, shipped: ShippedTool) -> dict[str, Any]:
    code = shipped.code
    parts: dict[str, Payload | None] = (
        {"source": code.text.encode(), "bindings": code.bindings} if isinstance(code, ToolSource) else {"value": code}
    )
    fields: dict[str, Any] = {"name": clipped(name, _SHORT_CHARS), "placement": "sandbox"}
    for part, payload in parts.items():
        if payload is not None:
            fields[f"{part}_bytes"] = payload.size_bytes if isinstance(payload, BlobRef) else len(payload)
            if session.audit.code != "none":
                fields[f"{part}_sha256"] = _digest(payload)
    return fields


def _digest(payload: Payload) -> str | None:
    return payload.sha256 if isinstance(payload, BlobRef) else hashlib.sha256(payload).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# What has happened


@dataclass
class _Window:
    """Refusals of the minute at hand, of one tenant or of strangers."""

    written: int = 0
    counted: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, method: str, reason: str) -> None:
        sort = (clipped(method, _SHORT_CHARS), reason)
        if sort not in self.counted and len(self.counted) >= _MAX_SORTS:
            sort = (_OTHERS, _OTHERS)
        self.counted[sort] += 1


class AuditTrail(Observer, PolicyListener):
    """Writes down what it is told of."""

    def __init__(self, log: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._refused: dict[str, _Window] = {}  # by tenant
        self._strangers = _Window()
        self._window_end_s = 0.0
        log.on_tick(self._end_window)

    # -- sessions and executions -----------------------------------------------------------------------------------

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        fields = {
            "request": clipped(session.request_id, _SHORT_CHARS),
            "backend": session.backend,
            "image": session.image,
            "warm": session.warm,
            "took_s": round(took_s, 6),
        }
        self._log.write(AuditKind.SESSION_CREATED, {**of_session(session), **fields})

    def session_recovered(self, session: SessionFacts) -> None:
        self._log.write(AuditKind.SESSION_RECOVERED, of_session(session))

    def session_lost(self, session: SessionFacts, reason: str) -> None:
        self._log.write(AuditKind.SESSION_LOST, {**of_session(session), "reason": reason})

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        self._log.write(AuditKind.SESSION_ENDED, {**of_session(session), "reason": str(reason)})

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        self._log.write(AuditKind.EXECUTION_RECOVERED, of_execution(session, execution_id))

    def limit_warned(self, session: SessionFacts, execution_id: str, warning: LimitWarning) -> None:
        self._log.write(AuditKind.LIMIT_WARNED, {**of_execution(session, execution_id), **asdict(warning)})

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        usage = vars(result.usage)
        fields = {
            "outcome": result.outcome.value,
            "limit": _LIMIT_OF.get(result.outcome),
            "error": clipped(result.error.type, _SHORT_CHARS) if result.error is not None else None,
            "variables": result.variables_state.value,
            "generation": result.generation,
            "took_s": round(took_s, 6),
            "usage": {name: round(value, 6) if isinstance(value, float) else value for name, value in usage.items()},
            "imports": result.imports,
            "artifacts": len(result.artifacts),
            "is_final_answer": bool(result.final_answer_call_id),
        }
        said = {name: value for name, value in fields.items() if value is not None}
        self._log.write(AuditKind.EXECUTION_ENDED, {**of_execution(session, execution_id), **said})

    def state_exported(self, session: SessionFacts, state: StateFacts) -> None:
        self._log.write(AuditKind.STATE_EXPORTED, {**of_session(session), **of_state(state)})

    def file_got(self, session: SessionFacts, file: FileInfo) -> None:
        self._log.write(AuditKind.FILE_GOT, {**of_session(session), "path": file.path, "bytes": file.size_bytes})

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        known = of_session(session) if session is not None else {}
        self._log.write(AuditKind.GUEST_MISBEHAVED, {**known, "what": what})

    # -- the daemon ------------------------------------------------------------------------------------------------

    def daemon_started(self, *, version: str, backend: str, policy: str, policy_version: str) -> None:
        fields = {"version": version, "backend": backend, "policy": policy, "policy_version": policy_version}
        self._log.write(AuditKind.DAEMON_STARTED, fields)

    def daemon_stopped(self) -> None:
        """It stops in order, and its sessions have ended."""
        self._log.write(AuditKind.DAEMON_STOPPED, {})

    def policy_changed(self, before: Policy, now: Policy) -> None:
        fields = {"before": before.fingerprint, "policy": now.fingerprint, "policy_version": now.version}
        self._log.write(AuditKind.POLICY_RELOADED, fields)

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        self._log.write(AuditKind.POLICY_REFUSED, {"policy": current.fingerprint, "problems": list(problems)})

    def tokens_changed(self, news: TokenNews) -> None:
        """For `Tokens.listen`."""
        self._log.write(AuditKind.TOKENS_RELOADED, asdict(news))

    def admin_called(self, principal: Principal, method: str, target: str = "") -> None:
        """An administrator is about to do something. `target` is what to, where that is something."""
        self._log.write(AuditKind.ADMIN_CALLED, {**of_principal(principal), "method": method, "target": target})

    # -- refusals --------------------------------------------------------------------------------------------------

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        self._end_window()
        reason = error.reason.value
        if principal is None:
            if not self._strangers.written:
                self._strangers.written = 1
                fields = {"method": clipped(method, _SHORT_CHARS), "reason": reason, "count": 1}
                self._log.write(AuditKind.CREDENTIALS_REFUSED, fields)
            else:
                self._strangers.count(method, reason)
            return
        tenant = principal.tenant if principal.tenant in self._refused or len(self._refused) < _MAX_TENANTS else _OTHERS
        window = self._refused.setdefault(tenant, _Window())
        if window.written >= REFUSALS_IN_FULL:
            window.count(method, reason)
            return
        window.written += 1
        fields = {
            **of_principal(principal),
            "method": clipped(method, _SHORT_CHARS),
            "reason": reason,
            "message": clipped(error.message, _MESSAGE_CHARS),
        }
        if isinstance(error, PolicyViolation):
            fields["violations"] = [
                {
                    "field": clipped(each.field, _SHORT_CHARS),
                    "kind": each.kind.value,
                    "requested": clipped(each.requested, _SHORT_CHARS),
                    "allowed": clipped(each.allowed, _SHORT_CHARS),
                    "rule": clipped(each.rule, _SHORT_CHARS),
                }
                for each in error.violations[:_MAX_SORTS]
            ]
            fields["violation_count"] = len(error.violations)
        self._log.write(AuditKind.REQUEST_REFUSED, fields)

    def _end_window(self) -> None:
        """When the minute is over, what was only counted is written down."""
        now_s = self._clock()
        if now_s < self._window_end_s:
            return
        for tenant, window in self._refused.items():
            self._write_counted(AuditKind.REQUESTS_REFUSED, {"tenant": tenant}, window)
        self._write_counted(AuditKind.CREDENTIALS_REFUSED, {}, self._strangers)
        self._refused.clear()
        self._strangers = _Window()
        self._window_end_s = now_s + REFUSALS_WINDOW_S

    def _write_counted(self, kind: AuditKind, known: Mapping[str, Any], window: _Window) -> None:
        for (method, reason), count in window.counted.items():
            self._log.write(kind, {**known, "method": method, "reason": reason, "count": count})
