"""Admission: holds tenants to their quotas, and records everything in the audit log before it happens.

It reserves the quota, then writes the record, and releases the reservation if that fails. With `audit.sync = "always"`
an effect waits until its record is on disk.

When the log can't be written, sessions of `fail_closed` profiles stop: their requests are refused, and their executions
end as soon as the failure is known. Others go on, and the log later states how many records are missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from executor_server.core import (
    ExecutionLimits,
    Principal,
    ProcessFacts,
    Reason,
    SessionFacts,
    SessionSpec,
    ToolCall,
    ToolSpec,
    Unavailable,
)
from executor_server.core.fairness import FairSemaphore
from executor_server.core.lifecycle import AdmissionController, Answer, StateFacts
from executor_server.policy.audit import (
    AuditKind,
    AuditLog,
    of_code,
    of_command,
    of_input,
    of_names,
    of_request,
    of_session,
    of_state,
    of_tools,
)
from executor_server.policy.quotas.quotas import Quotas

RETRY_S = 2.0
STOPPED_TEXT = "the audit log can't be written, and the policy lets nothing run unrecorded (audit.fail_closed)"


class Admission(AdmissionController):
    """Checks quotas and writes the audit log; `log` is None if auditing is off."""

    def __init__(self, quotas: Quotas, creations: FairSemaphore, log: AuditLog | None) -> None:
        self._quotas = quotas
        self._creations = creations
        self._log = log

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Callable[[], None]:
        if spec.prelude:
            self._quotas.check_use(principal.tenant)
        release = self._quotas.reserve_session(principal.tenant)
        try:
            await self.request(principal, request_id, spec)
        except BaseException:
            release()
            raise
        return release

    async def request(self, principal: Principal, request_id: str, spec: SessionSpec) -> None:
        """Records that a session is about to be created; its place is reserved elsewhere. Raises Unavailable."""
        fields = of_request(principal, request_id, spec)
        await self._record(AuditKind.SESSION_REQUESTED, fields, fail_closed=spec.audit.fail_closed)

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        async with self._creations.hold(tenant):
            yield

    async def execution(
        self, session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        release = self._quotas.reserve_execution(session, execution_id, limits)
        try:
            fields = of_code(session, execution_id, code, limits)
            await self._record(AuditKind.EXECUTION_REQUESTED, fields, fail_closed=session.audit.fail_closed)
        except BaseException:
            release()
            raise
        return release

    def network_window(self, session: SessionFacts) -> int | None:
        return self._quotas.network_window(session.owner.tenant)

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        """Writes the record. With `audit.sync = "always"` the call's answer waits until it is on the disk."""
        arguments = call.arguments
        size_bytes = len(arguments) if isinstance(arguments, bytes) else arguments.size_bytes
        fields = {"execution": execution_id, "call": call.call_id, "tool": call.name, "argument_bytes": size_bytes}
        written = self._log is not None and self._log.write(AuditKind.TOOL_CALLED, {**of_session(session), **fields})
        _require(written, fail_closed=session.audit.fail_closed)

    async def tool_answer(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        fields = {
            "execution": execution_id,
            "call": answer.call_id,
            "bytes": answer.size_bytes,
            "failed": answer.failed,
        }
        await self._record_in(session, AuditKind.TOOL_ANSWERED, fields)

    async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
        if any(tool.shipped is not None for tool in tools):
            self._check_use(session)
        await self._record_in(session, AuditKind.TOOLS_REGISTERED, of_tools(session, tools))

    async def imports(self, session: SessionFacts, patterns: Sequence[str]) -> None:
        await self._record_in(session, AuditKind.IMPORTS_AUTHORIZED, of_names(patterns))

    async def variables(self, session: SessionFacts, names: Sequence[str], *, write: bool) -> None:
        self._check_use(session)  # pickled values run code, and so does `__repr__`
        kind = AuditKind.VARIABLES_SET if write else AuditKind.VARIABLES_READ
        await self._record_in(session, kind, of_names(names))

    async def state_export(self, session: SessionFacts) -> None:
        self._check_use(session)  # pickling runs code
        await self._record_in(session, AuditKind.STATE_REQUESTED, {})

    async def state_restore(self, session: SessionFacts, state: StateFacts) -> None:
        self._check_use(session)
        await self._record_in(session, AuditKind.STATE_RESTORED, of_state(state))

    async def savepoint(self, session: SessionFacts, back_to: int | None) -> None:
        if back_to is None:
            await self._record_in(session, AuditKind.SAVEPOINT_REQUESTED, {})
        else:
            await self._record_in(session, AuditKind.ROLLBACK_REQUESTED, {"savepoint": back_to})

    async def file_put(self, session: SessionFacts, path: str, size_bytes: int, *, tar: bool) -> None:
        await self._record_in(session, AuditKind.FILE_PUT, {"path": path, "bytes": size_bytes, "archive": tar})

    async def file_get(self, session: SessionFacts, path: str, *, tar: bool) -> None:
        await self._record_in(session, AuditKind.FILE_REQUESTED, {"path": path, "archive": tar})

    async def process(self, session: SessionFacts, process: ProcessFacts) -> None:
        self._check_use(session)
        await self._record_in(session, AuditKind.PROCESS_REQUESTED, of_command(session, process))

    async def port(self, session: SessionFacts, port: int) -> None:
        await self._record_in(session, AuditKind.PORT_REQUESTED, {"port": port})

    async def process_input(self, session: SessionFacts, process_id: str, offset: int, data: bytes) -> None:
        await self._record_in(session, AuditKind.INPUT_PUT, of_input(session, process_id, offset, data))

    async def action(self, session: SessionFacts, kind: str, facts: Mapping[str, str | int | bool]) -> None:
        await self._record_in(session, AuditKind(kind), facts)

    def _check_use(self, session: SessionFacts) -> None:
        self._quotas.check_use(session.owner.tenant)

    async def _record_in(self, session: SessionFacts, kind: AuditKind, fields: Mapping[str, Any]) -> None:
        await self._record(kind, {**of_session(session), **fields}, fail_closed=session.audit.fail_closed)

    async def _record(self, kind: AuditKind, fields: Mapping[str, Any], *, fail_closed: bool) -> None:
        log = self._log
        written = log is not None and log.write(kind, fields) and await log.durable()
        _require(written, fail_closed=fail_closed)


def _require(written: bool, *, fail_closed: bool) -> None:
    if fail_closed and not written:
        raise Unavailable(Reason.AUDIT_UNAVAILABLE, STOPPED_TEXT, retry_after_s=RETRY_S)


def must_stop(session: SessionFacts) -> bool:
    """Returns True when the executions of a session must stop once the log can't be written."""
    return session.audit.fail_closed
