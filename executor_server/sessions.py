"""All sessions of the daemon: who owns which, how many there may be, when they end.

A session can only be named by its owner: look-ups take the tenant and the id, and what belongs to another tenant does
not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

import structlog

from executor_server.backends.base import Backend
from executor_server.creation_turns import CreationTurns
from executor_server.errors import (
    BackendFull,
    ExecutorError,
    ImageNotReady,
    NotFound,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    TooManySessions,
    Unavailable,
)
from executor_server.image_modules import ImageModules
from executor_server.journal_room import JournalRoom
from executor_server.leases import Leases, Released, Renewal, SessionKey
from executor_server.model import Principal, SandboxSpec, SessionFacts, SessionSpec
from executor_server.observer import SessionEnd
from executor_server.operations import VariablesReply
from executor_server.own_sessions import with_own_sessions
from executor_server.policy import Policy
from executor_server.pool import ReadySandbox, WarmPool
from executor_server.reading_shares import ReadingShares
from executor_server.registry import Registry, RegistryError, SessionRecord
from executor_server.session import Session
from executor_server.session_creations import Creations, taken_back
from executor_server.session_recovery import recover_sessions
from executor_server.session_requests import SessionSettings, Watch

__all__ = ["Session", "SessionManager", "SessionRequest", "SessionSettings", "VariablesReply", "Watch"]

_log = structlog.get_logger(__name__)

_RETRY_AFTER_S = 2.0
# How old what is written down of a session's last use may be.
_NOTE_USE_INTERVAL_S = 5.0


@dataclass(frozen=True)
class SessionRequest:
    """An approved request for a session; the same id again means the same session."""

    request_id: str
    spec: SessionSpec
    lease_id: str | None = None  # of the client that it will belong to; None: detached


class SessionManager:
    """Owns every session."""

    def __init__(
        self,
        backend: Backend,
        pool: WarmPool,
        registry: Registry,
        settings: SessionSettings,
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch or Watch()
        self._creation_turns = CreationTurns(self._watch.gate)
        self._policy: Policy | None = None  # that sessions are held to; None: whatever approved them
        self._backend = backend
        self._pool = pool
        self._registry = registry
        self._settings = settings
        self._sessions: dict[tuple[str, str], Session] = {}
        self._creations = Creations()
        self._leases = Leases(lambda key: self._sessions[key].spec.limits.owner_grace_s)
        self._in_set_up: set[Session] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._draining = False  # for an administrator, who may change their mind
        self._stopping = False
        self._sweeper: asyncio.Task[None] | None = None
        self._noted_use_s = time.monotonic()
        self._reading = ReadingShares()
        self._modules = ImageModules()
        self._room = JournalRoom(settings.journal_total_bytes, settings.max_sessions)

    async def recover(self) -> None:
        """Brings back the sessions of an earlier daemon; those whose time is over end at once.

        Takes over its sandboxes from the backend: to be called once, before the pool and anything else makes one.
        Raises StateDirError, SandboxFailure.
        """
        holders = self._registry.holders()

        def found(session: Session) -> None:
            self._add_recovered(session, holders.get(session.session_id, ()))

        await recover_sessions(self._backend, self._registry, self._settings, self._watch, found)
        await self._end_expired()

    def _add_recovered(self, session: Session, holders: Sequence[str]) -> None:
        session.share_reading(self._reading)
        session.share_room(self._room)
        key = (session.owner.tenant, session.session_id)
        self._sessions[key] = session
        for lease_id in holders:
            session.leased = True
            self._leases.hold(key, lease_id)
        self._creations.remember((session.owner.tenant, session.record.request_id), session)

    async def start(self) -> None:
        """Begins to sweep: sessions that nobody uses, or whose clients are gone, or that are too old, end."""
        self._leases.begin_anew()  # while the earlier daemon was gone, and this one recovered, nobody could renew one
        self._sweeper = asyncio.create_task(self._sweep_forever())

    # -- the life of sessions ------------------------------------------------------------------------------------

    async def create(self, principal: Principal, request: SessionRequest) -> Session:
        """Makes a session, or finds the one that this request already made.

        Raises ResourceExhausted (too many sessions, or sandboxes), Unavailable (draining, no sandbox can be made, or
        the policy has changed meanwhile), InvalidRequest (the prelude fails), and what the gate refuses with.
        """
        key = (principal.tenant, request.request_id)
        creation = self._creations.find(key)
        if creation is None:
            self._require_room(principal)
            creation = self._creations.begin(key, self._create(principal, request), request.lease_id)
        return await self._made(creation)

    def _require_room(self, principal: Principal) -> None:
        if self.draining:
            why = "the daemon is about to stop" if self._stopping else "an administrator is draining the daemon"
            raise Unavailable(Reason.DRAINING, f"{why}; it takes no new sessions")
        if len(self._sessions) + self._creations.under_way >= self._settings.max_sessions:
            message = f"the daemon has its {self._settings.max_sessions} sessions; end one, or try again later"
            refusal = TooManySessions(Reason.TOO_MANY_SESSIONS, message, retry_after_s=_RETRY_AFTER_S)
            raise with_own_sessions(refusal, self.list(principal))

    async def _made(self, creation: asyncio.Future[Session]) -> Session:
        """Return the session once it is made. Its making goes on without the caller: a repeated request finds it."""
        try:
            return await asyncio.shield(creation)
        except asyncio.CancelledError:
            if creation.cancelled() and not self._stopping:  # else it is the caller that is cancelled
                raise taken_back() from None
            raise

    async def created(self, principal: Principal, request_id: str) -> Session | None:
        """The session that this request has made or is making; None when it is a new one. Raises as `create`.

        To be asked before a request is judged: what was granted once is answered, whatever has changed since.
        """
        creation = self._creations.find((principal.tenant, request_id))
        return None if creation is None else await self._made(creation)

    async def _create(self, principal: Principal, request: SessionRequest) -> Session:
        started = time.monotonic()
        try:
            give_back = await self._watch.gate.session(principal, request.request_id, request.spec)
        except TooManySessions as refusal:
            raise with_own_sessions(refusal, self.list(principal)) from None
        try:
            session = await self._set_up(principal, request)
            key = (principal.tenant, session.session_id)
            self._sessions[key] = session
            if request.lease_id is not None:
                session.leased = True
                self._leases.hold(key, request.lease_id)
            self._watch.observer.session_created(session.facts, time.monotonic() - started)
        finally:
            give_back()
        if self._follow_policy(session, is_new=True) == "ended":  # another has come into force since it was approved
            message = "the policy has changed while the session was made; ask again"
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

    async def _set_up(self, principal: Principal, request: SessionRequest) -> Session:
        """A session whose guest knows what it may do. A kept sandbox that dies of it is replaced by a new one."""
        while True:
            ready = await self._take_sandbox(principal.tenant, request.spec.sandbox)
            record = self._record(principal, request, ready)
            session = Session(record, ready.sandbox, ready.channel, self._registry, self._settings, self._watch)
            session.share_reading(self._reading)
            session.share_room(self._room)
            self._in_set_up.add(session)
            try:
                session.begin()
                await session.configure()
                session.missing_modules = await self._modules.missing(
                    ready.sandbox.fingerprint, request.spec.authorized_imports, session.find_missing
                )
                # From here on a later daemon knows it. Before, its sandbox belongs to nobody.
                self._registry.add(replace(record, connections=ready.channel.connections), request.lease_id)
                return session
            except PreconditionFailed as died:
                await asyncio.shield(self._close(session, "its sandbox died"))
                if not ready.warm:
                    message = "a new sandbox died at once; the daemon's log says why"
                    raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from died
            except RegistryError as failure:
                _log.error("session_not_written", error=str(failure))
                await asyncio.shield(self._close(session, "it could not be written down"))
                message = "the daemon can't write a session down now; its log says why"
                raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from failure
            except BaseException:
                await asyncio.shield(self._close(session, "it could not be set up"))
                raise
            finally:
                self._in_set_up.discard(session)

    async def _take_sandbox(self, tenant: str, spec: SandboxSpec) -> ReadySandbox:
        try:
            return await self._pool.take(spec, lambda: self._creation_turns.turn(tenant, spec))
        except ImageNotReady as failure:
            raise Unavailable(Reason.IMAGE_NOT_READY, str(failure), failure.retry_after_s) from failure
        except BackendFull as failure:
            _log.warning("backend_full", image=spec.image, error=str(failure), retry_after_s=failure.retry_after_s)
            message = "there are as many sandboxes as there may be; end a session, or try again later"
            raise ResourceExhausted(Reason.BACKEND_FULL, message, failure.retry_after_s) from failure
        except SandboxFailure as failure:
            _log.error("sandbox_not_made", image=spec.image, error=str(failure))
            message = "no sandbox can be made now; the daemon's log says why"
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from failure

    def _record(self, principal: Principal, request: SessionRequest, ready: ReadySandbox) -> SessionRecord:
        info = ready.channel.info
        assert info is not None, "a sandbox that is ready has an answer of its guest"
        now = time.time()
        return SessionRecord(
            session_id=secrets.token_hex(16),
            owner=principal,
            request_id=request.request_id,
            spec=request.spec,
            backend=ready.sandbox.backend_name,
            sandbox_id=ready.sandbox.sandbox_id,
            token=ready.sandbox.endpoint.token,
            python_version=info.python_version,
            warm=ready.warm,
            create_time_s=now,
            connections=ready.channel.connections,
            generation=info.generation,
            last_used_s=now,
        )

    def get(self, principal: Principal, session_id: str) -> Session:
        """The caller's session. Raises NotFound; PreconditionFailed when what was written of it was damaged."""
        session = self._sessions.get((principal.tenant, session_id))
        if session is None:
            if (damage := self._registry.unbelieved.get(session_id)) is not None:
                raise PreconditionFailed(Reason.SESSION_LOST, f"the session is lost: {damage}")
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session {session_id!r}")
        return session

    def list(self, principal: Principal) -> list[Session]:
        """The caller's sessions, oldest first."""
        return [session for (tenant, _), session in self._sessions.items() if tenant == principal.tenant]

    def list_all(self) -> Sequence[Session]:
        """Those of all tenants, oldest first."""
        return list(self._sessions.values())

    async def delete(self, principal: Principal, session_id: str) -> None:
        """Ends a session; returns when its sandbox is gone. Raises NotFound."""
        if self._registry.unbelieved.pop(session_id, ""):
            return  # its sandbox is gone already
        await self._delete(self.get(principal, session_id))

    async def delete_by_request(self, principal: Principal, request_id: str) -> None:
        """Ends the session that a request made or is making. Raises NotFound; a request that comes later is refused."""
        session = await self._creations.take_back((principal.tenant, request_id))
        if session is not None and (principal.tenant, session.session_id) in self._sessions:
            await self._delete(session)

    async def _delete(self, session: Session) -> None:
        self._remove(session)
        await asyncio.shield(self._ending(session, SessionEnd.DELETED))

    # -- leases ------------------------------------------------------------------------------------------------------

    def attach(self, session: Session, lease_id: str) -> None:
        """One more client holds a session that is not detached. Raises ResourceExhausted."""
        if self._leases.attach((session.owner.tenant, session.session_id), lease_id):
            self._registry.note_holder(session.session_id, lease_id)

    def renew_lease(self, principal: Principal, lease_id: str) -> Renewal:
        """A client lives, and so do its sessions."""
        return self._leases.renew(principal.tenant, lease_id)

    def end_lease(self, principal: Principal, lease_id: str) -> int:
        """A client has ended, and with it what it held alone; how many sessions that were. They are not waited for."""
        released = self._leases.end(principal.tenant, lease_id)
        self._release(released, SessionEnd.OWNER_CLOSED)
        return len(released.sessions) + self._creations.end_of_lease(principal.tenant, lease_id)

    def _release(self, released: Released, reason: SessionEnd) -> Sequence[asyncio.Task[None]]:
        for (_, session_id), lease_id in released.dropped:
            self._registry.note_let_go(session_id, lease_id)
        sessions = [self._sessions[key] for key in released.sessions]
        for session in sessions:
            self._remove(session)
        return [self._ending(session, reason) for session in sessions]

    async def kill(self, session_id: str) -> None:
        """Ends a session, whoever owns it; returns when its sandbox is gone. Raises NotFound."""
        session = next((each for each in self._sessions.values() if each.session_id == session_id), None)
        if session is None:
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session {session_id!r}")
        self._remove(session)
        await asyncio.shield(self._ending(session, SessionEnd.KILLED))

    def stop_executions(self, concerned: Callable[[SessionFacts], bool], reason: str) -> None:
        """Cancels what runs or waits in the sessions that are concerned."""
        for session in self._sessions.values():
            if concerned(session.facts):
                session.cancel_all(reason)

    def set_cpu_share(self, facts: SessionFacts, share: float) -> None:
        """The part of a whole sandbox's share of the processors that a session is to have."""
        session = self._sessions.get((facts.owner.tenant, facts.session_id))
        if session is not None:
            session.set_cpu_share(share)

    def _remove(self, session: Session) -> None:
        """Nobody finds it from here on, so only one caller ends it."""
        key: SessionKey = (session.owner.tenant, session.session_id)
        self._leases.forget(key)
        del self._sessions[key]
        self._creations.forget(session)

    def _ending(self, session: Session, reason: str) -> asyncio.Task[None]:
        """Ends it, whether or not whoever asked for it still waits; `close` does."""
        return self._begin_ending(self._end(session, reason))

    def _begin_ending(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        ending = asyncio.create_task(work)
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return ending

    async def _end(self, session: Session, reason: str) -> None:
        await self._close(session, reason)
        await asyncio.sleep(0)  # the ends of its executions are told first
        self._watch.observer.session_ended(session.facts, reason)
        _log.info("session_ended", session_id=session.session_id, tenant=session.owner.tenant, reason=str(reason))

    async def _close(self, session: Session, reason: str) -> None:
        # First: what no registry names is destroyed by the next daemon, should this one not come to it.
        self._registry.forget(session.session_id)
        try:
            await session.close(reason)
        except SandboxFailure as failure:
            _log.error("sandbox_not_destroyed", session_id=session.session_id, error=str(failure))

    # -- another policy ----------------------------------------------------------------------------------------------

    def follow(self, policy: Policy) -> Counter[str]:
        """From here on this policy holds. Sessions that another one approved are kept, tightened or ended: so many."""
        self._policy = policy
        done = Counter(self._follow_policy(session) for session in list(self._sessions.values()))
        del done[""]
        return done

    def _follow_policy(self, session: Session, *, is_new: bool = False) -> str:
        """What was done with it; nothing when there is nothing to be done.

        A new session has nothing to keep: many may have waited to be made, and none gets what is not granted any more.
        """
        policy = self._policy
        if policy is None or session.spec.policy.fingerprint == policy.fingerprint or session.state == "lost":
            return ""
        on_reload = policy.on_reload(session.owner, session.spec)
        if on_reload == "keep" and not is_new:
            return "kept"
        if on_reload == "end" and policy.profile_name(session.owner.tenant) is not None:
            return self._end_by_policy(session, "the policy has changed, and ends the sessions of the one before")
        held = policy.tightened(session.owner, session.spec, session.backend_name)
        if isinstance(held, str):
            return self._end_by_policy(session, f"the policy has changed: {held}")
        _ = self._begin_ending(self._see_held(session, session.hold_to(held)))
        return "tightened"

    async def _see_held(self, session: Session, held: Coroutine[None, None, None]) -> None:
        try:
            await held
        except ExecutorError as failure:
            if session.state != "lost":
                self._end_by_policy(
                    session, f"the policy has changed, and could not be put in force: {failure.message}"
                )

    def _end_by_policy(self, session: Session, reason: str) -> str:
        if (session.owner.tenant, session.session_id) in self._sessions:
            self._remove(session)
            _ = self._ending(session, reason)
        return "ended"

    # -- sweeping and stopping -----------------------------------------------------------------------------------

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            try:
                await self._sweep()
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end sweeping for good
                _log.exception("sweep_broke")

    async def _sweep(self) -> None:
        """Looks after every guest, and ends the sessions whose time has come."""
        for session in self._in_set_up:
            session.check_guest()  # a kept sandbox may hang when it is needed
        for session in self._sessions.values():
            session.note_use()
            session.check_guest()
        if time.monotonic() - self._noted_use_s > _NOTE_USE_INTERVAL_S:
            self._noted_use_s = time.monotonic()
            self._registry.note_use([session.use for session in self._sessions.values()])
        # Not awaited: a backend that takes its time must not keep the sweeper from its next round.
        self._begin_endings()

    async def _end_expired(self) -> None:
        await asyncio.shield(asyncio.gather(*self._begin_endings()))

    def _begin_endings(self) -> Sequence[asyncio.Task[None]]:
        """Ends the sessions whose time is over, and those whose clients are gone. Returns the tasks that do so."""
        expired = [session for session in self._sessions.values() if session.expired]
        for session in expired:
            self._remove(session)
        endings = [self._ending(session, SessionEnd.EXPIRED) for session in expired]
        return [*endings, *self._release(self._leases.look(), SessionEnd.OWNER_GONE)]

    @property
    def draining(self) -> bool:
        """Whether no new sessions are taken."""
        return self._draining or self._stopping

    def stop_taking(self) -> None:
        """Takes no new sessions until `take_again`; what there is goes on."""
        self._draining = True

    def take_again(self) -> None:
        self._draining = False

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, lets what runs end within `grace_s`, then ends every session."""
        self._stopping = True
        for session in self._sessions.values():
            session.refuse_new()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(session.state == "busy" for session in self._sessions.values()):
                    await asyncio.gather(*(session.wait_idle() for session in self._sessions.values()))

    async def close(self) -> None:
        """Ends the sweeper and every session, now."""
        self._stopping = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._creations.close()
        sessions = list(self._sessions.values())
        for session in sessions:
            self._remove(session)
        begun = list(self._endings)
        await asyncio.gather(*begun, *(self._ending(session, SessionEnd.STOPPED) for session in sessions))
        self._reading.close()
