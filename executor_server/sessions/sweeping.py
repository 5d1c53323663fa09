"""Looks at every session now and then: pings its guest, notes its use, and finds those whose time is over.

A few sessions at a time, so that an execution waits for these and not for all: at one look at 300 sessions at once, a
call that came in that moment took several times as long. Between two groups anything may happen, so what was found is
asked for again before it is acted on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import structlog

from executor_server.sessions.leases import SessionKey
from executor_server.sessions.notes import UseNotes
from executor_server.sessions.session import Session

# Sessions that are looked at in one turn of the event loop: about 0.3 ms.
_AT_ONCE = 16

_log = structlog.get_logger(__name__)


class Sweeper:
    """Owns the task that looks."""

    def __init__(
        self,
        interval_s: float,
        sessions: Mapping[SessionKey, Session],
        in_set_up: Collection[Session],
        notes: UseNotes,
        end: Callable[[Sequence[Session]], object],
    ) -> None:
        """`end` begins to end sessions whose time is over, and others that must end; it is called in each round."""
        self._interval_s = interval_s
        self._sessions = sessions
        self._in_set_up = in_set_up
        self._notes = notes
        self._end = end
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_forever())

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sweep(self) -> None:
        """Looks at every session once."""
        for session in list(self._in_set_up):
            session.check_guest()  # a kept sandbox may hang when it is needed
        expired: list[Session] = []
        left = iter(list(self._sessions.items()))
        while group := tuple(islice(left, _AT_ONCE)):
            for key, session in group:
                if self._sessions.get(key) is session:
                    session.check_guest()
                    if session.expired:  # this notes a use, too
                        expired.append(session)
            await asyncio.sleep(0)
        self._notes.write(self._sessions.values())
        # Not awaited: a slow backend must not keep the sweeper from its next round.
        there = set(self._sessions.values())
        self._end([session for session in expired if session in there and session.expired])

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.sweep()
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end sweeping for good
                _log.exception("sweep_broke")
