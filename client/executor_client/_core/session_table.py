"""The sessions of a daemon as its AdminService reports them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from executor_api.v1 import admin_service_pb2 as admin_pb

SESSIONS_MAX = 100_000
"""Sessions in a table, many more than a daemon has. Others are left out."""


class SessionTable:
    """Takes the messages of WatchSessions. `views` has the sessions by id, ended ones too.

    A stream begins with all sessions. Until they have arrived, `views` has those of the stream before.
    """

    def __init__(self) -> None:
        self._views: dict[str, admin_pb.SessionView] = {}
        self._arriving: dict[str, admin_pb.SessionView] | None = None

    @property
    def views(self) -> Mapping[str, admin_pb.SessionView]:
        return self._views

    def begin(self) -> None:
        """Notes that a new stream begins."""
        self._arriving = {}

    def take(self, message: admin_pb.WatchSessionsResponse) -> bool:
        """Takes the next message of the stream. Returns True once all sessions of the stream are known."""
        table = self._views if self._arriving is None else self._arriving
        for view in message.sessions:
            session_id = view.owned.session.session_id
            if session_id in table or len(table) < SESSIONS_MAX:
                table[session_id] = view
        for session_id in message.forgotten_ids:
            table.pop(session_id, None)
        if self._arriving is not None and message.complete:
            self._views, self._arriving = self._arriving, None
        return self._arriving is None
