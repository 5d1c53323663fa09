"""Measures the seconds that admission takes: quotas and audit, before something happens."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from executor_server.core import SessionFacts, ToolCall
from executor_server.core.lifecycle import AdmissionController
from executor_server.telemetry.metrics import Metrics


class TimedAdmission(AdmissionController):
    """Passes every question on to another controller, and measures those that are awaited, and tool calls."""

    def __init__(self, admission: AdmissionController, metrics: Metrics) -> None:
        self._admission = admission
        self._metrics = metrics
        # All questions, future ones included: AdmissionController itself would admit whatever is not passed on.
        for name, question in inspect.getmembers(AdmissionController, inspect.isfunction):
            if name not in vars(TimedAdmission):
                ask = getattr(admission, name)
                setattr(self, name, self._timed(ask) if inspect.iscoroutinefunction(question) else ask)

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        started_s = time.perf_counter()
        async with self._admission.creation_turn(tenant):
            self._metrics.note_phase("creation_queue", time.perf_counter() - started_s)
            yield

    def tool_call(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        with self._measured():
            self._admission.tool_call(session, execution_id, call)

    def _timed(self, ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*arguments: Any, **options: Any) -> Any:
            with self._measured():
                return await ask(*arguments, **options)

        return timed

    @contextmanager
    def _measured(self) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._metrics.note_phase("admission", time.perf_counter() - started_s)
