"""Looks at sessions now and then: pings their guests, notes their use, and finds those whose time is over.

Only at those in which something is due: hundreds may be idle, and a look at each of them twice a second delayed one
execution in a hundred. A few at a time, and in the background over the whole interval, so that an execution waits for
these few and not for all, and so that not all guests answer at one time. Between two groups anything may happen, so
what was found is asked for again before it is acted on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from executor_server.sessions.leases import SessionKey
from executor_server.sessions.notes import UseNotes
from executor_server.sessions.session import Session

# Sessions that are looked at in one turn of the event loop at most: about 0.3 ms.
_AT_ONCE = 16
# Groups into which the sessions of one round are divided at least, where there are as many.
_GROUPS = 16

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

    async def sweep(self, *, spread_s: float = 0.0) -> None:
        """Looks once at every session in which something is due, spread over that many seconds."""
        for session in list(self._in_set_up):
            session.check_guest()  # a kept sandbox may hang when it is needed
        now_s = time.monotonic()
        due = [each for each in self._sessions.items() if each[1].life.look_at_s <= now_s]
        expired: list[tuple[SessionKey, Session]] = []
        size = min(math.ceil(len(due) / _GROUPS), _AT_ONCE)
        for first in range(0, len(due), size or 1):
            if first:
                await asyncio.sleep(spread_s * size / len(due))
            for key, session in due[first : first + size]:
                if self._sessions.get(key) is session:
                    if session.look():
                        expired.append((key, session))
                    self._notes.note(session)
        self._notes.write(self._sessions.values())
        # Not awaited: a slow backend must not keep the sweeper from its next round.
        self._end([each for key, each in expired if self._sessions.get(key) is each and each.expired])

    async def _sweep_forever(self) -> None:
        left_s = self._interval_s
        while True:
            await asyncio.sleep(left_s)
            began_s = time.monotonic()
            try:
                await self.sweep(spread_s=self._interval_s)
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end sweeping for good
                _log.exception("sweep_broke")
            left_s = max(self._interval_s - (time.monotonic() - began_s), 0.0)
