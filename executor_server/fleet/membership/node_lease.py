"""The lease of a node: decides at each moment whether the node may serve, and under which epoch.

Theory of operation. The front answers each report of the node. An answer to the report that was sent at t lets the node
serve until t + lease_s, by the node's own clock, whenever the answer arrives. The front counts the same lease from the
moment at which it answers, which is later than t, and waits `MARGIN_S` longer before it reports the sessions lost. So
no message has to arrive for a node to stop: it stops unless messages arrive.

All that a node needs to remember from one start to the next is its record: epoch, front, terms. `persist` writes it to
the disk, and returns when it is there; each method changes nothing before that. When `persist` raises, nothing has
happened.

Invariants:

1. Stops by itself. `state` is SERVING only before the end of a lease, and a lease ends lease_s after a report was
   sent. Answers to reports of an earlier link, to unknown reports, and answers that come twice renew nothing.
2. The epoch rises after the end. `ended` raises the epoch, and is called when no sandbox of the epochs before is alive.
   Once the node has begun to end them (`must_end`), nothing renews the lease until `ended`.
3. Persisted before used. An epoch, a term and the front of an epoch are on the disk before the front hears of them.
   So after any crash the record is at most ahead of what the front knows, and never behind.
4. One front for an epoch. The first front that links in an epoch is its only one. Another one is refused until the
   sandboxes of that epoch were ended, since it would not know what the first one has reported lost. Two starts of a
   front in one term are two fronts: one of them runs on a copy of the other's state directory.
5. Terms never fall. A link of a lower term of the same front is refused, however late its messages arrive.
6. Lost is final. A hello whose lost_epoch is not below the epoch ends the epoch before anything else, and the next
   epoch is above both.

Together with invariants 1 to 3 of members.py: when the front reports a session lost, the lease under which the node
served it is over, the front gives no further one to that epoch, and no other front can.

The clock is `timing.lease_clock`: it does not follow the date, and goes on while the machine is suspended. A clock that
runs backwards counts as stopped. Only the time until the sandboxes are ended is running time: a machine that was
suspended together with its front ends nothing when both wake.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from executor_server.fleet.membership.ids import MAX_EPOCH
from executor_server.fleet.membership.messages import PROTOCOL, FrontHello, Renewal
from executor_server.fleet.membership.timing import NodeRefused, Timing

_MAX_TERM = 2**62
_MAX_ID_CHARS = 64
# Reports that wait for their answers: older ones can't renew a lease any more.
_MAX_UNANSWERED = 64
# Fronts whose terms are remembered.
_MAX_FRONTS = 8


class NodeState(enum.Enum):
    UNLINKED = "unlinked"  # no lease since the start, or since the epoch began
    SERVING = "serving"
    LAPSED = "lapsed"  # the lease is over; the sandboxes are alive
    FENCED = "fenced"  # the sandboxes must be ended


@dataclass(frozen=True)
class NodeRecord:
    """The knowledge that a node keeps in its state directory. `instance` is chosen at random with it."""

    instance: str
    epoch: int = 1
    front_id: str = ""  # the only front that may have given leases in this epoch
    front_instance: str = ""  # the start of the front that linked last
    terms: Mapping[str, int] = field(default_factory=dict)  # highest seen of each front


class NodeLease:
    """The lease and the epoch of one node. Times are of one clock that never stops."""

    def __init__(
        self,
        record: NodeRecord,
        persist: Callable[[NodeRecord], None],
        timing: Timing,
        started_s: float,
        running_s: Callable[[], float] | None = None,
    ) -> None:
        """`timing` holds until a front has said another one. `persist` writes the record durably, or raises.

        `running_s`: a clock that stands while the machine is suspended. A machine that wakes has no lease, but it
        ends its sandboxes only when its front does not renew it after that.
        """
        self._record = record
        self._persist = persist
        self._timing = timing
        self._now_s = started_s
        self._running_s = running_s or (lambda: self._now_s)
        self._until_s = started_s  # end of the lease; without one, the start
        self._until_running_s = self._running_s()  # the same by the other clock
        self._leased = False
        self._ending = False
        self._lost_epoch = 0
        self._sequence = 0
        self._renewed = 0
        self._unanswered: OrderedDict[int, tuple[float, float]] = OrderedDict()  # times of sending, by sequence

    @property
    def record(self) -> NodeRecord:
        return self._record

    @property
    def epoch(self) -> int:
        return self._record.epoch

    @property
    def timing(self) -> Timing:
        return self._timing

    @property
    def until_s(self) -> float:
        """The end of the lease: a timer at this time cuts what is running."""
        return self._until_s

    @property
    def fenced_in_s(self) -> float:
        """Seconds of running time until the sandboxes must be ended if no answer comes before."""
        return self._until_running_s + self._timing.fence_s - self._running_s()

    @property
    def renewed_sequence(self) -> int:
        """The last report on this link whose answer has renewed the lease, for the next report."""
        return self._renewed

    def state(self, now_s: float) -> NodeState:
        self._note_time(now_s)
        if self._ending:
            return NodeState.FENCED
        if not self._leased:
            return NodeState.UNLINKED
        return NodeState.SERVING if self._now_s < self._until_s else NodeState.LAPSED

    def serves(self, now_s: float) -> bool:
        """Returns True when the node may serve. Ask for each request, and for each message that a stream sends."""
        return self.state(now_s) is NodeState.SERVING

    def hello(self, hello: FrontHello, now_s: float) -> bool:
        """Begins a link. Returns False when all sandboxes must be ended before: then call `ended`, and this again.

        Reports of earlier links can't renew the lease any more; the lease itself goes on. Raises NodeRefused.
        """
        self._note_time(now_s)
        timing = _checked(hello)
        record = self._record
        if record.front_id and record.front_id != hello.front_id:
            raise NodeRefused(
                "another front holds this node; it is free once it has had no lease for "
                f"{self._timing.fence_s:g} s and has ended its sandboxes"
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
            self._begin_ending()
        if self._ending:
            return False
        terms = _with_term(record.terms, hello)
        self._write(replace(record, front_id=hello.front_id, front_instance=hello.instance, terms=terms))
        if not record.front_id:  # nothing was there to end so far
            self._until_s, self._until_running_s = self._now_s, self._running_s()
        self._timing = timing
        self._unanswered.clear()
        self._renewed = 0
        return True

    def report_sent(self, now_s: float) -> int:
        """Returns the sequence of the next report. Call it before the report is handed to the connection."""
        self._note_time(now_s)
        self._sequence += 1
        self._unanswered[self._sequence] = self._now_s, self._running_s()
        while len(self._unanswered) > _MAX_UNANSWERED:
            self._unanswered.popitem(last=False)
        return self._sequence

    def renewed(self, renewal: Renewal, now_s: float) -> bool:
        """Extends the lease by an answer on the present link. Returns False when it does not."""
        self._note_time(now_s)
        sent = self._unanswered.get(renewal.sequence)
        if sent is None or self._ending:
            return False
        while self._unanswered and next(iter(self._unanswered)) <= renewal.sequence:
            self._unanswered.popitem(last=False)
        self._renewed = renewal.sequence
        self._leased = True
        self._until_s = max(self._until_s, sent[0] + self._timing.lease_s)
        self._until_running_s = max(self._until_running_s, sent[1] + self._timing.lease_s)
        return True

    @property
    def must_end(self) -> bool:
        """True when the node must end all its sandboxes, and call `ended` then."""
        return self._ending

    def ended(self, now_s: float) -> None:
        """Begins the next epoch. No sandbox of this one is alive. It needs a hello before it can get a lease."""
        assert self._ending, "sandboxes of an epoch that goes on must not be ended"
        epoch = max(self._record.epoch, self._lost_epoch) + 1
        self._write(replace(self._record, epoch=epoch, front_id=""))
        self._ending = self._leased = False
        self._until_s, self._until_running_s = self._note_time(now_s), self._running_s()

    def _note_time(self, now_s: float) -> float:
        """Begins the end when no answer has come for fence_s; an epoch without a front has nothing to end."""
        self._now_s = max(self._now_s, now_s)
        if self._record.front_id and self.fenced_in_s <= 0:
            self._begin_ending()
        return self._now_s

    def _begin_ending(self) -> None:
        self._ending = True
        self._unanswered.clear()

    def _write(self, record: NodeRecord) -> None:
        if record != self._record:
            self._persist(record)
            self._record = record


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
