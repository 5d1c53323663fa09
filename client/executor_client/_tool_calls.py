"""The sync client's runner of host tools: each call on a thread of a bounded pool, so that calls run side by side.

Threads are made on the first call; an execution that calls no tool never pays for them.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

from executor_client import _tools
from executor_client._assembler import ToolRequest
from executor_client._execution import Execution
from executor_client._limits import TOOL_CALLS_WAITING_MAX, TOOLS_GRACE_S
from executor_client._tools import Answer, Tool
from executor_client.errors import ProtocolError


class ToolPool:
    """The threads of one session's host tools."""

    def __init__(self, *, max_concurrent_tools: int) -> None:
        self._lock = threading.Lock()
        self._size = max_concurrent_tools
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._calls: set[concurrent.futures.Future[None]] = set()

    def submit(self, work: Callable[[], None]) -> None:
        """Runs `work` as soon as a thread is free. Raises ProtocolError when too many wait already."""
        with self._lock:
            if len(self._calls) >= TOOL_CALLS_WAITING_MAX:
                raise ProtocolError(f"more than {TOOL_CALLS_WAITING_MAX} tool calls at once")
            if self._executor is None:
                self._executor = concurrent.futures.ThreadPoolExecutor(self._size, thread_name_prefix="executor-tool")
            call = self._executor.submit(work)
            self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def close(self) -> None:
        """Drops the calls that wait and gives those that run a moment; a tool that hangs is left to its thread."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
            concurrent.futures.wait(set(self._calls), timeout=TOOLS_GRACE_S)


class ToolCalls:
    """Answers the tool calls of one execution.

    `failure` is what ends the execution from here: an error that a tool raised outside `Exception`, or an answer that
    could not be given. The stream being read is cancelled then, so that its reader looks.
    """

    def __init__(
        self,
        execution: Execution,
        tools: Mapping[str, Tool],
        pool: ToolPool,
        submit: Callable[[str, str, Answer], None],
    ) -> None:
        self.failure: BaseException | None = None
        self._execution = execution
        self._tools = tools
        self._pool = pool
        self._submit = submit
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._stream: Any = None

    def watch(self, stream: Any) -> None:
        """Names the stream that is cancelled on a failure. Cancels it at once if that has happened already."""
        with self._lock:
            self._stream = stream
            if self.failure is not None:
                stream.cancel()

    def start(self, request: ToolRequest) -> None:
        """Answers the call in the background, in a copy of the caller's context; each call once."""
        if request.event.call_id in self._seen:
            return
        self._seen.add(request.event.call_id)
        context = contextvars.copy_context()
        self._pool.submit(lambda: context.run(self._answer, request))

    def _answer(self, request: ToolRequest) -> None:
        call_id = request.event.call_id
        try:
            with _tools.pending(self._execution.session_id), self._execution.running(request):
                answer = self._run(request)
            if answer.is_final:
                # Recorded before the answer leaves: the result may be back before its confirmation.
                self._execution.assembler.final_answers[call_id] = answer.value
            self._submit(self._execution.execution_id, call_id, answer)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in execute, and raised there
            self._fail(error)

    def _run(self, request: ToolRequest) -> Answer:
        try:
            tool = _tools.find(self._tools, request.event.name)
            args, kwargs = _tools.arguments(request)
            return _tools.succeeded(tool, tool.function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the tool's error is the program's to handle
            return _tools.failed(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            if self._stream is not None:
                self._stream.cancel()
