"""The asyncio client's runner of host tools: each call a task; coroutine functions are awaited, others get a thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

from executor_client import _tools
from executor_client._assembler import ToolRequest
from executor_client._execution import Execution
from executor_client._limits import TOOL_CALLS_WAITING_MAX
from executor_client._shared_arguments import Arguments, ArgumentWatch
from executor_client._tools import Answer, Tool
from executor_client.errors import ProtocolError


class AioToolPool:
    """What one session's host tools share: how many run at once."""

    def __init__(self, *, max_concurrent_tools: int) -> None:
        self.room = asyncio.Semaphore(max_concurrent_tools)
        self.arguments = ArgumentWatch()

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Calls a function in a thread, in a copy of this context.

        A daemon thread, to which a tool that hangs is left: it must not keep a process from its end, as the threads of
        `concurrent.futures` do.
        """
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def call() -> None:
            try:
                end: tuple[Any, BaseException | None] = context.run(function), None
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                end = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, end)

        def tell(end: tuple[Any, BaseException | None]) -> None:
            if not ended.done():
                ended.set_result(end)

        threading.Thread(target=call, name="executor-tool", daemon=True).start()
        value, error = await ended
        if error is not None:
            raise error
        return value


class AioToolCalls:
    """Answers the tool calls of one execution; owns their tasks and leaves none behind.

    `failure` is what ends the execution from here; the stream being read is cancelled then, so that its reader looks.
    """

    def __init__(
        self,
        execution: Execution,
        tools: Mapping[str, Tool],
        pool: AioToolPool,
        submit: Callable[[str, str, Answer], Awaitable[None]],
    ) -> None:
        self.failure: BaseException | None = None
        self._execution = execution
        self._tools = tools
        self._pool = pool
        self._submit = submit
        self._seen: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stream: Any = None

    def watch(self, stream: Any) -> None:
        """Names the stream that is cancelled on a failure."""
        self._stream = stream
        if self.failure is not None:
            stream.cancel()

    def start(self, request: ToolRequest) -> None:
        """Answers the call in the background; each call once. Raises ProtocolError when too many wait already."""
        if request.event.call_id in self._seen:
            return
        if len(self._tasks) >= TOOL_CALLS_WAITING_MAX:
            raise ProtocolError(f"more than {TOOL_CALLS_WAITING_MAX} tool calls at once")
        self._seen.add(request.event.call_id)
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: ToolRequest) -> None:
        call_id = request.event.call_id
        try:
            async with self._pool.room:
                with _tools.pending(self._execution.session_id), self._execution.running(request):
                    answer, given = await self._run(request)
            if answer.is_final:
                # Recorded before the answer leaves: the result may be back before its confirmation.
                self._execution.assembler.final_answers[call_id] = answer.value
            try:
                await self._submit(self._execution.execution_id, call_id, answer)
            finally:  # the execution may end, and this task with it, before the answer is confirmed
                if given is not None:
                    self._pool.arguments.look(request.event.name, given)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - handed to the task that waits in execute, and raised there
            self.failure = self.failure or error
            if self._stream is not None:
                self._stream.cancel()

    async def _run(self, request: ToolRequest) -> tuple[Answer, Arguments | None]:
        """The answer and, of a tool that has returned, what it was given, where that is to be looked at."""
        try:
            tool = _tools.find(self._tools, request.event.name)
            given = _tools.arguments(request)
            if inspect.iscoroutinefunction(tool.function):
                value = await tool.function(*given.args, **given.kwargs)
            else:
                value = await self._pool.in_thread(functools.partial(tool.function, *given.args, **given.kwargs))
                if inspect.isawaitable(value):
                    value = await value
            return _tools.succeeded(tool, value), given.to_compare()
        except Exception as error:  # noqa: BLE001 - the tool's error is the program's to handle
            return _tools.failed(error), None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
