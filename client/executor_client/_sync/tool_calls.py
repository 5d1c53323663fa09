"""The blocking client's host tools: calls run concurrently, each in a thread, up to a limit."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self

from executor_client._core import tools as host_tools
from executor_client._core.assembler import ToolRequest
from executor_client._core.execution import Execution
from executor_client._core.limits import TOOL_CALLS_WAITING_MAX, TOOLS_GRACE_S
from executor_client._core.shared_arguments import Arguments, ArgumentWatch
from executor_client._core.tools import Answer, Tool
from executor_client._sync.channel import EventStream
from executor_client.errors import ProtocolError


class ToolPool:
    """The threads of one session's host tools: one for each call up to a limit; further calls wait.

    They are daemon threads, unlike those of `concurrent.futures`: a hanging tool must not keep an interrupted process
    alive.
    """

    def __init__(self, *, max_concurrent_tools: int) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._size = max_concurrent_tools
        self._waiting: deque[Callable[[], None]] = deque()
        self._threads = 0
        self.arguments = ArgumentWatch()

    def submit(self, work: Callable[[], None]) -> None:
        """Runs `work`, which must not raise, once a thread is free. Raises ProtocolError if too many wait."""
        with self._lock:
            if len(self._waiting) + self._threads >= TOOL_CALLS_WAITING_MAX:
                raise ProtocolError(f"more than {TOOL_CALLS_WAITING_MAX} tool calls at once")
            if self._threads < self._size:
                threading.Thread(target=self._serve, args=(work,), name="executor-tool", daemon=True).start()
                self._threads += 1
            else:
                self._waiting.append(work)

    def _serve(self, work: Callable[[], None]) -> None:
        while True:
            work()
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    self._ended.notify_all()
                    return
                work = self._waiting.popleft()

    def close(self) -> None:
        """Drops waiting calls, and waits a moment for running ones. A hanging tool keeps its thread."""
        with self._lock:
            self._waiting.clear()
            self._ended.wait_for(lambda: not self._threads, timeout=TOOLS_GRACE_S)


class ToolCalls:
    """Answers the tool calls of one execution. On exit, drops calls that wait for a thread.

    `failure` is an error that ends the execution: an answer could not be sent, or a tool raised something other than an
    `Exception`. It also cancels the current stream, so that its reader wakes up and raises the error.
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
        self._stream: EventStream | None = None
        self._over = False

    def watch(self, stream: EventStream) -> None:
        """Sets the stream to cancel on a failure. Cancels it at once if a call has failed already."""
        with self._lock:
            self._stream = stream
            has_failed = self.failure is not None
        if has_failed:
            stream.cancel()

    def start(self, request: ToolRequest) -> None:
        """Answers the call in the background, in a copy of the caller's context; each call once."""
        if request.event.call_id in self._seen:
            return
        self._seen.add(request.event.call_id)
        context = contextvars.copy_context()
        self._pool.submit(lambda: context.run(self._answer, request))

    def _answer(self, request: ToolRequest) -> None:
        if self._over:
            return
        call_id = request.event.call_id
        try:
            with host_tools.pending(self._execution.session_id), self._execution.running(request):
                answer, given = self._run(request)
            if answer.is_final:
                # Recorded before the answer is sent: the result may arrive before its confirmation.
                self._execution.assembler.final_answers[call_id] = answer.value
            self._submit(self._execution.execution_id, call_id, answer)
            if given is not None:
                self._pool.arguments.compare(request.event.name, given)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in execute, and raised there
            self._fail(error)

    def _run(self, request: ToolRequest) -> tuple[Answer, Arguments | None]:
        """Returns the answer and, if the tool returned and they are small, the arguments to compare."""
        try:
            tool = host_tools.find(self._tools, request.event.name)
            given = host_tools.arguments(request)
            value = host_tools.settled(tool.function(*given.args, **given.kwargs))
            return host_tools.succeeded(tool, value), given.to_compare()
        except Exception as error:  # noqa: BLE001 - the tool's error is the program's to handle
            return host_tools.failed(error), None

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            stream = self._stream
        if stream is not None:  # without the lock: the stream has one of its own
            stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over = True
