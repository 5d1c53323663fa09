"""All sessions of the daemon: who owns them, how many there may be, when they end.

Sessions are found by tenant and id, so a tenant can't see the sessions of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

import structlog

from executor_server.backends import Backend, Environment
from executor_server.core import (
    ExecutorError,
    NotFound,
    PreconditionFailed,
    Principal,
    Reason,
    SandboxSpec,
    SessionFacts,
    TooManySessions,
    Unavailable,
)
from executor_server.core.fairness import ReadingShares
from executor_server.core.lifecycle import SessionEnd
from executor_server.policy import Policy
from executor_server.sessions.creations import Creations, withdrawn
from executor_server.sessions.journal import JournalMemory, Registry
from executor_server.sessions.leases import Leases, Released, Renewal, SessionKey
from executor_server.sessions.lifetime import steady_s
from executor_server.sessions.pool import WarmPool
from executor_server.sessions.recovery import recover_sessions
from executor_server.sessions.refusals import no_room, with_own_sessions
from executor_server.sessions.session import Session
from executor_server.sessions.set_up import SessionFactory, SessionRequest, prepare_environment
from executor_server.sessions.shared import SessionHooks, SessionSettings
from executor_server.sessions.sweeping import Sweeper, UseNotes
from executor_server.sessions.teardown import Teardown

_log = structlog.get_logger(__name__)

_RETRY_AFTER_S = 2.0


class SessionManager:
    """Owns every session."""

    def __init__(
        self,
        backend: Backend,
        pool: WarmPool,
        registry: Registry,
        settings: SessionSettings,
        hooks: SessionHooks | None = None,
        clock: Callable[[], float] = steady_s,
    ) -> None:
        """`clock` measures how long clients have been silent."""
        self._reading = ReadingShares()
        memory = JournalMemory(settings.journal_total_bytes, settings.max_sessions)
        self._hooks = replace(hooks or SessionHooks(), reading=self._reading, memory=memory)
        self._policy: Policy | None = None  # in force; None: sessions keep the policy that approved them
        self._backend = backend
        self._registry = registry
        self._settings = settings
        self._sessions: dict[SessionKey, Session] = {}
        self._factory = SessionFactory(backend, pool, registry, settings, self._hooks, lambda: self._policy)
        self._creations = Creations()
        self._leases = Leases(lambda key: self._sessions[key].spec.limits.owner_grace_s, clock)
        self.requests_under_way = self._creations.under_way
        self.restart_leases, self.lease_of = self._leases.restart_all, self._leases.holder
        self._teardown = Teardown(registry, self._hooks.observer)
        self._draining = False  # by an administrator, who may undo it
        self._ending_all = False
        self._stopping = False
        self.sweeper = Sweeper(
            settings.sweep_interval_s,
            self._sessions,
            self._factory.in_set_up,
            UseNotes(registry),
            self._end_overdue,
        )

    async def recover(self) -> None:
        """Recovers the sessions of an earlier daemon; expired ones end at once.

        Must be called once, before the pool or anything else creates a sandbox. Raises StateDirError, SandboxFailure.
        """
        holders = self._registry.holders()

        def on_found(session: Session) -> None:
            self._add_recovered(session, holders.get(session.session_id, ()))

        await recover_sessions(self._backend, self._registry, self._settings, self._hooks, on_found)
        foreign = [each for each in self._sessions.values() if self._hooks.ids.is_foreign(each.session_id)]
        ended = [self._begin_end(session, SessionEnd.FOREIGN) for session in foreign]
        await asyncio.shield(asyncio.gather(*ended, *self._end_overdue()))

    def _add_recovered(self, session: Session, holders: Sequence[str]) -> None:
        key = _key(session)
        self._sessions[key] = session
        session.recorder = self._hooks.recorders.recorder_of(session, is_recovered=True)
        if session.recorder is not None:
            session.executions.report_to(session.recorder)
        for lease_id in holders:
            session.leased = True
            self._leases.hold(key, lease_id)
        self._creations.remember((session.owner.tenant, session.record.request_id), session)

    async def start(self) -> None:
        """Begins to sweep: ends sessions that are unused, too old, or without a living client."""
        self.restart_leases()
        self.sweeper.start()

    # -- making and finding ----------------------------------------------------------------------------------------

    async def create(self, principal: Principal, request: SessionRequest) -> Session:
        """Creates a session, or finds the one that this request has created.

        Raises ResourceExhausted (too many sessions or sandboxes), Unavailable (draining, no sandbox available, a new
        policy), InvalidRequest (the prelude), PreconditionFailed (the name), and admission's refusals.
        """
        key = (principal.tenant, request.request_id)
        creation = self._creations.find(key)
        if creation is None:
            self._require_room(principal)
            name = self._require_free(principal.tenant, request.spec.name)
            creation = self._creations.begin(key, self._create(principal, request), request.lease_id, name)
        return await self._made(creation)

    async def prepare_environment(self, principal: Principal, spec: SandboxSpec) -> Environment:
        """As the function `prepare_environment`; also raises Unavailable while the daemon drains."""
        self._require_taking()
        return await prepare_environment(self._backend, principal.tenant, spec)

    def _require_taking(self) -> None:
        if self.draining:
            why = "an administrator is draining the daemon"
            if self._stopping or self._ending_all:
                why = "the daemon is about to stop" if self._stopping else "the daemon is ending all its sessions"
            raise Unavailable(Reason.DRAINING, f"{why}; it takes no new sessions")

    def _require_room(self, principal: Principal) -> None:
        self._require_taking()
        if len(self._sessions) + len(self._creations.under_way()) >= self._settings.max_sessions:
            raise no_room(self._settings.max_sessions, self.list(principal))

    async def _made(self, creation: asyncio.Future[Session]) -> Session:
        """Waits for a session. Its creation goes on if the caller leaves, and a repeated request finds it."""
        try:
            return await asyncio.shield(creation)
        except asyncio.CancelledError:
            if creation.cancelled() and not self._stopping:  # else the caller itself was cancelled
                raise withdrawn() from None
            raise

    async def created(self, principal: Principal, request_id: str) -> Session | None:
        """Returns the session that this request has created or is creating; None for a new request. Raises as `create`.

        Must be called before the policy decides: a repeated request gets its session even if the policy has changed.
        """
        creation = self._creations.find((principal.tenant, request_id))
        return None if creation is None else await self._made(creation)

    async def _create(self, principal: Principal, request: SessionRequest) -> Session:
        started = time.monotonic()
        await self._factory.require_environment(principal, request)
        try:
            give_back = await self._hooks.admission.session(principal, request.request_id, request.spec)
        except TooManySessions as refusal:
            raise with_own_sessions(refusal, self.list(principal)) from None
        try:
            session = await self._factory.make(principal, request)
            key = _key(session)
            self._sessions[key] = session
            if self._stopping:  # it was not there when `drain` began
                _refuse_new(session)
            if request.lease_id is not None:
                session.leased = True
                self._leases.hold(key, request.lease_id)
            session.recorder = self._hooks.recorders.recorder_of(session)
            self._hooks.observer.session_created(session.facts, time.monotonic() - started)
        finally:
            give_back()
        if self._apply_policy(session, is_new=True) == "ended":  # the policy has changed since the approval
            message = "the policy changed while the session was created; try again"
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, message, _RETRY_AFTER_S)
        _log.info(
            "session_created",
            session_id=session.session_id,
            tenant=principal.tenant,
            image=request.spec.sandbox.image,
            backend=session.backend_name,
            warm=session.warm,
            took_ms=round((time.monotonic() - started) * 1000, 1),
        )
        return session

    def get(self, principal: Principal, session_id: str) -> Session:
        """Returns the caller's session. Raises NotFound; PreconditionFailed when its registry row was damaged."""
        session = self._sessions.get((principal.tenant, session_id))
        if session is None:
            if why := self._registry.rejected.get(session_id) or self._hooks.ids.why_lost(session_id):
                raise PreconditionFailed(Reason.SESSION_LOST, f"the session is lost: {why}")
            raise _not_found(session_id)
        return session

    def list(self, principal: Principal) -> list[Session]:
        """Returns the caller's sessions, oldest first."""
        return [session for (tenant, _), session in self._sessions.items() if tenant == principal.tenant]

    def list_all(self) -> Sequence[Session]:
        """Returns the sessions of all tenants, oldest first."""
        return list(self._sessions.values())

    def find(self, session_id: str) -> Session:
        """Returns a session of any tenant, for an administrator. Raises NotFound."""
        for session in self._sessions.values():
            if session.session_id == session_id:
                return session
        raise _not_found(session_id)

    def has(self, session: Session) -> bool:
        """Returns True until the session has ended."""
        return self._sessions.get((session.owner.tenant, session.session_id)) is session

    # -- names -------------------------------------------------------------------------------------------------------

    def named(self, principal: Principal, name: str) -> Session:
        """Returns the caller's session of a name. Raises NotFound."""
        session = self._holder(principal.tenant, name)
        if session is None:
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session named {name!r}")
        return session

    async def rename(self, session: Session, name: str) -> None:
        """Renames a session; an empty name removes it. Raises PreconditionFailed if the name is taken."""
        if name != session.spec.name:
            await session.admit_rename(name)
            session.rename(self._require_free(session.owner.tenant, name))

    def _require_free(self, tenant: str, name: str) -> str:
        """Returns the name. Raises PreconditionFailed if a session of the tenant has it, or is being created with it.

        A lost session gives up its name.
        """
        if not name:
            return name
        holder = self._holder(tenant, name)
        if self._creations.names(tenant, name) or (holder is not None and holder.state != "lost"):
            raise PreconditionFailed(Reason.NAME_TAKEN, f"another session of yours has the name {name!r}")
        if holder is not None:
            holder.rename("")
        return name

    def _holder(self, tenant: str, name: str) -> Session | None:
        owned = (each for (owner, _), each in self._sessions.items() if owner == tenant)
        return next((each for each in owned if each.spec.name == name), None)

    # -- ending ------------------------------------------------------------------------------------------------------

    async def delete(self, principal: Principal, session_id: str) -> None:
        """Ends a session; returns when its sandbox is gone. Raises NotFound."""
        if not self._registry.rejected.pop(session_id, ""):  # else its sandbox is gone already
            await asyncio.shield(self._begin_end(self.get(principal, session_id), SessionEnd.DELETED))

    async def delete_by_request(self, principal: Principal, request_id: str) -> None:
        """Ends the session of a request, created or not; refuses a request that arrives later. Raises NotFound."""
        session = await self._creations.withdraw((principal.tenant, request_id))
        if session is not None and _key(session) in self._sessions:
            await asyncio.shield(self._begin_end(session, SessionEnd.DELETED))

    async def kill(self, session_id: str, *, unless_used: bool = False) -> None:
        """Ends a session of any tenant, as `delete` does. Raises NotFound.

        `unless_used`: raises PreconditionFailed instead if its last export lacks anything of it.
        """
        session = self.find(session_id)
        if unless_used and not session.is_as_exported:  # there is no await between this and the end
            raise PreconditionFailed(Reason.SESSION_USED, "the session was used after its state was exported")
        await asyncio.shield(self._begin_end(session, SessionEnd.KILLED))

    def on_end(self, call: Callable[[Session, str], None]) -> None:
        """Registers a callback for sessions that have ended, with the reason."""
        self._teardown.on_end = call

    def _begin_end(self, session: Session, reason: str) -> asyncio.Task[None]:
        """Removes a session, so that no second caller finds and ends it, and begins its teardown."""
        session.closed = True  # a call that has found it, and waits for admission, does nothing more
        key = _key(session)
        self._leases.forget(key)
        del self._sessions[key]
        self._creations.forget(session)
        return self._teardown.begin(session, reason)

    # -- leases ------------------------------------------------------------------------------------------------------

    def attach(self, session: Session, lease_id: str) -> None:
        """Adds a client that holds a session. No effect on a detached session. Raises ResourceExhausted."""
        if self._leases.attach(_key(session), lease_id):
            self._registry.note_holder(session.session_id, lease_id)

    def renew_lease(self, principal: Principal, lease_id: str) -> Renewal:
        """Renews a client's lease, which keeps its sessions."""
        return self._leases.renew(principal.tenant, lease_id)

    def end_lease(self, principal: Principal, lease_id: str) -> int:
        """Ends the sessions that only this client held. Returns how many; does not wait for them."""
        released = self._leases.end(principal.tenant, lease_id)
        self._release(released, SessionEnd.OWNER_CLOSED)
        return len(released.sessions) + self._creations.end_of_lease(principal.tenant, lease_id)

    def _release(self, released: Released, reason: SessionEnd) -> Sequence[asyncio.Task[None]]:
        for (_, session_id), lease_id in released.dropped:
            self._registry.note_released(session_id, lease_id)
        return [self._begin_end(self._sessions[key], reason) for key in released.sessions]

    # -- steering ----------------------------------------------------------------------------------------------------

    def stop_executions(self, concerned: Callable[[SessionFacts], bool], reason: str) -> None:
        """Cancels running and queued executions of the sessions for which `concerned` returns True."""
        for session in (each for each in self._sessions.values() if concerned(each.facts)):
            session.executions.cancel_all(reason)

    def set_cpu_share(self, facts: SessionFacts, share: float) -> None:
        """Sets a session's CPU share, as a fraction of a whole sandbox's share."""
        if (session := self._sessions.get((facts.owner.tenant, facts.session_id))) is not None:
            session.set_cpu_share(share)

    def renew_windows(self, tenant: str | None = None) -> None:
        """Lets the sessions of a tenant, or of all, request new network windows from admission."""
        sessions = (*self._sessions.values(), *self._factory.in_set_up)
        for session in (each for each in sessions if tenant in (None, each.owner.tenant)):
            session.network.renew_window()

    def follow(self, policy: Policy) -> Counter[str]:
        """Puts a policy in force. Returns how many sessions of other policies were kept, tightened and ended."""
        self._policy = policy
        done = Counter(self._apply_policy(session) for session in list(self._sessions.values()))
        del done[""]
        return done

    def _apply_policy(self, session: Session, *, is_new: bool = False) -> str:
        """Keeps, tightens or ends a session that an earlier policy approved. Returns which; empty for neither.

        `is_new`: the session was created while the policy changed. It has no state to keep, and many such sessions may
        have waited, so none may keep what the new policy refuses.
        """
        policy = self._policy
        if policy is None or session.spec.policy.fingerprint == policy.fingerprint or session.state == "lost":
            return ""
        on_reload = policy.on_reload(session.owner, session.spec)
        if on_reload == "keep" and not is_new:
            return "kept"
        if on_reload == "end" and policy.profile_name(session.owner.tenant) is not None:
            self._end_by_policy(session, "the policy has changed, and ends older sessions")
            return "ended"
        held = policy.tightened(session.owner, session.spec, session.backend_name)
        if isinstance(held, str):
            self._end_by_policy(session, f"the policy has changed: {held}")
            return "ended"
        _ = self._teardown.spawn(self._tighten(session, session.hold_to(held)))
        return "tightened"

    async def _tighten(self, session: Session, held: Coroutine[None, None, None]) -> None:
        """Ends a session whose guest does not accept the new rules, since it must not go on under the old ones."""
        try:
            await held
        except ExecutorError as failure:
            if session.state != "lost":
                self._end_by_policy(session, f"the policy has changed, and could not be applied: {failure.message}")

    def _end_by_policy(self, session: Session, reason: str) -> None:
        if _key(session) in self._sessions:
            _ = self._begin_end(session, reason)

    # -- sweeping and stopping ---------------------------------------------------------------------------------------

    def _end_overdue(self, expired: Sequence[Session] | None = None) -> Sequence[asyncio.Task[None]]:
        """Begins to end expired sessions (None: finds them), and those whose clients are overdue."""
        if expired is None:
            expired = [session for session in self._sessions.values() if session.expired]
        ending = [self._begin_end(session, SessionEnd.EXPIRED) for session in expired]
        return [*ending, *self._release(self._leases.overdue(), SessionEnd.OWNER_GONE)]

    @property
    def draining(self) -> bool:
        """True while new sessions are refused."""
        return self._draining or self._stopping or self._ending_all

    def stop_taking(self) -> None:
        """Refuses new sessions until `take_again`; existing sessions go on."""
        self._draining = True

    def take_again(self) -> None:
        self._draining = False

    async def end_all(self, reason: SessionEnd, retry_s: float) -> None:
        """Ends all sessions and creations, and lets none begin meanwhile. Idempotent.

        Returns when none of their sandboxes is left, or after `retry_s`.
        """
        self._ending_all = True
        try:
            await self._creations.close()
            for session in list(self._sessions.values()):
                _ = self._begin_end(session, reason)
            await self._teardown.finish()
            await self._teardown.destroy_left(retry_s)
        finally:
            self._ending_all = False

    async def drain(self, grace_s: float) -> None:
        """Refuses new sessions and executions, and waits at most `grace_s` for running executions."""
        self._stopping = True
        for session in self._sessions.values():
            _refuse_new(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(session.state == "busy" for session in self._sessions.values()):
                    await asyncio.gather(*(each.executions.wait_idle() for each in self._sessions.values()))

    async def close(self) -> None:
        """Ends the sweeper and every session, now."""
        self._stopping = True
        await self.sweeper.close()
        await self._creations.close()
        for session in list(self._sessions.values()):
            _ = self._begin_end(session, SessionEnd.STOPPED)
        await self._teardown.finish()
        self._reading.close()


def _key(session: Session) -> SessionKey:
    return (session.owner.tenant, session.session_id)


def _refuse_new(session: Session) -> None:
    session.executions.refuse_new()
    session.processes.refuse_new()


def _not_found(session_id: str) -> NotFound:
    return NotFound(Reason.SESSION_NOT_FOUND, f"there is no session {session_id!r}")
