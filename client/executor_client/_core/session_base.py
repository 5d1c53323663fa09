"""A session as the daemon last described it. No I/O; both clients share it."""

from __future__ import annotations

import re

from executor_api.v1 import types_pb2
from executor_client._core import convert
from executor_client._core.short_repr import ShortRepr
from executor_client._core.waiting import Awaited
from executor_client.results import Limits, PolicyRef, SessionInfo, StateManifest
from executor_client.waits import WaitKind

# In a fleet the node's name and its epoch, eight digits that all of its sessions have, come before the random ones.
_LONG_ID = re.compile(r"([a-z0-9-]{1,24}-[0-9a-f]{8}(?=[0-9a-f]{24}$))?([0-9a-f]{24,32})")


def short_id(session_id: str, digits: int = 8) -> str:
    """Returns the beginning of a session's id with so many random digits, for people."""
    found = _LONG_ID.fullmatch(session_id)
    return f"{found[1] or ''}{found[2][:digits]}" if found else session_id


def is_id(text: str) -> bool:
    """True for a text in the form of a session's id; another one can be a name."""
    return _LONG_ID.fullmatch(text) is not None


def begins(session_id: str, prefix: str) -> bool:
    """True when a person who writes the prefix may mean this session. What comes before the random digits may be left
    out."""
    found = _LONG_ID.fullmatch(session_id)
    return session_id.startswith(prefix) or (found is not None and found[2].startswith(prefix))


class SessionBase(ShortRepr):
    """The derived class passes on each new description by the daemon."""

    _shows = ("session_id", "name", "generation")

    def __init__(self, info: SessionInfo) -> None:
        self._info = info
        self._generation = info.generation
        self._restored: StateManifest | None = None

    @property
    def restored(self) -> StateManifest | None:
        """The restored part of the state that the session began with; None if this object did not begin it with one."""
        return self._restored

    @property
    def session_id(self) -> str:
        return self._info.session_id

    @property
    def name(self) -> str:
        """Its name, which is unique among the caller's sessions; empty if it has none."""
        return self._info.name

    @property
    def info(self) -> SessionInfo:
        """The session as the daemon last described it; `refresh` asks again."""
        return self._info

    @property
    def generation(self) -> int:
        """The interpreter's number, from the last execution or description: it rises when variables were lost."""
        return self._generation

    @property
    def limits(self) -> Limits:
        return self._info.limits

    @property
    def policy(self) -> PolicyRef:
        """The policy that approved the session, or has tightened it since."""
        return self._info.policy

    @property
    def network(self) -> tuple[str, ...]:
        """The hosts that code may reach, through the proxy of its sandbox; empty: it has no network."""
        return self._info.network

    def _turn(self, to_do: str) -> Awaited:
        """Returns the object of the wait of a call that the executions ahead of it delay."""
        return Awaited(WaitKind.SESSION, f"session {short_id(self.session_id)} {to_do}")

    def _described(self, wire: types_pb2.Session) -> SessionInfo:
        self._info = convert.session_from_wire(wire)
        self._generation = self._info.generation
        return self._info
