"""Creates sessions: takes a sandbox from the pool, configures its guest, and writes the session to the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from executor_server.backends import Backend, Environment
from executor_server.core import (
    ImageNotReady,
    InvalidRequest,
    PreconditionFailed,
    Principal,
    Reason,
    SandboxFailure,
    SandboxSpec,
    SessionSpec,
    Unavailable,
)
from executor_server.packages import requested_by
from executor_server.policy import Policy
from executor_server.sessions.journal import Registry, RegistryError, SessionRecord
from executor_server.sessions.needed_packages import NeededPackages
from executor_server.sessions.pool import CreationQueue, ReadySandbox, WarmPool
from executor_server.sessions.refusals import refusal_of
from executor_server.sessions.session import Session
from executor_server.sessions.shared import SessionHooks, SessionSettings
from executor_server.sessions.teardown import close_session

# Remembered requests that wait for an environment. The oldest is forgotten, and needs admission again.
_MAX_AWAITING = 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SessionRequest:
    """An approved request for a session; the same id again means the same session."""

    request_id: str
    spec: SessionSpec
    lease_id: str | None = None  # of the client that will hold the session; None: detached
    modules: tuple[str, ...] = ()  # modules of its tools, besides the authorized imports
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # values are for the guest alone


class SessionFactory:
    """Creates sessions with configured guests. `in_set_up` has the unfinished ones.

    It remembers which requests wait for an environment until they are repeated.
    """

    def __init__(
        self,
        backend: Backend,
        pool: WarmPool,
        registry: Registry,
        settings: SessionSettings,
        hooks: SessionHooks,
        policy: Callable[[], Policy | None],
    ) -> None:
        """`policy` returns the one in force, if any."""
        self._backend = backend
        self._pool = pool
        self._registry = registry
        self._settings = settings
        self._hooks = hooks
        self._queue = CreationQueue(hooks.admission)
        self._needs = NeededPackages(backend.fingerprint, policy)
        self._awaiting: dict[tuple[str, str], None] = {}  # tenants and ids of requests, the oldest first
        self.in_set_up: set[Session] = set()

    async def make(self, principal: Principal, request: SessionRequest) -> Session:
        """Creates a session. A warm sandbox that dies during the set-up is replaced by a new one.

        If the policy adds packages by itself, a sandbox whose image lacks modules is replaced by one that has them.

        Raises ResourceExhausted, Unavailable, PreconditionFailed (the packages are not available), and the guest's
        refusals (InvalidRequest: the prelude fails). Nothing is left behind then.
        """
        with requested_by(principal.tenant):
            spec = await self._needs.foreseen(request.spec, request.modules)
            while True:
                ready = await self._take_sandbox(principal, request, spec.sandbox)
                granted = replace(request, spec=spec)
                made = await self._set_up(principal, granted, ready, may_add=spec is request.spec)
                if isinstance(made, Session):
                    return made
                spec = made

    async def require_environment(self, principal: Principal, request: SessionRequest) -> None:
        """Raises as `make` while the environment that this request waits for is not ready.

        Must be called before admission: a repeated request that waits for its environment must not use up quota or be
        recorded again.
        """
        key = (principal.tenant, request.request_id)
        if key not in self._awaiting:
            return
        spec = await self._needs.foreseen(request.spec, request.modules)
        if spec.sandbox.packages is not None:
            await prepare_environment(self._backend, principal.tenant, spec.sandbox)
        self._awaiting.pop(key, None)

    async def _set_up(
        self, principal: Principal, request: SessionRequest, ready: ReadySandbox, *, may_add: bool
    ) -> Session | SessionSpec:
        """Creates a session in this sandbox; if it can't be used, returns the spec of another one to take."""
        record = _record(self._hooks.ids.new(), principal, request, ready)
        session = Session(record, ready.sandbox, ready.channel, self._registry, self._settings, self._hooks)
        self.in_set_up.add(session)
        try:
            session.begin()
            added = await self._configure(session, request, ready, may_add=may_add)
            if added is not None:
                await self._discard(session, "its image lacks modules that packages bring")
                return added
            # Until this row is written, a later daemon destroys the sandbox, since it belongs to no session.
            self._registry.add(replace(record, connections=ready.channel.connections), request.lease_id)
            return session
        except PreconditionFailed as died:
            await self._discard(session, "its sandbox died")
            if not ready.warm:
                message = "a new sandbox died at once; the daemon's log has the reason"
                raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from died
            return request.spec
        except RegistryError as failure:
            _log.error("session_not_written", error=str(failure))
            await self._discard(session, "it could not be written down")
            message = "the daemon could not store the session; its log has the reason"
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from failure
        except BaseException:
            await self._discard(session, "it could not be set up")
            raise
        finally:
            self.in_set_up.discard(session)

    async def _configure(
        self, session: Session, request: SessionRequest, ready: ReadySandbox, *, may_add: bool
    ) -> SessionSpec | None:
        """Configures the guest and notes missing modules; returns the spec with packages that bring them, if any."""
        refusal: InvalidRequest | None = None
        try:
            await session.configure(request.env)
        except InvalidRequest as refused:
            if not may_add:
                raise
            refusal = refused  # perhaps because the prelude imports what packages can bring
        spec = request.spec
        session.missing_modules = await self._needs.missing(
            ready.sandbox, spec, request.modules, session.requests.find_missing
        )
        session.images_with_missing = self._needs.images_with(session.missing_modules)
        added = self._needs.added(spec, session.missing_modules, request.modules) if may_add else None
        if added is None and refusal is not None:
            raise refusal
        return added

    async def _discard(self, session: Session, reason: str) -> None:
        await asyncio.shield(close_session(session, self._registry, reason))

    async def _take_sandbox(self, principal: Principal, request: SessionRequest, spec: SandboxSpec) -> ReadySandbox:
        try:
            return await self._pool.take(spec, lambda: self._queue.turn(principal.tenant, spec))
        except SandboxFailure as failure:
            if isinstance(failure, ImageNotReady) and failure.progress is not None:
                self._awaiting[principal.tenant, request.request_id] = None
                while len(self._awaiting) > _MAX_AWAITING:
                    del self._awaiting[next(iter(self._awaiting))]
            raise refusal_of(failure, spec) from failure


async def prepare_environment(backend: Backend, tenant: str, spec: SandboxSpec) -> Environment:
    """Returns the environment that a session with such a sandbox would have; does not create the sandbox.

    Raises InvalidRequest (no packages requested), Unavailable (it is being built, with the progress, or can't be built
    now), PreconditionFailed (it can't be built from these packages).
    """
    try:
        with requested_by(tenant):
            environment = await backend.prepare_environment(spec)
    except SandboxFailure as failure:
        raise refusal_of(failure, spec) from failure
    if environment is None:
        raise InvalidRequest(Reason.INVALID_FIELD, "packages: none requested", "packages")
    return environment


def _record(session_id: str, principal: Principal, request: SessionRequest, ready: ReadySandbox) -> SessionRecord:
    info = ready.channel.info
    assert info is not None, "a sandbox that is ready has an answer of its guest"
    now = time.time()
    return SessionRecord(
        session_id=session_id,
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
