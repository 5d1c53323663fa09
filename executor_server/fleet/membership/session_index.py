"""The sessions that a front knows: by id, by request, counted by tenant; creations under way; lost ones.

Counts are exact. A session counts from the reservation of its creation until its node reports its end or is lost. The
answer to a creation and the node's report may arrive in any order; the session is counted once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from executor_server.fleet.membership.messages import NodeSession
from executor_server.fleet.membership.store import MAX_TOMBSTONES, Tombstone

Request = tuple[str, str]
"""Tenant and request_id of a CreateSession."""


@dataclass(slots=True)
class KnownSession:
    """A session on a node. `is_lost`: its node says so; the front passes calls on, and the node says why."""

    session_id: str
    node: str
    tenant: str
    request_id: str
    is_lost: bool
    is_reported: bool  # False: so far only the answer to its creation says that it exists
    since_s: float
    is_placed: bool = False  # it answers a creation that this front has placed on its node

    @property
    def request(self) -> Request:
        return self.tenant, self.request_id


@dataclass(eq=False, slots=True)
class Creation:
    """A creation under way that this front has reserved. `node`: the one that was asked last; empty: none yet."""

    tenant: str
    request_id: str
    node: str = ""
    epoch: int = 0  # the epoch of that node
    is_counted: bool = True

    @property
    def request(self) -> Request:
        return self.tenant, self.request_id


class SessionIndex:
    """Counts for `Members`, which decides."""

    def __init__(self) -> None:
        self._sessions: dict[str, KnownSession] = {}
        self._by_request: dict[Request, KnownSession] = {}
        self._creations: dict[Request, Creation] = {}
        self._foreign: dict[Request, str] = {}  # node, of creations that an earlier front has begun
        self._counts: dict[str, int] = {}  # by tenant
        self._nodes: dict[str, dict[str, int]] = {}  # sessions by tenant and node, lost ones included
        self._tombstones: OrderedDict[str, Tombstone] = OrderedDict()
        self._lost_requests: dict[Request, Tombstone] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def count(self, tenant: str) -> int:
        """Returns the sessions of a tenant, those that are being created included."""
        return self._counts.get(tenant, 0)

    def count_all(self) -> int:
        return sum(self._counts.values())

    def tenants(self) -> list[str]:
        return sorted(self._counts)

    def find(self, session_id: str) -> KnownSession | None:
        return self._sessions.get(session_id)

    def find_request(self, request: Request) -> KnownSession | None:
        return self._by_request.get(request)

    def nodes_of(self, tenant: str) -> list[str]:
        """Returns the nodes that have sessions of a tenant, sorted."""
        return sorted(self._nodes.get(tenant, ()))

    # -- sessions --------------------------------------------------------------------------------------------------

    def add(self, session: KnownSession) -> KnownSession | None:
        """Adds or replaces a session. Returns the other node's session that a request has made too, if one is surplus.

        Only a session that this front has placed makes another one surplus, and is never surplus itself: a node can
        report a session for any request, and must not thereby end the session of another node.
        """
        before = self.remove(session.session_id)
        session.is_placed = session.is_placed or (before is not None and before.is_placed)
        self._sessions[session.session_id] = session
        nodes = self._nodes.setdefault(session.tenant, {})
        nodes[session.node] = nodes.get(session.node, 0) + 1
        creation = self._creations.get(session.request)
        if creation is not None and creation.is_counted and creation.node == session.node:
            creation.is_counted = False
            self._uncount(session.tenant)
        if self._foreign.get(session.request) == session.node:
            self.end_foreign(session.request)
        if not session.is_lost:
            self._count(session.tenant)
        if not session.request_id:
            return None
        first = self._by_request.setdefault(session.request, session)
        if first.node == session.node:
            self._by_request[session.request] = session  # a node answers for its own repeated requests
            return None
        if session.is_placed:
            self._by_request[session.request] = session
            return first
        return session if first.is_placed else None

    def remove(self, session_id: str) -> KnownSession | None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return None
        if self._by_request.get(session.request) is session:
            del self._by_request[session.request]
        nodes = self._nodes[session.tenant]
        nodes[session.node] -= 1
        if not nodes[session.node]:
            del nodes[session.node]
            if not nodes:
                del self._nodes[session.tenant]
        if not session.is_lost:
            self._uncount(session.tenant)
        return session

    # -- creations -------------------------------------------------------------------------------------------------

    def creation(self, request: Request) -> Creation | None:
        return self._creations.get(request)

    def foreign(self, request: Request) -> str | None:
        """Returns the node on which an earlier front has begun this creation."""
        return self._foreign.get(request)

    def begin(self, creation: Creation) -> None:
        assert creation.request not in self._creations
        self._creations[creation.request] = creation
        self._count(creation.tenant)

    def place(self, creation: Creation, node: str, epoch: int) -> None:
        """Notes the next node to ask. The creation counts again if the session of its request is lost."""
        creation.node, creation.epoch = node, epoch
        if not creation.is_counted and creation.request not in self._by_request:
            creation.is_counted = True
            self._count(creation.tenant)

    def end(self, creation: Creation) -> None:
        """Ends a creation, with or without a session. Idempotent."""
        if self._creations.get(creation.request) is creation:
            del self._creations[creation.request]
            if creation.is_counted:
                creation.is_counted = False
                self._uncount(creation.tenant)

    def set_foreign(self, node: str, before: Iterable[Request], creating: Iterable[NodeSession]) -> frozenset[Request]:
        """Replaces the creations that a node reports and this front has not begun. Returns them."""
        for request in before:
            if self._foreign.get(request) == node:
                self.end_foreign(request)
        now = set()
        for each in creating:
            request = (each.tenant, each.request_id)
            if request in self._creations or request in self._by_request or request in self._foreign:
                continue
            self._foreign[request] = node
            self._count(each.tenant)
            now.add(request)
        return frozenset(now)

    def end_foreign(self, request: Request) -> None:
        if self._foreign.pop(request, None) is not None:
            self._uncount(request[0])

    # -- lost sessions ---------------------------------------------------------------------------------------------

    def bury(self, tombstones: Iterable[Tombstone]) -> None:
        for tombstone in tombstones:
            self.remove(tombstone.session_id)
            self._tombstones[tombstone.session_id] = tombstone
            self._tombstones.move_to_end(tombstone.session_id)
            if tombstone.request_id:
                self._lost_requests[tombstone.tenant, tombstone.request_id] = tombstone
        while len(self._tombstones) > MAX_TOMBSTONES:
            self.unearth(next(iter(self._tombstones)))

    def unearth(self, session_id: str) -> Tombstone | None:
        """Forgets a lost session."""
        tombstone = self._tombstones.pop(session_id, None)
        if tombstone is not None:
            request = tombstone.tenant, tombstone.request_id
            if self._lost_requests.get(request) is tombstone:
                del self._lost_requests[request]
        return tombstone

    def prune(self, before_unix_s: float) -> None:
        """Forgets the sessions that were lost before this time."""
        while self._tombstones and (first := next(iter(self._tombstones.values()))).lost_unix_s < before_unix_s:
            self.unearth(first.session_id)

    def tombstone(self, session_id: str) -> Tombstone | None:
        return self._tombstones.get(session_id)

    def lost_request(self, request: Request) -> Tombstone | None:
        return self._lost_requests.get(request)

    def tombstones(self) -> Iterator[Tombstone]:
        """Yields those of all tenants, the newest first."""
        return reversed(self._tombstones.values())

    def tombstones_of(self, tenant: str) -> list[Tombstone]:
        return [each for each in self._tombstones.values() if each.tenant == tenant]

    # -- counts ----------------------------------------------------------------------------------------------------

    def _count(self, tenant: str) -> None:
        self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def _uncount(self, tenant: str) -> None:
        left = self._counts[tenant] - 1
        if left:
            self._counts[tenant] = left
        else:
            del self._counts[tenant]
