"""Runs the supervisor's programs in the runtime, one after the other, and reports how each ended."""

from __future__ import annotations

import _thread
import linecache
import sys

from ..checks.control import ControlException, ExecutionInterrupted, FinalAnswerGiven, Refusal
from ..checks.failures import MAX_MESSAGE_CHARS, describe, text_of
from ..checks.meter import OperationLimitExceeded
from ..checks.sentinels import LastValue
from ..checks.time_limit import clear_timers, within
from ..wire import link
from ..wire.lean import dumps, signal
from ..wire.link_messages import NearLimit, Output, ProgramEnded, ProgramStopped, RunProgram
from ..wire.messages import ErrorDetail
from . import display
from .encoding import encode_description, encode_in_parts, encode_output
from .fitness import why_unfit
from .leftovers import end_leftovers, threads
from .own_process import give_headroom, hold_headroom

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import Any, Callable, Optional

    from executor_api.values.packing import Parts

    from .inbox import Inbox
    from .own_process import OwnProcess
    from .runtime import Runtime
    from .streams import Streams

_CO_COROUTINE = 0x80
# Seconds for a value's own code while it is encoded: `__repr__`, properties, the drawing of a figure.
VALUE_TIME_S = 5.0
_NOT_DESCRIBED = "<the exception cannot be described: its own code raised another one>"


