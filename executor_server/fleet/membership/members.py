"""The front's knowledge of its nodes: which are linked, which sessions there are, and which are lost.

Theory of operation. `linked` begins a link with a node's hello, `reported` takes a report, and `tick` declares sessions
lost when their node has not reported for too long. All other knowledge comes from the reports. The first report on a
link is complete, so a restarted front knows everything as soon as its nodes have linked. Only statements that can't be
taken back are stored (store.py).

Invariants; those of heartbeat.py are the other half:

1. Late enough. A node is lost when `lease_s + MARGIN_S` have passed since its last report, and since this front began.
2. Durable first. The epoch of a node is on the disk before its first renewal; lost_epoch and the tombstones are on the
   disk before any session of theirs is declared lost. When writing fails, nothing is lost yet, and nothing is renewed.
3. Lost is final. No epoch up to lost_epoch is linked, and all sessions in a report are of the epoch of its link, as
   their ids say. lost_epoch never falls.
4. One instance. While a node is not lost, no other state directory can link under its name, and no lower epoch. When
   it is lost, lost_epoch is the highest epoch seen, so a node with an old state directory gets an epoch above all.
5. One link. A report on any link but the present one renews nothing. Sequences rise by one on a link; a gap ends it.
6. One front. A node may obey a later start of this front, or a front with a copy of its state directory. Then this
   front does not declare it lost, however long it is silent. A node that lies about it keeps only its own sessions
   from being lost.
7. Checked before changed. A report that is refused changes nothing but its link, and renews nothing.
8. Bounded. A node can make the front remember at most `MAX_NODE_SESSIONS` sessions, whatever it reports.
9. Placed is kept. Of two nodes' sessions of one request, only one that this front has placed makes the other surplus:
   no report of a node ends a session on another node.

After a pause of its own process, a front finds unread reports. `tick` notices the gap, and waits before it
decides.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from executor_server.fleet.membership.ids import epoch_of, node_of
from executor_server.fleet.membership.messages import MAX_NODE_SESSIONS, PROTOCOL, FrontHello, NodeHello, NodeReport
from executor_server.fleet.membership.session_index import KnownSession, Request, SessionIndex
from executor_server.fleet.membership.store import TOMBSTONE_TIME_S, FleetStore, StoredNode, Tombstone
from executor_server.fleet.membership.timing import MARGIN_S, NodeRefused, Timing

MAX_NODES = 4096
TICK_S = 0.25
"""Seconds between two calls of `tick`."""
STALL_S = 1.0
"""A longer gap between two ticks means that the front was stopped. Its nodes then get a whole lease again to link and
report."""
MAX_EPOCH_STEP = 2**20
"""Limits how far one hello can raise an epoch, so that a node can't use up the epochs of its name."""
HOLD_S = 2.0
"""Seconds that a starting front waits for the first reports of its nodes before it places sessions."""
_MAX_CLOSED_EARLY = 1024


class MemberState(enum.Enum):
    UNSEEN = "unseen"  # an earlier start of the front knew it; it has not linked since
    LINKED = "linked"
    ABSENT = "absent"  # its link broke; its lease may hold
    LOST = "lost"


@dataclass(eq=False)
class Link:
    """A link with a node, for `Members.reported` and `Members.unlinked`."""

    node: str
    began_s: float
    sequence: int = 0  # the last report's


@dataclass(eq=False)
class KnownNode:
    """A node as its front knows it. Only `Members` changes it."""

    name: str
    instance: str
    epoch: int
    lost_epoch: int
    state: MemberState
    renewed_s: float  # the time at which its last renewal was computed
    hello: NodeHello | None = None
    link: Link | None = None
    report: NodeReport | None = None  # the last one in this epoch, without its lists of sessions and tenants
    sessions: set[str] = field(default_factory=set)
    unreported: dict[str, float] = field(default_factory=dict)  # sessions known by their answer alone, and since when
    creating: set[Request] = field(default_factory=set)  # by this front, without a session yet
    foreign: frozenset[Request] = frozenset()  # creations that an earlier front has begun
    has_reported: bool = False  # since the front's start
    is_taken: bool = False  # it obeys a later start of this front, or a copy of it
    is_full: bool = False  # it has refused a creation since its last report
    closed_early: set[str] = field(default_factory=set)  # sessions that ended before their creation was answered
    # Sessions whose request another node has answered, and the times at which they are due to be ended.
    surplus: dict[str, float] = field(default_factory=dict)

    @property
    def stored(self) -> StoredNode:
        return StoredNode(self.name, self.instance, self.epoch, self.lost_epoch)

    @property
    def used(self) -> int:
        """The number of sessions and creations."""
        return len(self.sessions) + len(self.creating) + len(self.foreign)

    @property
    def is_ready(self) -> bool:
        """True when it has reported on its present link."""
        return self.state is MemberState.LINKED and self.link is not None and self.link.sequence > 0


