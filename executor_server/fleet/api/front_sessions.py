"""Sessions of all nodes together: their names, lists of them, and lost ones that no node has any more.

A node does not give a name twice. Over a fleet the front decides: one tenant's calls that give names take turns, and
each asks every node that has sessions of the tenant. A node that does not answer may have the name, so none is given
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.timestamp_pb2 import Timestamp

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import NotFound, PreconditionFailed, Principal, Reason, Unavailable
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.node_calls import RETRY_S, answers_of
from executor_server.fleet.membership import Tombstone, node_of


class SessionNames:
    """Gives each name of a tenant to one session of the fleet."""

    def __init__(self, fleet: FrontFleet) -> None:
        self._fleet = fleet
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def giving(self, principal: Principal, name: str, to: str = "") -> AsyncIterator[None]:
        """Holds a name for the block, which gives it to the session `to`, or to one that it makes.

        Raises PreconditionFailed when another session has it, Unavailable when that can't be known now.
        """
        if not name:
            yield
            return
        turn = self._turns.setdefault(principal.tenant, asyncio.Lock())
        async with turn:
            holder = await self._holder(principal, name)
            if holder is not None and holder.session_id != to and holder.state != pb.SESSION_STATE_LOST:
                raise PreconditionFailed(Reason.NAME_TAKEN, f"another session of yours has the name {name!r}")
            yield

    async def named(self, principal: Principal, name: str) -> pb.Session:
        """Returns the caller's session of a name. Raises NotFound, Unavailable."""
        holder = await self._holder(principal, name)
        if holder is None:
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session named {name!r}")
        return holder

    async def _holder(self, principal: Principal, name: str) -> pb.Session | None:
        nodes = self._fleet.members.sessions.nodes_of(principal.tenant)
        links = [link for node in nodes if (link := self._fleet.link_of(node)) is not None]
        answers = await answers_of(links, "ListSessions", service_pb.ListSessionsRequest(), principal)
        found: list[pb.Session] = []
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, Exception):
                message = f"the node {link.node}, which has sessions of yours, does not answer now"
                raise Unavailable(Reason.NODE_FENCED, message, retry_after_s=RETRY_S)
            found += [session for session in of_node(link.node, answer.sessions) if session.name == name]
        # A lost session keeps its name until another gets it.
        return min(found, key=lambda session: session.state == pb.SESSION_STATE_LOST, default=None)


def lost_session(tombstone: Tombstone) -> pb.Session:
    """Returns a lost session with the reason; nothing else is known about it."""
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
    """Returns the sessions whose ids name this node: it can't answer for another."""
    return [session for session in sessions if node_of(session.session_id) == node]


def in_order(sessions: Iterable[pb.Session]) -> list[pb.Session]:
    """Returns the sessions, oldest first."""
    return sorted(sessions, key=_age)


def owned_in_order(owned: Iterable[admin_pb.OwnedSession]) -> list[admin_pb.OwnedSession]:
    """Returns the sessions of several tenants, oldest first."""
    return sorted(owned, key=lambda each: _age(each.session))


def _age(session: Any) -> tuple[int, int, str]:
    return session.create_time.seconds, session.create_time.nanos, session.session_id
