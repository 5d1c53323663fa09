"""The window of numbered frames: over any connection each frame is taken once, in order, and what is kept is bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.guest.wire import sequenced
from executor_server.guest.wire.frames import FrameDecoder, FrameError, Kind
from executor_server.guest.wire.sequenced import KEPT_BYTES, Sequenced
from tests.support.rounds import rounds


@dataclass
class End:
    """One end, and what it says to the other one over a connection that keeps nothing in order."""

    window: Sequenced = field(default_factory=Sequenced)
    said: list[bytes] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)
    on_the_way: list[bytes] = field(default_factory=list)  # to the other end
    carried: int = 0  # the last number that the present connection was given

    def say(self, body: bytes) -> None:
        if not self.window.full:
            self.said.append(body)
            self.window.send(Kind.LOG, {}, body)

    def carry(self, most: int) -> None:
        """Gives the connection at most so many frames."""
        for _ in range(most):
            frame = self.window.next_frame()
            carried = max(self.carried, self.window.acked)
            if frame is None:
                assert carried == self.window.sent, "a frame was not given to the connection"
                return
            assert frame.seq == carried + 1
            self.carried = frame.seq
            self.on_the_way.append(frame.prefix + frame.body)

    def acknowledge(self) -> None:
        self.on_the_way.append(self.window.unnumbered(Kind.ACK, {}))

    def hear(self, data: bytes) -> None:
        """Raises FrameError."""
        [frame] = FrameDecoder().feed(data)
        self.window.acknowledge(frame.ack)
        if frame.kind != Kind.ACK and self.window.accept(frame.seq):
            self.heard.append(frame.body)


class Pair:
    """Two ends, and a network between them that a test makes as bad as it likes."""

    def __init__(self) -> None:
        self.ends = (End(), End())

    def reconnect(self) -> None:
        """Loses the frames in flight. Each end reports the last frame that it has taken of the other's."""
        one, other = self.ends
        for end in self.ends:
            end.on_the_way.clear()
            end.carried = 0
        one.window.reconnect(other.window.taken)
        other.window.reconnect(one.window.taken)

    def deliver(self, sender: int, at: int) -> None:
        """Any frame on its way may come next. A gap ends the connection, as it does in either end's channel."""
        on_the_way = self.ends[sender].on_the_way
        if on_the_way:
            receiver, data = self.ends[1 - sender], on_the_way.pop(at % len(on_the_way))
            [frame] = FrameDecoder().feed(data)
            try:
                receiver.hear(data)
            except FrameError:
                assert frame.seq > receiver.window.taken + 1, "a frame that left no gap was refused"
                self.reconnect()

    def settle(self) -> None:
        """A network that works, until nothing is left to be said."""
        self.reconnect()
        for end in self.ends:
            end.carry(len(end.said) + 1)
        for sender in (0, 1, 0, 1):
            while self.ends[sender].on_the_way:
                self.deliver(sender, 0)
            self.ends[1 - sender].acknowledge()
        for sender in (0, 1):
            while self.ends[sender].on_the_way:
                self.deliver(sender, 0)

    def check(self, limit_bytes: int) -> None:
        """Checks the invariants that hold at every moment."""
        for end, other in (self.ends, self.ends[::-1]):
            assert end.heard == other.said[: len(end.heard)], "a frame was lost, came twice or out of order"
            kept = end.window.kept
            assert [frame.seq for frame in kept] == list(range(end.window.acked + 1, end.window.sent + 1))
            assert end.window.acked <= other.window.taken <= end.window.sent
            assert end.window.kept_bytes == sum(frame.size for frame in kept) <= limit_bytes


_SENDERS = st.integers(0, 1)
_STEPS = st.one_of(
    st.tuples(st.just("say"), _SENDERS, st.binary(max_size=60)),
    st.tuples(st.just("carry"), _SENDERS, st.integers(1, 4)),
    st.tuples(st.just("deliver"), _SENDERS, st.integers(0, 3)),
    st.tuples(st.just("deliver"), _SENDERS, st.just(0)),
    st.tuples(st.just("carry"), _SENDERS, st.just(4)),
    st.tuples(st.just("lose"), _SENDERS, st.integers(0, 3)),
    st.tuples(st.just("repeat"), _SENDERS, st.integers(0, 3)),
    st.tuples(st.just("acknowledge"), _SENDERS, st.none()),
    st.tuples(st.just("reconnect"), _SENDERS, st.none()),
)


