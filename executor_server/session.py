"""A session: one client's interpreter in one sandbox.

The session owns its sandbox, the channel to its guest and the ledger of its executions. It gives executions and
operations to the guest in order of arrival, routes the guest's frames to whom they concern, and knows the one
transition that matters: a session is alive until its guest is gone, then it is lost, for good. It is never bound to
another sandbox. It may be bound to another daemon: `recall` makes it again from what the last one wrote down. Its way
to the guest may break and its sandbox rest meanwhile; that is the business of `session_way`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from executor_server.backends.base import Sandbox
from executor_server.errors import PreconditionFailed, Reason, SandboxFailure
from executor_server.guest.frames import Frame, Kind
from executor_server.guest_channel import GuestChannel
from executor_server.journal_room import JournalRoom
from executor_server.model import ErrorDetail, Outcome, SessionSpec
from executor_server.reading_shares import ReadingShares
from executor_server.registry import Registry, SessionRecord, SessionUse
from executor_server.session_executions import SessionExecutions, facts_of
from executor_server.session_life import SessionLife
from executor_server.session_requests import SessionSettings, Watch
from executor_server.session_way import GuestWay, WayControl, WayState
from executor_server.tape import TapeError

# Renaming a container takes the Engine and a thread of ours milliseconds: whoever has just asked for it goes first.
_LABEL_PAUSE_S = 0.1


class Session(SessionExecutions):
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
        super().__init__(record, channel, registry, settings, watch or Watch())
        self.record = record
        self.owner = record.owner
        self.backend_name = record.backend
        self.warm = record.warm
        self.leased = False  # whether it belongs to clients, whose leases hold it; whoever makes it says so
        self.python_version = record.python_version
        self.create_time_s = record.create_time_s
        self.missing_modules: tuple[str, ...] = ()  # authorized, and not in the image; told when the session is made
        self._sandbox = sandbox
        self._registry = registry
        self._life = SessionLife(record.create_time_s, record.last_used_s)
        control = WayControl(self._spawn, self._is_idle, self._on_connected, self._give_up_guest)
        self._way = GuestWay(record.session_id, sandbox, channel, registry, control)
        self._lost: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[object] = set()  # executions and operations whose readers are behind
        self._pinged_s = 0.0
        # CPU seconds charged so far of what the guest uses between executions; None where only an earlier daemon knew.
        self._background_cpu_s: float | None = None

    def begin(self) -> None:
        """Starts it on a guest that has just been connected to. `configure` must follow."""
        self._number_operations()
        self._background_cpu_s = 0.0
        self._channel.on_background_cpu = self._on_background_cpu
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
        if self._ledger.running:
            return "busy"
        return "paused" if self._way.state is WayState.PAUSED else "idle"

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
        self.note_use()
        return self._life.last_used_s

    @property
    def use(self) -> SessionUse:
        """What is written down of it now and then."""
        return SessionUse(self.session_id, self.last_used_s, self.generation, self.puts, self.gets)

    @property
    def expire_time_s(self) -> float:
        """When it ends if nobody uses it any more; Unix time."""
        self.note_use()
        return self._life.expire_time_s(self.spec.limits)

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        self.note_use()
        return self._life.left_s(self.spec.limits) <= 0

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
        self._life.touch()

    def note_use(self) -> None:
        """To be called now and then: what runs puts off the idle end."""
        if self._in_use:
            self.touch()

    def check_guest(self) -> None:
        """Asks a quiet guest for a sign of life, and gives up one that has not answered for too long.

        Has the sandbox of a session that nobody uses rest, where it can.
        """
        now = time.monotonic()
        if self._lost is not None or self._way.state is not WayState.UP:
            return
        if self._held:
            # Nothing is read now, so nothing can be heard; but the guest must not think that it is an orphan.
            if now - self._pinged_s > self._settings.ping_interval_s:
                self._pinged_s = now
                self._channel.ping()
            return
        silence_s = self._way.silence_max_s(self._settings.ping_interval_s, self._settings.silence_s)
        if self._pinged_s > self._channel.last_heard_s and now - self._pinged_s > silence_s:
            reason = f"the guest has not answered for {silence_s:g} s"
            if not self._way.renew_if_it_can_break(reason):
                self._lose(reason)
        elif now - max(self._channel.last_heard_s, self._pinged_s) > self._settings.ping_interval_s:
            if self._pinged_s <= self._channel.last_heard_s:
                self._pinged_s = now
            self._channel.ping()
        self._way.rest_if_unused()

    def _is_idle(self) -> bool:
        """Whether its guest has nothing to do, and nobody is behind with what it said."""
        return self._lost is None and not (self._ledger.running or self._operations or self._held)

    def _require_alive(self) -> None:
        if self._lost is not None:
            raise PreconditionFailed(Reason.SESSION_LOST, f"the session's sandbox is gone: {self._lost}")
        self.touch()

    # -- steering -----------------------------------------------------------------------------------------------

    def share_reading(self, shares: ReadingShares) -> None:
        """From here on, what its guest sends counts for its owner."""
        self._channel.share_reading(shares, self.owner.tenant)

    def share_room(self, room: JournalRoom) -> None:
        """From here on, what its journals hold counts for its owner."""
        self._ledger.share_room(room.of(self.owner.tenant))

    def set_cpu_share(self, share: float) -> None:
        """The part of a whole sandbox's share of the processors that this one is to have."""
        self._sandbox.set_cpu_share(share)

    async def authorize_imports(self, imports: Sequence[str], decide: Callable[[SessionSpec], SessionSpec]) -> None:
        """Authorizes more modules, from the next execution on, as far as `decide` makes a spec of it.

        Raises what `decide` raises, PreconditionFailed when the session is lost, and what the gate refuses with.
        """
        self._require_alive()
        decide(self.spec)  # before anything is written down about it
        await self._gate.imports(self.facts, imports)
        self._require_alive()
        # Decided again: the policy and the session's spec may have changed while the audit log was written.
        held = asyncio.ensure_future(self.hold_to(decide(self.spec)))
        self._tasks.add(held)
        held.add_done_callback(self._tasks.discard)
        # The guest has been told by now. A caller that leaves must not keep the registry from learning it, too.
        await asyncio.shield(held)

    def hold_to(self, spec: SessionSpec) -> Coroutine[Any, Any, None]:
        """Holds it to another spec of the same sandbox, from its next execution on.

        What is returned is to be awaited, and raises what the guest refuses with. PreconditionFailed when it is lost.
        """
        # The guest does what it is told in order, so what is executed from here on is under the new rules.
        held = self.restrict(spec)
        self.spec = spec
        self.record = replace(self.record, spec=spec)
        self.facts = facts_of(self.record)
        return self._confirm(held, spec)

    async def _confirm(self, held: Coroutine[Any, Any, None], spec: SessionSpec) -> None:
        """Writes down what the guest is held to by now; a daemon that comes before that finds the old spec."""
        await held
        self._registry.note_spec(self.session_id, spec)

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

    def _on_background_cpu(self, cpu_time_s: float) -> None:
        """A sum that never falls, so that an answer that got lost costs nothing."""
        charged_s, self._background_cpu_s = self._background_cpu_s, max(cpu_time_s, self._background_cpu_s or 0.0)
        if charged_s is not None and cpu_time_s > charged_s:
            self._observer.background_used(self.facts, cpu_time_s - charged_s)

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
        self._announce_executions()

    async def resume(self, deadline_s: float) -> None:
        """Goes on with its guest; is lost when that can't be."""
        if self._lost is not None:
            return
        self._channel.on_background_cpu = self._on_background_cpu
        self._channel.on_frame = self._on_frame
        self._channel.on_lost = self._on_channel_lost
        if self._sandbox.endpoint.breaks_by_itself:
            deadline_s = max(deadline_s, self._sandbox.endpoint.reconnect_s)
        try:
            await self._way.wake_again()
            await self._way.connect(deadline_s)
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
        if self._lost is None:
            self._way.on_lost(reason)

    def _on_connected(self) -> None:
        if self._held:
            self._channel.pause_reading()  # the new connection knows nothing of it

    async def _give_up_guest(self, reason: str) -> None:
        self._lose(await self._cause_of_death(reason))

    async def _oom_kills(self) -> int | None:
        return await self._sandbox.oom_kills()

    async def _cause_of_death(self, reason: str) -> str:
        kills = await self._oom_kills()
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of ours. What waited for this task would wait for ever.
            self._log.error("session_task_broke", exc_info=error)
            self._lose("an internal error of the daemon")
