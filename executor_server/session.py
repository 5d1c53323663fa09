"""A session: one client's interpreter in one sandbox.

The session owns its sandbox, the channel to its guest and the ledger of its executions. It gives executions and
operations to the guest in order of arrival, routes the guest's frames to whom they concern, and knows the one
transition that matters: a session is alive until its guest is gone, then it is lost, for good. It is never bound to
another sandbox. It may be bound to another daemon: `recall` makes it again from what the last one wrote down.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import structlog

from executor_server.backends.base import Sandbox
from executor_server.errors import (
    ExecutorError,
    NotFound,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    Unavailable,
)
from executor_server.executions import Execution, ExecutionRequest, ToolFailure
from executor_server.gate import Answer
from executor_server.guest.frames import Frame, Kind
from executor_server.guest_channel import GuestChannel
from executor_server.ledger import Ledger, LedgerControl, LedgerLimits
from executor_server.model import (
    BlobRef,
    ErrorDetail,
    EventKind,
    LimitWarning,
    Log,
    Outcome,
    OutputCut,
    OutputMode,
    Payload,
    Result,
    SessionFacts,
    SessionSpec,
    ToolCall,
    ToolSpec,
    Usage,
)
from executor_server.registry import Registry, SessionRecord, SessionUse
from executor_server.requested import RequestedLimits
from executor_server.session_requests import GuestRequests, SessionSettings, Watch
from executor_server.session_rules import check_tools, execution_limits
from executor_server.tape import TapeError

_log = structlog.get_logger(__name__)

# For the guest to connect again after its channel broke; it is on the same host, and there or dead.
_RECONNECT_TIME_S = 2.0
# Renaming a container takes the Engine and a thread of ours milliseconds: whoever has just asked for it goes first.
_LABEL_PAUSE_S = 0.1
# Of one session. A channel does not break by itself, so a guest that goes on hanging up plays with us.
_MAX_RECONNECTS = 8


class Session(GuestRequests):
    """One session. Its methods are called by the RPC layer, one caller having been checked to own it."""

    def __init__(
        self,
        record: SessionRecord,
        sandbox: Sandbox,
        channel: GuestChannel,
        registry: Registry,
        settings: SessionSettings,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(_facts(record), record.spec, channel, settings, watch or Watch())
        self.record = record
        self.puts, self.gets = record.puts, record.gets
        self.session_id = record.session_id
        self.owner = record.owner
        self.backend_name = record.backend
        self.warm = record.warm
        self.python_version = record.python_version
        self.create_time_s = record.create_time_s
        self._sandbox = sandbox
        self._registry = registry
        self._last_used_s = record.last_used_s
        self._lost: str | None = None
        self._refuses_new = False
        self._ledger = Ledger(
            registry.tape_of(record.session_id),
            LedgerLimits(settings.journal_bytes, settings.max_finished_executions),
            LedgerControl(channel.send, self._hold, self._on_kill, self._refuses, self._on_event, self._on_end),
            record.generation,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[object] = set()  # executions and operations whose readers are behind
        self._reconnects = 0
        self._pinged_s = 0.0
        self._begun_s: dict[str, float] = {}  # when this daemon heard of the executions that run
        self._printed_bytes: Counter[str] = Counter()  # by them, as far as this daemon was told
        self._log = _log.bind(session_id=record.session_id, tenant=record.owner.tenant)

    def begin(self) -> None:
        """Starts it on a guest that has just been connected to. `configure` must follow."""
        self._number_operations()
        self._channel.on_frame = self._on_frame
        self._channel.on_send = self._ledger.note_sent
        self._channel.on_lost = self._on_channel_lost
        if not self._channel.connected:  # it hung up right after it had answered, when nobody was told
            self._on_channel_lost("the guest closed the channel")

    def _begin_tape(self) -> None:
        self._ledger.begin_tape()
        self._spawn(self._label())

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self._lost is not None:
            return "lost"
        return "busy" if self._ledger.running else "idle"

    @property
    def lost_reason(self) -> str:
        """Why it is lost; empty when it is not."""
        return self._lost or ""

    @property
    def generation(self) -> int:
        """Rises whenever the interpreter was replaced."""
        return self._ledger.generation

    @property
    def last_used_s(self) -> float:
        """When it was used last; Unix time."""
        return time.time() if self._in_use else self._last_used_s

    @property
    def use(self) -> SessionUse:
        """What is written down of it now and then."""
        return SessionUse(self.session_id, self.last_used_s, self.generation, self.puts, self.gets)

    @property
    def expire_time_s(self) -> float:
        """When it ends if nobody uses it any more; Unix time."""
        limits = self.spec.limits
        return min(self.create_time_s + limits.session_time_s, self.last_used_s + limits.idle_time_s)

    @property
    def _in_use(self) -> bool:
        """Whether something runs that ends by itself, or that somebody follows.

        The clocks of an execution stand still while it waits for its client. One whose client is gone would wait as
        long as the session may live, so it alone does not keep the session.
        """
        if any(execution.followed for execution in self._ledger.running.values()):
            return True
        first = next(iter(self._ledger.running.values()), None)
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

    async def execute(self, execution_id: str, code: str, mode: OutputMode, limits: RequestedLimits) -> Execution:
        """Starts an execution, or finds the one that this id already names. See errors for what it raises."""
        request = ExecutionRequest(execution_id, code, mode, limits)
        known = self._ledger.known_as(request)
        if known is not None:
            return known
        self._require_room()
        granted = execution_limits(self.spec, limits)
        give_back = await self._gate.execution(self.facts, execution_id, code, granted)
        try:
            # While the gate was asked others may have come, the same caller once more among them; or another policy.
            known = self._ledger.known_as(request)
            if known is not None:
                return known
            self._require_room()
            granted = execution_limits(self.spec, limits)
            execution = self._ledger.execute(request, granted, self.spec.policy.fingerprint)
            self._begun_s[execution_id] = time.monotonic()
            self._observer.execution_started(self.facts, execution_id)
        finally:
            give_back()
        self._log.debug("execution_started", execution_id=execution_id, source_chars=len(code))
        return execution

    def _require_room(self) -> None:
        self._require_alive()
        if self._refuses_new:
            raise Unavailable(Reason.DRAINING, "the daemon is about to stop and takes no new executions")
        if len(self._ledger.running) > self._settings.max_queued_executions:
            raise ResourceExhausted(
                Reason.QUEUE_FULL,
                f"{len(self._ledger.running)} executions of this session run or wait",
                retry_after_s=1.0,
            )

    def execution(self, execution_id: str) -> Execution:
        """An execution of this session. Raises NotFound when there is none, or it has been forgotten."""
        found = self._ledger.known(execution_id)
        if found is None:
            raise NotFound(Reason.EXECUTION_NOT_FOUND, f"there is no execution {execution_id!r} in this session")
        self.touch()
        return found

    async def submit_tool_result(self, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        """Passes the answer of a tool call on. Raises NotFound, PreconditionFailed; an answer counts once."""
        execution = self.execution(execution_id)
        execution.check_answer(call_id)
        told = Answer(call_id, _size_bytes(answer), isinstance(answer, ToolFailure))
        await self._gate.tool_answer(self.facts, execution_id, told)
        execution.submit_tool_result(call_id, answer)
        self._observer.tool_answered(self.facts, execution_id, told)

    def cancel_all(self, reason: str) -> None:
        """Cancels what runs or waits; its clients are told why."""
        for execution_id in list(self._ledger.running):
            self._ledger.stop(execution_id, reason)

    def set_cpu_share(self, share: float) -> None:
        """The part of a whole sandbox's share of the processors that this one is to have."""
        self._sandbox.set_cpu_share(share)

    def hold_to(self, spec: SessionSpec) -> Coroutine[Any, Any, None]:
        """Holds it to another spec of the same sandbox, from its next execution on.

        What is returned is to be awaited, and raises what the guest refuses with. PreconditionFailed when it is lost.
        """
        # The guest does what it is told in order, so what is executed from here on is under the new rules.
        held = self.restrict(spec)
        self.spec = spec
        self.record = replace(self.record, spec=spec)
        self.facts = _facts(self.record)
        return self._confirm(held, spec)

    async def _confirm(self, held: Coroutine[Any, Any, None], spec: SessionSpec) -> None:
        """Writes down what the guest is held to by now; a daemon that comes before that finds the old spec."""
        await held
        self._registry.note_spec(self.session_id, spec)

    def refuse_new(self) -> None:
        """Takes no new executions from here on; those that run or wait go on."""
        self._refuses_new = True

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
        self._ledger.take(frame)

    def _refuses(self, execution_id: str, call: ToolCall) -> str | None:
        try:
            if self._ledger.running[execution_id].policy_fingerprint == self.spec.policy.fingerprint:
                # Registered it may have been under an earlier policy; or not at all, which only a liar calls.
                check_tools(self.spec, [ToolSpec(call.name, "", (), is_final_answer=False)])
            self._gate.tool_call(self.facts, execution_id, call)
        except ExecutorError as refusal:
            return refusal.message
        return None

    def _on_event(self, execution_id: str, event: EventKind) -> None:
        if isinstance(event, Log):
            self._printed_bytes[execution_id] += len(event.text.encode("utf-8", "replace"))
        elif isinstance(event, OutputCut):
            self._printed_bytes[execution_id] += event.omitted_bytes
        elif isinstance(event, ToolCall):
            self._observer.tool_called(self.facts, execution_id, event)
        elif isinstance(event, LimitWarning):
            self._observer.limit_warned(self.facts, execution_id, event)

    def _on_kill(self, execution_id: str) -> None:
        self._spawn(self._judge_kill(execution_id))

    async def _judge_kill(self, execution_id: str) -> None:
        self._ledger.judge(execution_id, await self._sandbox.oom_kills())

    def _on_end(self, execution_id: str, result: Result) -> None:
        self.touch()
        # Readers have been woken; they go first.
        asyncio.get_running_loop().call_soon(self._tell_end, execution_id, result)

    def _tell_end(self, execution_id: str, result: Result) -> None:
        now_s = time.monotonic()
        took_s, printed_bytes = now_s - self._begun_s.pop(execution_id, now_s), self._printed_bytes.pop(execution_id, 0)
        if result.usage == Usage():
            # Nobody could account for it: whoever ends a session in the middle has had its output all the same.
            result = replace(result, usage=Usage(output_bytes=printed_bytes))
        self._observer.execution_ended(self.facts, execution_id, result, took_s)
        self._log.info(
            "execution_ended",
            execution_id=execution_id,
            outcome=result.outcome.value,
            generation=result.generation,
            operations=result.usage.operations,
            wall_time_s=round(result.usage.wall_time_s, 4),
        )

    # -- after another daemon ------------------------------------------------------------------------------------

    def recall(self, gone: str | None) -> None:
        """Remembers its executions, as far as they can be read; `gone` says why its sandbox is not there any more."""
        damage = None
        try:
            self._ledger.replay()
        except TapeError as error:
            damage = str(error)
        reason = self.record.lost_reason or self._ledger.lost or gone or damage
        if reason is not None:
            self._lose(reason)
        else:
            self._channel.go_on_after(self._ledger.taken_seq)

    def announce(self) -> None:
        """Tells of what was recalled: before its guest is heard, who may have ended some of it meanwhile."""
        if self._lost is not None:
            return
        self._observer.session_recovered(self.facts)
        for execution_id in self._ledger.running:
            self._begun_s[execution_id] = time.monotonic()
            self._observer.execution_recovered(self.facts, execution_id)

    async def resume(self, deadline_s: float) -> None:
        """Goes on with its guest; is lost when that can't be."""
        if self._lost is not None:
            return
        self._channel.on_frame = self._on_frame
        self._channel.on_lost = self._on_channel_lost
        try:
            await self._connect(deadline_s)
        except SandboxFailure as failure:
            self._lose(await self._cause_of_death(f"after a restart of the daemon, {failure}"))
            return
        self._number_operations()
        for kind, head, body in self._ledger.resume(self._channel.sent_seq):
            self._channel.send(kind, head, body)
        self._channel.on_send = self._ledger.note_sent
        for execution_id in self._ledger.unjudged():
            self._on_kill(execution_id)
        self._spawn(self._label())

    # -- the end -------------------------------------------------------------------------------------------------

    def _on_channel_lost(self, reason: str) -> None:
        if self._channel.violated:
            self._observer.guest_misbehaved(self.facts, reason)
        self._spawn(self._reconnect(reason))

    async def _reconnect(self, reason: str) -> None:
        """A channel that broke may be made again, a few times; a supervisor that died, or lied, may not."""
        self._reconnects += 1
        try:
            if self._reconnects > _MAX_RECONNECTS:
                raise SandboxFailure(f"the channel broke {self._reconnects} times")
            await self._connect(_RECONNECT_TIME_S)
        except SandboxFailure:
            self._lose(await self._cause_of_death(reason))
            return

    async def _connect(self, deadline_s: float) -> None:
        """Connects once more. Raises SandboxFailure."""
        # First, so that a later daemon does not show a token that has been used.
        self._registry.note_connections(self.session_id, self._channel.connections + 1)
        await self._channel.connect(deadline_s)
        if self._held:
            self._channel.pause_reading()  # the new connection knows nothing of it

    async def _cause_of_death(self, reason: str) -> str:
        kills = await self._sandbox.oom_kills()
        if kills is not None and kills > self._ledger.oom_kills:
            return "the kernel killed the sandbox for its memory"
        return await self._sandbox.cause_of_death() or reason

    def give_up(self, reason: str) -> None:
        """The session is lost: nobody can go on with it."""
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        """The sandbox is gone: everything that waits for it learns so, with the reason."""
        if self._lost is not None:
            return
        self._lost = reason
        self._channel.close()
        self._log.warning("session_lost", reason=reason)
        if self.record.lost_reason is None:  # else an earlier daemon has told
            self._observer.session_lost(self.facts, reason)
        self._ledger.lose(reason)
        self._registry.note_lost(self.session_id, reason)
        self._fail_operations(reason)
        self._spawn(self._destroy_sandbox())

    def _fail_operations(self, reason: str) -> None:
        for operation in self._operations.values():
            operation.fail(PreconditionFailed(Reason.SESSION_LOST, f"the session's sandbox is gone: {reason}"))

    async def close(self, reason: str) -> None:
        """Ends the session: what runs is cancelled, the sandbox destroyed. Idempotent. Raises SandboxFailure."""
        if self._lost is None:
            self._lost = reason
            self._channel.close()
            self._ledger.end_all(Outcome.CANCELLED, ErrorDetail("SessionEnded", reason))
            self._fail_operations(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ledger.close()
        await self._sandbox.destroy()

    async def _destroy_sandbox(self) -> None:
        try:
            await self._sandbox.destroy()
        except SandboxFailure as failure:
            self._log.error("sandbox_not_destroyed", sandbox_id=self._sandbox.sandbox_id, error=str(failure))

    async def wait_idle(self) -> None:
        """Until no execution runs or waits."""
        for execution in list(self._ledger.running.values()):
            await execution.wait()

    async def _label(self) -> None:
        await asyncio.sleep(_LABEL_PAUSE_S)
        await self._sandbox.label(self.session_id)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of ours. What waited for this task would wait for ever.
            self._log.error("session_task_broke", exc_info=error)
            self._lose("an internal error of the daemon")


def _facts(record: SessionRecord) -> SessionFacts:
    spec = record.spec
    return SessionFacts(
        session_id=record.session_id,
        owner=record.owner,
        request_id=record.request_id,
        policy=spec.policy,
        audit=spec.audit,
        backend=record.backend,
        image=spec.sandbox.image,
        warm=record.warm,
    )


def _size_bytes(answer: Payload | ToolFailure) -> int:
    match answer:
        case ToolFailure():
            return len(answer.message.encode())
        case BlobRef():
            return answer.size_bytes
        case bytes():
            return len(answer)
