"""The in-memory guest: does the daemon's jobs one after the other, and reports their results.

Runs, the cutting of output, and transfers of files are the real guest's code; this module has the order
of things, which in a sandbox is the supervisor's, and the thread that takes the place of the interpreter's process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor_server.guest.checks.control import FinalAnswerGiven
from executor_server.guest.checks.rules import Rules
from executor_server.guest.files.transfers import Transfers
from executor_server.guest.interpreter.host_tools import _tool_exception, decode_value, encode_value
from executor_server.guest.interpreter.shipped import missing_modules
from executor_server.guest.supervisor.log_relay import LogRelay
from executor_server.guest.supervisor.outcomes import limit_error
from executor_server.guest.supervisor.run import Call, Phase, Run, Settings, Warning
from executor_server.guest.wire.frames import CHUNK_BYTES, PROTOCOL_VERSION, Frame, FrameError
from executor_server.guest.wire.messages import (
    BlobBegin,
    BlobData,
    BlobDrop,
    Cancel,
    Configure,
    ErrorDetail,
    Execute,
    ExportState,
    FileData,
    FileGet,
    FileList,
    FilePut,
    FindModules,
    GetVariables,
    GotVariable,
    GotVariables,
    LimitWarning,
    Ready,
    RegisterTools,
    RestoreState,
    Restrict,
    Result,
    SetVariable,
    SetVariables,
    Shutdown,
    ToolCall,
    ToolResult,
)
from executor_server.guest.wire.process_messages import StartProcess
from executor_server.guest.wire.schema import message_of, read_listed, read_object
from executor_server.guest.wire.session_rules import SessionRules
from executor_server.guest.wire.tools import listed_tools, places
from tests.support.in_memory.channel import MemoryChannel, read_file
from tests.support.in_memory.interpreter import Ended, Grant, Interpreter, Ties

_Job = Configure | Restrict | Execute | RegisterTools | SetVariables | GetVariables | FindModules
_MAX_JOBS = 64
# Pieces of output, of 64 Ki characters, that the event loop has not taken yet.
_MAX_ON_ITS_WAY = 64
_PRELUDE = Settings("trailing_expression", 60.0, 60.0, 10**9, 64 * 1024)
_WATCH_S = 0.02
# As for a real interpreter that dies: what it can have spent in its time.
_MAX_OPERATIONS_PER_S = 2 * 10**8
_CPU_ERROR_S = 0.05


class MemoryGuest:
    """One guest. `on_end` is called once, when it has ended, with why in a clause."""

    def __init__(self, secret: bytes, workspace: Path, orphan_time_s: float, on_end: Callable[[str], None]) -> None:
        self.channel = MemoryChannel(secret, self._on_frame, self._describe)
        self.channel.on_room = self._on_room
        self._workspace = workspace
        self._orphan_time_s = orphan_time_s
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        # The real ones: they need no more of a channel than the one that is here has.
        self._transfers = Transfers(self.channel, str(workspace))  # type: ignore[arg-type]
        self.channel.on_new_daemon = self._transfers.on_new_daemon
        self._interpreter = Interpreter(workspace)
        self._generation = 1
        self._reset = False
        self._notices: list[str] = []
        self._jobs: deque[tuple[_Job, bytes]] = deque()
        self._run: Run | None = None
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._answers: dict[str, _Answer] = {}
        self._clock: asyncio.TimerHandle | None = None
        self._cpu_before_s = 0.0
        self._configuring: int | None = None
        self._prelude = ""
        self._prelude_due = False
        self._rules = Rules()
        self._session_operations = 2**63 - 1
        self._prelude_settings = _PRELUDE
        self._spent = 0
        self._count = 0
        self._tools: frozenset[str] = frozenset()
        self._final_tools: frozenset[str] = frozenset()
        self._memory = threading.Event()
        self._memory.set()
        self._on_its_way = threading.Semaphore(_MAX_ON_ITS_WAY)
        self.ended = False
        self._orphan_watch = self._loop.call_later(orphan_time_s, self._watch_daemon)

    # -- its life ------------------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """It is gone, as by a SIGKILL of all that it is. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self._orphan_watch.cancel()
        if self._clock is not None:
            self._clock.cancel()
        self._stop_program()
        self.channel.close()
        self._transfers.close_all()
        self._on_end(why)

    def _stop_program(self) -> None:
        self._interpreter.interrupt()
        self._memory.set()
        for answer in self._answers.values():
            answer.give(_Refused("RuntimeError", "the sandbox has ended"))

    async def joined(self, timeout_s: float) -> bool:
        """Waits for its threads, at most so long; returns true when none runs any more."""
        deadline = time.monotonic() + timeout_s
        for thread in self._alive():
            await asyncio.to_thread(thread.join, max(deadline - time.monotonic(), 0.0))
        return not self._alive()

    def _alive(self) -> list[threading.Thread]:
        """Returns the living threads of the current program, and those that earlier ones left behind."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return self._threads

    @property
    def busy(self) -> bool:
        return self._run is not None

    def _watch_daemon(self) -> None:
        """Ends the guest when no daemon has been heard for the orphan time."""
        left_s = self.channel.last_heard_s + self._orphan_time_s - time.monotonic()
        if left_s > 0 or self.channel.frozen:
            self._orphan_watch = self._loop.call_later(max(left_s, _WATCH_S), self._watch_daemon)
        else:
            self.end("it ended itself, since no daemon had spoken to it")

    # -- frames --------------------------------------------------------------------------------------------------

    def _describe(self, last_seq: int, acked: int) -> Ready:
        return Ready(
            protocol=PROTOCOL_VERSION,
            python="{}.{}.{}".format(*sys.version_info),
            generation=self._generation,
            last_seq=last_seq,
            acked=acked,
        )

    def _on_frame(self, frame: Frame) -> None:
        message = message_of(frame)
        match message:
            case (
                Configure() | Restrict() | Execute() | RegisterTools() | SetVariables() | GetVariables() | FindModules()
            ):
                if not isinstance(message, Execute) and len(self._jobs) >= _MAX_JOBS:
                    self.channel.fail(message.op, "queue_full", f"{_MAX_JOBS} requests of this session wait")
                    return
                self._jobs.append((message, frame.body))
                self._next_job()
            case Cancel():
                self._cancel(message.id)
            case ToolResult():
                self._on_tool_result(message, frame.body)
            case BlobBegin():
                self._transfers.begin_blob(message)
            case BlobData():
                self._transfers.add_to_blob(message, frame.view)
            case BlobDrop():
                self._transfers.drop_blob(message.blob)
            case FilePut() | FileGet() | FileList():
                self._transfers.begin_file(message)
                self._pump()
            case FileData():
                self._transfers.add_to_file(message, frame.view)
            case Shutdown():
                self.end("it was told to end")
            case StartProcess():
                self.channel.fail(message.op, "command_not_found", "the in-memory fake has no commands")
            case ExportState() | RestoreState():
                self.channel.fail(message.op, "value_refused", "the in-memory fake can't do this")
            case _:
                raise FrameError(f"frame kind {frame.kind} is not for this guest")

    def _pump(self) -> None:
        while self._transfers.busy:
            self._transfers.pump()

    def _on_room(self) -> None:
        self._memory.set()
        if self._run is not None:
            self._run.hold(False)
        self._pump()

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _next_job(self) -> None:
        if self._prelude_due and self._run is None and not self.ended:
            self._prelude_due = False
            self._begin("", self._prelude, self._prelude_settings)
        while self._jobs and self._run is None and not self.ended:
            request, body = self._jobs.popleft()
            match request:
                case Execute():
                    self._begin(request.id, body.decode("utf-8", "replace"), Settings.of(request))
                case Configure():
                    self._configure(request, body)
                case Restrict():
                    self._hold_to(body)
                    self.channel.done(request.op)
                case RegisterTools():
                    self._register_tools(request, body)
                case SetVariables():
                    self._set_variables(request, body)
                case FindModules():
                    self.channel.done(request.op, json.dumps(missing_modules(json.loads(body))).encode())
                case GetVariables():
                    self._get_variables(request, body)

    def _configure(self, request: Configure, body: bytes) -> None:
        self._hold_to(body[: request.settings])
        self._prelude = body[request.settings + request.env :].decode("utf-8", "replace")
        if self._prelude:
            self._configuring = request.op
            self._begin("", self._prelude, self._prelude_settings)
        else:
            self.channel.done(request.op)

    def _hold_to(self, settings: bytes) -> None:
        rules = read_object(SessionRules, settings, "rules")
        self._rules = Rules.of(rules)
        self._session_operations = rules.session_operations
        self._prelude_settings = _PRELUDE.at_most(rules.execution_max)
        self._interpreter.set_rules(self._rules)

    def _register_tools(self, request: RegisterTools, body: bytes) -> None:
        tools = listed_tools(request, body)
        if any(places(tool) for tool in tools):
            self.channel.fail(request.op, "tool_refused", "the in-memory fake takes no shipped tools")
            return
        self._tools = frozenset(tool.name for tool in tools)
        self._final_tools = frozenset(tool.name for tool in tools if tool.final)
        self._interpreter.set_tools(self._tools)
        self.channel.done(request.op)

    def _set_variables(self, request: SetVariables, body: bytes) -> None:
        op, position = request.op, request.listed
        staged: dict[str, Any] = {}
        for item in read_listed(SetVariable, body[:position], 1024, "variables"):
            if item.blob is not None:
                fd = self._transfers.take_blob(item.blob)
                if fd is None:
                    self.channel.fail(op, "blob_not_found", f"the bytes of variable {item.name} are not there")
                    return
                data = read_file(fd)
            else:
                size = item.inline or 0
                data, position = body[position : position + size], position + size
            try:
                staged[item.name] = decode_value(data)
            except Exception as problem:  # noqa: BLE001 - the border: unpickling runs what it wants
                self.channel.fail(op, "value_refused", f"variable {item.name}: {problem}")
                return
        self._interpreter.variables.update(staged)
        self.channel.done(op)

    def _get_variables(self, request: GetVariables, body: bytes) -> None:
        variables = self._interpreter.variables
        names = json.loads(body) or [name for name, value in variables.items() if _is_variable(name, value)]
        listed: list[GotVariable] = []
        inline: list[bytes] = []
        for name in names:
            if name not in variables:
                continue
            data = encode_value(variables[name])
            if len(data) <= CHUNK_BYTES // 4:
                listed.append(GotVariable(name=name, inline=len(data)))
                inline.append(data)
            else:
                blob_id = self.channel.send_blob(data, op=request.op)
                listed.append(GotVariable(name=name, blob=blob_id, size=len(data)))
        answer = GotVariables(variables=listed, missing=[name for name in names if name not in variables])
        head = json.dumps(answer.head()).encode()
        self.channel.done(request.op, head + b"".join(inline), names=len(head))

    # -- runs ----------------------------------------------------------------------------------------------------

    def _begin(self, execution_id: str, source: str, settings: Settings) -> None:
        self._count += bool(execution_id)
        run = self._run = Run(execution_id, source, settings, self._count, self.channel)  # type: ignore[arg-type]
        if self._spent >= self._session_operations:
            message = f"the session has spent its operations: session_operations = {self._session_operations}"
            self._finish(run, "operation_limit", ErrorDetail(type="OperationLimitExceeded", message=message))
            return
        grant = self._grant(run)
        ties = Ties(
            write=lambda stream, data: self._from_program(run, self._on_output, stream, data),
            warn=lambda limit: self._from_program(run, self._warn, limit),
            call=lambda name, arguments: self._call(run, name, arguments),
        )
        interpreter = self._interpreter

        def begun() -> None:
            run.phase = Phase.RUNNING
            self._cpu_before_s = time.thread_time()

        def program() -> None:
            ended = interpreter.run(source, run.filename, settings.mode, grant, ties, begun)
            self._in_loop(self._on_program_end, run, interpreter, ended)

        self._thread = threading.Thread(target=program, name=f"program-{run.filename}", daemon=True)
        self._thread.start()
        self._threads = [*self._alive(), self._thread]
        self._watch(run)

    def _grant(self, run: Run) -> Grant:
        asked, left = run.settings.operations, self._session_operations - self._spent
        if run.visible:
            run.warnings = {
                "operations": Warning(asked),
                "session_operations": Warning(self._session_operations, self._spent),
            }
        run.budget = min(asked, left)
        self._spent += run.budget
        marks: dict[int, list[str]] = {}
        for limit, warning in list(run.warnings.items()):
            if warning.mark == 0:
                self._warn(run, limit)
            elif warning.mark <= run.budget:
                marks.setdefault(warning.mark, []).append(limit)
        return Grant(run.budget, self._session_operations if left < asked else None, marks)

    def _in_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Calls a function in the loop, from a program's thread. The loop may be closed: then no guest is left."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _from_program(self, run: Run, function: Callable[..., object], *args: Any) -> None:
        """In the program's thread, which waits while the daemon takes nothing."""
        self._memory.wait()
        self._on_its_way.acquire()

        def arrived() -> None:
            self._on_its_way.release()
            if self._run is run and not self.ended:
                function(run, *args)

        self._in_loop(arrived)

    def _on_output(self, run: Run, stream: str, data: bytes) -> None:
        run.logs.add(stream, data)
        if run.logs.flooded and run.ended_by is None:
            self._interrupt(run, "output_limit")
        if self.channel.full:
            self._memory.clear()
            run.hold(True)

    def _warn(self, run: Run, limit: str) -> None:
        warning = run.warnings.pop(limit, None)
        if warning is not None:
            run.logs.flush()
            warned = LimitWarning(id=run.execution_id, limit=limit, used=warning.used, budget=warning.budget)
            self.channel.send(warned)

    def _watch(self, run: Run) -> None:
        """Ends a run whose time is up, and gives up an interpreter that does not end."""
        if self._run is not run or self.ended:
            return
        now = time.monotonic()
        if run.logs.due is not None and now >= run.logs.due:
            run.logs.flush()
        if run.kill_at is not None:
            if now >= run.kill_at:
                # The thread can't be ended: it is left behind, and with it the variables.
                self._on_program_end(run, self._interpreter, Ended("crashed", None, run.budget, died=True))
                return
        elif now >= run.wall_deadline:
            self._interrupt(run, "timeout")
        elif self._cpu_time_s() > run.settings.cpu_time_s:
            self._interrupt(run, "cpu_limit")
        self._clock = self._loop.call_later(_WATCH_S, self._watch, run)

    def _cpu_time_s(self) -> float:
        thread, run = self._thread, self._run
        if thread is None or thread.ident is None or run is None or run.phase != Phase.RUNNING:
            return 0.0
        try:
            spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread.is_alive() else 0.0
        except OSError:
            return 0.0  # it ended meanwhile
        return max(spent - self._cpu_before_s, 0.0)

    def _interrupt(self, run: Run, outcome: str) -> None:
        run.ended_by = outcome
        run.note_interrupted()
        self._interpreter.interrupt()
        self._memory.set()
        for answer in self._answers.values():
            answer.give(_Refused("RuntimeError", "the execution was interrupted"))

    def _cancel(self, execution_id: str) -> None:
        run = self._run
        if run is not None and run.execution_id == execution_id:
            if run.ended_by is None:
                self._interrupt(run, "cancelled")
            return
        for job in self._jobs:
            if isinstance(job[0], Execute) and job[0].id == execution_id:
                self._jobs.remove(job)
                waiting = Run(execution_id, "", Settings.of(job[0]), 0, self.channel)  # type: ignore[arg-type]
                self._send_result(waiting, "cancelled", None, b"")
                return

    def _on_program_end(self, run: Run, interpreter: Interpreter, ended: Ended) -> None:
        if self._run is not run or self.ended or interpreter is not self._interpreter:
            return
        run.cpu_time_s = self._cpu_time_s()
        run.imports = ended.imports
        run.operations = 0 if ended.died else ended.operations
        if ended.died:
            able = int((run.cpu_time_s + _CPU_ERROR_S) * _MAX_OPERATIONS_PER_S)
            self._spent -= run.budget - min(run.budget, able)
            self._replace_interpreter(over_prelude=not run.visible)
        else:
            self._spent -= run.budget - ended.operations
        for limit in [limit for limit, warning in run.warnings.items() if warning.mark <= run.operations]:
            self._warn(run, limit)
        while run.calls:
            self._answers.pop(run.calls.popitem()[1].waiting_id).give(
                _Refused("RuntimeError", "the execution ended before the tool had answered")
            )
        run.set_clock()
        self._finish(run, ended.outcome, ended.error, ended.output)

    def _replace_interpreter(self, *, over_prelude: bool) -> None:
        self._generation += 1
        self._reset = True
        self._interpreter = Interpreter(self._workspace)
        self._interpreter.set_rules(self._rules)
        self._interpreter.set_tools(self._tools)
        self._prelude_due = bool(self._prelude) and not over_prelude

    def _finish(self, run: Run, outcome: str, detail: ErrorDetail | None, output: bytes = b"") -> None:
        if run.ended_by is not None:
            outcome, detail, output = run.ended_by, limit_error(run.ended_by, run.settings, detail), b""
        self._run = None
        if run.visible:
            self._send_result(run, outcome, detail, output)
        else:
            self._end_prelude(outcome, detail)
        self._loop.call_soon(self._next_job)

    def _end_prelude(self, outcome: str, detail: ErrorDetail | None) -> None:
        failed = "" if outcome == "succeeded" else f"the prelude ended as {outcome}: {detail.message if detail else ''}"
        op, self._configuring = self._configuring, None
        if op is not None and failed:
            self.channel.fail(op, "prelude_failed", failed)
        elif op is not None:
            self.channel.done(op)
        elif failed:
            self._notices.append(f"{failed}\n")

    def _send_result(self, run: Run, outcome: str, detail: ErrorDetail | None, output: bytes) -> None:
        run.logs.finish()
        _say_all(run.logs, self._notices)
        self._notices = []
        details = json.dumps(detail.head()).encode() if detail else b""
        result = Result(
            id=run.execution_id,
            outcome=outcome,
            error=len(details),
            variables="reset" if self._reset else "kept",
            generation=self._generation,
            final=run.final_call_id,
            operations=run.operations,
            wall_time_s=run.wall_time_s(),
            cpu_time_s=run.cpu_time_s,
            peak_memory_bytes=0,
            output_bytes=run.logs.total_bytes,
            oom_suspect=False,
            imports=run.imports or None,
        )
        self._reset = False
        if output and outcome == "succeeded" and len(output) > CHUNK_BYTES:
            blob_id = self.channel.send_blob(output, execution_id=run.execution_id)
            result = result.but(blob=blob_id, size=len(output))
        elif output and outcome == "succeeded":
            result = result.but(output=len(output))
            details += output
        self.channel.send(result, details)

    # -- tools ---------------------------------------------------------------------------------------------------

    def _call(self, run: Run, name: str, arguments: bytes) -> Callable[[], Any]:
        """In the program's thread: begins a call; what comes back waits for its answer."""
        answer = _Answer()
        self._in_loop(self._open_call, run, name, arguments, answer)
        return answer.wait

    def _open_call(self, run: Run, name: str, arguments: bytes, answer: _Answer) -> None:
        if self._run is not run or run.ended_by is not None or self.ended:
            answer.give(_Refused("RuntimeError", "no execution is running that could call a tool"))
        elif why_not := run.why_no_call(len(arguments)):
            answer.give(_Refused("RuntimeError", why_not))
        else:
            waiting_id = f"w{run.calls_made + 1}"
            self._answers[waiting_id] = answer
            run.logs.flush()
            call_id = run.open_call(Call(name, waiting_id, len(arguments)))
            run.set_clock()
            self.channel.send_payload(ToolCall(id=run.execution_id, call=call_id, name=name), arguments)

    def _on_tool_result(self, result: ToolResult, body: bytes) -> None:
        run = self._run
        fd = self._transfers.take_blob(result.blob) if result.blob is not None else None
        data = read_file(fd) if fd is not None else body
        if run is None or run.execution_id != result.id or result.call not in run.calls:
            return  # it came too late
        call = run.calls.pop(result.call)
        run.set_clock()
        answer = self._answers.pop(call.waiting_id)
        if not result.ok:
            end = len(body) - (result.arguments or 0)
            answer.give(_Refused(result.type or "", body[:end].decode("utf-8", "replace"), body[end:]))
        elif result.blob is not None and fd is None:
            answer.give(_Refused("RuntimeError", "the tool's answer did not arrive whole"))
        else:
            is_final = call.name in self._final_tools
            if is_final:
                run.final_call_id = run.final_call_id or result.call
            answer.give(_Given(data, is_final=is_final))


class _Refused:
    """A call that fails in the program, with an exception of this type where Python has one."""

    def __init__(self, type_name: str, message: str, arguments: bytes = b"") -> None:
        self._error = _tool_exception(type_name, message, arguments)

    def take(self) -> Any:
        raise self._error


class _Given:
    """A value, packed."""

    def __init__(self, data: bytes, *, is_final: bool) -> None:
        self._data = data
        self._is_final = is_final

    def take(self) -> Any:
        if self._is_final:
            raise FinalAnswerGiven
        return decode_value(self._data)


class _Answer:
    """An answer that a program's thread waits for; the first one given counts."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._what: _Refused | _Given | None = None

    def give(self, what: _Refused | _Given) -> None:
        if self._what is None:
            self._what = what
            self._event.set()

    def wait(self) -> Any:
        self._event.wait()
        assert self._what is not None
        return self._what.take()


def _say_all(logs: LogRelay, notices: list[str]) -> None:
    for notice in notices:
        logs.say("stderr", notice)


def _is_variable(name: str, value: Any) -> bool:
    skipped = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    return name[:1] != "_" and not isinstance(value, skipped)
