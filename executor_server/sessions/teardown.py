"""Ends sessions in tasks of their own, so that a caller that leaves stops no teardown half way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import structlog

from executor_server.core import SandboxFailure
from executor_server.journal import Registry
from executor_server.lifecycle import Observer
from executor_server.sessions.session import Session

_log = structlog.get_logger(__name__)


async def close_session(session: Session, registry: Registry, reason: str) -> None:
    """Forgets a session and destroys its sandbox."""
    # The row goes first: a sandbox without a row is destroyed by the next daemon, should this one be killed here.
    registry.forget(session.session_id)
    try:
        await session.close(reason)
    except SandboxFailure as failure:
        _log.error("sandbox_not_destroyed", session_id=session.session_id, error=str(failure))


class Teardown:
    """Owns the tasks that end sessions."""

    def __init__(self, registry: Registry, observer: Observer) -> None:
        self._registry = registry
        self._observer = observer
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, session: Session, reason: str) -> asyncio.Task[None]:
        """Ends a session that the manager has removed already, so that only one caller ends it."""
        return self.spawn(self._end(session, reason))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs work that may end a session, and that `finish` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Waits for all that was begun."""
        await asyncio.gather(*self._tasks)

    async def _end(self, session: Session, reason: str) -> None:
        await close_session(session, self._registry, reason)
        await asyncio.sleep(0)  # the ends of its executions are reported first
        self._observer.session_ended(session.facts, reason)
        _log.info("session_ended", session_id=session.session_id, tenant=session.owner.tenant, reason=str(reason))