def _do(pair: Pair, step: str, sender: int, what: object) -> None:
    end = pair.ends[sender]
    if step == "say":
        assert isinstance(what, bytes)
        end.say(what)
    elif step == "acknowledge":
        end.acknowledge()
    elif step == "reconnect":
        pair.reconnect()
    elif isinstance(what, int) and step == "carry":
        end.carry(what)
    elif isinstance(what, int) and step == "deliver":
        pair.deliver(sender, what)
    elif isinstance(what, int) and end.on_the_way:
        at = what % len(end.on_the_way)
        if step == "lose":
            del end.on_the_way[at]
        else:
            end.on_the_way.append(end.on_the_way[at])


@given(st.lists(_STEPS, min_size=25, max_size=100))
@settings(max_examples=rounds(200, 40), deadline=None)
def test_each_frame_is_taken_once_and_in_order_over_any_network(steps: list[tuple[str, int, object]]) -> None:
    """Loss, repetition, reordering and a new connection at any point; a limit small enough to be met."""
    limit_bytes = 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequenced, "KEPT_BYTES", limit_bytes)
        pair = Pair()
        for step, sender, what in steps:
            _do(pair, step, sender, what)
            pair.check(limit_bytes + 100)  # a frame of 60 bytes and what comes before its body
        pair.settle()
        for end, other in (pair.ends, pair.ends[::-1]):
            assert end.heard == other.said
            assert end.window.settled, "what was acknowledged is still kept"


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
@settings(deadline=None)
def test_a_later_owner_goes_on_where_the_killed_one_stopped(said: int, taken: int, written_down: int) -> None:
    """It remembers of the guest's frames what it wrote down, or what was acknowledged, whichever is more."""
    guest, first = End(), Sequenced()
    for number in range(said):
        guest.say(b"%d" % number)
    guest.carry(said)
    for data in guest.on_the_way[:taken]:
        [frame] = FrameDecoder().feed(data)
        first.accept(frame.seq)
    acknowledged = min(first.taken, written_down)
    guest.window.acknowledge(acknowledged)

    later = Sequenced()
    later.taken = acknowledged
    guest.window.reconnect(later.taken)
    later.adopt(sent=3, taken=guest.window.acked)
    assert later.send(Kind.CANCEL, {}).seq == 4
    while (resent := guest.window.next_frame()) is not None:
        assert later.accept(resent.seq)
    assert later.taken == said


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    """Or a hostile guest could have a request counted as delivered before it left."""
    window = Sequenced()
    window.send(Kind.CANCEL, {})
    for claim in (window.acknowledge, window.reconnect):
        with pytest.raises(FrameError, match="frame 2 was"):
            claim(2)
        assert (window.acked, len(window.kept)) == (0, 1)


def test_what_is_acknowledged_is_given_back_to_be_closed() -> None:
    window = Sequenced()
    frames = [window.send(Kind.LOG, {}, object(), 10) for _ in range(3)]
    assert window.acknowledge(2) == frames[:2]
    assert window.acknowledge(1) == []  # an older one comes later: it was on a frame that waited
    assert window.kept_bytes == frames[2].size


def test_an_acknowledgement_is_due_after_so_many_bytes_unless_a_frame_carried_it() -> None:
    window = Sequenced()
    assert not window.note_received(sequenced.ACK_BYTES)
    assert window.note_received(1)
    window.unnumbered(Kind.ACK, {})
    assert not window.note_received(1)
    window.send(Kind.LOG, {})
    window.accept(1)
    assert window.next_frame() is not None  # it was made before the number came, so it says nothing of it
    assert window.note_received(sequenced.ACK_BYTES)
    window.send(Kind.LOG, {})
    assert window.next_frame() is not None
    assert not window.note_received(sequenced.ACK_BYTES)


def test_a_full_window_is_one_frame_past_its_limit_at_most() -> None:
    window = Sequenced()
    while not window.full:
        window.send(Kind.LOG, {}, bytes(1024 * 1024))
    assert window.kept_bytes <= KEPT_BYTES + 2 * 1024 * 1024
    window.acknowledge(window.sent)
    assert not window.full
    assert window.settled


def test_a_frame_without_a_number_carries_the_newest_acknowledgement() -> None:
    window = Sequenced()
    window.accept(1)
    [frame] = FrameDecoder().feed(window.unnumbered(Kind.PONG, {"a": 1}))
    assert (frame.kind, frame.seq, frame.ack, frame.head.values) == (Kind.PONG, 0, 1, {"a": 1})


def test_a_numbered_frame_carries_the_newest_acknowledgement() -> None:
    """A peer that only sends would otherwise make the other end wait for a frame of its own."""
    window = Sequenced()
    assert window.accept(1) and window.accept(2)
    window.send(Kind.LOG, {}, b"x")
    frame = window.next_frame()
    assert frame is not None
    [decoded] = FrameDecoder().feed(frame.prefix + frame.body)
    assert (decoded.seq, decoded.ack) == (1, 2)
