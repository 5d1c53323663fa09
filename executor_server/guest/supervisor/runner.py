"""Runs executions: from the source through the checker and the interpreter to the result.

One run at a time. The supervisor begins it, and gets `on_end` when it has ended. Deadlines, output and resources are
measured here, outside the interpreter. The program reports the rest through the interpreter: its value, images, tool
calls, warnings, and its end. Agent code shares the interpreter's memory, so it can forge any report. Each is accepted
only while the run expects it, and can harm no other run. Three invariants:

- The first cause that ends a run decides its outcome (`Run.ended_by`). A program that its time limit interrupts may
  still report any error; only its traceback is used.
- Events come in the order of what the program did. Before a report becomes an event, the run's pipes are drained, so
  that output written before an image or a tool call is sent before it. The program waits for the reply.
- An end names its run. Agent code can declare a run ended while its code goes on; the true end, which comes later, must
  not end the next run.
"""

from __future__ import annotations

import os
import time

from executor_api.limits import VALUE_BYTES_MAX

from ..checks.offline import NOT_INSTALLED, note
from ..checks.rules import Rules
from ..files.artifacts import ArtifactFinder
from ..processes.pipe import Pipe
from ..wire import link
from ..wire.frames import FrameError
from ..wire.guest_channel import Channel
from ..wire.lean import signal
from ..wire.link_messages import (
    CalledTool,
    ImageReply,
    NearLimit,
    ProgramEnded,
    ProgramStopped,
    RefusedSource,
    RunProgram,
    SetRules,
    ShownImage,
    Verdict,
    message_of,
)
from ..wire.loop import Loop
from ..wire.messages import ErrorDetail, Image, LimitWarning, ToolCall
from ..wire.schema import read_object
from . import usage
from .checking import Checking
from .child_processes import ChildProcesses
from .memory import MemoryWatch
from .outcomes import MAX_ERROR_BYTES, exit_error, limit_error, memory_error
from .output import ProgramOutput
from .run import INTERRUPT_AGAIN_S, Budget, Call, Phase, Run
from .tool_calls import ToolCalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Union

    from ..wire.messages import Execute
    from .config import Config
    from .copies import KeptCopies
    from .leftover_output import LeftoverOutput

_NOT_HANDED_OVER = (
    "the code did not start: other sandboxes use up this host's descriptors or memory; the variables are unchanged, so "
    "run it again later\n"
)
_CLOSED = (
    "a process was killed because it hid its memory (PR_SET_DUMPABLE, or an unreadable program file): this host has no "
    "control groups to measure it\n"
)
# Seconds between two measurements of CPU time and memory. One costs as much as a short run.
_WATCH_INTERVAL_S = 0.1


