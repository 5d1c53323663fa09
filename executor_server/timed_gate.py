"""A gate that another one stands behind, with a clock at it: how long the agreement of quotas and audit takes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from executor_server.gate import Answer, Gate, StateFacts
from executor_server.metrics import Metrics
from executor_server.model import ExecutionLimits, Principal, SessionFacts, SessionSpec, ToolCall, ToolSpec


class TimedGate(Gate):
    """Asks the gate behind it for everything. A test sees to it that nothing passes here unasked."""

    def __init__(self, gate: Gate, metrics: Metrics) -> None:
        self._gate = gate
        self._metrics = metrics

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._metrics.note_phase("gate", time.perf_counter() - started_s)

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Callable[[], None]:
        with self._timed():
            return await self._gate.session(principal, request_id, spec)

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        started_s = time.perf_counter()
        async with self._gate.creation_turn(tenant):
            self._metrics.note_phase("creation_turn", time.perf_counter() - started_s)
            yield

    async def execution(
        self, session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        with self._timed():
            return await self._gate.execution(session, execution_id, code, limits)

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        with self._timed():
            self._gate.tool_call(session, execution_id, call)

    async def tool_answer(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        with self._timed():
            await self._gate.tool_answer(session, execution_id, answer)

    async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
        with self._timed():
            await self._gate.tools(session, tools)

    async def imports(self, session: SessionFacts, patterns: Sequence[str]) -> None:
        with self._timed():
            await self._gate.imports(session, patterns)

    async def variables(self, session: SessionFacts, names: Sequence[str], *, write: bool) -> None:
        with self._timed():
            await self._gate.variables(session, names, write=write)

    async def state_export(self, session: SessionFacts) -> None:
        with self._timed():
            await self._gate.state_export(session)

    async def state_restore(self, session: SessionFacts, state: StateFacts) -> None:
        with self._timed():
            await self._gate.state_restore(session, state)

    async def file_put(self, session: SessionFacts, path: str, size_bytes: int, *, tar: bool) -> None:
        with self._timed():
            await self._gate.file_put(session, path, size_bytes, tar=tar)

    async def file_get(self, session: SessionFacts, path: str, *, tar: bool) -> None:
        with self._timed():
            await self._gate.file_get(session, path, tar=tar)
