"""Sweeps the sessions: pings their guests, notes their use, and finds expired ones.

Only sessions that need attention are visited: hundreds may be idle, and visiting all twice a second delayed one
execution in a hundred. The visits are spread in small groups over the interval, so that an execution waits for one
group only, and not all guests answer at once. Anything may happen between two groups, so expired sessions are checked
again at the end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from executor_server.sessions.journal import Registry, SessionUse
from executor_server.sessions.leases import SessionKey
from executor_server.sessions.session import Session

# Most sessions of one group: about 0.3 ms of the event loop.
_AT_ONCE = 16
# The least number of groups in one round, if there are enough sessions.
_GROUPS = 16
# Seconds between two writes of the sessions' last use.
_NOTE_USE_INTERVAL_S = 5.0
# Times that differ by at most this many seconds are those of one use: they depend on the host's clock, which is slewed.
_SAME_USE_S = 0.5

_log = structlog.get_logger(__name__)


class Sweeper:
    """Owns the task that sweeps."""

    def __init__(
        self,
        interval_s: float,
        sessions: Mapping[SessionKey, Session],
        in_set_up: Collection[Session],
        notes: UseNotes,
        end: Callable[[Sequence[Session]], object],
    ) -> None:
        """`end` is called in each round with the expired sessions, and begins to end them."""
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
        """Visits each session that needs attention once, spread over `spread_s` seconds."""
        for session in list(self._in_set_up):
            session.check_guest()  # a warm sandbox may hang
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
        # Not awaited: a slow backend must not delay the next round.
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


class UseNotes:
    """Writes the use of sessions to the registry, for a later daemon. Called with each sweep."""

    def __init__(self, registry: Registry, *, interval_s: float = _NOTE_USE_INTERVAL_S) -> None:
        self._registry = registry
        self._interval_s = interval_s
        self._written_s = time.monotonic()
        self._written: dict[str, SessionUse] = {}  # by session
        self._changed: dict[str, SessionUse] = {}

    def note(self, session: Session) -> None:
        """Notes the use of a session if it has changed: writing a row takes half as long as an execution."""
        use = session.use
        if not _is_same(self._written.get(session.session_id), use):
            self._changed[session.session_id] = use

    def write(self, sessions: Collection[Session]) -> None:
        if time.monotonic() - self._written_s > self._interval_s:
            self._written_s = time.monotonic()
            self._write_use({session.session_id for session in sessions})
        self._write_network(sessions)

    def _write_use(self, there: Collection[str]) -> None:
        changed = {session_id: use for session_id, use in self._changed.items() if session_id in there}
        noted = self._registry.note_use(tuple(changed.values()))
        self._changed = {} if noted else changed
        if noted:
            self._written = {key: use for key, use in {**self._written, **changed}.items() if key in there}

    def _write_network(self, sessions: Collection[Session]) -> None:
        """Writes the network usage since the last sweep; after a failure, the next sweep does."""
        used = [(each, usage) for each in sessions if (usage := each.network.unwritten())]
        if used and self._registry.note_network({each.session_id: usage for each, usage in used}):
            for each, usage in used:
                each.network.note_written(usage)


def _is_same(noted: SessionUse | None, use: SessionUse) -> bool:
    if noted is None or abs(use.last_used_s - noted.last_used_s) > _SAME_USE_S:
        return False
    return (use.generation, use.puts, use.gets) == (noted.generation, noted.puts, noted.gets)
