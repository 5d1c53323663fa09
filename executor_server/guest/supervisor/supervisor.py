"""The supervisor: pid 1 of the sandbox, between the daemon and the interpreter.

Theory of operation. One thread, one event loop, and nothing in it blocks. The daemon sends jobs (configure, execute,
register tools, set and get variables), which are done one after the other, in order of arrival. Files and blobs are
served at any time, so a program that hangs does not lock its files away. For an execution the checker parses, checks
and instruments the source (a child, so that a parser bomb costs no more than one execution); then the interpreter runs
the code object.

Trust. Three parties speak here. The daemon has proved that it knows the channel's token; a frame that makes no sense
ends the sandbox. Agent code speaks through the interpreter's link, since it has the interpreter's memory: each message
is bounded before it is read, is accepted only in the state that expects it, and can end at most its own run. Other
processes of the sandbox have the same uid: they can kill, stop and starve both children, and neither trace nor signal
this process, which is undumpable and, as pid 1, ignores what it does not handle.

Therefore this process never runs agent code, never parses it and never unpickles or unmarshals anything. It never holds
the daemon's token, a host path, or anything of another session: each child is forked from it and inherits its memory.

Replacing the interpreter. When it dies or has to be killed, everything in the sandbox is killed with it: a process that
survived could hold the old link, ports, and files, and act in the new generation. The generation rises, tools and
prelude are put in place again, and the next result says that variables were reset. Two races are handled in
`_replace_interpreter`:

- A job must not start between the new interpreter's fork and its prelude, or it would run without it. The waiting jobs
  are taken out of the queue until the prelude is due.
- What is put in place may itself kill the interpreter, at once or after it has answered. It is tried again only while
  something else may have been the cause; otherwise the sandbox would replace interpreters for ever.

Ending. The loop ends when the daemon says SHUTDOWN, when no daemon has been heard for `orphan_time_s` (orphan_time.py),
when the daemon breaks the protocol, or when no interpreter starts any more. Then everything in the sandbox is killed,
and with the exit of pid 1 the kernel ends the namespace, whatever else may be left in it.
"""

from __future__ import annotations

import os
import sys
import time

from ..checks.rules import Rules
from ..files.transfers import Transfers
from ..wire import link, messages
from ..wire.channel import Channel
from ..wire.frames import PROTOCOL_VERSION, Frame, FrameError
from ..wire.lean import deque, dumps, signal, socket
from ..wire.link import MAX_REASON_CHARS
from ..wire.loop import READ, Loop
from ..wire.messages import Configure, Execute, Restrict
from ..wire.schema import message_of, read_object
from ..wire.session_rules import SessionRules
from . import usage
from .child_processes import ChildProcesses
from .children import kill_everything
from .jobs import KINDS, MAX_JOBS, Job
from .orphan_time import OrphanTime
from .prelude import Prelude
from .requests import Requests
from .results import Results
from .run import Phase, Run, Settings
from .runner import Runner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from .config import Config, Programs
    from .jobs import JobRequest
    from .runner import Detail

# Interpreters that die before they have started, after which none is tried again: the next would die, too.
_MAX_BOOT_FAILURES = 3
# Seconds of the loop's longest wait.
_POLL_TIME_S = 60.0
# Seconds without a word from the daemon after which the children are started, before and after it connects. They are
# ready when a new session needs them, and the fork delays no answer that is due.
_CONNECT_TIME_S = 0.05
_START_TIME_S = 0.002


