"""An admission that a test can close, and an observer that remembers what it was notified of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from executor_server.core.errors import Reason, Unavailable
from executor_server.core.lifecycle.admission import AdmissionController, Answer
from executor_server.core.lifecycle.observer import Observer
from executor_server.core.model import (
    ExecutionLimits,
    FileInfo,
    LimitWarning,
    Principal,
    Result,
    SessionFacts,
    SessionSpec,
    ToolCall,
    ToolSpec,
)

CLOSED_TEXT = "the gate is closed"


class FakeAdmission(AdmissionController):
    """`asked` has what it was asked for; what is in `closed` it refuses, and what is in `slow` waits for `opened`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.closed: set[str] = set()
        self.slow: set[str] = set()
        self.opened = asyncio.Event()
        self.reserved = 0
        self.turns = 0

    def names(self) -> list[str]:
        return [name for name, *_ in self.asked]

    def _refuse(self, name: str, *what: Any) -> None:
        self.asked.append((name, *what))
        if name in self.closed:
            raise Unavailable(Reason.AUDIT_UNAVAILABLE, CLOSED_TEXT)

    async def _ask(self, name: str, *what: Any) -> None:
        self._refuse(name, *what)
        if name in self.slow:
            await self.opened.wait()

    async def _reserve(self, name: str, *what: Any) -> Callable[[], None]:
        await self._ask(name, *what)
        self.reserved += 1

        def give_back() -> None:
            self.reserved -= 1

        return give_back

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Callable[[], None]:
        return await self._reserve("session", request_id)

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        await self._ask("creation_turn", tenant)
        self.turns += 1
        try:
            yield
        finally:
            self.turns -= 1

    async def execution(
        self, session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits
    ) -> Callable[[], None]:
        return await self._reserve("execution", execution_id, limits)

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        self._refuse("tool_call", call.name)

    async def tool_answer(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        await self._ask("tool_answer", answer)

    async def tools(self, session: SessionFacts, tools: Sequence[ToolSpec]) -> None:
        await self._ask("tools", [tool.name for tool in tools])

    async def variables(self, session: SessionFacts, names: Sequence[str], *, write: bool) -> None:
        await self._ask("set" if write else "get", list(names))

    async def file_put(self, session: SessionFacts, path: str, size_bytes: int, *, tar: bool) -> None:
        await self._ask("file_put", path, size_bytes)

    async def file_get(self, session: SessionFacts, path: str, *, tar: bool) -> None:
        await self._ask("file_get", path)


class Witness(Observer):
    """`notified` has its notifications, in order."""

    def __init__(self) -> None:
        self.notified: list[tuple[Any, ...]] = []

    def names(self) -> list[str]:
        return [name for name, *_ in self.notified]

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        self.notified.append(("session_created", session.session_id))

    def session_recovered(self, session: SessionFacts) -> None:
        self.notified.append(("session_recovered", session.session_id))

    def session_lost(self, session: SessionFacts, reason: str) -> None:
        self.notified.append(("session_lost", reason))

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        self.notified.append(("session_ended", reason))

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        self.notified.append(("execution_started", execution_id))

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        self.notified.append(("execution_recovered", execution_id))

    def limit_warned(self, session: SessionFacts, execution_id: str, warning: LimitWarning) -> None:
        self.notified.append(("limit_warned", warning))

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        self.notified.append(("execution_ended", execution_id, result.outcome))

    def tool_called(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        self.notified.append(("tool_called", call.name))

    def tool_answered(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        self.notified.append(("tool_answered", answer))

    def file_got(self, session: SessionFacts, file: FileInfo) -> None:
        self.notified.append(("file_got", file.path))

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        self.notified.append(("guest_misbehaved", what))
