"""A session: one client's interpreter in one sandbox.

The session owns its sandbox and the channel to its guest. It gives executions and operations to the guest in order of
arrival, routes the guest's frames to whom they concern, and knows the one transition that matters: a session is alive
until its guest is gone, then it is lost, for good. It is never bound to another sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from executor_server.errors import (
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    Unavailable,
)
from executor_server.executions import Execution, ExecutionControl, ToolFailure
from executor_server.guest.frames import Frame, FrameError, Kind
from executor_server.guest_events import (
    read_event,
    read_result,
)
from executor_server.model import (
    BlobRef,
    ErrorDetail,
    ExecutionLimits,
    Outcome,
    OutputMode,
    Payload,
    Principal,
    Queued,
    Result,
    SessionSpec,
    VariablesState,
)
from executor_server.pool import ReadySandbox
from executor_server.session_requests import GuestRequests, SessionSettings

_log = structlog.get_logger(__name__)

T = TypeVar("T")

# For the guest to connect again after its channel broke; it is on the same host, and there or dead.
_RECONNECT_TIME_S = 2.0
# Of one session. A channel does not break by itself, so a guest that goes on hanging up plays with us.
_MAX_RECONNECTS = 8


class Session(GuestRequests):
    """One session. Its methods are called by the RPC layer, one caller having been checked to own it."""

    def __init__(
        self,
        session_id: str,
        owner: Principal,
        spec: SessionSpec,
        ready: ReadySandbox,
        backend_name: str,
        settings: SessionSettings,
    ) -> None:
        assert ready.channel.info is not None
        super().__init__(spec, ready.channel, settings)
        self.session_id = session_id
        self.owner = owner
        self.backend_name = backend_name
        self.warm = ready.warm
        self.python_version = ready.channel.info.python_version
        self.generation = ready.channel.info.generation
        self.create_time_s = time.time()
        self._sandbox = ready.sandbox
        self._last_used_s = self.create_time_s
        self._lost: str | None = None
        self._refuses_new = False
        self._executions: dict[str, Execution] = {}
        self._running: dict[str, Execution] = {}  # not done, in order of arrival
        self._finished: dict[str, Execution] = {}  # the oldest first
        self._finished_bytes = 0
        self._oom_kills: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[object] = set()  # executions and operations whose readers are behind
        self._reconnects = 0
        self._pinged_s = 0.0
        self._log = _log.bind(session_id=session_id, tenant=owner.tenant)
        self._channel.on_frame = self._on_frame
        self._channel.on_lost = self._on_channel_lost

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self._lost is not None:
            return "lost"
        return "busy" if self._running else "idle"

    @property
    def expire_time_s(self) -> float:
        """When it ends if nobody uses it any more; Unix time."""
        limits = self.spec.limits
        used = time.time() if self._in_use else self._last_used_s
        return min(self.create_time_s + limits.session_time_s, used + limits.idle_time_s)

    @property
    def _in_use(self) -> bool:
        """Whether something runs that ends by itself, or that somebody follows.

        The clocks of an execution stand still while it waits for its client. One whose client is gone would wait as
        long as the session may live, so it alone does not keep the session.
        """
        if any(execution.followed for execution in self._running.values()):
            return True
        first = next(iter(self._running.values()), None)
        return first is not None and not first.waits_for_client

    def touch(self) -> None:
        """Puts off its idle end."""
        self._last_used_s = time.time()

    def note_use(self) -> None:
        """To be called now and then: what runs puts off the idle end."""
        if self._in_use:
            self.touch()

    def check_guest(self) -> None:
        """Asks a quiet guest for a sign of life, and gives up one that has not answered for too long."""
        now = time.monotonic()
        if self._lost is not None:
            return
        if self._held:
            # Nothing is read now, so nothing can be heard; but the guest must not think that it is an orphan.
            if now - self._pinged_s > self._settings.ping_interval_s:
                self._pinged_s = now
                self._channel.ping()
            return
        if self._pinged_s > self._channel.last_heard_s and now - self._pinged_s > self._settings.silence_s:
            self._lose(f"the guest has not answered for {self._settings.silence_s:g} s")
        elif now - max(self._channel.last_heard_s, self._pinged_s) > self._settings.ping_interval_s:
            if self._pinged_s <= self._channel.last_heard_s:
                self._pinged_s = now
            self._channel.ping()

    def _require_alive(self) -> None:
        if self._lost is not None:
            raise PreconditionFailed(Reason.SESSION_LOST, f"the session's sandbox is gone: {self._lost}")
        self.touch()

    # -- executions ----------------------------------------------------------------------------------------------

    def execute(self, execution_id: str, code: str, mode: OutputMode, limits: ExecutionLimits) -> Execution:
        """Starts an execution, or finds the one that this id already names. See errors for what it raises."""
        source = code.encode()
        fingerprint = hashlib.sha256(source + mode.value.encode() + repr(limits).encode()).digest()
        known = self._executions.get(execution_id)
        if known is not None:
            if known.fingerprint != fingerprint:
                raise InvalidRequest(
                    Reason.EXECUTION_ID_REUSED, f"execution id {execution_id!r} names another execution of this session"
                )
            return known
        self._require_alive()
        if self._refuses_new:
            raise Unavailable(Reason.DRAINING, "the daemon is about to stop and takes no new executions")
        if len(self._running) > self._settings.max_queued_executions:
            raise ResourceExhausted(
                Reason.QUEUE_FULL, f"{len(self._running)} executions of this session run or wait", retry_after_s=1.0
            )
        control = ExecutionControl(
            cancel=self._cancel,
            answer=self._answer,
            hold=lambda held: self._hold(execution_id, held),
        )
        execution = Execution(execution_id, fingerprint, self._settings.journal_bytes, control)
        if self._running:
            execution.publish(Queued(len(self._running)))
        self._executions[execution_id] = self._running[execution_id] = execution
        self._channel.send(
            Kind.EXECUTE,
            {
                "id": execution_id,
                "mode": mode.value,
                "wall_time_s": limits.wall_time_s,
                "cpu_time_s": limits.cpu_time_s,
                "operations": limits.operations,
                "output_bytes": limits.output_bytes,
            },
            source,
        )
        self._log.debug("execution_started", execution_id=execution_id, source_bytes=len(source))
        return execution

    def execution(self, execution_id: str) -> Execution:
        """An execution of this session. Raises NotFound when there is none, or it has been forgotten."""
        found = self._executions.get(execution_id)
        if found is None:
            raise NotFound(Reason.EXECUTION_NOT_FOUND, f"there is no execution {execution_id!r} in this session")
        self.touch()
        return found

    def refuse_new(self) -> None:
        """Takes no new executions from here on; those that run or wait go on."""
        self._refuses_new = True

    def _forget_old(self) -> None:
        """Lets go of the oldest finished journals, but for the last: so many there may be, so much they may hold."""
        for execution_id, execution in list(self._finished.items())[:-1]:
            limit = self._settings.max_finished_executions
            if len(self._finished) <= limit and self._finished_bytes <= self._settings.journal_bytes:
                return
            del self._finished[execution_id]
            del self._executions[execution_id]
            self._finished_bytes -= execution.journal_size

    def _cancel(self, execution_id: str) -> None:
        self._channel.send(Kind.CANCEL, {"id": execution_id})

    def _answer(self, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        head: dict[str, Any] = {"id": execution_id, "call": call_id}
        match answer:
            case ToolFailure():
                self._channel.send(
                    Kind.TOOL_RESULT, {**head, "ok": False, "type": answer.type}, answer.message.encode()
                )
            case BlobRef():
                self._channel.send(Kind.TOOL_RESULT, {**head, "ok": True, "blob": answer.blob_id})
            case bytes():
                self._channel.send(Kind.TOOL_RESULT, {**head, "ok": True}, answer)

    def _hold(self, holder: object, held: bool) -> None:
        """Stops or resumes taking frames while a journal, or what an operation brought, is full."""
        if held:
            self._held.add(holder)
            self._channel.pause_reading()
        else:
            self._held.discard(holder)
            if not self._held:
                self._pinged_s = 0.0  # what it answered meanwhile has not been read
                self._channel.resume_reading()

    # -- frames of the guest -------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind in (Kind.DONE, Kind.FILE_CHUNK) or (frame.kind == Kind.BLOB_CHUNK and "op" in frame.head):
            operation = self._operations.get(frame.head.integer("op"))
            if operation is not None:
                operation.take(frame)
            return
        execution = self._running.get(frame.head.text("id", 64))
        if execution is None:
            raise FrameError("an event of an execution that does not run")
        if frame.kind == Kind.RESULT:
            self._on_result(execution, frame)
        else:
            execution.publish(read_event(frame))

    def _on_result(self, execution: Execution, frame: Frame) -> None:
        result = read_result(frame)
        if result.generation < self.generation:
            raise FrameError(f"generation {result.generation} after {self.generation}")
        self.generation = result.generation
        self.touch()
        if frame.head.boolean("oom_suspect", default=False):
            # Only outside of the sandbox is it known who sent the kill.
            self._spawn(self._judge_kill(execution, result))
        else:
            self._end(execution, result)

    async def _judge_kill(self, execution: Execution, result: Result) -> None:
        kills = await self._sandbox.oom_kills()
        if kills is not None and kills > (self._oom_kills or 0):
            self._oom_kills = kills
            detail = ErrorDetail("MemoryError", "the program used more memory than memory_bytes allows and was killed")
            result = replace(result, outcome=Outcome.OUT_OF_MEMORY, error=detail)
        self._end(execution, result)

    def _end(self, execution: Execution, result: Result) -> None:
        execution.publish(result)
        self._held.discard(execution.execution_id)
        self._running.pop(execution.execution_id, None)
        self._finished[execution.execution_id] = execution
        self._finished_bytes += execution.journal_size
        self._forget_old()
        # Readers have been woken; they go first.
        asyncio.get_running_loop().call_soon(self._log_end, execution.execution_id, result)

    def _log_end(self, execution_id: str, result: Result) -> None:
        self._log.info(
            "execution_ended",
            execution_id=execution_id,
            outcome=result.outcome.value,
            generation=result.generation,
            operations=result.usage.operations,
            wall_time_s=round(result.usage.wall_time_s, 4),
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def _on_channel_lost(self, reason: str) -> None:
        self._spawn(self._reconnect(reason))

    async def _reconnect(self, reason: str) -> None:
        """A channel that broke may be made again, a few times; a supervisor that died, or lied, may not."""
        self._reconnects += 1
        try:
            if self._reconnects > _MAX_RECONNECTS:
                raise SandboxFailure(f"the channel broke {self._reconnects} times")
            await self._channel.connect(_RECONNECT_TIME_S)
        except SandboxFailure:
            self._lose(await self._cause_of_death(reason))
            return
        if self._held:
            self._channel.pause_reading()  # the new connection knows nothing of it

    async def _cause_of_death(self, reason: str) -> str:
        kills = await self._sandbox.oom_kills()
        if kills is not None and kills > (self._oom_kills or 0):
            return "the kernel killed the sandbox for its memory"
        return reason

    def _lose(self, reason: str) -> None:
        """The sandbox is gone: everything that waits for it learns so, with the reason."""
        if self._lost is not None:
            return
        self._lost = reason
        self._channel.close()
        self._log.warning("session_lost", reason=reason)
        self._end_everything(Outcome.LOST, reason)
        self._spawn(self._destroy_sandbox())

    def _end_everything(self, outcome: Outcome, reason: str) -> None:
        for execution in list(self._running.values()):
            detail = ErrorDetail("SandboxLost" if outcome is Outcome.LOST else "SessionEnded", reason)
            self._end(execution, Result(outcome, VariablesState.LOST, self.generation, error=detail))
        for operation in self._operations.values():
            operation.fail(PreconditionFailed(Reason.SESSION_LOST, f"the session's sandbox is gone: {reason}"))

    async def close(self, reason: str) -> None:
        """Ends the session: what runs is cancelled, the sandbox destroyed. Idempotent. Raises SandboxFailure."""
        if self._lost is None:
            self._lost = reason
            self._channel.close()
            self._end_everything(Outcome.CANCELLED, reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sandbox.destroy()

    async def _destroy_sandbox(self) -> None:
        try:
            await self._sandbox.destroy()
        except SandboxFailure as failure:
            self._log.error("sandbox_not_destroyed", sandbox_id=self._sandbox.sandbox_id, error=str(failure))

    async def wait_idle(self) -> None:
        """Until no execution runs or waits."""
        for execution in list(self._running.values()):
            await execution.wait()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
