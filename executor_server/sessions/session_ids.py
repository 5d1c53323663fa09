"""The ids of sessions: random, and in a fleet with the node in front, so that an id alone says where its session is."""

from __future__ import annotations

import secrets

_RANDOM_BYTES = 16


class SessionIds:
    """Makes the ids of a daemon that belongs to no fleet. A node of one overrides all of it."""

    node = ""
    """The name of the node; empty without a fleet."""

    def new(self) -> str:
        return secrets.token_hex(_RANDOM_BYTES)

    def why_lost(self, session_id: str) -> str:
        """Returns the reason why a session of this id is lost if it is not here; empty where there may be none."""
        return ""

    def is_foreign(self, session_id: str) -> bool:
        """True when no session of this daemon can have this id, though its registry has one."""
        return False
