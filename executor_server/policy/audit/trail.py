"""Records the events of sessions, executions, policies, tokens and the daemon that have happened.

Events that are about to happen are recorded by admission, before it lets them happen.

Records of refusals are bounded (refusal_window.py). Each minute the first REFUSALS_IN_FULL of a tenant are recorded one
by one, and the first of all unknown callers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

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
    Reason,
    Result,
    SessionFacts,
    Unavailable,
)
from executor_server.core.lifecycle import Observer, StateFacts
from executor_server.policy import Policy, PolicyListener
from executor_server.policy.approvals import Approval, ApprovalObserver, Ruling
from executor_server.policy.audit.chain import AuditKind, clipped
from executor_server.policy.audit.fields import (
    MAX_LISTED,
    SHORT_CHARS,
    of_execution,
    of_principal,
    of_session,
    of_state,
)
from executor_server.policy.audit.log import AuditLog
from executor_server.policy.audit.refusal_window import RefusalWindow
from executor_server.policy.identity import TokenNews

REFUSALS_IN_FULL = 30
"""Refusals of one tenant that are recorded one by one in a minute."""

_MESSAGE_CHARS = 256
_APPROVALS = "approvals"  # denials that no person decided are counted like the refusals of a method

_LIMIT_OF = {
    Outcome.OPERATION_LIMIT: "operations",
    Outcome.TIMEOUT: "wall_time_s",
    Outcome.CPU_LIMIT: "cpu_time_s",
    Outcome.OUT_OF_MEMORY: "memory_bytes",
    Outcome.OUTPUT_LIMIT: "output_bytes",
}


class AuditTrail(Observer, PolicyListener, ApprovalObserver):
    """Records the events of sessions, executions, policies, tokens and the daemon."""

    def __init__(self, log: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._policy = ""  # the fingerprint of the policy in force
        self._refused = RefusalWindow(REFUSALS_IN_FULL, clock, self._refusals_counted)
        # Counted as those of one tenant, since theirs is unknown.
        self._unknown_callers = RefusalWindow(1, clock, self._unknown_callers_counted)
        log.on_tick(self._refused.end)
        log.on_tick(self._unknown_callers.end)

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
        self._log.write(AuditKind.EXECUTION_ENDED, {**of_session(session), **there})

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

    def approval_requested(self, approval: Approval) -> None:
        self._log.write(AuditKind.APPROVAL_REQUESTED, {**_of_approval(approval), "wait_s": approval.wait_s})

    def approval_decided(self, approval: Approval, ruling: Ruling) -> None:
        who = {} if ruling.by is None else {"by_tenant": ruling.by.tenant, "by": ruling.by.name}
        self._log.write(
            AuditKind.APPROVAL_DECIDED, {**_of_approval(approval), "policy": self._policy, **_of_ruling(ruling), **who}
        )

    def approval_refused(self, approval: Approval, ruling: Ruling) -> None:
        # A sandbox can cause any number of these.
        if self._refused.records(approval.tenant, _APPROVALS, ruling.decision.value):
            fields = {**_of_approval(approval), "policy": self._policy, **_of_ruling(ruling)}
            self._log.write(AuditKind.APPROVAL_DECIDED, fields)

    # -- the daemon ------------------------------------------------------------------------------------------------

    def daemon_started(self, *, version: str, backend: str, policy: str, policy_version: str) -> None:
        self._policy = policy
        fields = {"version": version, "backend": backend, "policy": policy, "policy_version": policy_version}
        self._log.write(AuditKind.DAEMON_STARTED, fields)

    def daemon_stopped(self) -> None:
        """The daemon stops in order, and its sessions have ended."""
        self._log.write(AuditKind.DAEMON_STOPPED, {})

    def policy_changed(self, before: Policy, now: Policy) -> None:
        self._policy = now.fingerprint
        fields = {"before": before.fingerprint, "policy": now.fingerprint, "policy_version": now.version}
        self._log.write(AuditKind.POLICY_RELOADED, fields)

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        self._log.write(AuditKind.POLICY_REFUSED, {"policy": current.fingerprint, "problems": list(problems)})

    def tokens_changed(self, news: TokenNews) -> None:
        self._log.write(AuditKind.TOKENS_RELOADED, asdict(news))

    def admin_called(self, principal: Principal, method: str, target: str = "") -> None:
        """An administrator's call is about to be made. `target` is its session or tenant, if it has one."""
        self._log.write(AuditKind.ADMIN_CALLED, {**of_principal(principal), "method": method, "target": target})

    def recording_fetched(self, caller: Principal, session_id: str, tenant: str) -> None:
        """The recording of a tenant's session is about to be sent."""
        fields = {"tenant": tenant, "session": session_id, "by_tenant": caller.tenant, "by": caller.name}
        self._log.write(AuditKind.RECORDING_FETCHED, fields)

    # -- refusals --------------------------------------------------------------------------------------------------

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        if isinstance(error, Unavailable) and (error.progress is not None or error.reason is Reason.APPROVAL_PENDING):
            return  # the caller only waits, and polls
        method, reason = clipped(method, SHORT_CHARS), error.reason.value
        if principal is None:
            if self._unknown_callers.records("", method, reason):
                self._unknown_callers_counted("", (method, reason), 1)
            return
        if not self._refused.records(principal.tenant, method, reason):
            return
        fields = {
            **of_principal(principal),
            "method": method,
            "reason": reason,
            "message": clipped(error.message, _MESSAGE_CHARS),
        }
        if isinstance(error, PolicyViolation):
            fields["policy"] = self._policy
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

    def _refusals_counted(self, tenant: str, kind: tuple[str, ...], count: int) -> None:
        method, reason = kind
        fields = {"tenant": tenant, "method": method, "reason": reason, "count": count}
        self._log.write(AuditKind.REQUESTS_REFUSED, fields)

    def _unknown_callers_counted(self, _tenant: str, kind: tuple[str, ...], count: int) -> None:
        method, reason = kind
        self._log.write(AuditKind.CREDENTIALS_REFUSED, {"method": method, "reason": reason, "count": count})


def _of_ruling(ruling: Ruling) -> dict[str, Any]:
    why = {"why": ruling.reason} if ruling.reason else {}
    return {"decision": ruling.decision.value, **why}


def _of_approval(approval: Approval) -> dict[str, Any]:
    named = {
        "session": approval.session_id,
        "request": clipped(approval.request_id, SHORT_CHARS),
        "execution": clipped(approval.execution_id, SHORT_CHARS),
    }
    return {
        "tenant": approval.tenant,
        "approval": approval.approval_id,
        **{name: text for name, text in named.items() if text},
        "approval_kind": approval.kind.value,
        "what": approval.what,
        "rule": clipped(approval.rule, SHORT_CHARS),
    }
