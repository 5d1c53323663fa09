"""Recovers the sessions of an earlier daemon at the start of the next one.

Afterwards each session of the registry exists again: it goes on with its guest, or is lost and gives the reason. In
both cases clients can attach to finished executions. A failure of one session does not affect others. An unreadable
registry, or a sandbox that can neither be adopted nor destroyed, stops the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from executor_server.backends import Backend, KnownSandbox, MissingSandbox, Sandbox
from executor_server.backends.channel import GuestChannel
from executor_server.guest.wire.frames import PROTOCOL_VERSION
from executor_server.sessions.journal import Registry, SessionRecord
from executor_server.sessions.session import Session
from executor_server.sessions.shared import SessionHooks, SessionSettings

# Guests that are being connected to at one time. This exceeds the number of silent guests that one tenant may have: all
# sessions share the deadline, and those that waited behind silent guests would be lost.
_CONCURRENCY = 256

_log = structlog.get_logger(__name__)


async def recover_sessions(
    backend: Backend,
    registry: Registry,
    settings: SessionSettings,
    hooks: SessionHooks,
    on_found: Callable[[Session], None],
) -> None:
    """Recovers all sessions of the registry.

    Calls `on_found` with each session before it notifies observers and connects to the guest. Must be called once,
    after the backend's start and before it creates a sandbox. Raises StateDirError, SandboxFailure.
    """
    records = registry.load()
    why_not = {record.session_id: _why_not(record, backend) for record in records}
    adopted = await backend.adopt(
        [
            KnownSandbox(each.sandbox_id, each.spec.sandbox, each.token, each.backend)
            for each in records
            if why_not[each.session_id] is None
        ]
    )
    sessions = []
    for record in records:
        missing = why_not[record.session_id]
        sandbox = adopted.get(record.sandbox_id) if missing is None else None
        missing = missing or _why_not_adopted(sandbox)
        kept = sandbox or MissingSandbox(record.sandbox_id)
        channel = GuestChannel(kept.endpoint, shown=record.connections)
        session = Session(record, kept, channel, registry, settings, hooks)
        session.recall(missing=missing)
        sessions.append(session)
        on_found(session)
        session.announce()
        await asyncio.sleep(0)  # reading a journal takes time; lets signals be handled in between
    await _resume(sessions, settings.recovery_s)
    if sessions:
        lost = sum(session.state == "lost" for session in sessions)
        _log.info("sessions_recovered", count=len(sessions) - lost, lost=lost)


def _why_not(record: SessionRecord, backend: Backend) -> str | None:
    """Returns the reason why the sandbox can't be adopted; None if it can."""
    if record.lost_reason is not None:
        return record.lost_reason
    if record.backend not in backend.name.split(","):
        return f"its sandbox is of backend {record.backend}, and the daemon came back with backend {backend.name}"
    if record.protocol != PROTOCOL_VERSION:
        return "its guest is of another version than the restarted daemon"
    return None


def _why_not_adopted(sandbox: Sandbox | None) -> str | None:
    """Returns the reason why a sandbox was not adopted; None if it was."""
    if sandbox is None:
        return "its sandbox was gone when the daemon came back"
    return sandbox.reason if isinstance(sandbox, MissingSandbox) else None


async def _resume(sessions: Sequence[Session], deadline_s: float) -> None:
    """Connects to all guests, a bounded number at one time, within one deadline."""
    connecting = asyncio.Semaphore(_CONCURRENCY)
    give_up_s = asyncio.get_running_loop().time() + deadline_s

    async def resume(session: Session) -> None:
        async with connecting:
            try:
                await session.resume(max(give_up_s - asyncio.get_running_loop().time(), 0.0))
            except Exception:  # noqa: BLE001 - a bug of ours with one session must not cost all the others
                _log.exception("session_not_resumed", session_id=session.session_id)
                session.give_up("an internal error of the daemon")

    await asyncio.gather(*(resume(session) for session in sessions))
