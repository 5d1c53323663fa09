"""A node serves while its lease holds, under an epoch that rises when its sandboxes were ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor_server.core import Reason
from executor_server.fleet.membership.messages import FrontHello, Renewal
from executor_server.fleet.membership.node_lease import NodeLease, NodeRecord, NodeState
from executor_server.fleet.membership.timing import NodeRefused, Timing

TIMING = Timing()
HELLO = FrontHello("front", 1, TIMING.report_interval_s, TIMING.lease_s, TIMING.fence_s, instance="start-1")


class Node:
    """A lease with its disk."""

    def __init__(self, record: NodeRecord | None = None, now_s: float = 100.0) -> None:
        self.disk = record or NodeRecord("instance")
        self.is_disk_full = False
        self.lease = NodeLease(self.disk, self.write, TIMING, now_s)

    def write(self, record: NodeRecord) -> None:
        if self.is_disk_full:
            raise OSError("no space")
        self.disk = record

    def serve_from(self, now_s: float) -> int:
        assert self.lease.hello(HELLO, now_s)
        sequence = self.lease.report_sent(now_s)
        assert self.lease.renewed(Renewal(sequence), now_s)
        return sequence


def test_a_node_that_never_had_a_lease_is_unlinked() -> None:
    assert Node().lease.state(100.0) is NodeState.UNLINKED


def test_an_answer_lets_the_node_serve_from_the_time_at_which_the_report_was_sent() -> None:
    node = Node()
    assert node.lease.hello(HELLO, 100.0)
    sequence = node.lease.report_sent(100.0)
    assert not node.lease.serves(102.0)
    assert node.lease.renewed(Renewal(sequence), 102.5)
    assert node.lease.serves(102.9)
    assert node.lease.state(103.0) is NodeState.LAPSED


def test_an_answer_that_comes_twice_renews_nothing() -> None:
    node = Node()
    sequence = node.serve_from(100.0)
    assert not node.lease.renewed(Renewal(sequence), 101.0)
    assert not node.lease.renewed(Renewal(sequence + 1), 101.0)
    assert node.lease.until_s == 103.0


def test_an_answer_on_an_earlier_link_renews_nothing() -> None:
    node = Node()
    node.serve_from(100.0)
    sequence = node.lease.report_sent(101.0)
    assert node.lease.hello(HELLO, 101.5)
    assert not node.lease.renewed(Renewal(sequence), 101.6)
    assert node.lease.serves(102.9), "the lease itself goes on"


def test_a_machine_that_was_suspended_serves_nothing_and_ends_nothing_when_it_wakes() -> None:
    running_s = [50.0]
    lease = NodeLease(NodeRecord("instance"), lambda _: None, TIMING, 100.0, lambda: running_s[0])
    assert lease.hello(HELLO, 100.0)
    assert lease.renewed(Renewal(lease.report_sent(100.0)), 100.0)
    assert lease.state(1000.0) is NodeState.LAPSED
    assert lease.fenced_in_s == TIMING.lease_s + TIMING.fence_s
    assert lease.renewed(Renewal(lease.report_sent(1000.0)), 1000.0)
    assert lease.serves(1000.0)
    running_s[0] += TIMING.lease_s + TIMING.fence_s
    assert lease.state(1013.0) is NodeState.FENCED


def test_a_lapsed_node_serves_again_when_it_is_renewed_before_the_fence() -> None:
    node = Node()
    node.serve_from(100.0)
    sequence = node.lease.report_sent(110.0)
    assert node.lease.state(112.9) is NodeState.LAPSED
    assert node.lease.renewed(Renewal(sequence), 112.9)
    assert node.lease.serves(112.95)


def test_nothing_renews_a_node_that_has_to_end_its_sandboxes() -> None:
    node = Node()
    node.serve_from(100.0)
    sequence = node.lease.report_sent(112.0)
    assert not node.lease.renewed(Renewal(sequence), 113.0), "fence_s after the end of the lease, whoever looked"
    assert node.lease.must_end
    assert node.lease.state(113.0) is NodeState.FENCED
    assert not node.lease.hello(HELLO, 113.0)
    node.lease.ended(114.0)
    assert (node.lease.epoch, node.disk.epoch) == (2, 2)
    assert node.lease.state(114.0) is NodeState.UNLINKED
    assert node.lease.hello(HELLO, 500.0)
    assert not node.lease.must_end, "an epoch without sessions has nothing to end"


def test_a_node_whose_sessions_were_lost_ends_them_before_it_links() -> None:
    node = Node(NodeRecord("instance", epoch=4))
    assert not node.lease.hello(replace(HELLO, lost_epoch=6), 100.0)
    assert not node.lease.serves(100.0)
    node.lease.ended(101.0)
    assert node.lease.epoch == 7
    assert node.lease.hello(replace(HELLO, lost_epoch=6), 101.0)


def test_a_started_node_keeps_its_epoch_and_fences_itself_without_a_front() -> None:
    first = Node()
    first.serve_from(100.0)
    second = Node(first.disk, now_s=200.0)
    assert second.lease.epoch == 1
    assert not second.lease.serves(200.0)
    assert second.lease.state(209.9) is NodeState.UNLINKED
    assert second.lease.state(210.0) is NodeState.FENCED


def test_another_front_is_refused_until_the_sandboxes_of_the_epoch_were_ended() -> None:
    node = Node()
    node.serve_from(100.0)
    other = replace(HELLO, front_id="other")
    for now_s in (101.0, 105.0, 113.5):
        with pytest.raises(NodeRefused, match="another front"):
            node.lease.hello(other, now_s)
    node.lease.ended(114.0)
    assert node.lease.hello(other, 114.0)
    with pytest.raises(NodeRefused, match="another front"):
        node.lease.hello(HELLO, 114.5)


def test_a_lower_term_is_refused_after_a_restart_too() -> None:
    node = Node()
    assert node.lease.hello(replace(HELLO, term=5), 100.0)
    again = Node(node.disk)
    with pytest.raises(NodeRefused, match="term 4") as refused:
        again.lease.hello(replace(HELLO, term=4), 100.0)
    assert refused.value.reason is Reason.FRONT_SUPERSEDED
    assert again.lease.hello(replace(HELLO, term=6, instance="start-2"), 100.0)


def test_a_front_on_a_copy_of_the_state_directory_is_refused() -> None:
    node = Node()
    assert node.lease.hello(HELLO, 100.0)
    with pytest.raises(NodeRefused, match="copy") as refused:
        node.lease.hello(replace(HELLO, instance="start-2"), 100.0)
    assert refused.value.reason is Reason.FRONT_SUPERSEDED
    assert node.lease.hello(HELLO, 100.0)


def test_nothing_happens_when_the_record_cannot_be_written() -> None:
    node = Node()
    node.is_disk_full = True
    with pytest.raises(OSError, match="no space"):
        node.lease.hello(HELLO, 100.0)
    assert node.lease.record == node.disk == NodeRecord("instance")
    node.is_disk_full = False
    node.serve_from(100.0)
    node.is_disk_full = True
    assert node.lease.state(113.0) is NodeState.FENCED
    with pytest.raises(OSError, match="no space"):
        node.lease.ended(113.0)
    assert node.lease.epoch == 1
    assert node.lease.must_end


def test_a_clock_that_runs_backwards_counts_as_stopped() -> None:
    node = Node()
    node.serve_from(100.0)
    assert node.lease.state(103.0) is NodeState.LAPSED
    assert node.lease.state(50.0) is NodeState.LAPSED


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": 2},
        {"front_id": ""},
        {"front_id": "x" * 65},
        {"term": 0},
        {"lost_epoch": 2**62},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"lease_s": -1.0},
        {"lease_s": 0.9},
        {"lease_s": 101.0},
        {"fence_s": 0.0},
        {"report_interval_s": float("nan")},
    ],
)
def test_a_hello_out_of_range_is_refused(wrong: dict) -> None:
    node = Node()
    with pytest.raises(NodeRefused):
        node.lease.hello(replace(HELLO, **wrong), 100.0)
    assert node.disk == NodeRecord("instance")


def test_a_front_that_never_answers_costs_bounded_memory() -> None:
    node = Node()
    assert node.lease.hello(HELLO, 100.0)
    first = node.lease.report_sent(100.0)
    for _ in range(10_000):
        last = node.lease.report_sent(100.0)
    assert not node.lease.renewed(Renewal(first), 100.0)
    assert node.lease.renewed(Renewal(last), 100.0)
