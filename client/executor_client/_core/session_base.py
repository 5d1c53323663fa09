"""A session as the daemon last described it, and the transport of its calls. No I/O; both clients share it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from executor_api.v1 import types_pb2
from executor_client._core import convert
from executor_client._core.local import LocalPath
from executor_client._core.short_repr import ShortRepr
from executor_client._core.waiting import Awaited
from executor_client.errors import ExecutorClientError, InvalidRequest, SessionGone
from executor_client.results import Limits, PolicyRef, SessionInfo, StateManifest
from executor_client.waits import WaitKind

if TYPE_CHECKING:
    from executor_client._core.session_record import SessionRecord
    from executor_client.recording import Recorder

T = TypeVar("T")

# In a fleet, the node's name and its epoch (eight digits, the same for all its sessions) precede the random digits.
_LONG_ID = re.compile(r"([a-z0-9-]{1,24}-[0-9a-f]{8}(?=[0-9a-f]{24}$))?([0-9a-f]{24,32})")


def short_id(session_id: str, digits: int = 8) -> str:
    """Returns the start of a session's id, with this many random digits, for people."""
    found = _LONG_ID.fullmatch(session_id)
    return f"{found[1] or ''}{found[2][:digits]}" if found else session_id


def is_id(text: str) -> bool:
    """True for text in the form of a session's id; other text can be a name."""
    return _LONG_ID.fullmatch(text) is not None


def begins(session_id: str, prefix: str) -> bool:
    """True if a person who types the prefix may mean this session. The part before the random digits is optional."""
    found = _LONG_ID.fullmatch(session_id)
    return session_id.startswith(prefix) or (found is not None and found[2].startswith(prefix))


class SessionBase(ShortRepr, Generic[T]):
    """Its files, ports and processes refer to it, which keeps it alive: a session ends with the last reference to it.

    `T` is the transport of the client.
    """

    _shows = ("session_id", "name", "generation")

    def __init__(self, transport: T, info: SessionInfo) -> None:
        self._transport = transport
        self._closed = False
        self._info = info
        self._generation = info.generation
        self._restored: StateManifest | None = None
        self._record: SessionRecord | None = None
        self._was_used = False  # it has files, variables, tools or executions that a new recording would lack
        self._prelude = ""  # known to the client that created the session

    @property
    def restored(self) -> StateManifest | None:
        """What was restored of the state given to `create_session`; None without one."""
        return self._restored

    @property
    def session_id(self) -> str:
        return self._info.session_id

    @property
    def name(self) -> str:
        """Its name, unique among the caller's sessions; empty if it has none."""
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
        """The hosts that code may reach through the sandbox's proxy; empty without a network."""
        return self._info.network

    def record(self, path: LocalPath | Recorder, *, redact_tools: Iterable[str] = ()) -> Recorder:
        """Records from now on what this object does with the session, in one file; see `Recording`.

        The recording ends with the session, or with a `with` block around the returned `Recorder`, which writes the
        file. Several sessions can share a given `Recorder`, which does not end with them. `redact_tools` has patterns
        ("crm_*") of host tools whose arguments and answers are left out; what the code prints is recorded.

        A recording holds code, outputs, variables, files and answers of tools: protect it like that data. The run
        goes on if the recording can't. Raises OSError if the file can't be made, and InvalidRequest for a session
        that is recorded already.
        """
        from executor_client._core.session_record import SessionRecord
        from executor_client.recording import Recorder

        self._open()
        if self._record is not None and self._record.is_active:
            if self._record.recorder is path:
                return self._record.recorder
            raise InvalidRequest(f"this session is recorded already, in {self._record.recorder.path}")
        owns = not isinstance(path, Recorder)
        recorder = path if isinstance(path, Recorder) else Recorder(path, redact_tools=redact_tools)
        was_used = self._was_used or self._restored is not None
        self._record = SessionRecord(recorder, self._info, owns_recorder=owns, was_used=was_used, prelude=self._prelude)
        return recorder

    def _open(self) -> T:
        """Returns the transport, for a new call. Raises SessionGone after the session was closed here."""
        if self._closed:
            raise SessionGone(
                "this session was closed, by its close() or at the end of its `with` block; create another one "
                "(create_session)",
                reason="SESSION_CLOSED",
            )
        return self._transport

    def _is_lost(self, error: ExecutorClientError) -> bool:
        """True if the error is from the front of a fleet, and says that the session was lost with its node."""
        return bool(self._info.node) and error.reason == "SESSION_LOST"

    def _turn(self, to_do: str) -> Awaited:
        """Describes the wait of a call behind the session's executions."""
        return Awaited(WaitKind.SESSION, f"session {short_id(self.session_id)} {to_do}")

    def _described(self, wire: types_pb2.Session) -> SessionInfo:
        self._info = convert.session_from_wire(wire)
        self._generation = self._info.generation
        return self._info
