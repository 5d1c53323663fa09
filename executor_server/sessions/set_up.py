"""Makes sessions: takes a sandbox from the pool, configures its guest, and writes the session to the registry."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from executor_server.core import (
    BackendFull,
    ImageNotReady,
    PreconditionFailed,
    Principal,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    SandboxSpec,
    SessionSpec,
    SpecUnsupported,
    Unavailable,
)
from executor_server.journal import Registry, RegistryError, SessionRecord
from executor_server.pool import CreationQueue, ReadySandbox, WarmPool
from executor_server.sessions.image_modules import ImageModules
from executor_server.sessions.session import Session
from executor_server.sessions.shared import SessionHooks, SessionSettings
from executor_server.sessions.teardown import close_session

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SessionRequest:
    """An approved request for a session; the same id again means the same session."""

    request_id: str
    spec: SessionSpec
    lease_id: str | None = None  # the client that the session will belong to; None: detached


class SessionFactory:
    """Makes sessions whose guests are configured. `in_set_up` are those that it is working on."""

    def __init__(
        self,
        pool: WarmPool,
        registry: Registry,
        settings: SessionSettings,
        hooks: SessionHooks,
        prepare: Callable[[Session], None],
    ) -> None:
        """`prepare` is given each new session before its guest is asked for anything."""
        self._pool = pool
        self._registry = registry
        self._settings = settings
        self._hooks = hooks
        self._prepare = prepare
        self._queue = CreationQueue(hooks.admission)
        self._modules = ImageModules()
        self.in_set_up: set[Session] = set()

    async def make(self, principal: Principal, request: SessionRequest) -> Session:
        """Makes a session. A kept sandbox that dies of the set-up is replaced by a new one, once.

        Raises ResourceExhausted, Unavailable, and what the guest refuses with (InvalidRequest: the prelude fails).
        Nothing is left behind then.
        """
        while True:
            ready = await self._take_sandbox(principal.tenant, request.spec.sandbox)
            record = _record(principal, request, ready)
            session = Session(record, ready.sandbox, ready.channel, self._registry, self._settings, self._hooks)
            self._prepare(session)
            self.in_set_up.add(session)
            try:
                session.begin()
                await session.configure()
                session.missing_modules = await self._modules.missing(
                    ready.sandbox.fingerprint, request.spec.authorized_imports, session.requests.find_missing
                )
                # Until this row is written, a later daemon destroys the sandbox as one that belongs to no session.
                self._registry.add(replace(record, connections=ready.channel.connections), request.lease_id)
                return session
            except PreconditionFailed as died:
                await self._discard(session, "its sandbox died")
                if not ready.warm:
                    message = "a new sandbox died at once; the daemon's log says why"
                    raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from died
            except RegistryError as failure:
                _log.error("session_not_written", error=str(failure))
                await self._discard(session, "it could not be written down")
                message = "the daemon can't write a session down now; its log says why"
                raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from failure
            except BaseException:
                await self._discard(session, "it could not be set up")
                raise
            finally:
                self.in_set_up.discard(session)

    async def _discard(self, session: Session, reason: str) -> None:
        await asyncio.shield(close_session(session, self._registry, reason))

    async def _take_sandbox(self, tenant: str, spec: SandboxSpec) -> ReadySandbox:
        try:
            return await self._pool.take(spec, lambda: self._queue.turn(tenant, spec))
        except ImageNotReady as failure:
            raise Unavailable(Reason.IMAGE_NOT_READY, str(failure), failure.retry_after_s) from failure
        except BackendFull as failure:
            _log.warning("backend_full", image=spec.image, error=str(failure), retry_after_s=failure.retry_after_s)
            message = "there are as many sandboxes as there may be; end a session, or try again later"
            raise ResourceExhausted(Reason.BACKEND_FULL, message, failure.retry_after_s) from failure
        except SpecUnsupported as failure:
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, str(failure)) from failure
        except SandboxFailure as failure:
            _log.error("sandbox_not_made", image=spec.image, error=str(failure))
            message = "no sandbox can be made now; the daemon's log says why"
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from failure


def _record(principal: Principal, request: SessionRequest, ready: ReadySandbox) -> SessionRecord:
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
