"""Measures the seconds that admission takes: quotas and audit, before something happens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from executor_server.core import ExecutionLimits, Principal, ProcessFacts, SessionFacts, SessionSpec, ToolCall, ToolSpec
from executor_server.core.lifecycle import AdmissionController, Answer, StateFacts
from executor_server.telemetry.metrics import Metrics


class _Timed:
    """Notes the seconds that a block took. A generator as context manager would take three times as long as this."""

    __slots__ = ("_metrics", "_started_s")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started_s = 0.0

    def __enter__(self) -> None:
        self._started_s = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        self._metrics.note_phase("admission", time.perf_counter() - self._started_s)


class TimedAdmission(AdmissionController):
    """Passes every question on to another controller. A test ensures that no method is missing here."""

    def __init__(self, admission: AdmissionController, metrics: Metrics) -> None:
        self._admission = admission
        self._metrics = metrics

    def _timed(self) -> _Timed:
        return _Timed(self._metrics)

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Callable[[], None]:
        with self._timed():
            return await self._admission.session(principal, request_id, spec)

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        started_s = time.perf_counter()
        async with self._admission.creation_turn(tenant):
            self._metrics.note_phase("creation_queue", time.perf_counter() - started_s)
            yield

    async def execution(
        self, session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        with self._timed():
            return await self._admission.execution(session, execution_id, code, limits)

    def network_window(self, session: SessionFacts) -> int | None:
        return self._admission.network_window(session)  # not before an effect, but during one

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        with self._timed():
            self._admission.tool_call(session, execution_id, call)

    async def tool_answer(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        with self._timed():
            await self._admission.tool_answer(session, execution_id, answer)

    async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
        with self._timed():
            await self._admission.tools(session, tools)

    async def imports(self, session: SessionFacts, patterns: Sequence[str]) -> None:
        with self._timed():
            await self._admission.imports(session, patterns)

    async def variables(self, session: SessionFacts, names: Sequence[str], *, write: bool) -> None:
        with self._timed():
            await self._admission.variables(session, names, write=write)

    async def state_export(self, session: SessionFacts) -> None:
        with self._timed():
            await self._admission.state_export(session)

    async def state_restore(self, session: SessionFacts, state: StateFacts) -> None:
        with self._timed():
            await self._admission.state_restore(session, state)

    async def savepoint(self, session: SessionFacts, back_to: int | None) -> None:
        with self._timed():
            await self._admission.savepoint(session, back_to)

    async def file_put(self, session: SessionFacts, path: str, size_bytes: int, *, tar: bool) -> None:
        with self._timed():
            await self._admission.file_put(session, path, size_bytes, tar=tar)

    async def file_get(self, session: SessionFacts, path: str, *, tar: bool) -> None:
        with self._timed():
            await self._admission.file_get(session, path, tar=tar)

    async def process(self, session: SessionFacts, process: ProcessFacts) -> None:
        with self._timed():
            await self._admission.process(session, process)

    async def port(self, session: SessionFacts, port: int) -> None:
        with self._timed():
            await self._admission.port(session, port)

    async def process_input(self, session: SessionFacts, process_id: str, offset: int, data: bytes) -> None:
        with self._timed():
            await self._admission.process_input(session, process_id, offset, data)

    async def action(self, session: SessionFacts, kind: str, facts: Mapping[str, str | int | bool]) -> None:
        with self._timed():
            await self._admission.action(session, kind, facts)