class Runner:
    """Owns the current run, if any. `on_end` gets it with its outcome and error."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        channel: Channel,
        child_processes: ChildProcesses,
        leftover: LeftoverOutput,
        cpu: usage.SandboxCpu,
        copies: KeptCopies,
        on_end: Callable[[Run, str, Optional[ErrorDetail]], None],
    ) -> None:
        self._config = config
        self._channel = channel
        self._child_processes = child_processes
        self._cpu = cpu
        self._charged_cpu_s = 0.0  # spent by executions that have ended
        self._on_end = on_end
        self._copies = copies
        self._count = 0
        self._memory = MemoryWatch()
        self._next_watch = 0.0
        # For the run whose source is being checked: its meter, the message that starts it, and the source.
        self._prepared: Optional[tuple[usage.CpuMeter, RunProgram, bytes]] = None
        self._output = ProgramOutput(loop, self._on_flood)
        self._leftover = leftover
        self._idle_of: Optional[usage.Process] = None  # the interpreter that has pipes for output between runs
        self.run: Optional[Run] = None
        self._held = False  # a connection of the session waits for an approval
        self.rules = Rules()
        self.budget = Budget()
        self.tool_calls = ToolCalls(child_processes)
        self._checking = Checking(child_processes)
        self._artifacts = ArtifactFinder(config.workspace)

    @property
    def busy(self) -> bool:
        return self.run is not None

    @property
    def executing(self) -> bool:
        """True during an execution; false during the prelude."""
        return self.run is not None and self.run.visible

    @property
    def has_run(self) -> bool:
        """True if this session has executed anything but its prelude."""
        return self._count > 0

    def post_rules(self) -> None:
        """Gives the interpreter, if there is one, the rules that hold now."""
        if self._child_processes.started:
            self._child_processes.post(SetRules(), self.rules.packed())

    # -- beginning -----------------------------------------------------------------------------------------------

    def begin(
        self, request: Execute, source: str, savepoint: Optional[int] = None, savepoint_refused: str = ""
    ) -> None:
        """Begins a run; one without an id is the prelude. `savepoint` was taken before it."""
        if request.id:
            self._count += 1
        self.run = Run(request, source, self._count, self._channel)
        if self._output.paused or self._held:
            self.run.hold(True)
        self.run.savepoint, self.run.savepoint_refused = savepoint, savepoint_refused
        if request.id:
            self._leftover.show(self.run.logs, request.output_bytes)
        if self.budget.is_spent:
            message = f"the session has spent its operations: session_operations = {self.budget.of_session}"
            self.finish(self.run, "operation_limit", ErrorDetail(type="OperationLimitExceeded", message=message))
            return
        self._checking.begin(self.run, self.rules)
        self._prepare(self.run)

    def _prepare(self, run: Run) -> None:
        """Prepares everything that does not depend on the verdict, while the checker works: pipes, artifacts, meters.

        Each run has new pipes: a process left over from an earlier run still has that run's pipes, and its output must
        not be taken for output of this run (leftover_output.py).
        """
        run.pipes = [Pipe("stdout"), Pipe("stderr")]
        run.write_fds = tuple(pipe.write_fd for pipe in run.pipes)
        self._output.watch(run)
        if run.visible and not run.is_branch:  # the files of a branch do not stay
            run.artifacts = self._artifacts.begin()
        source = run.source.encode("utf-8", "surrogatepass")
        cpu = usage.CpuMeter(self._child_processes.interpreter, self._cpu)
        self._prepared = cpu, self.budget.charge(run, len(source)), source

    def on_verdict(self, packet: link.Packet) -> None:
        """Starts the code, or ends the run, by the checker's verdict. Raises FrameError."""
        run = self.run
        if run is None or run.phase != Phase.CHECKING:
            return
        verdict = message_of(packet)
        if not isinstance(verdict, Verdict):
            raise FrameError(f"a message {verdict.kind!r} of the checker")
        body = link.read_body(packet, None if verdict.ok else MAX_ERROR_BYTES)
        refused = None if verdict.ok else read_object(RefusedSource, body, "a refusal")
        self._child_processes.release()
        run.imports = verdict.imports
        if refused is None:
            self._start_code(run, body)
        else:
            self.finish(run, refused.outcome, refused.error)
        self._child_processes.renew_checker(only_if_worn=True)

    def on_checker_exit(self, status: int) -> None:
        run = self.run
        if run is None or run.phase != Phase.CHECKING:
            return
        if refusal := self._checking.on_exit(run, status):
            self.finish(run, *refusal)

    def _start_code(self, run: Run, code: bytes) -> None:
        """Hands the checked code to the interpreter, with the run's pipes as its stdout and stderr."""
        run.phase = Phase.RUNNING
        assert self._prepared is not None
        run.cpu, message, source = self._prepared
        self._prepared = None
        run.cpu.begin()
        self._next_watch = time.monotonic() + _WATCH_INTERVAL_S
        self._warn(run, spent=0)
        fds, run.write_fds = run.write_fds, ()
        if self._idle_of is not self._child_processes.interpreter and not run.is_branch:
            self._idle_of = self._child_processes.interpreter
            fds += self._leftover.open_idle()
        self._child_processes.post(message, source + code, fds=fds)

    # -- what the program reports ------------------------------------------------------------------------------------

    def on_output(self, packet: link.Packet) -> None:
        """Keeps the program's value, which has a message of its own if it is large. Raises FrameError."""
        run = self.run
        if run is None or run.output is not None:
            raise FrameError("a value that was not asked for")
        if packet.size > VALUE_BYTES_MAX:
            raise FrameError(f"a value of {packet.size} bytes")
        run.output, run.output_size = _data(packet), packet.size

    def on_image(self, shown: ShownImage, packet: link.Packet) -> None:
        run = self.run
        left_out = ""
        if run is not None and run.visible and not (left_out := run.take_image(packet.size, shown.mime)):
            self._output.drain(run)
            image = Image(id=run.request.id, mime=shown.mime, source=shown.source)
            self._channel.send_payload(image, _data(packet), packet.size)
        # The reply lets the program continue: what it prints next belongs after the image.
        self._child_processes.post(ImageReply(call=shown.call, left_out=left_out))

    def on_tool_call(self, called: CalledTool, packet: link.Packet) -> None:
        run = self.run
        call = Call(called.name, called.call, packet.size)
        if self.tool_calls.accept(run, call):
            assert run is not None
            self._output.drain(run)
            event = ToolCall(id=run.request.id, call=run.open_call(call), name=call.name)
            self._channel.send_payload(event, _data(packet), packet.size)
            run.set_clock()

    def on_limit(self, near: NearLimit) -> None:
        """Warns that the program has spent nearly all of a budget. Raises FrameError."""
        run = self.run
        if run is None or run.phase != Phase.RUNNING or near.limit not in run.warnings:
            raise FrameError(f"a warning of {near.limit!r} that was not asked for")
        self._output.drain(run)
        self._send_warning(run, near.limit)

    def on_stopped(self, stopped: ProgramStopped) -> None:
        """Fixes the outcome of a program that the interpreter stops; `on_time` kills it if it swallows the stop."""
        run = self.run
        if run is not None and run.phase == Phase.RUNNING and run.ended_by is None:
            run.ended_by = stopped.outcome
            run.note_interrupted()

    def _warn(self, run: Run, spent: int) -> None:
        """Sends the unsent warnings that are due after `spent` operations."""
        for limit in [limit for limit, warning in run.warnings.items() if warning.mark <= spent]:
            self._send_warning(run, limit)

    def _send_warning(self, run: Run, limit: str) -> None:
        warning = run.warnings.pop(limit)
        self._channel.send(LimitWarning(id=run.request.id, limit=limit, used=warning.used, budget=warning.budget))

    @property
    def max_end_bytes(self) -> int:
        """Largest body of the message that ends a program: its error and a small value."""
        runs = self.run is not None and self.run.phase == Phase.RUNNING
        return MAX_ERROR_BYTES + link.INLINE_BYTES if runs else 0

    def on_done(self, ended: ProgramEnded, body: bytes) -> None:
        """Ends the run of a program that has ended, with its interpreter alive. Raises FrameError."""
        run = self.run
        # The name tells this run's end from the late end of an earlier run that agent code had declared ended.
        if run is None or run.phase != Phase.RUNNING or ended.filename != run.filename:
            raise FrameError("the end of a run that does not run")
        if ended.operations > run.budget or ended.error > len(body):
            raise FrameError("more operations than the run has, or an error longer than the body")
        if ended.error > MAX_ERROR_BYTES:
            raise FrameError(f"an error of {ended.error} bytes")
        detail = read_object(ErrorDetail, body[: ended.error], "an error") if ended.error else None
        run.operations = ended.operations
        self.budget.settle(run)
        self._output.drain(run)
        if ended.error < len(body) and run.output is None:
            run.output, run.output_size = body[ended.error :], len(body) - ended.error
        self._warn(run, spent=run.operations)
        if run.calls:
            self.tool_calls.refuse_open(run)
        self.finish(run, ended.outcome, detail)

    # -- time and resources --------------------------------------------------------------------------------------

    def due(self) -> float:
        """Latest time for the next call of `on_time`."""
        run = self.run
        if run is None:
            return self._leftover.due
        if run.kill_at is not None:
            ends_at = min(run.kill_at, run.interrupt_at)
        else:
            look_at = self._checking.deadline if run.phase == Phase.CHECKING else self._next_watch
            ends_at = min(run.wall_deadline, look_at)
        soonest = min(ends_at, self._leftover.due)
        return soonest if run.logs.due is None else min(soonest, run.logs.due)

    def on_time(self, now: float) -> bool:
        """Does what is due; true if the interpreter has to be killed."""
        self._leftover.on_time(now)
        run = self.run
        if run is None:
            return False
        if run.logs.due is not None and now >= run.logs.due:
            run.logs.flush()
        if run.phase == Phase.CHECKING:
            if now >= min(self._checking.deadline, run.wall_deadline) and (refusal := self._checking.on_time(run, now)):
                self.finish(run, *refusal)
        elif run.kill_at is not None:
            if now >= run.interrupt_at:
                run.interrupt_after_s += INTERRUPT_AGAIN_S
                # Shortly before the kill, children are interrupted, too: the kill would end them with the interpreter.
                self._child_processes.interrupt(with_children=run.kill_at - now < 4 * INTERRUPT_AGAIN_S)
            return now >= run.kill_at
        elif now >= run.wall_deadline:
            self.interrupt(run, "timeout")
        elif now >= self._next_watch:
            began_s = time.process_time()
            exceeds = self._watch_usage(run)
            # Measuring many processes that share memory takes long, so it may use half of the time at most. That is
            # counted in CPU time: on a loaded machine, a late measurement must not make the next one late.
            rest_s = time.process_time() - began_s
            interval_s = 0.0 if self._memory.busy else _WATCH_INTERVAL_S
            self._next_watch = max(now + interval_s, time.monotonic() + rest_s)
            return exceeds
        return False

    def _watch_usage(self, run: Run) -> bool:
        spent_s = run.cpu.look() if run.cpu is not None else 0.0
        run.settle_pause()
        if spent_s > run.request.cpu_time_s + run.extra_s:
            self.interrupt(run, "cpu_limit")
        elif self._config.watch_memory and self._lacks_memory():
            run.ended_by = "out_of_memory"
            return True
        return False

    def _lacks_memory(self) -> bool:
        """True if the sandbox uses more than its limit, and has no savepoint to drop before the next measurement."""
        limit = self._config.memory_bytes
        exceeds = self._memory.exceeds(limit, self._child_processes.closed)
        if self.run is not None:
            used_bytes = self._memory.held_bytes + self._child_processes.interpreter.memory_bytes(b"RssAnon:")
            self.run.peak_memory_bytes = max(self.run.peak_memory_bytes, used_bytes)
        for pid in self._memory.closed - self._child_processes.closed:
            self._end_closed(pid)
        return exceeds and not self._copies.make_room()

    def _end_closed(self, pid: int) -> None:
        """Kills a process that hides its memory: no other limit of this sandbox would count it."""
        self._memory.closed.discard(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        if self.run is not None:
            self.run.logs.say_notice(_CLOSED)

    def interrupt(self, run: Run, outcome: str) -> None:
        """Interrupts the program. If it has not ended after GRACE_S, `on_time` returns true, and it is killed."""
        run.ended_by = outcome
        if self._child_processes.take_back(RunProgram):  # the interpreter is unchanged
            run.logs.say_notice(_NOT_HANDED_OVER)
            self._idle_of = None  # its pipes were in the message
            self.budget.settle(run)
            self.finish(run, outcome, None)
            return
        run.note_interrupted()
        self._child_processes.interrupt()

    def _on_flood(self, run: Run) -> None:
        self.interrupt(run, "output_limit")

    def cancel(self, execution_id: str) -> bool:
        """Ends the current run if it has this id, and returns true then."""
        run = self.run
        if run is None or run.request.id != execution_id:
            return False
        if run.phase == Phase.CHECKING:
            self._child_processes.renew_checker()
            run.ended_by = "cancelled"
            self.finish(run, "cancelled", None)
        elif run.ended_by is None:
            self.interrupt(run, "cancelled")
        return True

    # -- output --------------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stops reading the program's output, or starts again."""
        if paused != self._output.paused:
            self._output.paused = paused
            if self.run is not None:
                self.run.hold(paused or self._held)
                self._output.watch(self.run)

    def hold(self, *, held: bool) -> None:
        """Stops the clock of runs while a connection of the session waits for an approval."""
        self._held = held
        if self.run is not None:
            self.run.hold(self._output.paused or held)

    def note(self, notice: str, otherwise: Callable[[str], None]) -> None:
        """Adds a notice to the output of the running program; `otherwise` gets it if none is running."""
        run = self.run
        if run is not None and run.visible and run.phase == Phase.RUNNING:
            self._output.drain(run)
            run.logs.say_notice(notice)
        else:
            otherwise(notice)

    def note_file_put(self, path: str, status: os.stat_result) -> None:
        """Records that a client has put a file: it is not an artifact of the program."""
        if self.run is not None and self.run.artifacts is not None:
            self.run.artifacts.put_by_client(path, status)

    # -- ending --------------------------------------------------------------------------------------------------

    def finish_dead(self, status: Optional[int], cpu_time_s: float, why: str = "") -> None:
        """Ends the run of a dead interpreter, given its wait status, or None if it is killed from here.

        `why` is the reason that it gave, if it could not continue.
        """
        run = self.run
        assert run is not None
        self._output.drain(run)
        self.budget.settle_dead(run, cpu_time_s)
        outcome, detail = "crashed", None
        if why:
            message = f"the interpreter could not run the program after the ones before it: {why}"
            detail = ErrorDetail(type="Crash", message=message)
        died = status is not None and run.ended_by is None
        if status is not None and died:
            outcome, detail = exit_error(status)
            if run.logs.no_memory:
                outcome, detail = "out_of_memory", memory_error(self._config.memory_bytes)
        # Only the backend knows whether the kernel sent a SIGKILL for lack of memory.
        suspect = died and os.WIFSIGNALED(status or 0) and os.WTERMSIG(status or 0) == signal.SIGKILL
        self.finish(run, outcome, detail, oom_suspect=suspect, cpu_time_s=cpu_time_s)

    def cpu_time_s(self) -> float:
        """Returns the CPU seconds of the current run, which is over."""
        return self.run.cpu.settled_s() if self.run is not None and self.run.cpu is not None else 0.0

    def charged_cpu_s(self) -> float:
        """Returns the CPU seconds in the results of executions so far. A prelude has no result."""
        return self._charged_cpu_s

    def finish(
        self,
        run: Run,
        outcome: str,
        detail: Optional[ErrorDetail],
        *,
        oom_suspect: bool = False,
        cpu_time_s: Optional[float] = None,
    ) -> None:
        """Ends a run. The supervisor's decision, if any, overrides the program's own outcome."""
        if run.ended_by is not None:
            outcome, detail = run.ended_by, limit_error(run.ended_by, run.request, detail)
        elif run.logs.no_memory and detail is not None and detail.type == "KeyboardInterrupt":
            outcome, detail = "out_of_memory", memory_error(self._config.memory_bytes)
        if run.phase == Phase.CHECKING:
            self.budget.settle(run)  # it has spent nothing
        self._child_processes.release()
        run.logs.finish()
        if run.logs.offline and (hint := note(self.rules.network)) not in (detail.message if detail else ""):
            run.logs.say_notice(f"{hint}\n")
        if run.logs.not_installed and NOT_INSTALLED not in (detail.message if detail else ""):
            run.logs.say_notice(f"{NOT_INSTALLED}\n")
        run.oom_suspect = oom_suspect
        run.cpu_time_s = self.cpu_time_s() if cpu_time_s is None else cpu_time_s
        if run.visible:
            self._charged_cpu_s += run.cpu_time_s
        resident_bytes = self._child_processes.interpreter.memory_bytes(b"VmHWM:")
        run.peak_memory_bytes = max(run.peak_memory_bytes, resident_bytes)
        held = [pipe for pipe in run.pipes if not pipe.ended and run.phase == Phase.RUNNING]
        if held:
            self._output.forget(run)
        if run.visible:
            self._leftover.show(run.logs, run.request.output_bytes, drain=True)
        if held:
            self._leftover.adopt(held)
            run.pipes = [pipe for pipe in run.pipes if pipe not in held]
        self.run = None
        self._on_end(run, outcome, detail)
        self._drop(run)  # last, so that the result does not wait for it

    def withdraw(self) -> None:
        """Forgets the current run, whose code has not begun, so that it can begin again."""
        run, self.run = self.run, None
        assert run is not None and run.phase == Phase.CHECKING
        self.budget.settle(run)
        self._drop(run)

    def _drop(self, run: Run) -> None:
        self._output.forget(run)
        run.close()


def _data(packet: link.Packet) -> Union[bytes, int]:
    """Returns the body, or the memory file that holds it, which the caller then owns."""
    memfd = packet.take_memfd()
    return packet.body if memfd is None else memfd
