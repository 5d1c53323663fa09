"""The supervisor: pid 1 of the sandbox, between the daemon and the interpreter.

Theory of operation. One thread, one event loop, and nothing in it blocks. The daemon sends jobs (configure, execute,
register tools, set and get variables), which are done one after the other, in order of arrival. Files and blobs are
served at any time, so a hanging program does not block access to its files. For an execution the checker parses, checks
and instruments the source, in a child process, so that a parser bomb costs no more than one execution. Then the
interpreter runs the code object.

Trust. Messages come from three parties. The daemon has proved that it knows the channel's token; an invalid frame ends
the sandbox. Agent code has the interpreter's memory, so it can send anything over the interpreter's link: each message
is bounded before it is read, is accepted only in the state that expects it, and can end at most its own run. Other
processes of the sandbox have the same uid: they can kill, stop and starve both children. They can neither trace nor
signal this process, which is undumpable and, as pid 1, ignores signals that it does not handle.

Therefore this process never runs or parses agent code, and never unpickles or unmarshals anything. It never holds the
daemon's token, a host path, or data of another session, because each child is forked from it and inherits its memory.

Ending. An interpreter that dies is replaced (replacement.py). wire/exit_codes.py lists the reasons why the loop ends.
Then everything in the sandbox is killed, and with the exit of pid 1 the kernel ends the namespace.
"""

from __future__ import annotations

import os
import sys
import time

from ..checks.rules import Rules
from ..files.transfers import Transfers
from ..wire import exit_codes, link, link_messages, messages
from ..wire.frames import PROTOCOL_VERSION, Frame, FrameError
from ..wire.guest_channel import Channel
from ..wire.lean import signal, socket
from ..wire.loop import READ, Loop
from ..wire.messages import Configure, Execute, Restrict
from ..wire.savepoint_messages import ListSavepoints, RollBack, TakeSavepoint
from ..wire.schema import message_of, read_object
from ..wire.session_rules import SessionRules
from . import usage
from .background_work import PROCESS_KINDS, BackgroundWork
from .branches import Branches
from .child import kill_everything
from .child_processes import ChildProcesses
from .copies import KeptCopies
from .interpreter_requests import Requests
from .jobs import KINDS, MAX_JOBS, Job, JobQueue
from .leftover_output import LeftoverOutput
from .orphan_time import OrphanTime
from .prelude import Prelude
from .replacement import Replacement
from .results import Results
from .run import Run
from .runner import Runner
from .savepoints import Savepoints

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ..wire.messages import ErrorDetail
    from .config import Config, Programs
    from .jobs import JobRequest

# Seconds of the loop's longest wait.
_POLL_TIME_S = 60.0
# Seconds without a message from the daemon after which the children are started, if no session needs them yet: before
# the daemon has connected, and after. So the fork delays no answer.
_CONNECT_TIME_S = 0.05
_START_TIME_S = 0.002


