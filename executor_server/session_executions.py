"""The part of a session that runs code: what may begin, who is asked before and told after, what becomes of it.

An execution is begun once: what repeats its id finds it, though less may be granted by then. Between the gate's
agreement and the frame that starts it nothing is waited for, and what was true before the gate was asked is looked at
again, since others may have come meanwhile; another policy among them.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import structlog

from executor_server.errors import ExecutorError, NotFound, Reason, ResourceExhausted, Unavailable
from executor_server.executions import Execution, ExecutionRequest, ToolFailure
from executor_server.gate import Answer
from executor_server.guest_channel import GuestChannel
from executor_server.ledger import Ledger, LedgerControl, LedgerLimits
from executor_server.model import (
    BlobRef,
    EventKind,
    LimitWarning,
    Log,
    OutputCut,
    OutputMode,
    Payload,
    Result,
    SessionFacts,
    ToolCall,
    ToolSpec,
    Usage,
)
from executor_server.registry import Registry, SessionRecord
from executor_server.requested import RequestedLimits
from executor_server.session_requests import SessionSettings, Watch
from executor_server.session_rules import check_tools, execution_limits
from executor_server.session_state import StateRequests

_log = structlog.get_logger(__name__)


class SessionExecutions(StateRequests):
    """Owns the ledger of a session."""

    def __init__(
        self,
        record: SessionRecord,
        channel: GuestChannel,
        registry: Registry,
        settings: SessionSettings,
        watch: Watch,
    ) -> None:
        super().__init__(facts_of(record), record.spec, channel, settings, watch)
        self.session_id = record.session_id
        self.puts, self.gets = record.puts, record.gets
        self._ledger = Ledger(
            registry.tape_of(record.session_id),
            LedgerLimits(settings.journal_bytes, settings.max_finished_executions),
            LedgerControl(channel.send, self._hold, self._on_kill, self._refuses, self._on_event, self._on_end),
            record.generation,
        )
        self._refuses_new = False
        self._begun_s: dict[str, float] = {}  # when this daemon heard of the executions that run
        self._printed_bytes: Counter[str] = Counter()  # by them, as far as this daemon was told
        self._log = _log.bind(session_id=record.session_id, tenant=record.owner.tenant)

    @abstractmethod
    def touch(self) -> None:
        """Puts off its idle end."""

    @abstractmethod
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Has a task of the session do it."""

    @abstractmethod
    async def _oom_kills(self) -> int | None:
        """How many of its processes the kernel has killed for memory."""

    # -- what clients ask ----------------------------------------------------------------------------------------

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

    def refuse_new(self) -> None:
        """Takes no new executions from here on; those that run or wait go on."""
        self._refuses_new = True

    # -- what happens -------------------------------------------------------------------------------------------

    def _announce_executions(self) -> None:
        """Tells of those that an earlier daemon started."""
        for execution_id in self._ledger.running:
            self._begun_s[execution_id] = time.monotonic()
            self._observer.execution_recovered(self.facts, execution_id)

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
        self._ledger.judge(execution_id, await self._oom_kills())

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


def facts_of(record: SessionRecord) -> SessionFacts:
    """What is told of a session."""
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
