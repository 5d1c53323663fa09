"""The processes of a session, which run next to its executions: started, written to, signalled, followed.

A process begins once, as an execution does: a request that repeats its id finds the same process. It is recorded before
the guest is asked to start it. After a daemon was killed in between, it is unknown whether the process runs; repeating
the request settles it, since the guest starts no id twice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextvars import Context, copy_context
from signal import SIGKILL
from typing import TYPE_CHECKING

import structlog

from executor_server.backends.channel import GuestChannel, nothing, written_bytes
from executor_server.core import (
    ExecutorError,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    ProcessEvent,
    ProcessEventKind,
    ProcessFacts,
    ProcessRequest,
    ProcessResult,
    ProcessStarted,
    Reason,
    ResourceExhausted,
    SignalTarget,
    TerminalSize,
    Unavailable,
)
from executor_server.guest.wire.frames import Frame
from executor_server.guest.wire.process_messages import (
    ForgetProcess,
    GrantOutput,
    ResizeProcess,
    SignalProcess,
    StartProcess,
    WriteProcess,
)
from executor_server.policy import check_process
from executor_server.sessions.guest_requests import GuestRequests
from executor_server.sessions.journal import (
    MAX_FINISHED_PROCESSES,
    MAX_UNREAD_PROCESSES,
    ProcessJournal,
    ProcessLog,
    Registry,
)
from executor_server.sessions.shared import SessionHooks

if TYPE_CHECKING:
    from executor_server.sessions.session import Session

# Writes to one process that may wait for it to read; the guest has the same limit.
_MAX_WRITES = 4
# Seconds after a daemon's restart until a process that the guest has not reported counts as never started. The guest
# reports a process within milliseconds of the request.
_START_TIME_S = 30.0

_log = structlog.get_logger(__name__)


class Processes:
    """Owns the journal of one session's processes, and implements its `ProcessJournalOwner`."""

    def __init__(
        self,
        session: Session,
        session_id: str,
        requests: GuestRequests,
        channel: GuestChannel,
        registry: Registry,
        hooks: SessionHooks,
    ) -> None:
        self._session = session
        self._session_id = session_id
        self._requests = requests
        self._channel = channel
        self._registry = registry
        self._admission = hooks.admission
        self._observer = hooks.observer
        memory = hooks.memory.of(session.facts.owner.tenant)
        self._journal = ProcessJournal(registry.process_segments_of(session_id), self, memory)
        self._starting: dict[str, asyncio.Future[None]] = {}
        # By process, the context of the call that starts it, since the observer wants that call's trace.
        self._callers: dict[str, Context] = {}
        self._writes: Counter[str] = Counter()
        self._refuses_new = False
        self._unstarted_until_s: float | None = None  # a monotonic time; None: the state of all processes is known
        self._log = _log.bind(session_id=session_id)

    # -- calls of clients ----------------------------------------------------------------------------------------

    async def start(self, request: ProcessRequest) -> ProcessLog:
        """Starts a process, or finds the one that this id already names. Returns when it runs.

        Raises InvalidRequest (no such command or directory, the id names another process), PolicyViolation,
        PreconditionFailed (the session is lost), ResourceExhausted, Unavailable, and admission's refusals.
        """
        log = self._journal.known_as(request)
        if log is None:
            self._require_room(request)
            facts = facts_of(request)
            await self._admission.process(self._session.facts, facts)
            # Checked again: admission was an await, and the same caller may have repeated the request meanwhile.
            log = self._journal.known_as(request)
        if log is None:
            self._require_room(request)
            log = self._journal.begin(request)
        if not (log.pid or log.done):
            await asyncio.shield(self._started(log, request))
        if log.refusal is not None:
            raise log.refusal
        return log

    def _started(self, log: ProcessLog, request: ProcessRequest) -> asyncio.Future[None]:
        """Asks the guest to start it, in a task of the session, since the caller may leave and others may wait."""
        starting = self._starting.get(log.process_id)
        if starting is None:
            starting = self._starting[log.process_id] = asyncio.get_running_loop().create_future()
            self._callers[log.process_id] = copy_context()
            self._session.spawn(self._ask_to_start(log, request, starting))
        return starting

    async def _ask_to_start(self, log: ProcessLog, request: ProcessRequest, starting: asyncio.Future[None]) -> None:
        argv = b"".join(each.encode() + b"\0" for each in request.argv)  # as JSON it could be six times as large
        body = argv + json.dumps(dict(request.env)).encode()
        size = request.pty

        def message(op: int) -> StartProcess:
            return StartProcess(
                op=op,
                id=log.process_id,
                argv=len(argv),
                cwd=request.cwd,
                columns=size.columns if size is not None else None,
                rows=size.rows if size is not None else None,
                stdin=request.stdin,
                prefers_bash=request.prefers_bash,
                merge_stderr=request.merge_stderr,
                timeout_s=request.timeout_s,
                output_bytes=self._session.spec.processes.max_output_bytes,
                granted=log.granted_bytes,
            )

        try:
            await self._requests.ask(nothing, message, body, counts=False)
        except ExecutorError as error:
            if not log.done:  # else the session was lost, and its result says so
                self._journal.refuse(log, error)
        finally:
            del self._starting[log.process_id]
            del self._callers[log.process_id]
            if not starting.done():
                starting.set_result(None)

    def _require_room(self, request: ProcessRequest) -> None:
        self._session.require_alive()
        if self._refuses_new:
            raise Unavailable(Reason.DRAINING, "the daemon is about to stop and starts no new processes")
        check_process(self._session.spec, pty=request.pty is not None)
        running, most = len(self._journal.running), self._session.spec.processes.max
        if running >= most:
            raise ResourceExhausted(
                Reason.TOO_MANY_PROCESSES,
                f"{running} processes of this session run, and the policy allows {most} at one time",
                retry_after_s=1.0,
            )

    def process(self, process_id: str) -> ProcessLog:
        """Returns a process of this session. Raises NotFound for an unknown or forgotten one."""
        log = self._journal.processes.get(process_id)
        if log is None and self._journal.was_forgotten(process_id):
            raise NotFound(
                Reason.PROCESS_NOT_FOUND,
                f"process {process_id!r} has ended and is forgotten: a session keeps the last {MAX_FINISHED_PROCESSES} "
                f"whose end was read, and at most {MAX_UNREAD_PROCESSES}; read the end of each command before that",
            )
        if log is None:
            raise NotFound(Reason.PROCESS_NOT_FOUND, f"there is no process {process_id!r} in this session")
        self._session.touch()
        return log

    @property
    def started(self) -> list[ProcessLog]:
        """As `list`, for operators: it does not count as use."""
        return [log for log in self._journal.processes.values() if log.pid or log.done]

    def list(self) -> list[ProcessLog]:
        """Returns the started processes, in the order of their starts."""
        self._session.touch()
        return self.started

    async def write(self, process_id: str, offset: int, data: bytes, *, eof: bool) -> int:
        """Writes to a process's input; returns the number of bytes written so far."""
        log = self._running(process_id)
        if self._writes[process_id] >= _MAX_WRITES:
            raise ResourceExhausted(
                Reason.QUEUE_FULL, f"{_MAX_WRITES} writes wait for this process to read", retry_after_s=0.1
            )
        self._writes[process_id] += 1
        try:
            if data:  # else it is the end of the input
                await self._admission.process_input(self._session.facts, process_id, offset, data)
            message = lambda op: WriteProcess(op=op, id=process_id, offset=offset, eof=eof)  # noqa: E731
            written = await self._requests.ask(written_bytes, message, data, counts=False)
        finally:
            self._writes[process_id] -= 1
            if not self._writes[process_id]:
                del self._writes[process_id]
        assert written is not None, "a write was answered without its sum"
        log.written_bytes = max(log.written_bytes, written)
        return written

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        """Sets the size of a process's terminal."""
        log = self.process(process_id)
        if not log.description.has_pty:
            raise InvalidRequest(Reason.INVALID_FIELD, "the process has no terminal")
        if not log.done:
            await self._requests.ask(
                nothing, lambda op: ResizeProcess(op=op, id=process_id, columns=size.columns, rows=size.rows)
            )

    async def signal(self, process_id: str, signal: int, target: SignalTarget) -> None:
        """Sends a signal to a process; has no effect after its end."""
        log = self.process(process_id)
        if not log.done:
            facts: dict[str, str | int | bool] = {"process": process_id, "signal": signal, "target": target.value}
            await self._admission.action(self._session.facts, "signal_requested", facts)
            await self._requests.ask(
                nothing, lambda op: SignalProcess(op=op, id=process_id, signal=signal, target=target.value)
            )
            if signal == SIGKILL and target is SignalTarget.TREE:
                log.note_kill()

    def _running(self, process_id: str) -> ProcessLog:
        log = self.process(process_id)
        if log.done:
            raise PreconditionFailed(Reason.PROCESS_ENDED, "the process has ended")
        return log

    # -- the life of the session ----------------------------------------------------------------------------------

    def refuse_new(self) -> None:
        """Refuses to start processes; running ones go on."""
        self._refuses_new = True

    @property
    def any_running(self) -> bool:
        """True while a process runs; pausing the sandbox would stop it."""
        return bool(self._journal.running)

    @property
    def in_use(self) -> bool:
        """True while a client follows a process, or one with a timeout runs.

        Otherwise a server that was started and left alone would keep its session for its whole life.
        """
        return any(log.followed or log.description.timeout_s is not None for log in self._journal.running)

    def on_time(self) -> None:
        """Must be called regularly: drops events that have been unread for long, to make room for newer ones."""
        self._journal.trim()
        if self._unstarted_until_s is not None and time.monotonic() >= self._unstarted_until_s:
            self._unstarted_until_s = None
            never = Unavailable(Reason.BACKEND_UNAVAILABLE, "the daemon was killed before the process was started")
            self._journal.drop_unstarted(never, self._starting)

    def lose(self, reason: str) -> None:
        """Ends all processes with the session."""
        self._journal.lose(reason)

    def close(self) -> None:
        """Drops the processes; their readers may finish."""
        self._journal.close()

    # -- after another daemon ------------------------------------------------------------------------------------

    @property
    def taken_seq(self) -> int:
        """The number of the last guest frame in the journal."""
        return self._journal.taken_seq

    def recall(self) -> None:
        """Reads the processes that an earlier daemon started. Raises SegmentError."""
        if self._registry.has_process_segments(self._session_id):
            self._journal.replay()

    def resume(self) -> None:
        """Repeats the grants to the guest, since the earlier daemon may have died before it sent them."""
        self._journal.grant_all()
        for log in self._journal.running:
            if log.pid:
                self._observer.process_recovered(self._session.facts, facts_of(log))
        if any(not log.pid for log in self._journal.running):
            self._unstarted_until_s = time.monotonic() + _START_TIME_S

    # -- calls of the journal, and the guest's frames --------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """Takes a frame about a process. Raises FrameError."""
        self._journal.take(frame)

    def grant(self, process_id: str, granted_bytes: int) -> None:
        self._channel.send(GrantOutput(id=process_id, granted=granted_bytes))

    def forget(self, process_id: str) -> None:
        self._channel.send(ForgetProcess(id=process_id))

    def on_process_event(self, log: ProcessLog, event: ProcessEventKind) -> None:
        if self._session.recorder is not None:
            self._session.recorder.process_event(log.process_id, ProcessEvent(log.last_number, event))
        if isinstance(event, ProcessStarted):
            context = self._callers.get(log.process_id) or Context()
            context.run(self._observer.process_started, self._session.facts, facts_of(log))
            self._log.debug("process_started", process_id=log.process_id)
        elif isinstance(event, ProcessResult):
            self._session.touch()
            self._observer.process_ended(self._session.facts, log.process_id, event)
            self._log.info(
                "process_ended",
                process_id=log.process_id,
                outcome=event.outcome.value,
                exit_code=event.exit_code,
                wall_time_s=round(event.wall_time_s, 4),
                age_s=round(time.time() - log.description.start_time_s, 1),
            )


def facts_of(process: ProcessRequest | ProcessLog) -> ProcessFacts:
    """Returns the facts of a process for observers and admission."""
    if isinstance(process, ProcessRequest):
        names = tuple(sorted(process.env))
        return ProcessFacts(process.process_id, process.argv, names, process.pty is not None)
    what = process.description
    return ProcessFacts(what.process_id, what.argv, what.env_names, what.has_pty)