class Supervisor:
    """Makes the parts, runs the loop, and decides which job is next."""

    def __init__(self, config: Config, listener: socket.socket, programs: Programs) -> None:
        self._loop = Loop()
        self._channel = Channel(
            *(listener, config.token_hash, self._loop, self._on_frame, self._describe),
            *(config.egress_listener, self._on_new_daemon, self._pong),
        )
        self._orphan_time = OrphanTime(self._channel, self._loop, config.orphan_time_s)
        self._jobs = JobQueue()
        self._results = Results(self._channel)
        leftover = LeftoverOutput(self._loop)
        self._background = BackgroundWork(config, self._channel, self._loop, leftover)
        cpu = usage.SandboxCpu(config.cpu_counter, self._background)
        copies = KeptCopies(config, self._results)
        self._child_processes = children = ChildProcesses(config, self._loop, programs, self, self._background, copies)
        self._runner = Runner(config, self._loop, self._channel, children, leftover, cpu, copies, self._on_run_end)
        self._background_cpu = usage.BackgroundCpu(cpu, self._runner.charged_cpu_s)
        self._transfers = Transfers(self._channel, config.workspace, self._runner.note_file_put)
        self._prelude = Prelude(self._channel, self._runner, self._results)
        self._requests = Requests(self._channel, children, self._transfers, self._runner, self._results)
        self._savepoints = Savepoints(self._channel, self._results, children, self._requests, copies)
        self._replacement = Replacement(
            *(children, self._runner, self._requests, self._results, self._prelude, self._jobs, self._savepoints)
        )
        self._branches = Branches(
            *(self._channel, self._results, self._jobs, children, self._requests, self._savepoints),
            self._replacement,
        )
        self._config = config
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._full = False  # the daemon does not take events
        self._unfit = ""  # why the interpreter can't run another program after the one that just ended
        self._exit_code: Optional[int] = None  # set when the daemon ends the sandbox, or is gone for too long

    # -- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> int:
        """Runs until the sandbox ends (see the module's docstring); returns one of wire/exit_codes.py."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._loop.watch(self._wakeup_read, READ, self._on_wakeup)
        while (exit_code := self._end) is None:
            due, began = self._due, time.monotonic()
            wait_s = self._turn_time_s(due - began)
            busy, now = self._loop.turn(wait_s), time.monotonic()
            self._orphan_time.note_turn(began + wait_s, now)
            self._transfers.expire_blobs(now)
            if not busy and not self._child_processes.started:
                self._replacement.start()  # no answer is due that the fork could delay
            if now >= due:
                self._on_time(now)
            if (self._prelude.due or self._requests.tools_due) and not self._child_processes.imports_ahead:
                self._next_job()
            self._transfers.pump()
            if self._channel.full or self._full:
                self._hold_back(self._channel.full)
        if exit_code == exit_codes.BROKEN:
            sys.stderr.write(f"the daemon broke the protocol: {self._channel.broken}\n")
        kill_everything()
        return exit_code

    @property
    def _end(self) -> Optional[int]:
        """The exit code once the sandbox has to end, else None."""
        if self._channel.broken:
            return exit_codes.BROKEN
        return exit_codes.NO_INTERPRETER if self._replacement.failed else self._exit_code

    def _turn_time_s(self, left_s: float) -> float:
        """Returns the seconds that a turn may wait for events; the next deadline is `left_s` away."""
        if not (self._child_processes.started or self._child_processes.serves):
            return _START_TIME_S if self._channel.connected else _CONNECT_TIME_S
        if self._transfers.busy or not self._child_processes.started:
            return 0.0
        # At most a quarter of the orphan time: a freeze shows as a turn that takes too long.
        return max(0.0, min(_POLL_TIME_S, self._orphan_time.limit_s / 4, left_s))

    @property
    def _due(self) -> float:
        """Time of the next call of `_on_time`."""
        runs = self._runner.due() if self._runner.busy else min(self._runner.due(), self._child_processes.due)
        others = self._requests.due, self._background.due, self._savepoints.successor_due, self._channel.due
        return min(self._orphan_time.ends_at, runs, self._child_processes.retry_at, *others)

    def _on_wakeup(self, _events: int) -> None:
        os.read(self._wakeup_read, 4096)
        self._child_processes.reap()

    def _hold_back(self, full: bool) -> None:
        """Makes the program wait while the daemon takes no events."""
        self._full = full
        if full:
            self._requests.postpone()
        self._child_processes.pause(full)
        self._runner.pause(full)
        self._background.pause(full)

    def _on_time(self, now: float) -> None:
        self._channel.expire_strangers()
        self._child_processes.retry(now)
        if self._full:
            self._requests.postpone()
        self._background.on_time(now)
        if now >= self._savepoints.successor_due:
            self._savepoints.on_successor_due()
        if self._orphan_time.is_over(now):
            self._exit_code = exit_codes.ORPHANED
        elif now >= self._requests.due or self._runner.on_time(now):
            self._replace_interpreter(None)
        elif not self._runner.busy and now >= self._child_processes.due:
            self._child_processes.on_due()

    def _on_new_daemon(self) -> None:
        self._transfers.on_new_daemon()
        self._background.on_new_daemon()

    def _pong(self) -> messages.Pong:
        return messages.Pong(background_cpu_time_s=self._background_cpu.spent_s(executing=self._runner.executing))

    # -- frames of the daemon ------------------------------------------------------------------------------------

    def _describe(self, last_seq: int, acked: int) -> messages.Ready:
        python, generation = "{}.{}.{}".format(*sys.version_info), self._results.generation
        return messages.Ready(
            protocol=PROTOCOL_VERSION, python=python, generation=generation, last_seq=last_seq, acked=acked
        )

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind in PROCESS_KINDS:
            self._background_cpu.begin()
        if self._background.take(frame):
            return
        message = message_of(frame)
        if isinstance(message, KINDS):
            self._add_job(message, frame.body)
        elif isinstance(message, messages.ToolResult):
            fd = self._transfers.take_blob(message.blob) if message.blob is not None else None
            self._runner.tool_calls.on_result(self._runner.run, message, frame.body, fd)
        elif isinstance(message, messages.Cancel):
            self._cancel(message.id)
        elif isinstance(message, messages.Note):
            self._runner.note(frame.body.decode("utf-8", "replace"), self._results.notify)
        elif isinstance(message, messages.Hold):
            self._runner.hold(held=message.held)
        elif isinstance(message, messages.BlobData):
            self._transfers.add_to_blob(message, frame.view)
        elif isinstance(message, messages.FileData):
            self._transfers.add_to_file(message, frame.view)
        elif isinstance(message, messages.BlobBegin):
            self._transfers.begin_blob(message)
        elif isinstance(message, messages.BlobDrop):
            self._transfers.drop_blob(message.blob)
        elif isinstance(message, (messages.FilePut, messages.FileGet, messages.FileList, messages.ManageFile)):
            self._transfers.begin_file(message, frame.body)
        elif isinstance(message, messages.Shutdown):
            self._exit_code = exit_codes.ASKED
        else:
            raise FrameError(f"frame kind {frame.kind} is not for a guest")

    def _add_job(self, request: JobRequest, body: bytes) -> None:
        if not isinstance(request, Execute) and self._jobs.full:
            self._channel.fail(request.op, "queue_full", f"{MAX_JOBS} requests of this session wait")
            return
        self._jobs.add(Job(request, body, self._requests.claim_blobs(request, body)))
        self._next_job()

    def _cancel(self, execution_id: str) -> None:
        if not self._runner.cancel(execution_id) and (request := self._jobs.cancel(execution_id)) is not None:
            self._results.send(Run(request, "", 0, self._channel), "cancelled", None)

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _next_job(self) -> None:
        if not (self._jobs.ready or self._prelude.due or self._requests.tools_due):
            return
        # Prelude and tools wait while a warm interpreter may replace this one, unless a job waits for them.
        settled = self._jobs.ready or not self._child_processes.imports_ahead
        if self._prelude.due and settled and not (self._runner.busy or self._end is not None):
            self._replacement.restored = True
            self._prelude.begin()
        idle = not (self._prelude.due or self._runner.busy or self._requests.busy or self._end is not None)
        if self._requests.tools_due and idle and settled:
            self._replacement.restored = True
            self._requests.make_tools_again()
        while self._jobs.ready and not (self._runner.busy or self._requests.busy or self._end is not None):
            job = self._jobs.take()
            self._replacement.restored = False
            if job.needs_interpreter:
                if not self._child_processes.started:
                    self._replacement.start()
                if not isinstance(job.request, messages.FindModules):  # comes from the daemon itself
                    self._background_cpu.begin()
            request = job.request
            if isinstance(request, Execute):
                if self._is_prepared(request, job):
                    refused = self._savepoints.why_not if request.savepoints else ""
                    self._runner.begin(
                        request, job.body.decode("utf-8", "replace"), self._savepoints.before_run, refused
                    )
            elif isinstance(request, TakeSavepoint):
                self._savepoints.take(request)
            elif isinstance(request, RollBack):
                self._savepoints.roll_back(request, self._replacement.go_back)
            elif isinstance(request, ListSavepoints):
                self._savepoints.answer(request.op)
            elif isinstance(request, Configure):
                self._configure(request, job.body)
            elif isinstance(request, Restrict):
                self._hold_to(job.body)
                self._runner.post_rules()
                self._channel.done(request.op)
            else:
                self._requests.begin(request, job.body, job.blobs)

    def _is_prepared(self, request: Execute, job: Job) -> bool:
        """False if the execution needs a savepoint or a branch first: the job is put back until that is made."""
        if request.branches or not (request.savepoints and job.saved):
            self._savepoints.before_run = None
        if job.saved or not (request.branches or request.savepoints):
            return True
        job.saved = True
        if request.branches:
            self._branches.begin(request, job)
        else:
            self._jobs.put_back(job)
            self._savepoints.take_before(request)
        return False

    def _configure(self, request: Configure, body: bytes) -> None:
        if request.settings + request.env > len(body):
            raise FrameError(f"rules of {request.settings} bytes in a body of {len(body)}")
        self._hold_to(body[: request.settings])
        prelude = body[request.settings + request.env :].decode("utf-8", "replace")
        if prelude:
            self._background_cpu.begin()
        if env := body[request.settings : request.settings + request.env]:
            from ..processes.environment import check_time_zone, read_variables

            variables = read_variables(env)
            if problem := check_time_zone(variables):
                self._channel.fail(request.op, "variable_refused", problem)
                return
            self._prelude.configure_booted(request.op, prelude)
            self._child_processes.set_variables(variables)
        else:
            self._prelude.configure(request.op, prelude)
        self._runner.post_rules()  # after the answer; the prelude's code follows once it is checked
        self._child_processes.serve_session()

    def _hold_to(self, settings: bytes) -> None:
        """Applies the session's rules to everything that starts from now on, in this interpreter and later ones."""
        rules = read_object(SessionRules, settings, "rules")
        self._runner.rules = Rules.of(rules)
        self._runner.budget.of_session = rules.session_operations
        self._prelude.limit(rules.execution_max)
        self._requests.forbid_tools(rules.shipped_tools)

    # -- messages and exits of the children ------------------------------------------------------------------------

    def on_message(self, packet: link.Packet) -> None:
        """Handles a message from the interpreter, which agent code may have sent. Raises FrameError."""
        packet.close_fds()  # no message carries any; kept, they would use up this process's limit of open files
        message = link_messages.message_of(packet)
        if isinstance(message, link_messages.ProgramEnded):
            self._unfit = message.unfit
            self._runner.on_done(message, link.read_body(packet, self._runner.max_end_bytes))
        elif isinstance(message, link_messages.CalledTool):
            self._runner.on_tool_call(message, packet)
        elif isinstance(message, link_messages.Output):
            self._runner.on_output(packet)
        elif isinstance(message, link_messages.ShownImage):
            self._runner.on_image(message, packet)
        elif isinstance(message, link_messages.Variable):
            self._requests.on_variable(message, packet)
        elif isinstance(message, link_messages.ExportedState):
            self._requests.on_state(packet)
        elif isinstance(message, link_messages.Answered):
            self._requests.on_answer(message, link.read_body(packet, self._requests.max_answer_bytes))
            self._next_job()
        else:
            link.read_body(packet, 0)
            if isinstance(message, link_messages.Booted):
                self._replacement.note_booted()
            elif isinstance(message, link_messages.ProgramStopped):
                self._runner.on_stopped(message)
            elif isinstance(message, link_messages.NearLimit):
                self._runner.on_limit(message)
            elif isinstance(message, link_messages.Drawing):
                if self._runner.run is not None:
                    self._runner.run.set_drawing(begins=message.begins)
            elif isinstance(message, link_messages.Unfit):
                self._replace_interpreter(None, message.why)
            else:
                raise FrameError(f"a message {message.kind!r} is not for the supervisor")

    def on_interpreter_exit(self, status: int) -> None:
        self._replace_interpreter(status)

    def on_verdict(self, packet: link.Packet) -> None:
        self._runner.on_verdict(packet)

    def on_checker_exit(self, status: int) -> None:
        self._runner.on_checker_exit(status)

    def _replace_interpreter(self, status: Optional[int], why: str = "") -> None:
        if self._prelude.refuse_variables(self._config.variables):
            self._child_processes.set_variables({})
            return
        self._replacement.replace(status, why)
        self._next_job()

    # -- the end of a run ----------------------------------------------------------------------------------------

    def _on_run_end(self, run: Run, outcome: str, detail: Optional[ErrorDetail]) -> None:
        why, self._unfit = self._unfit, ""
        if run.is_branch:
            self._branches.on_run_end(run, outcome, detail, why)
        elif why:
            self._replacement.replace_unfit(run, why)
        if run.visible and not run.is_branch:
            self._results.send(run, outcome, detail)
        elif not run.visible:
            self._prelude.end(outcome, detail)
        self._next_job()
