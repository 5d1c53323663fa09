"""Sessions as a front shows them: lost ones that no node has any more, and lists of several nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.fleet.membership import Tombstone, node_of


def lost_session(tombstone: Tombstone) -> pb.Session:
    """Returns a session that is lost, with the reason; nothing else of it is known."""
    time = Timestamp()
    time.FromMilliseconds(round(tombstone.lost_unix_s * 1000))
    return pb.Session(
        session_id=tombstone.session_id,
        state=pb.SESSION_STATE_LOST,
        lost_reason=tombstone.reason,
        node=node_of(tombstone.session_id) or "",
        expire_time=time,
    )


def of_node(node: str, sessions: Iterable[pb.Session]) -> list[pb.Session]:
    """Returns those that are the node's own by their ids: it can't answer for another node."""
    return [session for session in sessions if node_of(session.session_id) == node]


def in_order(sessions: Iterable[pb.Session]) -> list[pb.Session]:
    """Returns the sessions, oldest first."""
    return sorted(sessions, key=_age)


def owned_in_order(owned: Iterable[admin_pb.OwnedSession]) -> list[admin_pb.OwnedSession]:
    """Returns the sessions of several tenants, oldest first."""
    return sorted(owned, key=lambda each: _age(each.session))


def _age(session: Any) -> tuple[int, int, str]:
    return session.create_time.seconds, session.create_time.nanos, session.session_id
