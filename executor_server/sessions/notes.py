"""Writes to the registry, now and then, what a later daemon has to know of the use of sessions."""

from __future__ import annotations

import time
from collections.abc import Collection

from executor_server.sessions.journal import Registry, SessionUse
from executor_server.sessions.session import Session

# Seconds between two writes of the sessions' last use.
_NOTE_USE_INTERVAL_S = 5.0
# Seconds by which two times of one use differ at most: they are counted from the clock of the host, which is slewed.
_SAME_USE_S = 0.5


class UseNotes:
    """Called with every sweep."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._written_s = time.monotonic()
        self._written: dict[str, SessionUse] = {}  # by session
        self._changed: dict[str, SessionUse] = {}

    def note(self, session: Session) -> None:
        """Notes the use of a session that was looked at, where it has changed: each row takes half an execution."""
        use = session.use
        if not _is_same(self._written.get(session.session_id), use):
            self._changed[session.session_id] = use

    def write(self, sessions: Collection[Session]) -> None:
        if time.monotonic() - self._written_s > _NOTE_USE_INTERVAL_S:
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
        """Writes what sessions have used of the network since the last sweep; the next one does where that fails."""
        used = [(each, usage) for each in sessions if (usage := each.network.unwritten())]
        if used and self._registry.note_network({each.session_id: usage for each, usage in used}):
            for each, usage in used:
                each.network.note_written(usage)


def _is_same(noted: SessionUse | None, use: SessionUse) -> bool:
    if noted is None or abs(use.last_used_s - noted.last_used_s) > _SAME_USE_S:
        return False
    return (use.generation, use.puts, use.gets) == (noted.generation, noted.puts, noted.gets)
