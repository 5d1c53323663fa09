"""A session: one client's interpreter in one sandbox.

The session owns its sandbox, the channel to its guest, and its collaborators: `executions` (with the journal),
`requests` to the guest, `processes`, `network`, `checkpoints`, and the connection, which is renewed when it breaks. It
passes each frame of the guest to the right collaborator, and has one transition: it is alive until its guest is gone,
and then lost for good. It never gets another sandbox. After a restart of the daemon, `recall` rebuilds it from the
registry and the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from executor_server.backends import Sandbox
from executor_server.backends.channel import PROCESS_EVENTS, GuestChannel
from executor_server.core import ErrorDetail, Outcome, PreconditionFailed, Reason, SandboxFailure, SessionSpec
from executor_server.guest.wire.file_changes import FilesChanged
from executor_server.guest.wire.frames import Frame
from executor_server.guest.wire.messages import BlobChunk, Done, FileChunk
from executor_server.guest.wire.process_messages import PortOutput
from executor_server.guest.wire.schema import message_of
from executor_server.sessions.checkpoints import Checkpoints
from executor_server.sessions.connection import ConnectionState, GuestConnection
from executor_server.sessions.executions import Executions, facts_of
from executor_server.sessions.guest_requests import GuestRequests
from executor_server.sessions.journal import Registry, SegmentError, SessionRecord, SessionUse
from executor_server.sessions.lifetime import SessionLife
from executor_server.sessions.liveness import GuestLiveness
from executor_server.sessions.network import SessionNetwork
from executor_server.sessions.ports import Ports
from executor_server.sessions.processes import Processes
from executor_server.sessions.recorder import SessionRecorder
from executor_server.sessions.savepoints import SessionSavepoints
from executor_server.sessions.shared import SessionHooks, SessionSettings
from executor_server.sessions.watches import Watches

_log = structlog.get_logger(__name__)

# Seconds that the end of a session waits for the last report of its guest.
_LAST_REPORT_S = 0.5
_LABEL_PAUSE_S = 0.1


class Session:
    """One session. The RPC layer calls it after it has checked that the caller owns it."""

    def __init__(
        self,
        record: SessionRecord,
        sandbox: Sandbox,
        channel: GuestChannel,
        registry: Registry,
        settings: SessionSettings,
        hooks: SessionHooks | None = None,
    ) -> None:
        hooks = hooks or SessionHooks()
        self.record = record
        self.session_id = record.session_id
        self.owner = record.owner
        self.facts, self.spec = facts_of(record), record.spec
        self.backend_name, self.warm = record.backend, record.warm
        self.recorder: SessionRecorder | None = None  # set by the manager
        self.leased = False  # True when leases of clients hold it; set by the manager
        self.python_version, self.create_time_s = record.python_version, record.create_time_s
        self.missing_modules: tuple[str, ...] = ()  # needed or authorized, but not in the sandbox
        self.images_with_missing: tuple[str, ...] = ()  # images known to have all of these
        self.node = hooks.ids.node
        self.environment_id = hooks.environment_of(record.sandbox_id) if record.spec.sandbox.packages else ""
        self._admission, self._observer, self._approvals = hooks.admission, hooks.observer, hooks.approvals
        self._sandbox, self._channel = sandbox, channel
        if hooks.reading is not None:
            channel.share_reading(hooks.reading, record.owner.tenant)
        self._registry = registry
        self.life = SessionLife(record.create_time_s, record.last_used_s, in_use=lambda: self._in_use)
        self.touch = self.life.touch  # postpones the idle end
        self._lost: str | None = None
        self.closed = False  # by the daemon, which ends it
        self._tasks: set[asyncio.Task[None]] = set()
        # The highest sum of CPU seconds that its guest reported; None until the first report after a restart, since the
        # earlier daemon has charged an unknown part of it.
        self._background_cpu_s: float | None = None
        self._log = _log.bind(session_id=record.session_id, tenant=record.owner.tenant)
        self._connection = GuestConnection(self, sandbox, channel, registry, settings.connection)
        self._liveness = GuestLiveness(channel, self._connection, settings.ping_interval_s, settings.silence_s)
        self.executions = Executions(self, record, channel, registry, settings, hooks)
        self.network = SessionNetwork(self, record, self._connection, channel, self.executions.journal, hooks)
        self.requests = GuestRequests(self, channel, settings, hooks, puts=record.puts, gets=record.gets)
        self.ports = Ports(self, self.requests, channel, hooks)
        self.watches = Watches(self, self.requests, channel, hooks)
        self.processes = Processes(self, record.session_id, self.requests, channel, registry, hooks)
        self.checkpoints = Checkpoints(self, self.requests, hooks, record.python_version)
        self.savepoints = SessionSavepoints(self, self.requests, hooks)
        self.executions.on_result = self.savepoints.note_result
        # The calls of clients, by their names in the RPC layer.
        self.execute = self.executions.execute
        self.execution = self.executions.execution
        self.stop_execution = self.executions.stop
        self.submit_tool_result = self.executions.submit_tool_result
        self.register_tools, self.upload_blob = self.requests.register_tools, self.requests.upload_blob
        self.set_variables, self.get_variables = self.requests.set_variables, self.requests.get_variables
        self.put_file, self.get_file = self.requests.put_file, self.requests.get_file
        self.list_files, self.manage_file = self.requests.list_files, self.requests.manage_file
        self.export_state, self.restore_state = self.checkpoints.export_state, self.checkpoints.restore_state

    # -- beginning -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts it on a newly connected guest. `configure` must follow."""
        self.requests.number_from_here()
        self._background_cpu_s = 0.0
        self._channel.on_send = self.executions.journal.note_sent
        self._listen()
        if not self._channel.connected:  # the guest hung up before `_listen`
            self._on_channel_lost("the guest closed the channel")

    def _listen(self) -> None:
        self._channel.on_background_cpu = self._charge_background
        self._channel.on_frame = self._on_frame
        self._channel.on_lost = self._on_channel_lost

    async def configure(self, env: Mapping[str, str]) -> None:
        """Sends the guest its rules, environment variables and prelude, and opens the session's network.

        The first step after creation. Only the guest keeps the values of the variables.
        """
        await self.network.open_during(self.requests.configure(env, meanwhile=self._begin_segments))

    def _begin_segments(self) -> None:
        self.executions.journal.begin_segments()
        self.spawn(self._label())

    async def _label(self) -> None:
        """Labels the sandbox for operators, after a pause: renaming a container takes milliseconds."""
        await asyncio.sleep(_LABEL_PAUSE_S)
        await self._sandbox.label(self.session_id)

    def _charge_background(self, cpu_time_s: float) -> None:
        """Charges the CPU time used between executions since the last report. A lost report loses nothing."""
        before_s, self._background_cpu_s = self._background_cpu_s, max(cpu_time_s, self._background_cpu_s or 0.0)
        if before_s is not None and cpu_time_s > before_s:
            self._observer.background_used(self.facts, cpu_time_s - before_s)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self._lost is not None:
            return "lost"
        if self.executions.journal.state.running:
            return "busy"
        return "paused" if self._connection.state is ConnectionState.PAUSED else "idle"

    @property
    def lost_reason(self) -> str:
        """The reason why it is lost; empty when it is not."""
        return self._lost or ""

    @property
    def generation(self) -> int:
        """Number of the interpreter; rises each time it is replaced."""
        return self.executions.journal.state.generation

    @property
    def last_used_s(self) -> float:
        """Unix time of the last use."""
        return self.life.last_used_s

    @property
    def use(self) -> SessionUse:
        """The facts of its use that are regularly written to the registry."""
        return SessionUse(self.session_id, self.last_used_s, self.generation, self.requests.puts, self.requests.gets)

    @property
    def expire_time_s(self) -> float:
        """Unix time at which it ends if it stays unused."""
        return self.life.expire_time_s(self.spec.limits)

    @property
    def expired(self) -> bool:
        return self.life.left_s(self.spec.limits) <= 0

    @property
    def _in_use(self) -> bool:
        return self.executions.in_use or self.processes.in_use or self.ports.in_use

    @property
    def position(self) -> tuple[int, SessionRecord]:
        """Changes with each frame for the guest, and so with each use; and with a new name or new rules."""
        return self._channel.sent_seq, self.record

    @property
    def is_as_exported(self) -> bool:
        """True if the last export has all of it: nothing runs in it, and it was not used since the export began."""
        runs = self.executions.journal.state.running or self.processes.any_running or self.ports.in_use
        return not runs and self.checkpoints.exported_at == self.position

    def look(self) -> bool:
        """Must be called at `life.look_at_s`: checks the guest. Returns True if the session has expired."""
        self.check_guest()
        if self.is_idle() and not self._in_use and self._connection.state is ConnectionState.UP:
            self.life.rest(self.spec.limits, self._liveness.due_s, self._connection.rest_due_s)
        return self.expired

    def check_guest(self) -> None:
        """Pings a quiet guest, gives up a silent one, and pauses the sandbox of an unused session."""
        if self._lost is not None or self._connection.state is not ConnectionState.UP:
            return
        silent = self._liveness.check()
        if silent is not None:
            self.give_up(silent)
        self.processes.on_time()
        self._connection.rest_if_unused()

    def require_alive(self) -> None:
        """Raises PreconditionFailed if the session is lost or ends; counts as use otherwise."""
        if self._lost is not None or self.closed:
            reason = self._lost or "the session is being ended"
            raise PreconditionFailed(Reason.SESSION_LOST, f"the session's sandbox is gone: {reason}")
        self.touch()

    # -- steering ------------------------------------------------------------------------------------------------

    def set_cpu_share(self, share: float) -> None:
        """Sets its CPU share, as a fraction of a whole sandbox's share."""
        self._sandbox.set_cpu_share(share)

    async def authorize_imports(self, imports: Sequence[str], decide: Callable[[SessionSpec], SessionSpec]) -> None:
        """Authorizes more modules from the next execution; `decide` returns the new spec, or raises.

        Raises also PreconditionFailed if the session is lost, and admission's refusals.
        """
        self.require_alive()
        decide(self.spec)  # the policy refuses before admission writes its audit record
        await self._admission.imports(self.facts, imports)
        self.require_alive()
        # Decided again: the policy and the session's spec may have changed during admission.
        held = asyncio.ensure_future(self.hold_to(decide(self.spec), must_go=False))
        self._tasks.add(held)
        held.add_done_callback(self._tasks.discard)
        # The guest has the rules by now. If the caller leaves, they must still reach the registry.
        await asyncio.shield(held)

    def hold_to(self, spec: SessionSpec, *, must_go: bool = True) -> Coroutine[Any, Any, None]:
        """Applies another spec of the same sandbox from the next execution.

        The returned coroutine must be awaited; it raises the guest's refusal. Raises PreconditionFailed if the session
        is lost, and ResourceExhausted unless it `must_go` to the guest, as a new policy must.
        """
        # The guest handles frames in order, so later executions run under the new rules.
        restricted = self.requests.restrict(spec, must_go=must_go)
        if self.recorder is not None and spec.record != self.spec.record:
            self.recorder.hold_to(spec.record)
        self.spec, self.life.look_at_s = spec, 0.0
        self.record = replace(self.record, spec=spec)
        self.facts = facts_of(self.record)
        self.network.apply_rules()
        return self._note_restricted(restricted, spec)

    async def admit_rename(self, name: str) -> None:
        """Asks admission for a new name; `rename` may follow."""
        await self._admission.action(self.facts, "rename_requested", {"name": name, "before": self.spec.name})

    def rename(self, name: str) -> None:
        """Renames it. The caller has checked that the owner's other sessions don't have the name."""
        self.spec = replace(self.spec, name=name)
        self.record = replace(self.record, spec=self.spec)
        self._registry.note_spec(self.session_id, self.spec)

    async def _note_restricted(self, restricted: Coroutine[Any, Any, None], spec: SessionSpec) -> None:
        """Writes the spec when the guest has it; a daemon that restarts earlier finds the old one."""
        await restricted
        self._registry.note_spec(self.session_id, spec)

    # -- for the collaborators -----------------------------------------------------------------------------------

    def hold_reading(self, holder: object, held: bool) -> None:
        """Stops reading from the guest while any holder is full; resumes when none is."""
        self._liveness.hold_reading(holder, held)

    async def oom_kills(self) -> int | None:
        """Returns the number of processes that the kernel killed for memory; None if that can't be read."""
        return await self._sandbox.oom_kills()

    def is_idle(self) -> bool:
        """True when the guest has nothing to do and no reader is behind."""
        busy = self.executions.journal.state.running or self.requests.waiting or self._liveness.reading_held
        return self._lost is None and not (busy or self.processes.any_running)

    async def give_up_guest(self, reason: str) -> None:
        """Gives the session up. If the sandbox knows a better reason, that one is given."""
        self.give_up(await self._cause_of_death(reason))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work in a task that the session owns and ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of ours. Whatever waits for this task would wait for ever.
            self._log.error("session_task_broke", exc_info=error)
            self.give_up("an internal error of the daemon")

    # -- frames of the guest -------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        message = message_of(frame)
        if isinstance(message, (Done, FileChunk, BlobChunk, PortOutput, FilesChanged)) and message.op is not None:
            self.requests.take(message.op, frame)
        elif frame.kind in PROCESS_EVENTS:
            self.processes.take(frame)
        else:
            self.executions.journal.take(frame)

    def _on_channel_lost(self, reason: str) -> None:
        if self._channel.violated:
            self._observer.guest_misbehaved(self.facts, reason)
        if self._lost is None:
            self._connection.on_lost(reason)

    # -- after another daemon ------------------------------------------------------------------------------------

    def recall(self, missing: str | None) -> None:
        """Reads its executions from the readable part of the journal.

        `missing` is the reason why its sandbox is gone; None if it is there.
        """
        journal = self.executions.journal
        damage = None
        try:
            journal.replay()
        except SegmentError as error:
            damage = str(error)
        try:
            self.processes.recall()
        except SegmentError as error:
            damage = damage or str(error)
        self.network.recall()
        reason = self.record.lost_reason or journal.state.lost or missing or damage
        if reason is not None:
            self.give_up(reason)
        else:
            self._channel.go_on_after(max(journal.state.taken_seq, self.processes.taken_seq))

    def announce(self) -> None:
        """Notifies the observer of the recovered session. Must precede `resume`, after which executions may end."""
        if self._lost is None:
            self._observer.session_recovered(self.facts)
            self.executions.announce()

    async def resume(self, deadline_s: float) -> None:
        """Connects to its guest again; if that fails, the session is lost."""
        if self._lost is not None:
            return
        self._listen()
        if self._sandbox.endpoint.breaks_by_itself:
            deadline_s = max(deadline_s, self._sandbox.endpoint.reconnect_s)
        try:
            await self._connection.wake_again()
            await self._connection.connect(deadline_s)
        except SandboxFailure as failure:
            await self.give_up_guest(f"after a restart of the daemon, {failure}")
            return
        self.requests.number_from_here()
        self.spawn(self.network.reopen())
        self.executions.resume()
        self.processes.resume()
        self.spawn(self._label())

    # -- the end -------------------------------------------------------------------------------------------------

    async def _cause_of_death(self, reason: str) -> str:
        kills = await self.oom_kills()
        if kills is not None and kills > self.executions.journal.state.oom_kills:
            return "the kernel killed the sandbox for its memory"
        return await self._sandbox.cause_of_death() or reason

    def give_up(self, reason: str) -> None:
        """Loses the session: ends its executions and requests with the reason, and destroys the sandbox."""
        if self._lost is not None:
            return
        self._lost = reason
        self._channel.close()
        self._log.warning("session_lost", reason=reason)
        self.network.note_step()
        if self.record.lost_reason is None:  # else an earlier daemon notified the observer
            self._observer.session_lost(self.facts, reason)
        self.executions.journal.lose(reason)
        self.processes.lose(reason)
        self._registry.note_lost(self.session_id, reason)
        self._fail_requests(reason)
        self.spawn(self._destroy_sandbox())

    def _fail_requests(self, reason: str) -> None:
        self.requests.fail_all(PreconditionFailed(Reason.SESSION_LOST, f"the session's sandbox is gone: {reason}"))

    async def charge_rest(self) -> None:
        """Charges the CPU time since the guest's last report, if the guest answers.

        Work between executions may be most of a short session.
        """
        if self._lost is not None or not self._channel.connected:
            return
        reported = asyncio.Event()

        def note(cpu_time_s: float) -> None:
            self._charge_background(cpu_time_s)
            reported.set()

        self._channel.on_background_cpu = note
        if self._liveness.reading_held:  # the report would lie behind frames that are not read
            self._channel.on_frame = lambda _frame: None
            self._channel.reading.resume()
        self._channel.ping()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reported.wait(), _LAST_REPORT_S)

    async def close(self, reason: str) -> None:
        """Cancels its executions and closes its files; `destroy` must follow. Idempotent."""
        self.closed = True
        if self._lost is None:
            self._lost = reason
            self._channel.close()
            self.network.note_step()
            self.executions.journal.end_all(Outcome.CANCELLED, ErrorDetail("SessionEnded", reason))
            self.processes.lose(reason)
            self._fail_requests(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.executions.journal.close()
        self.processes.close()
        await self.network.close()
        # Last: a program whose request is refused might still end as if its session went on.
        self._approvals.end_session(self.owner.tenant, self.session_id)

    async def destroy(self) -> None:
        """Destroys the sandbox. Raises SandboxFailure; may be called again then."""
        await self._sandbox.destroy()

    async def _destroy_sandbox(self) -> None:
        await self.network.close()
        try:
            await self._sandbox.destroy()
        except SandboxFailure as failure:
            self._log.error("sandbox_not_destroyed", sandbox_id=self._sandbox.sandbox_id, error=str(failure))
