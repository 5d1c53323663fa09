"""A node as its front knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from executor_server.fleet.membership.messages import NodeHello, NodeReport
from executor_server.fleet.membership.session_index import Request
from executor_server.fleet.membership.store import StoredNode, Tombstone


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
class Member:
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
    # Sessions whose request another node has answered, and the times from which on they are to be ended.
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
