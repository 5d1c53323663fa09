"""Names of sessions over all nodes: a front gives each name of a tenant to one session.

A node keeps a name from being given twice on that node. What is exact over a fleet is decided here: calls that give
names take turns, tenant by tenant, and each asks every node that has sessions of the tenant. A node that does not
answer may have the name, so nothing is given meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import NotFound, PreconditionFailed, Principal, Reason, Unavailable
from executor_server.fleet.api.asking import answers_of
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_sessions import of_node
from executor_server.fleet.api.node_calls import RETRY_S


class FrontNames:
    """Finds sessions of a fleet by their names."""

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
