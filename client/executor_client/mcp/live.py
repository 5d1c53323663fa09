"""Sends a host the output of a running call: as log messages, and its last line and waits as progress."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any, Self

from executor_client.events import ExecutionEvent, LogEvent, QueuedEvent
from executor_client.mcp.sdk import send_log
from executor_client.waits import Wait

OUTPUT_CHARS_MAX = 20_000
"""Characters of output shown while an execution runs; the result has all of it, up to its own limit."""
OUTPUT_EVENTS_MAX = 500
PROGRESS_CHARS_MAX = 200

_log = logging.getLogger(__name__)
_current: contextvars.ContextVar[Live] = contextvars.ContextVar("current")


def show_wait(wait: Wait) -> None:
    """Shows the wait of a call to the host. The client's `on_wait`."""
    if (live := _current.get(None)) is not None:
        live.show_wait(wait)


class Live:
    """The live output of one call. A context manager around the call."""

    def __init__(self, ctx: Any, tool: str = "") -> None:
        """`tool` is the logger's name for output in the host's log."""
        self._ctx = ctx
        self._tool = tool
        self._events = 0
        self._chars = 0
        self._open = True
        self._over = False
        self._sending: set[asyncio.Task[None]] = set()

    async def show(self, event: ExecutionEvent) -> None:
        if isinstance(event, QueuedEvent) and event.ahead:
            await self._progress(f"waiting for {event.ahead} other executions of this session")
        elif isinstance(event, LogEvent) and self._open:
            await self._show_output(event)

    async def _show_output(self, event: LogEvent) -> None:
        self._chars += len(event.text)
        self._open = self._events < OUTPUT_EVENTS_MAX and self._chars <= OUTPUT_CHARS_MAX
        text = event.text if self._open else "[more output comes with the result]"
        await send_log(self._ctx, "info" if event.stream == "stdout" else "warning", text, logger=self._tool)
        await self._progress(text.rstrip().rpartition("\n")[2])

    def show_wait(self, wait: Wait) -> None:
        if self._over:
            return  # work of a cancelled call, such as creating a session, may still be waiting
        sending = asyncio.create_task(self._progress(str(wait)))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            _log.debug("the host was not notified of a wait: %r", error)  # the host is gone

    async def _progress(self, message: str) -> None:
        self._events += 1
        await self._ctx.report_progress(self._events, message=message[:PROGRESS_CHARS_MAX])

    async def __aenter__(self) -> Self:
        self._entered = _current.set(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._over = True
        _current.reset(self._entered)
        for sending in self._sending:
            sending.cancel()
        if self._sending:
            await asyncio.wait(self._sending)
