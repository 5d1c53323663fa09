"""Runs executions: from the source through the checker and the interpreter to the result.

One run at a time. The supervisor asks it to begin; it tells the supervisor when it has ended. Deadlines, output and
resources are measured here, outside the interpreter; the first thing that ends a run decides its outcome.
"""

from __future__ import annotations

import os
import time

from executor_api.limits import VALUE_BYTES_MAX

from . import link, memory, usage
from .artifacts import Artifacts
from .background import Background
from .channel import Channel
from .children import describe_exit
from .crew import Config, Crew
from .frames import Fields, FrameError, Kind
from .lean import dumps, loads, signal
from .loop import READ, Loop
from .offline import NOTE
from .rules import Rules
from .run import (
    GRACE_S,
    IMAGE_SOURCES,
    IMAGE_TYPES,
    MAX_ERROR_BYTES,
    MAX_IMPORT_CHARS,
    MAX_IMPORTS,
    OWN_OUTCOMES,
    Call,
    Phase,
    Pipe,
    Run,
    Settings,
    Warning,
    error,
    read_error,
)
from .transfers import Transfers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

    Detail = dict[str, Any]
    """An error as it travels: type, message, traceback, line, statement."""

_WATCH_INTERVAL_S = 0.1
# More than any machine does, and more than the kernel's clocks are wrong.
_MAX_OPERATIONS_PER_S = 2 * 10**8
_CPU_ERROR_S = 0.05
_READS_PER_EVENT = 8
# A background process that prints without end must not hold up a result.
_READS_PER_DRAIN = 64


