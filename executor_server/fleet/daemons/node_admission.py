"""Looks at a node's lease once more between admission and the effect that was admitted.

Admission may wait, for the audit log above all. A daemon that was stopped meanwhile goes on after the end of its lease,
when its front may have reported the session lost. No await lies between the consent here and the frame to the guest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from executor_server.core import ExecutionLimits, Principal, ProcessFacts, SessionFacts, SessionSpec, ToolCall, ToolSpec
from executor_server.core.lifecycle import AdmissionController, Answer, StateFacts


class LeasedAdmission(AdmissionController):
    """Asks another controller, and then `require`, which raises an ExecutorError without a lease."""

    def __init__(self, admission: AdmissionController, require: Callable[[], None]) -> None:
        self._admission = admission
        self._require = require

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Callable[[], None]:
        return self._held(await self._admission.session(principal, request_id, spec))

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        async with self._admission.creation_turn(tenant):
            self._require()
            yield

    async def execution(
        self, session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        return self._held(await self._admission.execution(session, execution_id, code, limits))

    def _held(self, release: Callable[[], None]) -> Callable[[], None]:
        try:
            self._require()
        except BaseException:
            release()
            raise
        return release

    def network_window(self, session: SessionFacts) -> int | None:
        return self._admission.network_window(session)

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        # Nothing reaches a client without a lease; the call waits in the journal for one that attaches again.
        self._admission.tool_call(session, execution_id, call)

    async def tool_answer(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        await self._admission.tool_answer(session, execution_id, answer)
        self._require()

    async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
        await self._admission.tools(session, tools)
        self._require()

    async def imports(self, session: SessionFacts, patterns: Sequence[str]) -> None:
        await self._admission.imports(session, patterns)
        self._require()

    async def variables(self, session: SessionFacts, names: Sequence[str], *, write: bool) -> None:
        await self._admission.variables(session, names, write=write)
        self._require()

    async def state_export(self, session: SessionFacts) -> None:
        await self._admission.state_export(session)
        self._require()

    async def state_restore(self, session: SessionFacts, state: StateFacts) -> None:
        await self._admission.state_restore(session, state)
        self._require()

    async def savepoint(self, session: SessionFacts, back_to: int | None) -> None:
        await self._admission.savepoint(session, back_to)
        self._require()

    async def file_put(self, session: SessionFacts, path: str, size_bytes: int, *, tar: bool) -> None:
        await self._admission.file_put(session, path, size_bytes, tar=tar)
        self._require()

    async def file_get(self, session: SessionFacts, path: str, *, tar: bool) -> None:
        await self._admission.file_get(session, path, tar=tar)
        self._require()

    async def process_input(self, session: SessionFacts, process_id: str, offset: int, data: bytes) -> None:
        await self._admission.process_input(session, process_id, offset, data)
        self._require()

    async def action(self, session: SessionFacts, kind: str, facts: Mapping[str, str | int | bool]) -> None:
        await self._admission.action(session, kind, facts)
        self._require()

    async def process(self, session: SessionFacts, process: ProcessFacts) -> None:
        await self._admission.process(session, process)
        self._require()

    async def port(self, session: SessionFacts, port: int) -> None:
        await self._admission.port(session, port)
        self._require()
