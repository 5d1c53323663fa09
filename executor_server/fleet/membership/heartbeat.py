"""The node's side of leases: which front it obeys, under which epoch, and when it must end its sessions.

Theory of operation. The front answers each report of the node, and each answer is a heartbeat. Clients reach a session
through the front alone, so sessions that the front has reported lost can't be served. The node only has to end them:
after lease_s + fence_s without a heartbeat, or when the front's hello says that they are lost.

All that a node needs to remember from one start to the next is its record: epoch, front, terms. `persist` writes it to
the disk, and returns when it is there; each method changes nothing before that. When `persist` raises, nothing has
happened.

Invariants:

1. The epoch rises after the end. `ended` raises the epoch, and is called when no sandbox of the epochs before is alive.
   Once the node has begun to end them (`must_end`), no heartbeat counts until `ended`.
2. Persisted before used. An epoch, a term and the front of an epoch are on the disk before the front learns them.
   So after any crash the record is at most ahead of what the front knows, and never behind.
3. One front for an epoch. The first front that links in an epoch is its only one. Another one is refused until the
   sandboxes of that epoch are ended, since it would not know what the first one has reported lost. Two starts of a
   front in one term are two fronts: one of them runs on a copy of the other's state directory.
4. Terms never fall. A link of a lower term of the same front is refused, however late its messages arrive. Calls are
   refused too unless they come from the front that linked last (`obeyed`): another may not know what is lost.
5. Lost is final. A hello whose lost_epoch is not below the epoch ends the epoch before anything else, and the next
   epoch is above both.

Times come from a clock that stops while the machine is suspended: a machine that slept together with its front ends
nothing when both wake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from executor_server.fleet.membership.ids import MAX_EPOCH
from executor_server.fleet.membership.messages import PROTOCOL, FrontHello
from executor_server.fleet.membership.timing import NodeRefused, Timing

_MAX_TERM = 2**62
_MAX_ID_CHARS = 64
# Fronts whose terms are remembered.
_MAX_FRONTS = 8


@dataclass(frozen=True)
class NodeRecord:
    """The knowledge that a node keeps in its state directory. `instance` is chosen at random with it."""

    instance: str
    epoch: int = 1
    front_id: str = ""  # the only front that may have linked in this epoch
    front_instance: str = ""  # the start of the front that linked last
    terms: Mapping[str, int] = field(default_factory=dict)  # highest seen of each front


class Heartbeat:
    """The epoch of one node, and the heartbeats of its front."""

    def __init__(
        self, record: NodeRecord, persist: Callable[[NodeRecord], None], timing: Timing, started_s: float
    ) -> None:
        """`timing` holds until a front sends another one. `persist` writes the record durably, or raises."""
        self.record = record
        self.timing = timing
        self._persist = persist
        self._lease_end_s = started_s
        self._ending = False
        self._lost_epoch = 0

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def obeyed(self) -> str | None:
        """The start of the front whose calls count; None while sandboxes are being ended, and then until a hello."""
        return None if self._ending or not self.record.front_id else self.record.front_instance

    def is_silent(self, now_s: float) -> bool:
        """True when the front has not answered for a lease, or not since the node's start."""
        return now_s >= self._lease_end_s

    def must_end(self, now_s: float) -> bool:
        """True when the node must end all its sandboxes, and then call `ended`."""
        # An epoch without a front has nothing to end.
        if self.record.front_id and now_s >= self._lease_end_s + self.timing.fence_s:
            self._ending = True
        return self._ending

    def hello(self, hello: FrontHello, now_s: float) -> bool:
        """Begins a link. Returns False when all sandboxes must be ended before: then call `ended`, and this again.

        Raises NodeRefused.
        """
        timing = _checked(hello)
        record, must_end = self.record, self.must_end(now_s)
        if record.front_id and record.front_id != hello.front_id:
            raise NodeRefused(
                "another front holds this node; it is free once it has heard nothing of that front for "
                f"{self.timing.lease_s + self.timing.fence_s:g} s and has ended its sandboxes"
            )
        if hello.term < record.terms.get(hello.front_id, 0):
            over = f"term {hello.term} of the front is over: {record.terms[hello.front_id]} has begun"
            raise NodeRefused(over, is_superseded=True)
        is_last = list(record.terms.items())[-1:] == [(hello.front_id, hello.term)]
        if is_last and hello.instance != record.front_instance:
            copied = f"term {hello.term} is that of another front, with a copy of the same state directory"
            raise NodeRefused(copied, is_superseded=True)
        if hello.lost_epoch >= record.epoch:
            self._lost_epoch = max(self._lost_epoch, hello.lost_epoch)
            self._ending = must_end = True
        if must_end:
            return False
        terms = _with_term(record.terms, hello)
        self._write(replace(record, front_id=hello.front_id, front_instance=hello.instance, terms=terms))
        if not record.front_id:  # nothing was there to end so far
            self._lease_end_s = now_s
        self.timing = timing
        return True

    def renewed(self, now_s: float) -> bool:
        """Takes an answer of the front. Returns False when it comes too late: the sandboxes are being ended."""
        if self.must_end(now_s):
            return False
        self._lease_end_s = now_s + self.timing.lease_s
        return True

    def ended(self, now_s: float) -> None:
        """Begins the next epoch. No sandbox of this one may be alive. No session is made in the next before a hello."""
        assert self._ending, "sandboxes of an epoch that goes on must not be ended"
        epoch = max(self.record.epoch, self._lost_epoch) + 1
        self._write(replace(self.record, epoch=epoch, front_id=""))
        self._ending = False
        self._lease_end_s = now_s

    def _write(self, record: NodeRecord) -> None:
        if record != self.record:
            self._persist(record)
            self.record = record


def _checked(hello: FrontHello) -> Timing:
    """Returns the times of a front's hello. Raises NodeRefused."""
    if hello.protocol != PROTOCOL:
        raise NodeRefused(f"the front speaks version {hello.protocol} of the fleet's protocol, this node {PROTOCOL}")
    if not 0 < len(hello.front_id) <= _MAX_ID_CHARS:
        raise NodeRefused(f"front_id must have 1 to {_MAX_ID_CHARS} characters")
    if not (0 < hello.term < _MAX_TERM and 0 <= hello.lost_epoch < MAX_EPOCH):
        raise NodeRefused("term or lost_epoch is out of range")
    timing = Timing(hello.report_interval_s, hello.lease_s, hello.fence_s)
    try:
        timing.check()
    except ValueError as error:
        raise NodeRefused(str(error)) from None
    return timing


def _with_term(terms: Mapping[str, int], hello: FrontHello) -> dict[str, int]:
    """The terms with this one, most recent last; those of the fronts that linked longest ago are dropped."""
    others = [(front_id, term) for front_id, term in terms.items() if front_id != hello.front_id]
    return dict([*others, (hello.front_id, hello.term)][-_MAX_FRONTS:])