class Executions:
    """Runs one program at a time, in the main thread."""

    def __init__(
        self, runtime: Runtime, streams: Streams, process: OwnProcess, inbox: Inbox, send: Callable[..., None]
    ) -> None:
        self._runtime = runtime
        self._meter, self._enforcer, self._main = runtime.meter, runtime.enforcer, runtime.main
        self._streams = streams
        self._process = process
        self._inbox = inbox
        self._send = send
        self._last_value = LastValue()
        self._output = b""
        self._in_agent_code = False
        self._stop_reported = False
        self._loop: Any = None
        # Captured: agent code may replace the names in their module.
        self._encode, self._encode_output, self._describe = encode_in_parts, encode_output, encode_description

    def on_interrupt(self, _signum: int, _frame: Any) -> None:
        """Handles SIGINT, which the supervisor sends to stop the program."""
        if self._in_agent_code and not self._inbox.defer_interrupt():
            raise ExecutionInterrupted

    @property
    def has_loop(self) -> bool:
        """True when a program has used the session's event loop."""
        return self._loop is not None

    def forget_loop(self) -> None:
        """Drops the event loop in a copy of the interpreter: its descriptors do not exist there."""
        if self._loop is not None:
            import asyncio

            self._loop = None
            asyncio.set_event_loop(None)

    def on_run(self, program: RunProgram, packet: link.Packet) -> None:
        body = link.read_body(packet)
        source = body[: program.source].decode("utf-8", "surrogatepass")
        self._streams.connect(packet.fds)
        lines = source.splitlines(keepends=True)
        linecache.cache[program.filename] = (program.source, None, lines, program.filename)
        self._last_value = LastValue()
        code, spans, may_need_loop = self._runtime.load(body[program.source :], self._last_value)
        in_loop = may_need_loop and bool(code.co_flags & _CO_COROUTINE)
        self._stop_reported = False
        self._meter.start(
            program.operations, self._warnings(program), program.session_operations, on_stop=self._report_stop
        )
        self._enforcer.begin()
        display.begin()
        hold_headroom()
        outcome, detail = self._run(code, program, source, spans, in_loop=in_loop)
        give_headroom()
        self._enforcer.end()
        operations = self._meter.finish()
        self._last_value = LastValue()
        error = dumps(detail.head()) if detail else b""
        output, self._output = self._output, b""
        ended = ProgramEnded(
            filename=program.filename,
            outcome=outcome,
            operations=operations,
            error=len(error),
            # An encoded value has shown already that encoding works.
            unfit=why_unfit(self._streams.null, None if output else self._encode),
        )
        # Before the end is reported, so that a pipe of the run that is still open then is held by other processes.
        # Right before it, because closing the pipes wakes the supervisor, too.
        self._streams.disconnect()
        self._send(ended, error + output)

    def _warnings(self, program: RunProgram) -> dict[int, Callable[[], None]]:
        """Returns the warnings that a budget is nearly spent, by the operation at which each is due."""
        marks: dict[int, list[str]] = {}
        for limit, mark in (
            ("operations", program.operations_mark),
            ("session_operations", program.session_mark),
        ):
            if mark is not None:
                marks.setdefault(mark, []).append(limit)
        return {mark: lambda limits=limits: self._warn(limits) for mark, limits in marks.items()}  # type: ignore[misc]

    def _warn(self, limits: list[str]) -> None:
        """Reports that a budget is nearly spent, if it can; else the supervisor does when the program has ended."""
        if not self._process.is_here():
            return
        try:
            for limit in limits:
                self._send(NearLimit(limit=limit))
        except (RecursionError, MemoryError):
            return  # the program is out of stack or memory itself

    def _run(
        self, code: types.CodeType, program: RunProgram, source: str, spans: list[list[int]], *, in_loop: bool
    ) -> tuple[str, Optional[ErrorDetail]]:
        """Runs the code; sends its images and its value from within, where the deadline still holds."""
        try:
            try:
                if in_loop:
                    self._make_loop()
                self._in_agent_code = True
                try:
                    self._evaluate(code, in_loop=in_loop)
                    self._meter.finish()  # the code of its value is bounded by time
                    clear_timers()
                    self._send_output(program)
                finally:
                    if self._process.is_here():
                        clear_timers()
                        display.show_open_figures()
                        self._runtime.notebook.end_step()
                self._streams.flush()
            except FinalAnswerGiven:
                self._streams.flush()
            finally:
                self._in_agent_code = False
        except BaseException as error:  # noqa: BLE001 (the border of agent code)
            self._process.end_forks(1)
            self._streams.settle()
            return self._classify(error, program.filename, source, spans)
        self._process.end_forks()
        swallowed = self._decisive()
        return ("succeeded", None) if swallowed is None else self._classify(swallowed, program.filename, source, spans)

    def _decisive(self) -> Optional[BaseException]:
        """Returns the exception that ends the execution even if a thread, a finalizer or a library swallowed it."""
        return self._enforcer.refusal or self._meter.raised

    def _evaluate(self, code: types.CodeType, *, in_loop: bool) -> None:
        self._main.__dict__["__builtins__"] = self._runtime.names  # an earlier program may have replaced them
        signal.signal(signal.SIGINT, self.on_interrupt)  # this, too
        before = threads()
        try:
            result = eval(code, self._main.__dict__)
            if in_loop:
                self._await(result)
            elif code.co_flags & _CO_COROUTINE:
                try:
                    result.send(None)
                except StopIteration:
                    pass  # it awaits nothing, so it ran to its end
            swallowed = self._decisive()
            if swallowed is not None:
                raise swallowed
        except FinalAnswerGiven:
            raise
        except ControlException:
            # The supervisor keeps interrupting a waiting program, and must not cut this short.
            self._in_agent_code = False
            end_leftovers(before)
            self._in_agent_code = True
            raise

    def _make_loop(self) -> None:
        """Makes the event loop. No interrupt arrives here: after an interrupted import, asyncio can't be imported."""
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)

    def _await(self, program: Any) -> None:
        task = self._loop.create_task(program)
        try:
            self._loop.run_until_complete(task)
        except ControlException:
            if not task.done():  # else it would go on in the next program that awaits
                task.cancel()
                self._loop.run_until_complete(sys.modules["asyncio"].wait([task]))
            raise

    def _report_stop(self) -> None:
        """Reports that the program was stopped. If that fails, the next refused tick reports it."""
        if self._stop_reported or not self._process.is_here():
            return
        try:
            refusal = self._enforcer.refusal
            self._send(ProgramStopped(outcome="operation_limit" if refusal is None else refusal.outcome))
            self._stop_reported = True
        except (RecursionError, MemoryError):
            return

    def _send_output(self, program: RunProgram) -> None:
        """Encodes the value of the program; a small one is sent with the program's end, a large one now."""
        value = self._last_value.value
        if value is None:
            return
        parts = self._encode(value) if program.whole_output else self._encoded(value)
        if len(parts) == 1 and len(parts[0]) <= link.INLINE_BYTES // 2:
            self._output = bytes(parts[0])
        else:
            self._send(Output(), parts)

    def _encoded(self, value: object) -> Parts:
        """Encodes the value of a step, or a description of it: the value's own code never fails the step."""
        attempts: list[Callable[[], Parts]] = [
            lambda: self._encode_output(value),
            lambda: self._describe(value, failure, shown=True),
            lambda: self._describe(value, failure, shown=False),
        ]
        failure: BaseException
        for attempt in attempts:
            try:
                return within(VALUE_TIME_S, attempt)  # type: ignore[no-any-return]
            except (ExecutionInterrupted, FinalAnswerGiven, Refusal):
                raise
            except BaseException as error:  # noqa: BLE001 (the value's own code)
                failure = error
        raise failure

    def _classify(
        self, raised: BaseException, filename: str, source: str, spans: list[list[int]]
    ) -> tuple[str, Optional[ErrorDetail]]:
        error: Any = self._decisive() or raised
        self._meter.finish()  # now str() and repr() of the program's exceptions are free
        kind = type(error)  # not isinstance, which asks the exception itself
        network, owns = self._enforcer.rules.network, self._enforcer.own.owns_path
        try:
            if issubclass(kind, SystemExit):
                return "exited", ErrorDetail(type="SystemExit", message=text_of(error), exit_code=_exit_code(error))
            detail = describe(error, filename, source, spans, network, owns)
        except BaseException:  # noqa: BLE001 (the program's own attributes)
            detail = ErrorDetail(type="Exception", message=_NOT_DESCRIBED)
        if issubclass(kind, OperationLimitExceeded):
            return "operation_limit", detail
        if issubclass(kind, MemoryError):
            return "out_of_memory", detail.but(message=detail.message or "out of memory")
        if issubclass(kind, Refusal):
            return error.outcome, detail
        if len(detail.message) > MAX_MESSAGE_CHARS:
            self._runtime.notebook.last_exc = error
        return "exception", detail


def keep_final_answers_quiet() -> None:
    """Wraps threads' excepthook: a thread that gave the final answer or was stopped prints nothing."""
    # `threading` takes its hook from _thread when it is imported, which the guest does not do at the start.
    threading: Any = sys.modules.get("threading")
    report = _thread._excepthook if threading is None else threading.excepthook

    def report_others(args: Any) -> None:
        if args.exc_type not in (FinalAnswerGiven, ExecutionInterrupted):
            report(args)

    if threading is None:
        _thread._excepthook = report_others
    else:
        threading.excepthook = report_others


def _exit_code(error: SystemExit) -> int:
    code: Any = error.code
    if code is None:
        return 0
    # Not isinstance, which asks the code itself; and an int of the program's own may have its own `&`.
    return int.__and__(code, 0xFF) if issubclass(type(code), int) else 1
