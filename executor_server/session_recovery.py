"""Brings back the sessions of an earlier daemon, at the start of the next one.

Each session of the registry exists again afterwards: it goes on with its guest, or it is lost and says why; what had
finished can be attached to in both cases. Nothing here fails for one session only; a registry that can't be read or a
sandbox that can be neither taken over nor destroyed stops the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from executor_server.backends.base import Backend, KnownSandbox, Sandbox
from executor_server.backends.gone import GoneSandbox
from executor_server.guest.frames import PROTOCOL_VERSION
from executor_server.guest_channel import GuestChannel
from executor_server.registry import Registry, SessionRecord
from executor_server.session import Session
from executor_server.session_requests import SessionSettings, Watch

# Guests that are connected to at one time: more than a tenant may have that do not answer, since the time is for all,
# and who waited behind those would be lost for them.
_CONCURRENCY = 256

_log = structlog.get_logger(__name__)


async def recover_sessions(
    backend: Backend, registry: Registry, settings: SessionSettings, watch: Watch, found: Callable[[Session], None]
) -> None:
    """All sessions of the registry: `found` is given each before anybody is told of it, and before its guest is heard.

    To be called once, after the backend's start and before it makes anything. Raises StateDirError, SandboxFailure.
    """
    records = registry.load()
    ours = [record for record in records if _why_not(record, backend) is None]
    adopted = await backend.adopt(
        [KnownSandbox(each.sandbox_id, each.spec.sandbox, each.token, each.backend) for each in ours]
    )
    sessions = []
    for record in records:
        sandbox = adopted.get(record.sandbox_id) if record in ours else None
        gone = _why_not(record, backend) or _why_not_adopted(sandbox)
        kept = sandbox or GoneSandbox(record.sandbox_id)
        channel = GuestChannel(kept.endpoint, shown=record.connections)
        session = Session(record, kept, channel, registry, settings, watch)
        session.recall(gone=gone)
        sessions.append(session)
        found(session)
        session.announce()
        await asyncio.sleep(0)  # reading takes its time, and signals are to be heard
    await _resume(sessions, settings.recovery_s)
    if sessions:
        lost = sum(session.state == "lost" for session in sessions)
        _log.info("sessions_recovered", count=len(sessions) - lost, lost=lost)


def _why_not(record: SessionRecord, backend: Backend) -> str | None:
    """Why its sandbox can't be asked for; None when it can."""
    if record.lost_reason is not None:
        return record.lost_reason
    if record.backend not in backend.name.split(","):
        return f"its sandbox is of backend {record.backend}, and the daemon came back with backend {backend.name}"
    if record.protocol != PROTOCOL_VERSION:
        return "its guest is of another version than the daemon that came back"
    return None


def _why_not_adopted(sandbox: Sandbox | None) -> str | None:
    """Why a sandbox did not come back that was asked for; None when it did."""
    if sandbox is None:
        return "its sandbox was gone when the daemon came back"
    return sandbox.reason if isinstance(sandbox, GoneSandbox) else None


async def _resume(sessions: Sequence[Session], deadline_s: float) -> None:
    """Connects to all guests, a bounded number at a time, within a time for all."""
    places = asyncio.Semaphore(_CONCURRENCY)
    give_up_s = asyncio.get_running_loop().time() + deadline_s

    async def resume(session: Session) -> None:
        async with places:
            try:
                await session.resume(max(give_up_s - asyncio.get_running_loop().time(), 0.0))
            except Exception:  # noqa: BLE001 - a bug of ours with one session must not cost all the others
                _log.exception("session_not_resumed", session_id=session.session_id)
                session.give_up("an internal error of the daemon")

    await asyncio.gather(*(resume(session) for session in sessions))
