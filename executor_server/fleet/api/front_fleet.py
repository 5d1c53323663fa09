"""The front's part in a running fleet: its links, what it learns over them, and what is lost.

`Members` decides. This file has the clock and the links, and notifies others of changes. `Members` writes a loss to the
disk before it reports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

import structlog

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api.errors import PassedOn
from executor_server.core import (
    AddressError,
    ExecutorError,
    NotFound,
    PreconditionFailed,
    Principal,
    Reason,
    Unavailable,
)
from executor_server.fleet.api.dialing import Dialer
from executor_server.fleet.api.fleet_news import FleetNews
from executor_server.fleet.api.front_link import REFUSED_TEXT, FrontLink, LinkBroken
from executor_server.fleet.api.node_calls import RETRY_S, ask
from executor_server.fleet.membership import (
    MARGIN_S,
    TICK_S,
    Control,
    FleetUsage,
    FrontHello,
    KnownNode,
    Link,
    Lost,
    Members,
    MemberState,
    NodeHello,
    NodeReport,
    Renewal,
    Tombstone,
    Whereabouts,
    lease_clock,
    node_address,
)

FRONT_PRINCIPAL = Principal("local", "front", is_admin=True)
"""The caller of the front's own calls."""

_log = structlog.get_logger(__name__)


