"""The executions of a session: admission before each, notifications during and after it.

An execution begins once. A request that repeats its id finds the same execution, even if the policy grants less by
then. There is no await between admission and the frame that starts the execution. All checks before admission, which
is an await, are repeated after it: the caller may have repeated the request meanwhile, or the policy may have changed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from executor_api.values.outline import OUTLINE_OF_UNKNOWN, outline_call
from executor_server.backends.channel import GuestChannel
from executor_server.core import (
    BlobRef,
    EventKind,
    ExecutorError,
    LimitWarning,
    Log,
    NotFound,
    OutputCut,
    OutputMode,
    Payload,
    Principal,
    Reason,
    ResourceExhausted,
    Result,
    SessionFacts,
    SessionSpec,
    ToolCall,
    ToolSpec,
    Unavailable,
    Usage,
)
from executor_server.core.lifecycle import Answer
from executor_server.guest.wire.schema import Message
from executor_server.policy import (
    RequestedLimits,
    check_branch,
    check_savepoint,
    check_tools,
    execution_limits,
    tool_to_ask,
)
from executor_server.policy.approvals import Decision, Ruling
from executor_server.sessions.journal import (
    Execution,
    ExecutionRequest,
    Journal,
    JournalLimits,
    Registry,
    SessionRecord,
    ToolFailure,
)
from executor_server.sessions.recorder import SessionRecorder
from executor_server.sessions.shared import SessionHooks, SessionSettings

if TYPE_CHECKING:
    from executor_server.sessions.session import Session

_log = structlog.get_logger(__name__)


class Executions:
    """Owns the journal of one session, and implements its `JournalOwner`."""

    def __init__(
        self,
        session: Session,
        record: SessionRecord,
        channel: GuestChannel,
        registry: Registry,
        settings: SessionSettings,
        hooks: SessionHooks,
    ) -> None:
        self._session = session
        self._channel = channel
        self._settings = settings
        self._admission = hooks.admission
        self._observer = hooks.observer
        self._approvals = hooks.approvals
        self._asking: set[str] = set()  # executions with calls that had to be approved
        self.journal = Journal(
            registry.segments_of(record.session_id),
            JournalLimits(settings.journal_bytes, settings.max_finished_executions),
            self,
            record.generation,
            has_network=record.spec.sandbox.egress,
            memory=hooks.memory.of(record.owner.tenant),
        )
        self.on_result: Callable[[Result], None] = lambda _result: None
        self._refuses_new = False
        self._begun_s: dict[str, float] = {}  # when each running execution began, or was recovered
        self._printed_bytes: Counter[str] = Counter()  # by execution; what this daemon has read
        self._log = _log.bind(session_id=record.session_id, tenant=record.owner.tenant)

    # -- calls of clients ----------------------------------------------------------------------------------------

    async def execute(
        self,
        execution_id: str,
        code: str,
        mode: OutputMode,
        limits: RequestedLimits,
        *,
        savepoint: bool = False,
        branch: bool = False,
    ) -> Execution:
        """Starts an execution, or finds the one that this id already names.

        `savepoint`: take one before it. `branch`: run it in a copy of the interpreter, and leave the session as it was.

        Raises InvalidRequest (the id names other code), PreconditionFailed (the session is lost), Unavailable (the
        daemon drains), ResourceExhausted (the queue is full), PolicyViolation, and admission's refusals.
        """
        request = ExecutionRequest(execution_id, code, mode, limits, savepoint, branch)
        known = self.journal.known_as(request)
        if known is not None:
            return known
        self._require_room()
        spec = self._session.spec
        _check_undo(spec, request)
        granted = execution_limits(spec, limits)
        give_back = await self._admission.execution(self._session.facts, execution_id, code, granted)
        try:
            # Checked again: admission was an await (see the module's docstring).
            known = self.journal.known_as(request)
            if known is not None:
                return known
            self._require_room()
            if self._session.spec is not spec:
                spec = self._session.spec
                _check_undo(spec, request)
                granted = execution_limits(spec, limits)
            rules = spec.state if savepoint or branch else None
            execution = self.journal.execute(request, granted, spec.policy.fingerprint, rules)
            execution.start_time_s = time.time()
            if spec.audit.view == "content":
                execution.keep_code(code.encode())
            self._begun_s[execution_id] = time.monotonic()
            self._observer.execution_started(self._session.facts, execution_id)
            if (recorder := self._session.recorder) is not None:
                recorder.begin(request)
                execution.report_to(recorder.event)
        finally:
            give_back()
        self._log.debug("execution_started", execution_id=execution_id, source_chars=len(code))
        return execution

    def _require_room(self) -> None:
        self._session.require_alive()
        if self._refuses_new:
            raise Unavailable(Reason.DRAINING, "the daemon is about to stop and takes no new executions")
        if len(self.journal.state.running) > self._settings.max_queued_executions:
            raise ResourceExhausted(
                Reason.QUEUE_FULL,
                f"{len(self.journal.state.running)} executions of this session run or wait",
                retry_after_s=1.0,
            )

    def execution(self, execution_id: str) -> Execution:
        """Returns an execution of this session. Raises NotFound when there is none, or it was dropped."""
        found = self.journal.state.executions.get(execution_id)
        if found is None:
            raise NotFound(Reason.EXECUTION_NOT_FOUND, f"there is no execution {execution_id!r} in this session")
        self._session.touch()
        return found

    async def submit_tool_result(self, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        """Passes the answer to a tool call on, once. Raises NotFound, PreconditionFailed."""
        execution = self.execution(execution_id)
        execution.check_answer(call_id)
        submitted = Answer(call_id, _size_bytes(answer), isinstance(answer, ToolFailure))
        await self._admission.tool_answer(self._session.facts, execution_id, submitted)
        execution.submit_tool_result(call_id, answer)
        if self._session.recorder is not None:
            self._session.recorder.answer(execution_id, call_id, answer)
        self._observer.tool_answered(self._session.facts, execution_id, submitted)

    def stop(self, execution_id: str, reason: str) -> None:
        """Cancels an execution; its result states the reason. No effect after its end. Raises NotFound."""
        self.journal.stop(self.execution(execution_id).execution_id, reason)

    def cancel_all(self, reason: str) -> None:
        """Cancels running and queued executions; each result states the reason."""
        for execution_id in list(self.journal.state.running):
            self.journal.stop(execution_id, reason)

    def refuse_new(self) -> None:
        """Refuses new executions; running and queued ones go on."""
        self._refuses_new = True

    async def wait_idle(self) -> None:
        """Waits until no execution runs or waits."""
        for execution in list(self.journal.state.running.values()):
            await execution.wait()

    @property
    def in_use(self) -> bool:
        """True while a client follows an execution, or one runs that does not wait for its client.

        An execution that waits for its client has no running clock. Without that client it would wait for the whole
        life of the session, so it does not keep the session alive.
        """
        running = self.journal.state.running.values()
        if any(execution.followed for execution in running):
            return True
        first = next(iter(running), None)
        return first is not None and not first.waits_for_client

    # -- viewers -------------------------------------------------------------------------------------------------

    def state_of(self, execution: Execution) -> str:
        """Returns "ended", "queued", "waiting" or "running"."""
        if execution.done:
            return "ended"
        if execution is not next(iter(self.journal.state.running.values()), execution):
            return "queued"
        waits = execution.waits_for_client or self._approvals.has_waiting(
            self._session.session_id, execution.execution_id
        )
        return "waiting" if waits else "running"

    async def admit_view(self, viewer: Principal, execution_id: str) -> None:
        """Records that somebody is about to see what executions print: one, or if it is "" all. Raises Unavailable."""
        facts = {"by_tenant": viewer.tenant, "by": viewer.name}
        if execution_id:
            facts["execution"] = execution_id
        await self._admission.action(self._session.facts, "content_viewed", facts)

    # -- after another daemon ------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Notifies the observer of executions that an earlier daemon started."""
        for execution_id in self.journal.state.running:
            self._begun_s[execution_id] = time.monotonic()
            self._observer.execution_recovered(self._session.facts, execution_id)

    def report_to(self, recorder: SessionRecorder) -> None:
        """Lets the recorder record an earlier daemon's executions: their kept events, and each new one."""
        for execution in self.journal.state.executions.values():
            execution.report_to(recorder.event)

    def resume(self) -> None:
        """Sends again what the guest may have missed, and decides the results that wait for a verdict."""
        for message, body in self.journal.resume(self._channel.sent_seq):
            self._channel.send(message, body)
        self._channel.on_send = self.journal.note_sent
        for execution_id in list(self.journal.state.undecided):
            self.on_undecided(execution_id)
        for (execution_id, _), held in self.journal.state.held.items():
            self._asking.add(execution_id)
            self._session.spawn(self._ask(execution_id, held.call, patient=True))

    # -- approvals -----------------------------------------------------------------------------------------------

    async def _ask(self, execution_id: str, call: ToolCall, *, patient: bool = False) -> None:
        """Waits for the decision on a held tool call, and acts on it."""
        spec = self._session.spec
        wanted = tool_to_ask(spec, call.name)
        ruling = Ruling(Decision.ONCE)  # a newer policy may no longer require an approval
        if wanted is not None:
            ruling = await self._approvals.ask(
                self._session.facts.owner.tenant,
                self._session.session_id,
                execution_id,
                wanted,
                spec.approval_wait_s,
                call_id=call.call_id,
                detail=outline_call(call.arguments) if isinstance(call.arguments, bytes) else OUTLINE_OF_UNKNOWN,
                patient=patient,
            )
        if (execution_id, call.call_id) not in self.journal.state.held:
            return  # the execution has ended
        # Checked only now: the policy may have changed, and a call that no client gets does not count.
        refusal = self.refusal_of(execution_id, call) if ruling.approved else ruling.reason
        if refusal is None:
            self.journal.release(execution_id, call.call_id)
        else:
            text = f"the tool {call.name!r} was not called: {refusal}. Go on without it, or say that it was refused."
            if self._session.recorder is not None:
                self._session.recorder.unseen("calls of tools that were not approved")
            self.journal.deny(execution_id, call.call_id, ToolFailure("PermissionError", text))

    # -- calls of the journal ------------------------------------------------------------------------------------

    def send(self, message: Message, body: bytes) -> None:
        self._channel.send(message, body)

    def hold(self, holder: object, held: bool) -> None:
        self._session.hold_reading(holder, held)

    def refusal_of(self, execution_id: str, call: ToolCall) -> str | None:
        try:
            if self.journal.state.running[execution_id].policy_fingerprint == self._session.spec.policy.fingerprint:
                # The tool may come from an earlier policy, or a hostile guest may have invented it.
                check_tools(self._session.spec, [ToolSpec(call.name, "", (), is_final_answer=False)])
            self._admission.tool_call(self._session.facts, execution_id, call)
        except ExecutorError as refusal:
            return refusal.message
        return None

    def must_ask(self, call: ToolCall) -> bool:
        return bool(self._session.spec.tools.ask) and tool_to_ask(self._session.spec, call.name) is not None

    def on_held(self, execution_id: str, call: ToolCall) -> None:
        self._asking.add(execution_id)
        self._session.spawn(self._ask(execution_id, call))

    def on_event(self, execution_id: str, event: EventKind) -> None:
        if isinstance(event, Log):
            self._printed_bytes[execution_id] += len(event.text.encode("utf-8", "replace"))
        elif isinstance(event, OutputCut):
            self._printed_bytes[execution_id] += event.omitted_bytes
        elif isinstance(event, ToolCall):
            self._observer.tool_called(self._session.facts, execution_id, event)
        elif isinstance(event, LimitWarning):
            self._observer.limit_warned(self._session.facts, execution_id, event)

    def on_undecided(self, execution_id: str) -> None:
        self._session.spawn(self._decide(execution_id))

    async def _decide(self, execution_id: str) -> None:
        waiting = self.journal.state.undecided.get(execution_id)
        oom_kills = await self._session.oom_kills() if waiting is not None and waiting.is_suspect else None
        await self._session.network.settle()
        self.journal.decide(execution_id, oom_kills)

    def on_end(self, execution_id: str, result: Result) -> None:
        self._session.touch()
        self.on_result(result)
        if (ended := self.journal.state.executions.get(execution_id)) is not None:
            ended.end_time_s = time.time()
        if execution_id in self._asking:
            self._asking.discard(execution_id)
            facts = self._session.facts
            self._approvals.end_execution(facts.owner.tenant, facts.session_id, execution_id)
        # Later in this round of the event loop: the readers that were just woken go first.
        asyncio.get_running_loop().call_soon(self._report_end, execution_id, result)

    def _report_end(self, execution_id: str, result: Result) -> None:
        now_s = time.monotonic()
        took_s, printed_bytes = now_s - self._begun_s.pop(execution_id, now_s), self._printed_bytes.pop(execution_id, 0)
        if result.usage == Usage():
            # The session ended in the middle, so the guest reported no usage; the output up to then still counts.
            result = replace(result, usage=Usage(output_bytes=printed_bytes))
        self._observer.execution_ended(self._session.facts, execution_id, result, took_s)
        self._log.info(
            "execution_ended",
            execution_id=execution_id,
            outcome=result.outcome.value,
            generation=result.generation,
            operations=result.usage.operations,
            wall_time_s=round(result.usage.wall_time_s, 4),
        )


def _check_undo(spec: SessionSpec, request: ExecutionRequest) -> None:
    """Raises PolicyViolation for a savepoint or a branch that the policy does not allow."""
    if request.savepoint:
        check_savepoint(spec)
    if request.branch:
        check_branch(spec)


def facts_of(record: SessionRecord) -> SessionFacts:
    """Returns the facts of a session for observers and admission."""
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
        audits_connections=spec.network.audit == "connections",
        packages=spec.sandbox.packages.requirements if spec.sandbox.packages is not None else (),
    )


def _size_bytes(answer: Payload | ToolFailure) -> int:
    match answer:
        case ToolFailure():
            return len(answer.message.encode()) + len(answer.arguments)
        case BlobRef():
            return answer.size_bytes
        case bytes():
            return len(answer)
