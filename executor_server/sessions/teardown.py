"""Ends sessions in separate tasks, so that a caller that leaves does not interrupt a teardown."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine

import structlog

from executor_server.core import SandboxFailure
from executor_server.core.lifecycle import Observer
from executor_server.sessions.journal import Registry
from executor_server.sessions.session import Session

# Seconds between attempts to destroy a sandbox, and the number of sandboxes that are remembered for another attempt.
_DESTROY_AGAIN_S = 1.0
_MAX_LEFT = 1024

_log = structlog.get_logger(__name__)


async def close_session(session: Session, registry: Registry, reason: str) -> bool:
    """Forgets a session and destroys its sandbox. Returns False if the sandbox may still live."""
    # The row goes first: a sandbox without a row is destroyed by the next daemon, should this one be killed here.
    registry.forget(session.session_id)
    await session.charge_rest()
    await session.close(reason)
    # In a thread, while the kernel ends the processes. After the files are closed: closing the last descriptor of a
    # removed file takes the file system longer than all of the rest.
    removing = asyncio.create_task(asyncio.to_thread(registry.remove_journals))
    try:
        await session.destroy()
    except SandboxFailure as failure:
        _log.error("sandbox_not_destroyed", session_id=session.session_id, error=str(failure))
        return False
    finally:
        await removing
    return True


class Teardown:
    """Owns the tasks that end sessions."""

    def __init__(self, registry: Registry, observer: Observer) -> None:
        self._registry = registry
        self._observer = observer
        self.on_end: Callable[[Session, str], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: OrderedDict[str, Session] = OrderedDict()  # ended sessions whose sandbox may live

    def begin(self, session: Session, reason: str) -> asyncio.Task[None]:
        """Ends a session. The manager has removed it already, so only one caller ends it."""
        return self.spawn(self._end(session, reason))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs work that may end a session; `finish` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Waits for all work that was begun."""
        await asyncio.gather(*self._tasks)

    async def destroy_left(self, retry_s: float) -> None:
        """Retries to destroy the remaining sandboxes until none is left, or for `retry_s`."""
        give_up_s = asyncio.get_running_loop().time() + retry_s
        while self._left and asyncio.get_running_loop().time() < give_up_s:
            for session_id, session in list(self._left.items()):
                try:
                    await session.destroy()
                    del self._left[session_id]
                except SandboxFailure as failure:
                    _log.error("sandbox_not_destroyed", session_id=session_id, error=str(failure))
            if self._left:
                await asyncio.sleep(_DESTROY_AGAIN_S)

    async def _end(self, session: Session, reason: str) -> None:
        if not await close_session(session, self._registry, reason):
            self._left[session.session_id] = session
            while len(self._left) > _MAX_LEFT:
                self._left.popitem(last=False)
        if session.recorder is not None:
            session.recorder.end()
        await asyncio.sleep(0)  # the ends of its executions are reported first
        self._observer.session_ended(session.facts, reason)
        if self.on_end is not None:
            self.on_end(session, reason)
        _log.info("session_ended", session_id=session.session_id, tenant=session.owner.tenant, reason=str(reason))
