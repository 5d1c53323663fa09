"""What a session is, as the daemon last described it: the same for both clients, since nobody is asked."""

from __future__ import annotations

import re

from executor_api.v1 import types_pb2
from executor_client import _convert
from executor_client._watch import Awaited
from executor_client.results import Limits, PolicyRef, SessionInfo, StateManifest
from executor_client.waits import WaitKind

_LONG_ID = re.compile(r"([0-9a-f]{8})[0-9a-f]{24}")


def short_id(session_id: str) -> str:
    """A session's id for a person's eyes: its beginning, which `executor ps` shows too, tells it from the others."""
    found = _LONG_ID.fullmatch(session_id)
    return found[1] if found else session_id


class SessionBase:
    """Whoever derives from it hands on what the daemon says of the session since."""

    def __init__(self, info: SessionInfo) -> None:
        self._info = info
        self._generation = info.generation
        self._restored: StateManifest | None = None

    @property
    def restored(self) -> StateManifest | None:
        """What was restored of the state that the session began with; None when this object did not begin it so."""
        return self._restored

    @property
    def session_id(self) -> str:
        return self._info.session_id

    @property
    def info(self) -> SessionInfo:
        """The session as the daemon last described it; `refresh` asks again."""
        return self._info

    @property
    def generation(self) -> int:
        """The interpreter's number, as of the last execution or description: it rises when variables were lost."""
        return self._generation

    @property
    def limits(self) -> Limits:
        return self._info.limits

    @property
    def policy(self) -> PolicyRef:
        """The policy that approved the session, or has tightened it since."""
        return self._info.policy

    def _turn(self, to_do: str) -> Awaited:
        """For a call that waits for the executions ahead of it."""
        return Awaited(WaitKind.SESSION, f"session {short_id(self.session_id)} {to_do}")

    def _described(self, wire: types_pb2.Session) -> SessionInfo:
        self._info = _convert.session_from_wire(wire)
        self._generation = self._info.generation
        return self._info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} generation {self._generation}>"