class Runner:
    """The current run, if any. `on_end` is called when it has ended, and whether it was the prelude that did."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        channel: Channel,
        crew: Crew,
        transfers: Transfers,
        cpu: usage.SandboxCpu,
        on_end: Callable[[Run, str, Optional[Detail]], None],
    ) -> None:
        self._config = config
        self._loop = loop
        self._channel = channel
        self._crew = crew
        self._transfers = transfers
        self._cpu = cpu
        self._charged_cpu_s = 0.0  # to all runs that have ended
        self._on_end = on_end
        transfers.on_file = self._on_file
        self._count = 0
        self._next_watch = 0.0
        self._paused = False
        self._background = Background(loop)
        self._idle_of: Optional[usage.Process] = None  # the interpreter that has pipes for the time between runs
        self.run: Optional[Run] = None
        self.rules = Rules()
        self.session_operations = 2**63 - 1
        self._spent = 0  # operations of all runs that have ended, and all that the current one may spend
        self.tools: frozenset[str] = frozenset()
        self.final_tools: frozenset[str] = frozenset()

    @property
    def busy(self) -> bool:
        return self.run is not None

    @property
    def has_run(self) -> bool:
        """Whether anything was executed in this session, besides its prelude."""
        return self._count > 0

    def close_all(self) -> None:
        """In a forked child that must not have them."""
        self._background.close_all()
        if self.run is not None:
            for pipe in self.run.pipes:
                pipe.close()

    # -- beginning -----------------------------------------------------------------------------------------------

    def begin(self, execution_id: str, source: str, settings: Settings) -> None:
        """Begins a run; without an id it is the prelude."""
        if execution_id:
            self._count += 1
        self.run = Run(execution_id, source, settings, self._count, self._channel)
        self.run.hold(self._paused)
        if execution_id:
            self._background.show(self.run.logs, settings.output_bytes)
        if self._spent >= self.session_operations:
            message = f"the session has spent its operations: session_operations = {self.session_operations}"
            self.finish(self.run, "operation_limit", error("OperationLimitExceeded", message))
            return
        self.check(self.run)

    def check(self, run: Run) -> None:
        """Has the source checked, for the first time or again."""
        request = {"filename": run.filename, "mode": run.settings.mode, "rules": self.rules.fields()}
        body = dumps(request)
        self._crew.check({"t": "check", "head": len(body)}, body + run.source.encode("utf-8", "surrogatepass"))

    def _check_alone(self, run: Run) -> None:
        """Checks a source again while everything else in the sandbox stands still.

        Processes of earlier steps are of the checker's user: they can kill it, stop it, or take its processor time.
        What fails while none of them can do anything is the source's own doing, and only that is said of a source.
        """
        run.alone = True
        run.check_began = time.monotonic()
        self._crew.hold()
        self.check(run)

    def _on_slow_check(self, run: Run, now: float) -> None:
        if run.alone or self._crew.check_cpu_s() >= (now - run.check_began) / 2:
            self._crew.renew_checker()
            self.finish(run, "exception", error("SyntaxError", "the source takes too long to parse", line=1))
        elif now >= run.wall_deadline:
            self._crew.renew_checker()
            run.ended_by = "timeout"
            self.finish(run, "timeout", None)
        else:
            self._check_alone(run)

    def on_verdict(self, message: link.Message) -> None:
        """What the checker says of the source."""
        run = self.run
        if run is None or run.phase != Phase.CHECKING:
            return
        self._crew.release()
        accepted = message.head.boolean("ok")
        body = link.read_body(message, None if accepted else MAX_ERROR_BYTES)
        run.imports = message.head.texts("imports", MAX_IMPORTS, MAX_IMPORT_CHARS)
        if accepted:
            self._start_code(run, body)
        else:
            verdict = loads(body)
            self.finish(run, verdict["outcome"], verdict["error"])
        self._crew.renew_checker(only_if_worn=True)

    def on_checker_exit(self, status: int) -> None:
        run = self.run
        if run is None or run.phase != Phase.CHECKING:
            return
        if not run.alone:
            self._check_alone(run)
            return
        code, signum = describe_exit(status)
        how = f"signal {signum}" if signum is not None else f"exit code {code}"
        message = f"the source cannot be parsed: the parser ended with {how}"
        self.finish(run, "exception", error("SyntaxError", message, line=1))

    def _start_code(self, run: Run, code: bytes) -> None:
        """Hands the checked code to the interpreter, with fresh pipes as its stdout and stderr."""
        run.phase = Phase.RUNNING
        run.pipes = [Pipe("stdout"), Pipe("stderr")]
        if run.visible:
            run.artifacts = Artifacts(self._config.workspace)
        run.cpu = usage.CpuMeter(self._crew.interpreter, self._cpu)
        self._next_watch = time.monotonic() + _WATCH_INTERVAL_S
        self._watch_pipes(run)
        source = run.source.encode("utf-8", "surrogatepass")
        head = {"t": "run", "filename": run.filename, "source": len(source), **self._grant(run)}
        fds = tuple(pipe.write_fd for pipe in run.pipes)
        if self._idle_of is not self._crew.interpreter:
            self._idle_of = self._crew.interpreter
            fds += self._background.open_idle()
        self._crew.post(head, source + code, fds=fds)

    def _grant(self, run: Run) -> dict[str, Any]:
        """What the run may spend, of its own budget and of the session's; charged with that until it has ended."""
        asked, left = run.settings.operations, self.session_operations - self._spent
        if run.visible:
            run.warnings = {
                "operations": Warning(asked),
                "session_operations": Warning(self.session_operations, self._spent),
            }
        run.budget = min(asked, left)
        self._spent += run.budget
        marks = {limit: warning.mark for limit, warning in run.warnings.items()}
        for limit in [limit for limit, mark in marks.items() if not 0 < mark <= run.budget]:
            if marks.pop(limit) == 0:
                self._warn(run, limit)
        return {
            "operations": run.budget,
            "marks": marks,
            "of_session": self.session_operations if left < asked else None,
        }

    def on_limit(self, head: Fields) -> None:
        """The program has come to where a budget is nearly spent."""
        run, limit = self.run, head.text("limit", 64)
        if run is None or run.phase != Phase.RUNNING or limit not in run.warnings:
            raise FrameError(f"a warning of {limit!r} that was not asked for")
        self._drain_pipes(run)
        self._warn(run, limit)

    def _warn(self, run: Run, limit: str) -> None:
        warning = run.warnings.pop(limit)
        head = {"id": run.execution_id, "limit": limit, "used": warning.used, "budget": warning.budget}
        self._channel.send(Kind.LIMIT_WARNING, head)

    # -- time and resources --------------------------------------------------------------------------------------

    def due(self) -> float:
        """When `on_time` should be called at the latest."""
        run = self.run
        if run is None:
            return self._background.due
        if run.kill_at is not None:
            return run.kill_at
        soonest = min(
            self._background.due,
            run.wall_deadline,
            run.check_deadline if run.phase == Phase.CHECKING else self._next_watch,
        )
        return soonest if run.logs.due is None else min(soonest, run.logs.due)

    def on_time(self, now: float) -> bool:
        """Does what is due; true when the interpreter has to be killed."""
        self._background.on_time(now)
        run = self.run
        if run is None:
            return False
        if run.logs.due is not None and now >= run.logs.due:
            run.logs.flush()
        if run.phase == Phase.CHECKING:
            if now >= min(run.check_deadline, run.wall_deadline):
                self._on_slow_check(run, now)
        elif run.kill_at is not None:
            return now >= run.kill_at
        elif now >= run.wall_deadline:
            self.interrupt(run, "timeout")
        elif now >= self._next_watch:
            self._next_watch = now + _WATCH_INTERVAL_S
            return self._watch_usage(run)
        return False

    def _watch_usage(self, run: Run) -> bool:
        spent_s = run.cpu.look() if run.cpu is not None else 0.0
        run.settle_pause()
        if spent_s > run.settings.cpu_time_s:
            self.interrupt(run, "cpu_limit")
        elif self._config.watch_memory and memory.sandbox_memory_bytes() > self._config.memory_bytes:
            run.ended_by = "out_of_memory"
            return True
        return False

    def interrupt(self, run: Run, outcome: str) -> None:
        """Asks the program to stop; the kill follows if it has not within the grace."""
        run.ended_by = outcome
        run.kill_at = time.monotonic() + GRACE_S
        self._crew.interrupt()

    def cancel(self, execution_id: str) -> bool:
        """Ends the current run if it is this one; whether it was."""
        run = self.run
        if run is None or run.execution_id != execution_id:
            return False
        if run.phase == Phase.CHECKING:
            self._crew.renew_checker()
            run.ended_by = "cancelled"
            self.finish(run, "cancelled", None)
        elif run.ended_by is None:
            self.interrupt(run, "cancelled")
        return True

    # -- output --------------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stops reading the program's output, or starts again."""
        if paused != self._paused:
            self._paused = paused
            if self.run is not None:
                self.run.hold(paused)
                self._watch_pipes(self.run)

    def _watch_pipes(self, run: Run) -> None:
        for pipe in run.pipes:
            handler = None if self._paused or pipe.ended else self._reader_of(run, pipe)
            self._loop.watch(pipe.read_fd, READ, handler)

    def _reader_of(self, run: Run, pipe: Pipe) -> Callable[[int], None]:
        def on_readable(_events: int) -> None:
            # A few pieces at a time, so that a program that prints without end cannot starve the rest.
            self._read(run, pipe, _READS_PER_EVENT)
            if pipe.ended:
                self._loop.watch(pipe.read_fd, 0, None)

        return on_readable

    def _read(self, run: Run, pipe: Pipe, pieces: int) -> None:
        for _ in range(pieces):
            data = pipe.read()
            if not data:
                return
            run.logs.add(pipe.stream, data)
            if run.logs.flooded and run.ended_by is None:
                self.interrupt(run, "output_limit")

    def _drain_pipes(self, run: Run) -> None:
        """Takes all that was written before the message at hand: what the order of events is made of."""
        for pipe in run.pipes:
            self._read(run, pipe, _READS_PER_DRAIN)
        run.logs.flush()

    def _on_file(self, path: str, status: os.stat_result) -> None:
        """A client's file has been put: it is none of the program's."""
        if self.run is not None and self.run.artifacts is not None:
            self.run.artifacts.put_by_client(path, status)

    # -- messages of the interpreter -----------------------------------------------------------------------------

    def on_output(self, message: link.Message) -> None:
        """The value of the program, when it is too large to come with the end."""
        run = self.run
        if run is None or run.output is not None:
            raise FrameError("a value that nobody asked for")
        if message.size > VALUE_BYTES_MAX:
            raise FrameError(f"a value of {message.size} bytes")
        run.output, run.output_size = _data(message), message.size

    def on_image(self, message: link.Message) -> None:
        run = self.run
        left_out = ""
        if run is not None and run.visible and not (left_out := run.take_image(message.size)):
            mime, source = message.head.text("mime", 64), message.head.text("source", 32)
            if mime not in IMAGE_TYPES or source not in IMAGE_SOURCES:
                raise FrameError("an image of an unknown kind")
            self._drain_pipes(run)
            head = {"id": run.execution_id, "mime": mime, "source": source}
            self._channel.send_payload(Kind.IMAGE, head, _data(message), message.size)
        # Only now may the program go on: what it prints next belongs after the image.
        self._crew.post({"t": "reply", "call": message.head.text("call", 64), "left_out": left_out})

    def on_tool_call(self, message: link.Message) -> None:
        run = self.run
        call = Call(message.head.text("name", 256), message.head.text("call", 64), message.size)
        if run is None or not run.visible or run.ended_by is not None:
            self._refuse_call(call, "no execution is running that could call a tool")
        elif call.name not in self.tools:
            self._refuse_call(call, "the session has no such tool any more")
        elif why_not := run.why_no_call(call.size):
            self._refuse_call(call, why_not)
        else:
            self._drain_pipes(run)
            head = {"id": run.execution_id, "call": run.open_call(call), "name": call.name}
            self._channel.send_payload(Kind.TOOL_CALL, head, _data(message), message.size)

    def _refuse_call(self, call: Call, message: str) -> None:
        answer = {"t": "reply", "call": call.waiting_id, "ok": False, "type": "RuntimeError"}
        self._crew.post(answer, message.encode())

    def on_tool_result(self, head: Fields, body: bytes) -> None:
        """The daemon's answer to a call."""
        run = self.run
        call_id = head.text("call", 64)
        fd = self._transfers.take_blob(head.text("blob", 64)) if "blob" in head else None
        if run is None or run.execution_id != head.text("id", 64) or call_id not in run.calls:
            if fd is not None:
                os.close(fd)
            return  # it came too late; the daemon answers the client from its own books
        call = run.close_call(call_id)
        answer: dict[str, Any] = {"t": "reply", "call": call.waiting_id, "ok": head.boolean("ok")}
        if not answer["ok"]:
            answer["type"] = head.text("type", 256)
        elif "blob" in head and fd is None:
            answer.update(ok=False, type="RuntimeError")
            body = b"the tool's answer did not arrive whole"
        elif call.name in self.final_tools:
            answer["final"] = True
            run.final_call_id = run.final_call_id or call_id
        self._crew.post(answer, body, memfd=fd)

    @property
    def max_end_bytes(self) -> int:
        """Bytes that the end of a program may bring: its error, and a value that is small enough to come with it."""
        runs = self.run is not None and self.run.phase == Phase.RUNNING
        return MAX_ERROR_BYTES + link.INLINE_BYTES if runs else 0

    def on_done(self, head: Fields, body: bytes) -> None:
        """The program ended, and the interpreter lives."""
        run = self.run
        # The name tells this run's end from one that comes late, of a run that agent code declared ended before.
        if run is None or run.phase != Phase.RUNNING or head.text("filename", 64) != run.filename:
            raise FrameError("the end of a run that does not run")
        outcome = head.text("outcome", 32)
        if outcome not in OWN_OUTCOMES:
            raise FrameError(f"outcome {outcome!r} is not a program's own")
        run.operations = head.integer("operations", 0, run.budget)
        self._spent -= run.budget - run.operations
        detail_bytes = head.integer("error", 0, len(body))
        detail = read_error(body[:detail_bytes]) if detail_bytes else None
        self._drain_pipes(run)
        if detail_bytes < len(body) and run.output is None:
            run.output, run.output_size = body[detail_bytes:], len(body) - detail_bytes
        for limit in [limit for limit, warning in run.warnings.items() if warning.mark <= run.operations]:
            self._warn(run, limit)  # it could not say so itself
        for call_id in list(run.calls):  # of threads, which would wait for ever
            self._refuse_call(run.close_call(call_id), "the execution ended before the tool had answered")
        self.finish(run, outcome, detail)

    # -- ending --------------------------------------------------------------------------------------------------

    def finish_dead(self, status: Optional[int], cpu_time_s: float, why: str = "") -> None:
        """The interpreter is dead (its wait status, None when we killed it): so is the run. `why`: its last words."""
        run = self.run
        assert run is not None
        self._drain_pipes(run)
        # What it has spent died with it. So it is charged with all that it can have spent in the time that it took.
        self._spent -= run.budget - min(run.budget, int((cpu_time_s + _CPU_ERROR_S) * _MAX_OPERATIONS_PER_S))
        outcome, detail, signum = "crashed", None, None
        if why:
            detail = error("Crash", f"the interpreter could not run the program after the ones before it: {why}")
        if status is not None and run.ended_by is None:
            code, signum = describe_exit(status)
            if code is not None:
                outcome = "exited"
                message = f"the program ended its interpreter with exit code {code}"
                detail = error("SystemExit", message, exit_code=code)
            else:
                detail = error("Crash", f"the interpreter was ended by {_signal_name(signum)}")
        # Who sent a SIGKILL is only known outside of the sandbox.
        suspect = run.ended_by is None and signum == signal.SIGKILL
        self.finish(run, outcome, detail, oom_suspect=suspect, cpu_time_s=cpu_time_s)

    def cpu_time_s(self) -> float:
        """What the current run has spent."""
        return self.run.cpu.spent_s() if self.run is not None and self.run.cpu is not None else 0.0

    def charged_cpu_s(self) -> float:
        """Return the CPU seconds that all runs have spent so far."""
        return self._charged_cpu_s + self.cpu_time_s()

    def finish(
        self,
        run: Run,
        outcome: str,
        detail: Optional[Detail],
        *,
        oom_suspect: bool = False,
        cpu_time_s: Optional[float] = None,
    ) -> None:
        """Ends a run: what the supervisor decided goes before what the program says of itself."""
        if run.ended_by is not None:
            outcome, detail = run.ended_by, run.limit_error(detail)
        self._crew.release()
        run.logs.finish()
        if run.logs.offline and NOTE not in (detail or {}).get("message", ""):
            run.logs.say("stderr", f"{NOTE}\n")
        run.oom_suspect = oom_suspect
        run.cpu_time_s = self.cpu_time_s() if cpu_time_s is None else cpu_time_s
        self._charged_cpu_s += run.cpu_time_s
        run.peak_memory_bytes = self._crew.interpreter.peak_memory_bytes()
        for pipe in run.pipes:
            self._loop.watch(pipe.read_fd, 0, None)
        if run.visible:
            self._background.show(run.logs, run.settings.output_bytes, drain=True)
        self._background.adopt(run.pipes)
        run.pipes = []
        self.run = None
        self._on_end(run, outcome, detail)
        run.close()


def _data(message: link.Message) -> Union[bytes, int]:
    """Where the body is; a memory file is the caller's from here on."""
    memfd = message.take_memfd()
    return message.body if memfd is None else memfd


def _signal_name(signum: Optional[int]) -> str:
    from signal import Signals

    return Signals(signum).name if signum in signal.valid_signals() else f"signal {signum}"
