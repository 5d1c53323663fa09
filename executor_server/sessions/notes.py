"""Writes to the registry, now and then, what a later daemon has to know of the use of sessions."""

from __future__ import annotations

import time
from collections.abc import Collection

from executor_server.journal import Registry, SessionUse
from executor_server.sessions.session import Session

# Seconds between two writes of the sessions' last use.
_NOTE_USE_INTERVAL_S = 5.0
# Seconds by which two times of one use differ at most: they are counted from the clock of the host, which is slewed.
_SAME_USE_S = 0.5


class UseNotes:
    """Called with every sweep."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._noted_use_s = time.monotonic()
        self._noted: dict[str, SessionUse] = {}  # by session

    def write(self, sessions: Collection[Session]) -> None:
        if time.monotonic() - self._noted_use_s > _NOTE_USE_INTERVAL_S:
            self._noted_use_s = time.monotonic()
            self._write_use(sessions)
        self._write_network(sessions)

    def _write_use(self, sessions: Collection[Session]) -> None:
        """Writes what has changed: many sessions are idle, and each row takes as long as half an execution."""
        uses = {session.session_id: session.use for session in sessions}
        changed = [use for session_id, use in uses.items() if not _is_same(self._noted.get(session_id), use)]
        if self._registry.note_use(changed):
            self._noted = {**{key: use for key, use in self._noted.items() if key in uses}, **_by_id(changed)}

    def _write_network(self, sessions: Collection[Session]) -> None:
        """Writes what sessions have used of the network since the last sweep; the next one does where that fails."""
        networks = {each.session_id: each.network for each in sessions}
        used = {session_id: usage for session_id, each in networks.items() if (usage := each.unwritten())}
        if used and self._registry.note_network(used):
            for session_id, usage in used.items():
                networks[session_id].note_written(usage)


def _is_same(noted: SessionUse | None, use: SessionUse) -> bool:
    if noted is None or abs(use.last_used_s - noted.last_used_s) > _SAME_USE_S:
        return False
    return (use.generation, use.puts, use.gets) == (noted.generation, noted.puts, noted.gets)


def _by_id(uses: Collection[SessionUse]) -> dict[str, SessionUse]:
    return {use.session_id: use for use in uses}
