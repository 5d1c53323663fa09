"""The asyncio client's host tools: each call is a task; coroutine functions are awaited, others run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from executor_client._aio.channel import AsyncEventStream
from executor_client._aio.runtime import is_cancelling, shielded
from executor_client._core import tools as host_tools
from executor_client._core.assembler import ToolRequest
from executor_client._core.execution import Execution
from executor_client._core.limits import TOOL_CALLS_WAITING_MAX, TOOLS_GRACE_S
from executor_client._core.shared_arguments import Arguments, ArgumentWatch
from executor_client._core.tools import Answer, Tool
from executor_client.errors import ProtocolError


class AsyncToolPool:
    """The limit on how many host tools of one session run at once."""

    def __init__(self, *, max_concurrent_tools: int) -> None:
        self.room = asyncio.Semaphore(max_concurrent_tools)
        self.arguments = ArgumentWatch()

    async def close(self) -> None:
        """Does nothing: each execution ended its calls."""

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Calls a function in a thread, in a copy of this context.

        It is a daemon thread, unlike those of `concurrent.futures`: a hanging tool must not keep the process alive.
        """
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def call() -> None:
            try:
                end: tuple[Any, BaseException | None] = context.run(function), None
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                end = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(finish, end)

        def finish(end: tuple[Any, BaseException | None]) -> None:
            if not ended.done():
                ended.set_result(end)

        threading.Thread(target=call, name="executor-tool", daemon=True).start()
        value, error = await ended
        if error is not None:
            raise error
        return value


class AsyncToolCalls:
    """Answers the tool calls of one execution. On exit, cancels their tasks and waits a moment for their end.

    `failure` is an error that ends the execution. It also cancels the current stream, so that its reader wakes up and
    raises the error.
    """

    def __init__(
        self,
        execution: Execution,
        tools: Mapping[str, Tool],
        pool: AsyncToolPool,
        submit: Callable[[str, str, Answer], Awaitable[None]],
    ) -> None:
        self.failure: BaseException | None = None
        self._execution = execution
        self._tools = tools
        self._pool = pool
        self._submit = submit
        self._seen: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stream: AsyncEventStream | None = None

    def watch(self, stream: AsyncEventStream) -> None:
        """Sets the stream to cancel on a failure. Cancels it at once if a call has failed already."""
        self._stream = stream
        if self.failure is not None:
            stream.cancel()

    def start(self, request: ToolRequest) -> None:
        """Answers the call in the background; each call once. Raises ProtocolError if too many wait."""
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
                with host_tools.pending(self._execution.session_id), self._execution.running(request):
                    answer, given = await self._run(request)
            if answer.is_final:
                # Recorded before the answer is sent: the result may arrive before its confirmation.
                self._execution.assembler.final_answers[call_id] = answer.value
            try:
                await self._submit(self._execution.execution_id, call_id, answer)
            finally:  # the execution may end, and cancel this task, before the answer is confirmed
                if given is not None:
                    self._pool.arguments.compare(request.event.name, given)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - handed to the task that waits in execute, and raised there
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        if self._stream is not None:
            self._stream.cancel()

    async def _run(self, request: ToolRequest) -> tuple[Answer, Arguments | None]:
        """Returns the answer and, if the tool returned and they are small, the arguments to compare."""
        try:
            tool = host_tools.find(self._tools, request.event.name)
            given = host_tools.arguments(request)
            if inspect.iscoroutinefunction(tool.function):
                value = await tool.function(*given.args, **given.kwargs)
            else:
                value = await self._pool.in_thread(functools.partial(tool.function, *given.args, **given.kwargs))
                if inspect.isawaitable(value):
                    value = await value
            return host_tools.succeeded(tool, value), given.to_compare()
        except asyncio.CancelledError:
            if is_cancelling():
                raise
            # The tool itself was cancelled. Without an answer the program would wait for it.
            return host_tools.failed(RuntimeError("the tool was cancelled")), None
        except Exception as error:  # noqa: BLE001 - the tool's error is the program's to handle
            return host_tools.failed(error), None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await shielded(lambda: asyncio.wait(tasks, timeout=TOOLS_GRACE_S))
