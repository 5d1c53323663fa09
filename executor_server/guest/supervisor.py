"""The supervisor: pid 1 of the sandbox, between the daemon and the interpreter.

Theory of operation. One thread, one event loop, nothing in it blocks. The daemon sends jobs (configure, execute,
register tools, set and get variables); they are done one after the other, in order of arrival. Files and blobs are
served at any time. For an execution the checker parses, checks and instruments the source (a child, so that a parser
bomb costs no more than one execution), then the interpreter runs the code object.

The supervisor never runs agent code, never parses it and never unpickles or unmarshals anything. It must never hold the
daemon's token, a host path, or anything of another session: a forked child inherits its memory.

The interpreter is replaced when it died or had to be killed: everything in the sandbox is killed with it, `generation`
rises, tools and prelude are put in place again, and the next result says that variables were reset.
"""

from __future__ import annotations

import os
import sys
import time

from . import link, usage
from .channel import Channel
from .children import kill_everything
from .crew import Config, Crew, Listener, Programs
from .fitness import MAX_REASON_CHARS
from .frames import CHUNK_BYTES, PROTOCOL_VERSION, Fields, Frame, FrameError, Kind, decode_head
from .lean import deque, dumps, signal, socket
from .loop import READ, Loop
from .operations import Operations
from .rules import Rules
from .run import Phase, Run, Settings
from .runner import Runner
from .transfers import Transfers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    from .runner import Detail

MAX_JOBS = 64
# An interpreter that dies so often before it has started will not start at all.
_MAX_BOOT_FAILURES = 3
# Of tools that may be shipped.
_MAX_TOOL_PATTERNS = 1024
# Of the prelude's statement that failed.
_STATEMENT_CHARS = 200
_POLL_TIME_S = 60.0
# A turn of the loop that takes so much longer than it was to: the whole sandbox stood still meanwhile.
_FROZEN_TIME_S = 5.0
# The children are started when the daemon has been quiet for so long, at first or after it connected: a new session
# does not have to wait for them.
_CONNECT_TIME_S = 0.05
_START_TIME_S = 0.002
# Done one after the other, in order of arrival.
_JOBS = frozenset(
    (
        *(Kind.CONFIGURE, Kind.RESTRICT, Kind.EXECUTE, Kind.REGISTER_TOOLS, Kind.SET_VARIABLES, Kind.GET_VARIABLES),
        *(Kind.EXPORT_STATE, Kind.RESTORE_STATE, Kind.FIND_MODULES),
    )
)
_PRELUDE = Settings("trailing_expression", 60.0, 60.0, 10**9, 64 * 1024)


class _Job:
    __slots__ = ("body", "head", "kind")

    def __init__(self, kind: int, head: Fields, body: bytes) -> None:
        self.kind = kind
        self.head = head
        self.body = body