class Supervisor:
    """Owns the parts, and decides what is next."""

    def __init__(self, config: Config, listener: socket.socket, programs: Programs) -> None:
        self._loop = Loop()
        self._channel = Channel(
            listener, config.token_hash, self._loop, self._on_frame, self._describe, config.egress_listener
        )
        self._transfers = Transfers(self._channel, config.workspace)
        self._channel.on_new_daemon = self._transfers.on_new_daemon
        self._channel.pong = lambda: messages.Pong(
            background_cpu_time_s=self._background_cpu.spent_s(busy=self._runner.busy)
        )
        self._cpu = usage.SandboxCpu(config.cpu_counter)
        self._orphan_time = OrphanTime(self._channel, config.orphan_time_s)
        self._child_processes = ChildProcesses(config, self._loop, programs, self)
        self._runner = Runner(
            config, self._loop, self._channel, self._child_processes, self._transfers, self._cpu, self._on_run_end
        )
        self._background_cpu = usage.BackgroundCpu(self._cpu, self._runner.charged_cpu_s)
        self._results = Results(self._channel)
        self._prelude = Prelude(self._channel, self._runner, self._results)
        self._requests = Requests(
            self._channel, self._child_processes, self._transfers, self._runner, self._results.notify
        )
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._jobs: deque[Job] = deque()
        self._restored = False  # prelude or tools were put into this interpreter, and no job has used it since
        self._booted = False
        self._boot_failures = 0
        self._unfit = ""  # the reason when the interpreter that just ended a run can't take another
        self._stop = False

    # -- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Runs until the sandbox ends (see the module's docstring)."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._loop.watch(self._wakeup_read, READ, self._on_wakeup)
        while not (self._stop or self._channel.broken):
            asked_s, began = self._turn_time_s(), time.monotonic()
            busy = self._loop.turn(asked_s)
            self._orphan_time.note_turn(began + asked_s)
            if not busy and not self._child_processes.started:
                self._start_child_processes()  # no answer is due, so the fork delays none
            self._on_time()
            if (self._prelude.due or self._requests.tools_due) and not self._child_processes.imports_ahead:
                self._next_job()
            self._transfers.pump()
            # While the daemon does not take events, the program waits.
            self._child_processes.pause(self._channel.full)
            self._runner.pause(self._channel.full)
        if self._channel.broken:
            sys.stderr.write(f"the daemon broke the protocol: {self._channel.broken}\n")
        kill_everything()

    def _turn_time_s(self) -> float:
        if not self._child_processes.started:
            return _START_TIME_S if self._channel.connected else _CONNECT_TIME_S
        if self._transfers.busy:
            return 0.0
        due = min(self._orphan_time.ends_at, self._runner.due(), self._rests_at, self._requests.due)
        # In quarters of the orphan time: a freeze is noticed by a turn that takes too long.
        return max(0.0, min(_POLL_TIME_S, self._orphan_time.limit_s / 4, due - time.monotonic()))

    @property
    def _rests_at(self) -> float:
        """Time at which the idle checker is ended."""
        return float("inf") if self._runner.busy else self._child_processes.rests_at

    def _on_wakeup(self, _events: int) -> None:
        os.read(self._wakeup_read, 4096)
        self._child_processes.reap()

    def _on_time(self) -> None:
        now = time.monotonic()
        self._channel.expire_strangers()
        if self._channel.full:
            self._requests.postpone()
        self._transfers.expire_blobs(now)
        if now >= self._orphan_time.ends_at:
            self._stop = True
        elif now >= self._requests.due or self._runner.on_time(now):
            self._replace_interpreter(None)
        elif now >= self._rests_at:
            self._child_processes.rest()

    def abandon(self) -> None:
        """In a forked child: closes the supervisor's descriptors, before any code of the child runs."""
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        self._channel.close_all()
        self._transfers.close_all()
        self._cpu.close()
        self._runner.close_all()
        self._requests.close_all()

    # -- frames of the daemon ------------------------------------------------------------------------------------

    def _describe(self, last_seq: int, acked: int) -> messages.Ready:
        return messages.Ready(
            protocol=PROTOCOL_VERSION,
            python="{}.{}.{}".format(*sys.version_info),
            generation=self._results.generation,
            last_seq=last_seq,
            acked=acked,
        )

    def _on_frame(self, frame: Frame) -> None:
        message = message_of(frame)
        if isinstance(message, KINDS):
            self._add_job(message, frame.body)
        elif isinstance(message, messages.ToolResult):
            self._runner.tool_calls.on_result(self._runner.run, message, frame.body)
        elif isinstance(message, messages.Cancel):
            self._cancel(message.id)
        elif isinstance(message, messages.Note):
            self._runner.note(frame.body.decode("utf-8", "replace"), self._results.notify)
        elif isinstance(message, messages.BlobData):
            self._transfers.add_to_blob(message, frame.view)
        elif isinstance(message, messages.FileData):
            self._transfers.add_to_file(message, frame.view)
        elif isinstance(message, messages.BlobBegin):
            self._transfers.begin_blob(message)
        elif isinstance(message, messages.BlobDrop):
            self._transfers.drop_blob(message.blob)
        elif isinstance(message, (messages.FilePut, messages.FileGet, messages.FileList)):
            self._transfers.begin_file(message)
        elif isinstance(message, messages.Shutdown):
            self._stop = True
        else:
            raise FrameError(f"frame kind {frame.kind} is not for a guest")

    def _add_job(self, request: JobRequest, body: bytes) -> None:
        if not isinstance(request, Execute) and len(self._jobs) >= MAX_JOBS:
            # The daemon bounds the requests that a caller waits for; those that a caller gave up are here, too.
            self._channel.fail(request.op, "queue_full", f"{MAX_JOBS} requests of this session wait")
            return
        self._requests.claim_blobs(request, body)
        self._jobs.append(Job(request, body))
        self._next_job()

    def _cancel(self, execution_id: str) -> None:
        if self._runner.cancel(execution_id):
            return
        for job in self._jobs:
            if isinstance(job.request, Execute) and job.request.id == execution_id:
                self._jobs.remove(job)
                run = Run(execution_id, "", Settings.of(job.request), 0, self._channel)
                self._results.send(run, "cancelled", None)
                return

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _start_child_processes(self) -> None:
        self._child_processes.start()
        self._post_settings()
        self._requests.post_tools()

    def _next_job(self) -> None:
        # Prelude and tools wait while a warm interpreter may take this one's place, unless a job waits for them.
        settled = bool(self._jobs) or not self._child_processes.imports_ahead
        if self._prelude.due and settled and not (self._runner.busy or self._stop):
            self._restored = True
            self._prelude.begin()
        idle = not (self._prelude.due or self._runner.busy or self._requests.busy or self._stop)
        if self._requests.tools_due and idle and settled:
            self._restored = True
            self._requests.make_tools_again()
        while self._jobs and not (self._runner.busy or self._requests.busy or self._stop):
            job = self._jobs.popleft()
            self._restored = False
            if job.needs_interpreter:
                if not self._child_processes.started:
                    self._start_child_processes()
                if not isinstance(job.request, messages.FindModules):  # comes before the session's own first request
                    self._background_cpu.begin()
            request = job.request
            if isinstance(request, Execute):
                self._runner.begin(request.id, job.body.decode("utf-8", "replace"), Settings.of(request))
            elif isinstance(request, Configure):
                self._configure(request, job.body)
            elif isinstance(request, Restrict):
                self._hold_to(job.body)
                self._channel.done(request.op)
            else:
                self._requests.begin(request, job.body)

    def _configure(self, request: Configure, body: bytes) -> None:
        if request.settings > len(body):
            raise FrameError(f"rules of {request.settings} bytes in a body of {len(body)}")
        self._hold_to(body[: request.settings])
        self._prelude.configure(request.op, body[request.settings :].decode("utf-8", "replace"))

    def _hold_to(self, settings: bytes) -> None:
        """Applies the session's rules to all that starts from now on, in this interpreter and in later ones."""
        rules = read_object(SessionRules, settings, "rules")
        self._runner.rules = Rules.of(rules)
        self._runner.budget.of_session = rules.session_operations
        self._prelude.limit(rules.execution_max)
        if self._child_processes.started:
            self._post_settings()
        self._requests.forbid_tools(rules.shipped_tools)

    # -- messages and exits of the children ------------------------------------------------------------------------

    def on_verdict(self, message: link.Message) -> None:
        self._runner.on_verdict(message)

    def on_checker_exit(self, status: int) -> None:
        self._runner.on_checker_exit(status)

    def on_message(self, message: link.Message) -> None:
        """Handles a message of the interpreter, which agent code may have sent. Raises FrameError."""
        message.close_fds()  # no message has any: a program could use up all that this process may have open
        kind = message.head.text("t", 32)
        if kind == "output":
            self._runner.on_output(message)
        elif kind == "image":
            self._runner.on_image(message)
        elif kind == "tool_call":
            self._runner.on_tool_call(message)
        elif kind == "variable":
            self._requests.on_variable(message)
        elif kind == "state":
            self._requests.on_state(message)
        elif kind == "op_done":
            self._requests.on_done(message.head, link.read_body(message, self._requests.max_answer_bytes))
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

    def on_interpreter_exit(self, status: int) -> None:
        self._replace_interpreter(status)

    def _post_settings(self) -> None:
        self._child_processes.post({"t": "settings"}, dumps(self._runner.rules.fields()))

    # -- replacing the interpreter -------------------------------------------------------------------------------

    def _replace_interpreter(self, status: Optional[int], why: str = "") -> None:
        """Starts another interpreter in place of one that died (with this wait status) or is to be killed (None).

        Ends what ran in the old one. `why` is the old one's own reason, if it could not go on.
        """
        cpu_time_s = self._runner.cpu_time_s()
        run = self._runner.run
        over_prelude = run is not None and not run.visible and run.phase == Phase.RUNNING
        # Prelude and tools did not kill it at once. But no job has used it, so one of them did: neither is tried again.
        over_both = self._restored and run is None and not self._requests.busy
        if not self._renew_child_processes():
            return
        waiting, self._jobs = self._jobs, deque()  # none may start before the prelude has run again
        if why and (run is None or run.phase != Phase.RUNNING):  # else it is that run's error
            self._results.notify_reset(why)
        self._end_what_ran(status, cpu_time_s, waiting, why)
        self._jobs = waiting
        if over_both:
            if self._prelude.source:
                self._results.notify("the interpreter died when the prelude had run; it is left out in this one\n")
            self._requests.give_up_tools()
        self._prelude.due = bool(self._prelude.source) and not (over_prelude or over_both)
        self._next_job()

    def _renew_child_processes(self) -> bool:
        """Kills everything in the sandbox and starts another interpreter; false when none starts any more."""
        self._child_processes.stop()
        self._results.note_replaced()
        if not self._booted:
            self._boot_failures += 1
            if self._boot_failures >= _MAX_BOOT_FAILURES:
                self._stop = True
                return False
        self._booted = False
        self._start_child_processes()
        return True

    def _replace_unfit(self, run: Run, why: str) -> None:
        """Replaces an interpreter in which no other run is possible after this one, whose result will say so."""
        if run.visible:
            self._results.notify_reset(why)
        else:
            self._results.notify(f"the prelude is left out, since the interpreter can't be used after it: {why}\n")
        if self._renew_child_processes():
            self._requests.on_interpreter_replaced()
            self._prelude.due = bool(self._prelude.source) and run.visible

    def _end_what_ran(self, status: Optional[int], cpu_time_s: float, waiting: deque[Job], why: str) -> None:
        run = self._runner.run
        if run is not None and run.phase == Phase.RUNNING:
            self._runner.finish_dead(status, cpu_time_s, why)
        elif run is not None:
            # A process of an earlier execution killed the interpreter while this source was checked: it has not begun.
            self._runner.run = None
            if run.visible:
                again = Execute(id=run.execution_id, asked={}, policy="", **run.settings.fields())
                waiting.appendleft(Job(again, run.source.encode("utf-8", "replace")))
        self._requests.on_interpreter_replaced()

    # -- the end of a run ----------------------------------------------------------------------------------------

    def _on_run_end(self, run: Run, outcome: str, detail: Optional[Detail]) -> None:
        why, self._unfit = self._unfit, ""
        if why:
            self._replace_unfit(run, why)
        if run.visible:
            self._results.send(run, outcome, detail)
        else:
            self._prelude.end(outcome, detail)
        self._next_job()