@dataclass(frozen=True)
class Lost:
    """The sessions of a node that were lost together."""

    node: str
    epoch: int
    reason: str
    tombstones: tuple[Tombstone, ...]


class Whereabouts(enum.Enum):
    NODE = "node"  # ask its node; only that knows whether the session exists
    WAIT = "wait"  # its node is not linked at the moment
    LOST = "lost"
    UNKNOWN = "unknown"


class Members:
    """The nodes of one front. Times are of one clock that never stops; `unix_s` is the date at `now_s`."""

    def __init__(self, store: FleetStore, timing: Timing, now_s: float, unix_s: float) -> None:
        """Begins the front's next term. Raises StateDirError, sqlite3.Error, ValueError."""
        timing.check()
        self.timing = timing
        self.sessions = SessionIndex()
        self.on_change: list[Callable[[KnownNode], None]] = []
        self.on_first_report: list[Callable[[NodeReport, float], None]] = []
        self._store = store
        self._instance = secrets.token_hex(16)
        self._start = store.begin()
        self._began_s = self._ticked_s = now_s
        self._ahead_s = unix_s - now_s  # fixed: a later change of the date neither keeps nor drops a lost session
        self._not_before_s = now_s + timing.lease_s + MARGIN_S
        self._unseen_until_s = self._not_before_s + timing.fence_s
        self._losses: list[Lost] = []
        self._members: dict[str, KnownNode] = {}
        for each in store.nodes():
            state = MemberState.LOST if each.epoch <= each.lost_epoch else MemberState.UNSEEN
            self._members[each.node] = KnownNode(each.node, each.instance, each.epoch, each.lost_epoch, state, now_s)
        self.sessions.bury(store.tombstones())
        self.sessions.prune(unix_s - TOMBSTONE_TIME_S)

    @property
    def front_id(self) -> str:
        return self._start.front_id

    @property
    def term(self) -> int:
        return self._start.term

    def __iter__(self) -> Iterator[KnownNode]:
        return iter(self._members.values())

    def get(self, node: str) -> KnownNode | None:
        return self._members.get(node)

    def is_settled(self, now_s: float) -> bool:
        """Returns True when all nodes of an earlier start have reported, or have had the time for it.

        Until then creations wait: a session that an earlier front placed may be unknown, and would be made twice.
        """
        if now_s >= self._began_s + HOLD_S:
            return True
        return all(each.has_reported or each.state is MemberState.LOST for each in self._members.values())

    # -- links -----------------------------------------------------------------------------------------------------

    def hello(self, node: str = "") -> FrontHello:
        """Returns the front's hello to a node; without a name, to a node that the front does not know yet."""
        member = self._members.get(node)
        timing = self.timing
        return FrontHello(
            self._start.front_id,
            self._start.term,
            timing.report_interval_s,
            timing.lease_s,
            timing.fence_s,
            lost_epoch=member.lost_epoch if member is not None else 0,
            instance=self._instance,
        )

    def linked(self, hello: NodeHello, now_s: float) -> Link:
        """Begins a link. Raises NodeRefused, sqlite3.Error; the caller closes the connection.

        With `NodeRefused.is_stale`, dial again with `hello(node)`, so that the node ends what is lost.
        """
        if hello.protocol != PROTOCOL:
            text = f"the node speaks version {hello.protocol} of the fleet's protocol, the front {PROTOCOL}"
            raise NodeRefused(text)
        member = self._members.get(hello.node)
        known = member.epoch if member is not None else 0
        if hello.epoch > known + MAX_EPOCH_STEP:
            raise NodeRefused(f"epoch {hello.epoch} can't follow epoch {known}")
        if member is None:
            member = self._new_member(hello, now_s)
        else:
            self._check_known(member, hello, now_s)
            self._enter_epoch(member, hello, now_s)
        member.state = MemberState.LINKED
        member.is_taken = False
        member.hello = hello
        member.link = Link(hello.node, now_s)
        self.changed(member)
        return member.link

    def unlinked(self, link: Link) -> None:
        """Notes that a link is over; a link that was replaced changes nothing."""
        member = self._members.get(link.node)
        if member is not None and member.link is link:
            member.link = None
            if member.state is MemberState.LINKED:
                member.state = MemberState.ABSENT
            self.changed(member)

    def superseded(self, node: str) -> None:
        """Notes that a node obeys another process with this front's identity, and has refused a link."""
        member = self._members.get(node)
        if member is not None:
            member.is_taken = True
            self.changed(member)

    def _new_member(self, hello: NodeHello, now_s: float) -> KnownNode:
        self._make_room()
        member = KnownNode(hello.node, hello.instance, hello.epoch, hello.epoch - 1, MemberState.LINKED, now_s)
        self._store.write_nodes([member.stored])
        self._members[hello.node] = member
        return member

    def _check_known(self, member: KnownNode, hello: NodeHello, now_s: float) -> None:
        if hello.instance != member.instance and member.state is not MemberState.LOST:
            raise NodeRefused(f"another node {hello.node} is a member, with another state directory; give this a name")
        if hello.epoch <= member.lost_epoch:
            text = f"the sessions of epoch {hello.epoch} were declared lost, all up to epoch {member.lost_epoch}"
            raise NodeRefused(text, is_stale=True)
        if hello.epoch < member.epoch:
            raise NodeRefused(f"epoch {hello.epoch} is over: the node had epoch {member.epoch}")
        link = member.link
        if link is not None and now_s < max(link.began_s, member.renewed_s) + 2 * self.timing.report_interval_s:
            raise NodeRefused(f"node {hello.node} is linked already")

    def _enter_epoch(self, member: KnownNode, hello: NodeHello, now_s: float) -> None:
        """A node with a higher epoch has ended its earlier sessions, so these are lost."""
        if (hello.epoch, hello.instance) != (member.epoch, member.instance):
            old = replace(member.stored, instance=hello.instance, epoch=hello.epoch, lost_epoch=hello.epoch - 1)
            tombstones = self._tombstones_of(member, f"node {member.name} has ended its sandboxes", now_s)
            self._store.write_nodes([old], tombstones)
            self._forget_sessions(member, tombstones)
            member.instance, member.epoch, member.lost_epoch = old.instance, old.epoch, old.lost_epoch
            member.renewed_s = now_s
        elif member.state is MemberState.UNSEEN:
            member.renewed_s = now_s

    def _make_room(self) -> None:
        """Forgets the node that has been lost for longest when there are too many."""
        if len(self._members) < MAX_NODES:
            return
        lost = [each for each in self._members.values() if each.state is MemberState.LOST]
        if not lost:
            raise NodeRefused(f"the front has {MAX_NODES} nodes already")
        oldest = min(lost, key=lambda each: each.renewed_s)
        self._store.remove_node(oldest.name)
        del self._members[oldest.name]

    # -- reports ---------------------------------------------------------------------------------------------------

    def reported(self, link: Link, report: NodeReport, now_s: float) -> bool:
        """Takes a report. Returns True if it must be answered with a renewal, False for a repeated one.

        Raises NodeRefused; the link is over then, and the caller closes the connection.
        """
        member = self._members.get(link.node)
        if member is None or member.link is not link:
            raise NodeRefused("this link is over; begin another one")
        if link.sequence and report.sequence <= link.sequence:
            return False
        try:
            self._check(member, link, report)
        except NodeRefused:
            self.unlinked(link)
            raise
        link.sequence = report.sequence
        member.renewed_s = now_s
        member.is_full = False
        if not member.has_reported:
            member.has_reported = True
            for notify in self.on_first_report:
                notify(report, now_s)
        self._apply(member, link, report, now_s)
        member.report = replace(report, opened=(), closed=(), creating=(), tenants={})
        self.changed(member)
        return True

    def _check(self, member: KnownNode, link: Link, report: NodeReport) -> None:
        if report.epoch != member.epoch:
            raise NodeRefused(f"a report of epoch {report.epoch} on a link of epoch {member.epoch}")
        if not link.sequence and not report.full:
            raise NodeRefused("the first report on a link must be full")
        if link.sequence and report.sequence != link.sequence + 1:
            raise NodeRefused(f"report {report.sequence} came after report {link.sequence}: some are missing")
        fresh = 0
        for each in report.opened:
            if epoch_of(each.session_id) != report.epoch:
                raise NodeRefused("opened: the id of a session must name the epoch of the report")
            known = self.sessions.find(each.session_id)
            fresh += known is None
            if known is not None and known.request != (each.tenant, each.request_id):
                raise NodeRefused(f"session {each.session_id} has changed its owner")
        if len(member.sessions) + fresh > MAX_NODE_SESSIONS:
            raise NodeRefused(f"more than {MAX_NODE_SESSIONS} sessions")

    def _apply(self, member: KnownNode, link: Link, report: NodeReport, now_s: float) -> None:
        for each in report.opened:
            self.add_session(
                member,
                KnownSession(
                    each.session_id,
                    member.name,
                    each.tenant,
                    each.request_id,
                    each.lost,
                    is_reported=True,
                    since_s=now_s,
                ),
            )
        if report.full:
            reported = {each.session_id for each in report.opened}
            for session_id in member.sessions - reported:
                known = self.sessions.find(session_id)
                # One that was made after the link began may be younger than the report, and comes with a later one.
                if known is None or known.is_reported or known.since_s < link.began_s:
                    self._remove(member, session_id)
        for session_id in report.closed:
            if session_id in member.sessions:
                self._remove(member, session_id)
            elif member.creating and len(member.closed_early) < _MAX_CLOSED_EARLY:
                member.closed_early.add(session_id)
        # A session that began and ended between two reports is in none.
        oldest_s = now_s - self.timing.lease_s
        for session_id in [each for each, since_s in member.unreported.items() if since_s < oldest_s]:
            self._remove(member, session_id)
        member.foreign = self.sessions.set_foreign(member.name, member.foreign, report.creating)

    def add_session(self, member: KnownNode, session: KnownSession) -> None:
        """Adds a session that its node has reported, or has made for a creation."""
        surplus = self.sessions.add(session)
        if surplus is not None:
            self._members[surplus.node].surplus.setdefault(surplus.session_id, 0.0)
        member.sessions.add(session.session_id)
        if session.is_reported:
            member.unreported.pop(session.session_id, None)
        else:
            member.unreported[session.session_id] = session.since_s
        creation = self.sessions.creation(session.request)
        if creation is not None and creation.node == member.name:
            member.creating.discard(session.request)

    def _remove(self, member: KnownNode, session_id: str) -> None:
        member.sessions.discard(session_id)
        member.surplus.pop(session_id, None)
        member.unreported.pop(session_id, None)
        self.sessions.remove(session_id)

    # -- losses ----------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Lost]:
        """Declares sessions lost when the leases of their nodes are over. Call it every `TICK_S`.

        Raises sqlite3.Error when a loss can't be written: the next call tries again, and returns the earlier ones too.
        """
        if now_s - self._ticked_s > STALL_S:
            self._not_before_s = max(self._not_before_s, now_s + self.timing.lease_s + MARGIN_S)
        self._ticked_s = now_s
        self.sessions.prune(self._ahead_s + now_s - TOMBSTONE_TIME_S)
        if now_s >= self._not_before_s:
            for member in [each for each in self._members.values() if self._is_over(each, now_s)]:
                self._losses.append(self._lose(member, now_s))
        losses, self._losses = self._losses, []
        return losses

    def _is_over(self, member: KnownNode, now_s: float) -> bool:
        if member.state is MemberState.LOST or member.is_taken:
            return False
        if member.state is MemberState.UNSEEN:
            # Its sessions are unknown, and until the node has ended them it may come back with all of them.
            return now_s >= self._unseen_until_s
        return now_s >= member.renewed_s + self.timing.lease_s + MARGIN_S

    def _lose(self, member: KnownNode, now_s: float) -> Lost:
        reason = f"node {member.name} could not be reached for {now_s - member.renewed_s:.1f} s"
        tombstones = self._tombstones_of(member, reason, now_s)
        self._store.write_nodes([replace(member.stored, lost_epoch=member.epoch)], tombstones)
        member.lost_epoch = member.epoch
        member.state = MemberState.LOST
        member.link = None
        self._forget_sessions(member, tombstones)
        self.changed(member)
        return Lost(member.name, member.epoch, reason, tombstones)

    def _tombstones_of(self, member: KnownNode, reason: str, now_s: float) -> tuple[Tombstone, ...]:
        found = [each for each in map(self.sessions.find, sorted(member.sessions)) if each is not None]
        lost_unix_s = self._ahead_s + now_s
        return tuple(Tombstone(each.session_id, *each.request, reason, lost_unix_s) for each in found)

    def _forget_sessions(self, member: KnownNode, tombstones: tuple[Tombstone, ...]) -> None:
        self.sessions.bury(tombstones)
        member.sessions.clear()
        member.surplus.clear()
        member.unreported.clear()
        member.creating.clear()
        member.closed_early.clear()
        member.foreign = self.sessions.set_foreign(member.name, member.foreign, ())
        member.report = None

    # -- finding ---------------------------------------------------------------------------------------------------

    def where(self, session_id: str, now_s: float) -> tuple[Whereabouts, KnownNode | None, Tombstone | None]:
        """Returns where a call for a session goes: to its node if that is linked, or nowhere if the session is lost.

        A lost session has no tombstone if this front never knew or has forgotten it; then its node is returned.
        """
        tombstone = self.sessions.tombstone(session_id)
        if tombstone is not None:
            return Whereabouts.LOST, None, tombstone
        node = node_of(session_id)
        if node is None:
            return Whereabouts.UNKNOWN, None, None
        member = self._members.get(node)
        if member is None:
            return (Whereabouts.UNKNOWN if now_s >= self._not_before_s else Whereabouts.WAIT), None, None
        if epoch_of(session_id) <= member.lost_epoch:
            return Whereabouts.LOST, member, None
        if member.state is MemberState.LOST:
            return Whereabouts.UNKNOWN, member, None
        return (Whereabouts.NODE if member.state is MemberState.LINKED else Whereabouts.WAIT), member, None

    def take_surplus(self, node: str, now_s: float) -> list[str]:
        """Returns sessions of a node that the caller must delete: another node has answered their requests since.

        That happens when the node was away for `HOLD_S` after a front's start and a client repeated its request. Each
        session is returned again after a lease until it is gone. If the front starts once more before the node is back,
        it can't know which of the two it has placed, and both stay.
        """
        surplus = self._members[node].surplus
        due = sorted(session_id for session_id, due_s in surplus.items() if due_s <= now_s)
        surplus.update(dict.fromkeys(due, now_s + self.timing.lease_s))
        return due

    def replaced(self, session_id: str, tenant: str, reason: str, now_s: float) -> None:
        """Marks a moved session as lost under its old id. Raises sqlite3.Error."""
        known = self.sessions.find(session_id)
        request_id = known.request_id if known is not None else ""
        tombstone = Tombstone(session_id, tenant, request_id, reason, self._ahead_s + now_s)
        self._store.write_nodes([], [tombstone])
        if (member := self._members.get(node_of(session_id) or "")) is not None:
            self._remove(member, session_id)
        self.sessions.bury([tombstone])

    def forget_lost(self, session_id: str) -> None:
        """Removes the tombstone of a session. Raises sqlite3.Error."""
        self._store.remove_tombstone(session_id)
        self.sessions.unearth(session_id)

    def changed(self, member: KnownNode) -> None:
        for notify in self.on_change:
            notify(member)
