"""Records the events of sessions, executions, policies, tokens and the daemon that have happened.

Events that are about to happen are recorded by admission, before it lets them happen.

A client can provoke any number of refusals, so their records are bounded: the first of a tenant in every minute are
recorded one by one and the others counted; of unknown callers only the first is recorded and the others are counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from executor_server.audit.chain import AuditKind, clipped
from executor_server.audit.fields import (
    MAX_LISTED,
    SHORT_CHARS,
    known_of,
    of_execution,
    of_principal,
    of_session,
    of_state,
)
from executor_server.audit.log import AuditLog
from executor_server.core import (
    NO_NETWORK_USE,
    ExecutorError,
    FileInfo,
    LimitWarning,
    Outcome,
    PolicyViolation,
    PortUse,
    Principal,
    ProcessFacts,
    ProcessResult,
    Result,
    SessionFacts,
    Unavailable,
)
from executor_server.identity import TokenNews
from executor_server.lifecycle import Observer, StateFacts
from executor_server.policy import Policy, PolicyListener

REFUSALS_WINDOW_S = 60.0
REFUSALS_IN_FULL = 30
"""Refusals of one tenant that are recorded one by one in a window."""

# Tenants, and kinds of refusals of each, that are counted by themselves in a window; the others are counted together.
_MAX_TENANTS = 1024
_MAX_SORTS = 64
_OTHERS = "(others)"
_MESSAGE_CHARS = 256

_LIMIT_OF = {
    Outcome.OPERATION_LIMIT: "operations",
    Outcome.TIMEOUT: "wall_time_s",
    Outcome.CPU_LIMIT: "cpu_time_s",
    Outcome.OUT_OF_MEMORY: "memory_bytes",
    Outcome.OUTPUT_LIMIT: "output_bytes",
}


@dataclass
class _Window:
    """Refusals of the current minute, of one tenant or of unknown callers."""

    written: int = 0
    counted: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, method: str, reason: str) -> None:
        sort = (clipped(method, SHORT_CHARS), reason)
        if sort not in self.counted and len(self.counted) >= _MAX_SORTS:
            sort = (_OTHERS, _OTHERS)
        self.counted[sort] += 1


class AuditTrail(Observer, PolicyListener):
    """Records the events of sessions, executions, policies, tokens and the daemon."""

    def __init__(self, log: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._refused: dict[str, _Window] = {}  # by tenant
        self._unknown_callers = _Window()
        self._window_end_s = 0.0
        log.on_tick(self._end_window)

    # -- sessions and executions -----------------------------------------------------------------------------------

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        fields: dict[str, Any] = {
            "request": clipped(session.request_id, SHORT_CHARS),
            "backend": session.backend,
            "image": session.image,
            "warm": session.warm,
            "took_s": round(took_s, 6),
        }
        if session.packages:
            fields["packages"] = session.packages[:MAX_LISTED]
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
            "execution": clipped(execution_id, SHORT_CHARS),
            "outcome": result.outcome.value,
            "limit": _LIMIT_OF.get(result.outcome),
            "error": clipped(result.error.type, SHORT_CHARS) if result.error is not None else None,
            "variables": result.variables_state.value,
            "generation": result.generation,
            "took_s": round(took_s, 6),
            "usage": {name: round(value, 6) if isinstance(value, float) else value for name, value in usage.items()},
            "network": None if result.network == NO_NETWORK_USE else vars(result.network),
            "imports": result.imports,
            "artifacts": len(result.artifacts),
            "branch": None if result.branch is None else result.branch.number,
            "is_final_answer": bool(result.final_answer_call_id),
        }
        there = {name: value for name, value in fields.items() if value is not None}
        self._log.write(AuditKind.EXECUTION_ENDED, there, known_of(session))

    def state_exported(self, session: SessionFacts, state: StateFacts) -> None:
        self._log.write(AuditKind.STATE_EXPORTED, {**of_session(session), **of_state(state)})

    def file_got(self, session: SessionFacts, file: FileInfo) -> None:
        self._log.write(AuditKind.FILE_GOT, {**of_session(session), "path": file.path, "bytes": file.size_bytes})

    def process_started(self, session: SessionFacts, process: ProcessFacts) -> None:
        self._log.write(AuditKind.PROCESS_STARTED, {**of_session(session), "process": process.process_id})

    def process_ended(self, session: SessionFacts, process_id: str, result: ProcessResult) -> None:
        fields = {
            "process": process_id,
            "outcome": result.outcome.value,
            "exit_code": result.exit_code,
            "bytes": result.output_bytes,
            "wall_time_s": round(result.wall_time_s, 6),
            "cpu_time_s": round(result.cpu_time_s, 6),
        }
        known = {name: value for name, value in fields.items() if value is not None}
        self._log.write(AuditKind.PROCESS_ENDED, {**of_session(session), **known})

    def port_closed(self, session: SessionFacts, use: PortUse) -> None:
        fields = {
            "port": use.port,
            "received_bytes": use.received_bytes,
            "sent_bytes": use.sent_bytes,
            "wall_time_s": round(use.wall_time_s, 6),
        }
        self._log.write(AuditKind.PORT_CLOSED, {**of_session(session), **fields})

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        known = of_session(session) if session is not None else {}
        self._log.write(AuditKind.GUEST_MISBEHAVED, {**known, "what": what})

    # -- the daemon ------------------------------------------------------------------------------------------------

    def daemon_started(self, *, version: str, backend: str, policy: str, policy_version: str) -> None:
        fields = {"version": version, "backend": backend, "policy": policy, "policy_version": policy_version}
        self._log.write(AuditKind.DAEMON_STARTED, fields)

    def daemon_stopped(self) -> None:
        """The daemon stops in order, and its sessions have ended."""
        self._log.write(AuditKind.DAEMON_STOPPED, {})

    def policy_changed(self, before: Policy, now: Policy) -> None:
        fields = {"before": before.fingerprint, "policy": now.fingerprint, "policy_version": now.version}
        self._log.write(AuditKind.POLICY_RELOADED, fields)

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        self._log.write(AuditKind.POLICY_REFUSED, {"policy": current.fingerprint, "problems": list(problems)})

    def tokens_changed(self, news: TokenNews) -> None:
        self._log.write(AuditKind.TOKENS_RELOADED, asdict(news))

    def admin_called(self, principal: Principal, method: str, target: str = "") -> None:
        """An administrator's call is about to be made. `target` is its session or tenant, if it has one."""
        self._log.write(AuditKind.ADMIN_CALLED, {**of_principal(principal), "method": method, "target": target})

    # -- refusals --------------------------------------------------------------------------------------------------

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        if isinstance(error, Unavailable) and error.progress is not None:
            return  # it only waits, and asks each second
        self._end_window()
        reason = error.reason.value
        if principal is None:
            if not self._unknown_callers.written:
                self._unknown_callers.written = 1
                fields = {"method": clipped(method, SHORT_CHARS), "reason": reason, "count": 1}
                self._log.write(AuditKind.CREDENTIALS_REFUSED, fields)
            else:
                self._unknown_callers.count(method, reason)
            return
        tenant = principal.tenant if principal.tenant in self._refused or len(self._refused) < _MAX_TENANTS else _OTHERS
        window = self._refused.setdefault(tenant, _Window())
        if window.written >= REFUSALS_IN_FULL:
            window.count(method, reason)
            return
        window.written += 1
        fields = {
            **of_principal(principal),
            "method": clipped(method, SHORT_CHARS),
            "reason": reason,
            "message": clipped(error.message, _MESSAGE_CHARS),
        }
        if isinstance(error, PolicyViolation):
            fields["violations"] = [
                {
                    "field": clipped(each.field, SHORT_CHARS),
                    "kind": each.kind.value,
                    "requested": clipped(each.requested, SHORT_CHARS),
                    "allowed": clipped(each.allowed, SHORT_CHARS),
                    "rule": clipped(each.rule, SHORT_CHARS),
                }
                for each in error.violations[:MAX_LISTED]
            ]
            fields["violation_count"] = len(error.violations)
        self._log.write(AuditKind.REQUEST_REFUSED, fields)

    def _end_window(self) -> None:
        """Records the counted refusals when the minute is over."""
        now_s = self._clock()
        if now_s < self._window_end_s:
            return
        for tenant, window in self._refused.items():
            self._write_counted(AuditKind.REQUESTS_REFUSED, {"tenant": tenant}, window)
        self._write_counted(AuditKind.CREDENTIALS_REFUSED, {}, self._unknown_callers)
        self._refused.clear()
        self._unknown_callers = _Window()
        self._window_end_s = now_s + REFUSALS_WINDOW_S

    def _write_counted(self, kind: AuditKind, known: Mapping[str, Any], window: _Window) -> None:
        for (method, reason), count in window.counted.items():
            self._log.write(kind, {**known, "method": method, "reason": reason, "count": count})