class FrontFleet:
    """Owns the links, and finds the node of a session."""

    def __init__(
        self,
        members: Members,
        usage: FleetUsage,
        dialer: Callable[[], Dialer],
        control: Callable[[], Control],
        news: FleetNews,
        *,
        version: str,
        wrong_retry_s: float,
    ) -> None:
        self.members = members
        self._wrong_retry_s = wrong_retry_s
        self.usage = usage
        self._dialer = dialer
        self._control = control
        self._news = news
        self._version = version
        self._links: dict[str, FrontLink] = {}  # by address
        self._by_node: dict[str, FrontLink] = {}  # those that are up
        self._begun: dict[FrontLink, Link] = {}
        self._following: dict[FrontLink, list[asyncio.Task[None]]] = {}
        self.followers: list[Callable[[FrontLink], Coroutine[None, None, None]]] = []
        """Each runs while a link is up; its end cancels it."""
        self.on_lost: list[Callable[[Lost], None]] = []
        self._wanted: frozenset[str] = frozenset()
        self._refused: frozenset[str] = frozenset()  # names
        self._change = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._working: set[asyncio.Task[None]] = set()
        self._alone_since_s = math.inf
        self.is_superseded = asyncio.Event()
        """Set for good when all nodes that are not lost have obeyed another front of this identity for a while."""
        members.on_change.append(self._changed)

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick_forever(), name="fleet tick")

    async def close(self) -> None:
        """Ends all links. Idempotent."""
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._working, return_exceptions=True)

    def follow(self, wanted: frozenset[str]) -> None:
        """Links to the nodes at these addresses. A link to any other address stays as long as it is up."""
        self._wanted = wanted
        timing = self.members.timing
        for text in sorted(wanted - self._links.keys()):
            try:
                address = node_address(text)
            except AddressError as error:
                _log.warning("fleet_address_refused", address=text, problem=str(error))
                continue
            link = FrontLink(
                address,
                self._dialer,
                self,
                interval_s=timing.report_interval_s,
                lease_s=timing.lease_s,
                wrong_retry_s=self._wrong_retry_s,
            )
            self._links[text] = link
            link.start()
        self._drop_unwanted()

    def refuse(self, nodes: frozenset[str]) -> None:
        """Refuses these nodes and no others: closes their links at once, and tries allowed ones again."""
        changed, self._refused = self._refused ^ nodes, nodes
        if changed:
            _log.warning("fleet_nodes_refused", nodes=sorted(nodes))
        for link in self._links.values():
            if link.node in changed:
                self._spawn(link.restart())

    def is_refused(self, node: str) -> bool:
        return node in self._refused

    def _drop_unwanted(self) -> None:
        for text in [text for text, link in self._links.items() if text not in self._wanted and not link.is_up]:
            self._spawn(self._links.pop(text).close())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._own(asyncio.create_task(work))

    def _own(self, task: asyncio.Task[None]) -> None:
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    # -- time ------------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick()
            except sqlite3.Error as error:
                _log.error("fleet_store_failed", error=str(error))  # nothing is lost yet; the next tick tries again
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end this for good
                _log.exception("fleet_tick_failed")

    def _tick(self) -> None:
        now_s = lease_clock()
        self.usage.prune(now_s)
        for lost in self.members.tick(now_s):
            self.usage.lost(lost.node, now_s)
            _log.error("fleet_node_lost", node=lost.node, epoch=lost.epoch, sessions=len(lost.tombstones))
            self._news.node_lost(lost)
            for notify in self.on_lost:
                notify(lost)
            if (link := self._by_node.get(lost.node)) is not None:  # its open calls would go on with lost sessions
                self._spawn(link.restart())
        self._note_superseded(now_s)
        self._drop_unwanted()
        self._news.fleet_seen([self.state_of(member) for member in self.members])

    def _note_superseded(self, now_s: float) -> None:
        """A single node may lie, and does not end a front that has others."""
        there = [each for each in self.members if self.state_of(each) != "lost" and not self.is_refused(each.name)]
        if not there or not all(each.is_taken for each in there):
            self._alone_since_s = math.inf
            return
        self._alone_since_s = min(self._alone_since_s, now_s)
        if now_s - self._alone_since_s >= self.members.timing.lease_s + MARGIN_S:
            self.is_superseded.set()

    # -- for the links -------------------------------------------------------------------------------------------

    @property
    def control(self) -> Control:
        return self._control()

    def hello_for(self, node: str) -> FrontHello:
        return replace(self.members.hello(node), program_version=self._version)

    def linked(self, link: FrontLink, hello: NodeHello) -> None:
        """Raises NodeRefused, LinkBroken."""
        try:
            begun = self.members.linked(hello, lease_clock())
        except sqlite3.Error as error:
            raise LinkBroken(f"the front can't store its epoch: {error}") from error
        self._begun[link] = begun
        self._by_node[hello.node] = link
        self._following[link] = [asyncio.create_task(follow(link)) for follow in self.followers]
        for task in self._following[link]:
            self._own(task)
        self._news.node_linked(hello.node, str(link.address), hello.epoch)

    def reported(self, link: FrontLink, report: NodeReport) -> Renewal | None:
        """Raises NodeRefused."""
        now_s = lease_clock()
        if not self.members.reported(self._begun[link], report, now_s):
            return None
        for session_id in self.members.take_surplus(link.node, now_s):
            self._spawn(self._end_surplus(link, session_id))
        return Renewal(report.sequence, self.usage.reported(link.node, report.tenants))

    async def _end_surplus(self, link: FrontLink, session_id: str) -> None:
        """Ends a session whose request was answered by another node."""
        try:
            await ask(link, "KillSession", admin_pb.KillSessionRequest(session_id=session_id), FRONT_PRINCIPAL, None)
            _log.warning("fleet_surplus_session_ended", session_id=session_id)
        except (ExecutorError, PassedOn) as error:  # `Members` brings it up again
            _log.warning("fleet_surplus_session_left", session_id=session_id, problem=str(error))

    def unlinked(self, link: FrontLink) -> None:
        for task in self._following.pop(link, ()):
            task.cancel()
        begun = self._begun.pop(link, None)
        if self._by_node.get(link.node) is link:
            del self._by_node[link.node]
            self._news.node_unlinked(link.node)
        if begun is not None:
            self.members.unlinked(begun)

    def superseded(self, node: str) -> None:
        member = self.members.get(node)
        if member is not None and not member.is_taken:
            _log.error("fleet_node_obeys_another_front", node=node)
        self.members.superseded(node)

    def link_of(self, node: str) -> FrontLink | None:
        """Returns the link to a node, or None."""
        return self._by_node.get(node)

    # -- changes ---------------------------------------------------------------------------------------------------

    def _changed(self, _member: KnownNode) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def settled(self) -> None:
        """Returns when all sessions of an earlier front are known, or their nodes had enough time to report."""
        while not self.members.is_settled(lease_clock()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._change.wait()

    # -- finding sessions ----------------------------------------------------------------------------------------------

    def links(self) -> list[FrontLink]:
        """Returns the links to all nodes that have reported, by their names."""
        ready = (member.name for member in self.members if member.is_ready)
        return [link for node in sorted(ready) if (link := self._by_node.get(node)) is not None]

    @property
    def expected(self) -> int:
        """The number of nodes that could answer if all were linked: the ones that are neither lost nor refused."""
        return sum(self.state_of(member) not in ("lost", "refused") for member in self.members)

    def find(self, principal: Principal, session_id: str, *, any_tenant: bool = False) -> FrontLink | Tombstone:
        """Returns the link to a session's node, or the tombstone of a lost one. Raises NotFound, Unavailable."""
        where, member, tombstone = self.members.where(session_id, lease_clock())
        known = self.members.sessions.find(session_id)
        owner = tombstone.tenant if tombstone is not None else known.tenant if known is not None else None
        if owner not in (None, principal.tenant) and not any_tenant:
            raise no_session(session_id)
        if tombstone is not None:
            return tombstone
        if where is Whereabouts.LOST and member is not None:
            # Its tenant is not known any more; that there was such an epoch is no secret.
            reason = f"node {member.name} was lost, or has ended its sandboxes"
            return Tombstone(session_id, principal.tenant, "", reason, time.time())
        link = self._by_node.get(member.name) if where is Whereabouts.NODE and member is not None else None
        if link is not None:
            return link
        if where is Whereabouts.UNKNOWN:
            raise no_session(session_id)
        name = f"the node {member.name}" if member is not None else "its node"
        raise Unavailable(Reason.NODE_FENCED, f"{name} is not linked now; it may come back", retry_after_s=RETRY_S)

    def route(self, principal: Principal, session_id: str, method: str) -> FrontLink:
        """Returns the link to a session's node. Raises ExecutorError."""
        is_for_admins = method.startswith("/executor_api.v1.AdminService/") or method.endswith("/GetRecording")
        found = self.find(principal, session_id, any_tenant=is_for_admins and principal.is_admin)
        if isinstance(found, Tombstone):
            raise lost(found)
        return found

    # -- for operators ---------------------------------------------------------------------------------------------

    def state_of(self, member: KnownNode) -> str:
        """Returns a node's state, by its name in `NodeState`."""
        if self.is_refused(member.name):
            return "refused"
        if member.is_taken:  # it obeys a later start of this front, or a copy of it
            return "refused"
        if member.state is MemberState.LOST:
            return "lost"
        if member.state is MemberState.ABSENT:
            return "silent"
        report = member.report
        if member.state is MemberState.UNSEEN or not member.is_ready or report is None:
            return "connecting"
        if report.control_fingerprint != self.control.fingerprint:
            return "waiting"
        return "draining" if report.draining else "serving"

    def address_of(self, node: str) -> str:
        """Returns the address of the link to a node; empty when it is not linked."""
        link = self._by_node.get(node)
        return str(link.address) if link is not None else ""

    def problem_of(self, member: KnownNode) -> str:
        """Returns why a node gets no sessions, for an operator; empty when it does."""
        if self.is_refused(member.name):
            return REFUSED_TEXT
        report, link = member.report, self._by_node.get(member.name)
        if link is None:
            tried = (each.problem for each in self._links.values() if each.node == member.name and each.problem)
            return next(tried, "")
        return report.control_problem if report is not None else ""

    def strange_links(self) -> list[FrontLink]:
        """Returns the links that are not up, at addresses where no known node was found."""
        return [link for link in self._links.values() if not link.is_up and self.members.get(link.node) is None]


def no_session(session_id: str) -> NotFound:
    return NotFound(Reason.SESSION_NOT_FOUND, f"there is no session {session_id!r}")


def lost(tombstone: Tombstone) -> PreconditionFailed:
    return PreconditionFailed(Reason.SESSION_LOST, f"the session is lost: {tombstone.reason}")
