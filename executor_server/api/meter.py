"""Measures served calls: number, duration and status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from executor_server.api.handlers import Behaviour, Context, Wrapper, around_own_methods, status_of
from executor_server.telemetry import Metrics

_BEGINS_EXECUTIONS = "/executor_api.v1.ExecutorService/Execute"


def metering(metrics: Metrics) -> Wrapper:
    """Returns a wrapper that reports every call of our services to `metrics`."""

    def around(method: str, behaviour: Behaviour) -> Behaviour:
        async def metered(request: Any, context: Context) -> Any:
            started_s = time.perf_counter()
            code = "CANCELLED"
            if method == _BEGINS_EXECUTIONS:
                context = cast("Context", _ReportingContext(context, _first_event(metrics, started_s)))
            metrics.call_began(method)
            try:
                answer = await behaviour(request, context)
                code = "OK"
                return answer
            except asyncio.CancelledError:
                raise
            except BaseException:  # the error border has set the status
                code = status_of(context)
                raise
            finally:
                metrics.call_ended(method, code, time.perf_counter() - started_s)

        return metered

    return around_own_methods(around)


def _first_event(metrics: Metrics, started_s: float) -> Callable[[], None]:
    return lambda: metrics.note_phase("first_event", time.perf_counter() - started_s)


class _ReportingContext:
    """A call's context that calls `on_first` when the first message has been written to it."""

    def __init__(self, context: Context, on_first: Callable[[], None]) -> None:
        self._context = context
        self._on_first: Callable[[], None] | None = on_first

    async def write(self, message: Any) -> None:
        await self._context.write(message)
        if self._on_first is not None:
            self._on_first()
            self._on_first = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