class Supervisor:
    """Owns the parts, and decides what is next."""

    def __init__(self, config: Config, listener: socket.socket, programs: Programs) -> None:
        self._config = config
        self._loop = Loop()
        self._channel = Channel(listener, config.token_hash, self._loop, self._on_frame, self._describe)
        self._transfers = Transfers(self._channel, config.workspace)
        self._channel.on_new_daemon = self._transfers.on_new_daemon
        self._channel.pong = lambda: {"background_cpu_time_s": self._background_cpu_s()}
        self._cpu = usage.SandboxCpu(config.cpu_counter)
        self._background_s = 0.0  # as it was told last
        self._cpu_before_s: Optional[float] = None  # when the session was asked for something first
        news = Listener(self._on_message, self._on_verdict, self._on_interpreter_exit, self._on_checker_exit)
        self._crew = Crew(config, self._loop, programs, news, self._abandon)
        self._runner = Runner(
            config, self._loop, self._channel, self._crew, self._transfers, self._cpu, self._on_run_end
        )
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._jobs: deque[_Job] = deque()
        self._configuring: Optional[int] = None
        self._prelude = ""
        self._prelude_settings = _PRELUDE
        self._prelude_due = False  # it has to run again, in a new interpreter
        self._restored = False  # prelude or tools were put into this interpreter, which nobody has used since
        self._notices: list[str] = []
        self._operations = Operations(
            self._channel, self._crew, self._transfers, self._runner, lambda notice: self._notices.append(notice)
        )
        self._generation = 1
        self._booted = False
        self._boot_failures = 0
        self._variables_reset = False
        self._unfit = ""  # why the interpreter that just ended a run can't have another one
        self._thawed_at = 0.0
        self._stop = False

    # -- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Runs until the daemon says SHUTDOWN, nobody has been the daemon for `orphan_time_s`, or nothing works."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._loop.watch(self._wakeup_read, READ, self._on_wakeup)
        while not (self._stop or self._channel.broken):
            asked_s, began = self._turn_time_s(), time.monotonic()
            busy = self._loop.turn(asked_s)
            self._note_thaw(began + asked_s)
            if not busy and not self._crew.started:
                self._start_crew()  # nobody waits for an answer just now: the time to get ready for the first job
            self._on_time()
            if (self._prelude_due or self._operations.tools_due) and not self._crew.imports_ahead:
                self._next_job()
            self._transfers.pump()
            # While the daemon does not take what the program says, the program waits.
            self._crew.pause(self._channel.full)
            self._runner.pause(self._channel.full)
        if self._channel.broken:
            sys.stderr.write(f"the daemon broke the protocol: {self._channel.broken}\n")
        kill_everything()

    def _turn_time_s(self) -> float:
        if not self._crew.started:
            return _START_TIME_S if self._channel.connected else _CONNECT_TIME_S
        if self._transfers.busy:
            return 0.0
        due = min(self._orphaned_at, self._runner.due(), self._rests_at, self._operations.due)
        # In parts of the orphan's time, so that standing still costs no more than one of them.
        return max(0.0, min(_POLL_TIME_S, self._config.orphan_time_s / 4, due - time.monotonic()))

    @property
    def _orphaned_at(self) -> float:
        """A daemon that lives says something far more often."""
        return self._channel.last_heard + self._config.orphan_time_s

    def _note_thaw(self, due: float) -> None:
        """After a turn that was to end at `due`. Who stood still could not be spoken to: the daemon gets its time anew.

        Once, until it is heard again: a program that can hold the supervisor up must not put its end off for ever.
        """
        now = time.monotonic()
        if now - due > _FROZEN_TIME_S and self._channel.last_heard > self._thawed_at:
            self._thawed_at = self._channel.last_heard = now

    @property
    def _rests_at(self) -> float:
        """When there is nothing to do any more for the one that checks sources."""
        return float("inf") if self._runner.busy else self._crew.rests_at

    def _on_wakeup(self, _events: int) -> None:
        os.read(self._wakeup_read, 4096)
        self._crew.reap()

    def _on_time(self) -> None:
        now = time.monotonic()
        self._channel.expire_strangers()
        if self._channel.full:
            self._operations.postpone()
        self._transfers.expire_blobs(now)
        if now >= self._orphaned_at:
            self._stop = True
        elif now >= self._operations.due or self._runner.on_time(now):
            self._replace_interpreter(None)
        elif now >= self._rests_at:
            self._crew.rest()

    def _abandon(self) -> None:
        """In a forked child: closes what is the supervisor's."""
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        self._channel.close_all()
        self._transfers.close_all()
        self._cpu.close()
        self._runner.close_all()
        self._operations.close_all()

    # -- frames of the daemon ------------------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        python = "{}.{}.{}".format(*sys.version_info)
        return {"protocol": PROTOCOL_VERSION, "python": python, "generation": self._generation}

    def _on_frame(self, frame: Frame) -> None:
        kind, head = frame.kind, frame.head
        if kind == Kind.TOOL_RESULT:
            self._runner.on_tool_result(head, frame.body)
        elif kind == Kind.CANCEL:
            self._cancel(head.text("id", 64))
        elif kind == Kind.BLOB_BEGIN:
            self._transfers.begin_blob(head)
        elif kind == Kind.BLOB_DATA:
            self._transfers.add_to_blob(head, frame.view)
        elif kind == Kind.BLOB_DROP:
            self._transfers.drop_blob(head.text("blob", 64))
        elif kind == Kind.FILE_DATA:
            self._transfers.add_to_file(head, frame.view)
        elif kind in (Kind.FILE_PUT, Kind.FILE_GET, Kind.FILE_LIST):
            self._transfers.begin_file(kind, head)
        elif kind == Kind.SHUTDOWN:
            self._stop = True
        elif kind in _JOBS:
            if kind != Kind.EXECUTE and len(self._jobs) >= MAX_JOBS:
                # The daemon counts those that somebody still waits for; here are also those that were given up.
                self._channel.fail(head.integer("op"), "queue_full", f"{MAX_JOBS} requests of this session wait")
                return
            self._operations.claim_blobs(kind, head, frame.body)
            self._jobs.append(_Job(kind, head, frame.body))
            self._next_job()
        else:
            raise FrameError(f"frame kind {kind} is not for a guest")

    def _cancel(self, execution_id: str) -> None:
        if self._runner.cancel(execution_id):
            return
        for job in self._jobs:
            if job.kind == Kind.EXECUTE and job.head.values.get("id") == execution_id:
                self._jobs.remove(job)
                run = Run(execution_id, "", Settings.read(job.head), 0, self._channel)
                self._send_result(run, "cancelled", None)
                return

    def _background_cpu_s(self) -> float:
        """CPU time of the sandbox since its session began, beside that of executions: nobody else would be charged it.

        Sources that are checked are in it, and interpreters that replace one that ended.
        """
        # Not during a run: what is found lost at a look is charged to whoever looks.
        if self._cpu_before_s is not None and not self._runner.busy:
            spent_s = self._cpu.total_s() - self._cpu_before_s - self._runner.charged_cpu_s()
            self._background_s = max(self._background_s, spent_s)
        return self._background_s

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _start_crew(self) -> None:
        self._crew.start()
        self._post_settings()
        self._operations.post_tools()

    def _next_job(self) -> None:
        # The prelude can wait for the interpreter that imports ahead, but not longer than anybody else waits.
        if self._prelude_due and not (self._runner.busy or self._stop) and (self._jobs or not self._crew.imports_ahead):
            self._prelude_due, self._restored = False, True
            self._runner.begin("", self._prelude, self._prelude_settings)
        idle = not (self._prelude_due or self._runner.busy or self._operations.busy or self._stop)
        if self._operations.tools_due and idle and (self._jobs or not self._crew.imports_ahead):
            self._restored = True
            self._operations.make_tools_again()
        while self._jobs and not (self._runner.busy or self._operations.busy or self._stop):
            job = self._jobs.popleft()
            self._restored = False
            if not self._is_settings(job):
                if not self._crew.started:
                    self._start_crew()
                # Which modules there are is asked before a session runs anything: to import ahead is not its own yet.
                if self._cpu_before_s is None and job.kind != Kind.FIND_MODULES:
                    self._cpu_before_s = self._cpu.total_s()
            if job.kind == Kind.EXECUTE:
                source = job.body.decode("utf-8", "replace")
                self._runner.begin(job.head.text("id", 64), source, Settings.read(job.head))
            elif job.kind == Kind.CONFIGURE:
                self._configure(job)
            elif job.kind == Kind.RESTRICT:
                self._restrict(job)
            else:
                self._operations.begin(job.kind, job.head, job.body)

    @staticmethod
    def _is_settings(job: _Job) -> bool:
        """Whether it can be done without an interpreter: RESTRICT, and CONFIGURE without a prelude."""
        if job.kind == Kind.CONFIGURE:
            return len(job.body) == job.head.integer("settings", 0, len(job.body))
        return job.kind == Kind.RESTRICT

    def _configure(self, job: _Job) -> None:
        op = job.head.integer("op")
        size = job.head.integer("settings", 0, len(job.body))
        self._hold_to(job.body[:size])
        self._prelude = job.body[size:].decode("utf-8", "replace")
        if self._prelude:
            self._configuring = op
            self._runner.begin("", self._prelude, self._prelude_settings)
        else:
            self._channel.done(op)

    def _restrict(self, job: _Job) -> None:
        self._hold_to(job.body)
        self._channel.done(job.head.integer("op"))

    def _hold_to(self, settings: bytes) -> None:
        """These rules hold for what starts from now on, in this interpreter and in those that replace it."""
        fields = decode_head(settings)
        self._runner.rules = Rules.read(fields)
        self._runner.session_operations = fields.integer("session_operations", 1)
        self._prelude_settings = _PRELUDE.at_most(fields.object("execution_max"))
        if self._crew.started:
            self._post_settings()
        self._operations.forbid_tools(fields.texts("shipped_tools", _MAX_TOOL_PATTERNS, 256))

    # -- news of the children ------------------------------------------------------------------------------------

    def _on_verdict(self, message: link.Message) -> None:
        self._runner.on_verdict(message)

    def _on_checker_exit(self, status: int) -> None:
        self._runner.on_checker_exit(status)

    def _on_message(self, message: link.Message) -> None:
        """A message of the interpreter, which is agent code's as much as ours."""
        message.close_fds()  # none belongs to any message
        kind = message.head.text("t", 32)
        if kind == "output":
            self._runner.on_output(message)
        elif kind == "image":
            self._runner.on_image(message)
        elif kind == "tool_call":
            self._runner.on_tool_call(message)
        elif kind == "variable":
            self._operations.on_variable(message)
        elif kind == "state":
            self._operations.on_state(message)
        elif kind == "op_done":
            self._operations.on_done(message.head, link.read_body(message, self._operations.max_answer_bytes))
            self._next_job()
        elif kind == "done":
            self._unfit = message.head.text("unfit", MAX_REASON_CHARS, default="")
            self._runner.on_done(message.head, link.read_body(message, self._runner.max_end_bytes))
        else:
            link.read_body(message, 0)
            if kind == "booted":
                self._booted, self._boot_failures = True, 0
            elif kind == "limit":
                self._runner.on_limit(message.head)
            elif kind == "unfit":
                self._replace_interpreter(None, message.head.text("why", MAX_REASON_CHARS))
            else:
                raise FrameError(f"an unknown message {kind!r}")

    def _on_interpreter_exit(self, status: int) -> None:
        self._replace_interpreter(status)

    def _post_settings(self) -> None:
        self._crew.post({"t": "settings"}, dumps(self._runner.rules.fields()))

    # -- replacing the interpreter -------------------------------------------------------------------------------

    def _replace_interpreter(self, status: Optional[int], why: str = "") -> None:
        """It died (with this wait status) or is to be killed: starts another, and ends what ran in the old one.

        `why`: what it says of itself, if it could not go on.
        """
        cpu_time_s = self._runner.cpu_time_s()
        run = self._runner.run
        over_prelude = run is not None and not run.visible and run.phase == Phase.RUNNING
        # What it was given did not end it at once: maybe both, later, and so it would go on.
        over_both = self._restored and run is None and not self._operations.busy
        if not self._renew_crew():
            return
        waiting, self._jobs = self._jobs, deque()  # nothing starts before the prelude has run again
        if why and (run is None or run.phase != Phase.RUNNING):  # else it is that run's error
            self._notices.append(_reset_notice(why))
        self._end_what_ran(status, cpu_time_s, waiting, why)
        self._jobs = waiting
        # What ended the last interpreter would end this one too. It is said that it is not there.
        if over_both:
            if self._prelude:
                self._notices.append("the interpreter died when the prelude had run; it is left out in this one\n")
            self._operations.give_up_tools()
        self._prelude_due = bool(self._prelude) and not (over_prelude or over_both)
        self._next_job()

    def _renew_crew(self) -> bool:
        """Kills everything in the sandbox and starts another interpreter; false when none starts any more."""
        self._crew.stop()
        self._generation += 1
        self._variables_reset = True
        if not self._booted:
            self._boot_failures += 1
            if self._boot_failures >= _MAX_BOOT_FAILURES:
                self._stop = True
                return False
        self._booted = False
        self._start_crew()
        return True

    def _replace_unfit(self, run: Run, why: str) -> None:
        """The run that has just ended left the interpreter so that no other can run in it. Its result will say so."""
        if run.visible:
            self._notices.append(_reset_notice(why))
        else:
            self._notices.append(f"the prelude is left out, since the interpreter can't be used after it: {why}\n")
        if self._renew_crew():
            self._operations.on_interpreter_gone()
            self._prelude_due = bool(self._prelude) and run.visible

    def _end_what_ran(self, status: Optional[int], cpu_time_s: float, waiting: deque[_Job], why: str) -> None:
        run = self._runner.run
        if run is not None and run.phase == Phase.RUNNING:
            self._runner.finish_dead(status, cpu_time_s, why)
        elif run is not None:
            # A process of an earlier execution ended the interpreter while this source was being checked.
            self._runner.run = None
            head = Fields({"id": run.execution_id, **run.settings.fields()})
            if run.visible:
                waiting.appendleft(_Job(Kind.EXECUTE, head, run.source.encode("utf-8", "replace")))
        self._operations.on_interpreter_gone()

    # -- the end of a run ----------------------------------------------------------------------------------------

    def _on_run_end(self, run: Run, outcome: str, detail: Optional[Detail]) -> None:
        why, self._unfit = self._unfit, ""
        if why:
            self._replace_unfit(run, why)
        if run.visible:
            self._send_result(run, outcome, detail)
        else:
            self._end_prelude(outcome, detail)
        self._next_job()

    def _end_prelude(self, outcome: str, detail: Optional[Detail]) -> None:
        failed = "" if outcome == "succeeded" else _prelude_failure(outcome, detail or {})
        op, self._configuring = self._configuring, None
        if op is not None:
            if failed:
                self._channel.fail(op, "prelude_failed", failed)
            else:
                self._channel.done(op)
        elif failed:
            self._notices.append(f"{failed}\n")

    def _send_result(self, run: Run, outcome: str, detail: Optional[Detail]) -> None:
        for notice in self._notices:
            run.logs.say("stderr", notice)
        self._notices = []
        error_body = dumps(detail) if detail else b""
        head: dict[str, Any] = {
            "id": run.execution_id,
            "outcome": outcome,
            "error": len(error_body),
            "variables": "reset" if self._variables_reset else "kept",
            "generation": self._generation,
            "final": run.final_call_id,
            "operations": run.operations,
            "wall_time_s": run.wall_time_s(),
            "cpu_time_s": run.cpu_time_s,
            "peak_memory_bytes": run.peak_memory_bytes,
            "output_bytes": run.logs.total_bytes,
            "oom_suspect": run.oom_suspect,
        }
        self._variables_reset = False
        artifacts, truncated = run.artifacts.found() if run.artifacts is not None else ([], False)
        listed = dumps(artifacts) if artifacts else b""
        if listed or truncated:
            head.update(artifacts=len(listed), artifacts_truncated=truncated)
        if run.imports:
            head["imports"] = run.imports
        details = error_body + listed
        output, run.output = run.output, None
        if output is not None and outcome == "succeeded":
            if run.output_size > CHUNK_BYTES:
                head["blob"] = self._channel.send_blob({"id": run.execution_id}, output, run.output_size)
                head["size"] = run.output_size
                output = b""
            else:
                head["output"] = run.output_size
                output = output if isinstance(output, bytes) else link.read_memfd(output, run.output_size)
            self._channel.send(Kind.RESULT, head, details + output)
        else:
            run.output = output  # closed with the run
            self._channel.send(Kind.RESULT, head, details)


def _reset_notice(why: str) -> str:
    return f"the interpreter was replaced, and variables were reset: {why}\n"


def _prelude_failure(outcome: str, detail: Detail) -> str:
    """One line: nobody sees the prelude's traceback, or what it printed."""
    statement = detail.get("statement", "").split("\n", 1)[0][:_STATEMENT_CHARS]
    place = f" at '{statement}'" if statement else ""
    cause = ": ".join(part for part in (detail.get("type", ""), detail.get("message", "")) if part)
    return f"the prelude ended as {outcome}{place}: {cause}"
