"""Writes to the registry, now and then, what a later daemon has to know of the use of sessions."""

from __future__ import annotations

import time
from collections.abc import Collection

from executor_server.journal import Registry
from executor_server.sessions.session import Session

# Seconds between two writes of the sessions' last use.
_NOTE_USE_INTERVAL_S = 5.0


class UseNotes:
    """Called with every sweep."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._noted_use_s = time.monotonic()

    def write(self, sessions: Collection[Session]) -> None:
        if time.monotonic() - self._noted_use_s > _NOTE_USE_INTERVAL_S:
            self._noted_use_s = time.monotonic()
            self._registry.note_use([session.use for session in sessions])
        self._write_network(sessions)

    def _write_network(self, sessions: Collection[Session]) -> None:
        """Writes what sessions have used of the network since the last sweep; the next one does where that fails."""
        networks = {each.session_id: each.network for each in sessions}
        used = {session_id: usage for session_id, each in networks.items() if (usage := each.unwritten())}
        if used and self._registry.note_network(used):
            for session_id, usage in used.items():
                networks[session_id].note_written(usage)
