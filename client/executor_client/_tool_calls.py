"""The sync client's runner of host tools: each call on a thread of a bounded pool, so that calls run side by side.

Threads are made for calls and end with them; an execution that calls no tool never pays for them.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from executor_client import _tools
from executor_client._assembler import ToolRequest
from executor_client._execution import Execution
from executor_client._limits import TOOL_CALLS_WAITING_MAX, TOOLS_GRACE_S
from executor_client._shared_arguments import Arguments, ArgumentWatch
from executor_client._tools import Answer, Tool
from executor_client.errors import ProtocolError


class ToolPool:
    """The threads of one session's host tools: as many as there are calls, up to a number; then calls wait.

    They are daemon threads: a tool that hangs must not keep a process that was interrupted from its end, as the threads
    of `concurrent.futures` do.
    """

    def __init__(self, *, max_concurrent_tools: int) -> None:
        self._changed = threading.Condition()
        self._size = max_concurrent_tools
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0
        self.arguments = ArgumentWatch()

    def submit(self, work: Callable[[], None]) -> None:
        """Runs `work`, which must not raise, as soon as a thread is free. Raises ProtocolError when too many wait."""
        with self._changed:
            if len(self._waiting) + self._running >= TOOL_CALLS_WAITING_MAX:
                raise ProtocolError(f"more than {TOOL_CALLS_WAITING_MAX} tool calls at once")
            if self._running >= self._size:
                self._waiting.append(work)
                return
            threading.Thread(target=self._serve, args=(work,), name="executor-tool", daemon=True).start()
            self._running += 1

    def _serve(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            with self._changed:
                work = self._waiting.popleft() if self._waiting else None
                if work is None:
                    self._running -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Drops the calls that wait and gives those that run a moment; a tool that hangs is left to its thread."""
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._running, timeout=TOOLS_GRACE_S)


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
        self._over = False

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

    def end(self) -> None:
        """The execution is over: calls that still wait for a thread are not made."""
        self._over = True

    def _answer(self, request: ToolRequest) -> None:
        if self._over:
            return
        call_id = request.event.call_id
        try:
            with _tools.pending(self._execution.session_id), self._execution.running(request):
                answer, given = self._run(request)
            if answer.is_final:
                # Recorded before the answer leaves: the result may be back before its confirmation.
                self._execution.assembler.final_answers[call_id] = answer.value
            self._submit(self._execution.execution_id, call_id, answer)
            if given is not None:
                self._pool.arguments.look(request.event.name, given)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in execute, and raised there
            self._fail(error)

    def _run(self, request: ToolRequest) -> tuple[Answer, Arguments | None]:
        """The answer and, of a tool that has returned, what it was given, where that is to be looked at."""
        try:
            tool = _tools.find(self._tools, request.event.name)
            given = _tools.arguments(request)
            return _tools.succeeded(tool, tool.function(*given.args, **given.kwargs)), given.to_compare()
        except Exception as error:  # noqa: BLE001 - the tool's error is the program's to handle
            return _tools.failed(error), None

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            if self._stream is not None:
                self._stream.cancel()
