"""A node ends its sandboxes when its front is silent or says that they are lost, and begins the next epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor_server.core import Reason
from executor_server.fleet.membership.heartbeat import Heartbeat, NodeRecord
from executor_server.fleet.membership.messages import FrontHello
from executor_server.fleet.membership.timing import NodeRefused, Timing

TIMING = Timing()
HELLO = FrontHello("front", 1, TIMING.report_interval_s, TIMING.lease_s, TIMING.fence_s, instance="start-1")


class Node:
    """A heartbeat with its disk."""

    def __init__(self, record: NodeRecord | None = None, now_s: float = 100.0) -> None:
        self.disk = record or NodeRecord("instance")
        self.is_disk_full = False
        self.heartbeat = Heartbeat(self.disk, self.write, TIMING, now_s)

    def write(self, record: NodeRecord) -> None:
        if self.is_disk_full:
            raise OSError("no space")
        self.disk = record

    def link_at(self, now_s: float) -> None:
        assert self.heartbeat.hello(HELLO, now_s)
        assert self.heartbeat.renewed(now_s)


def test_a_front_is_silent_a_lease_after_its_last_answer_and_the_sandboxes_end_later() -> None:
    node = Node()
    assert node.heartbeat.is_silent(100.0)
    node.link_at(100.0)
    assert not node.heartbeat.is_silent(102.9)
    assert node.heartbeat.is_silent(103.0)
    assert not node.heartbeat.must_end(112.9)
    assert node.heartbeat.renewed(112.9)
    assert not node.heartbeat.is_silent(113.0)


def test_nothing_renews_a_node_that_has_to_end_its_sandboxes() -> None:
    node = Node()
    node.link_at(100.0)
    assert not node.heartbeat.renewed(113.0), "fence_s after the end of the lease, whoever looked"
    assert node.heartbeat.must_end(50.0), "a clock that runs backwards changes nothing"
    assert not node.heartbeat.hello(HELLO, 113.0)
    node.heartbeat.ended(114.0)
    assert (node.heartbeat.epoch, node.disk.epoch) == (2, 2)
    assert node.heartbeat.hello(HELLO, 500.0)
    assert not node.heartbeat.must_end(500.0), "an epoch without sessions has nothing to end"


def test_a_node_obeys_nobody_from_the_end_of_its_sandboxes_until_a_hello() -> None:
    """A session that its last front makes then would be in an epoch that no front holds, and nothing would end it."""
    node = Node()
    assert node.heartbeat.obeyed is None
    node.link_at(100.0)
    assert node.heartbeat.obeyed == HELLO.instance
    assert node.heartbeat.must_end(113.0)
    assert node.heartbeat.obeyed is None
    node.heartbeat.ended(114.0)
    assert node.heartbeat.obeyed is None
    assert node.heartbeat.hello(HELLO, 115.0)
    assert node.heartbeat.obeyed == HELLO.instance


def test_a_node_whose_sessions_were_lost_ends_them_before_it_links() -> None:
    node = Node(NodeRecord("instance", epoch=4))
    assert not node.heartbeat.hello(replace(HELLO, lost_epoch=6), 100.0)
    assert node.heartbeat.must_end(100.0)
    node.heartbeat.ended(101.0)
    assert node.heartbeat.epoch == 7
    assert node.heartbeat.hello(replace(HELLO, lost_epoch=6), 101.0)


def test_a_started_node_keeps_its_epoch_and_fences_itself_without_a_front() -> None:
    first = Node()
    first.link_at(100.0)
    second = Node(first.disk, now_s=200.0)
    assert second.heartbeat.epoch == 1
    assert not second.heartbeat.must_end(209.9)
    assert second.heartbeat.must_end(210.0)


def test_another_front_is_refused_until_the_sandboxes_of_the_epoch_were_ended() -> None:
    node = Node()
    node.link_at(100.0)
    other = replace(HELLO, front_id="other")
    for now_s in (101.0, 105.0, 113.5):
        with pytest.raises(NodeRefused, match="another front"):
            node.heartbeat.hello(other, now_s)
    node.heartbeat.ended(114.0)
    assert node.heartbeat.hello(other, 114.0)
    with pytest.raises(NodeRefused, match="another front"):
        node.heartbeat.hello(HELLO, 114.5)


def test_a_lower_term_is_refused_after_a_restart_too() -> None:
    node = Node()
    assert node.heartbeat.hello(replace(HELLO, term=5), 100.0)
    again = Node(node.disk)
    with pytest.raises(NodeRefused, match="term 4") as refused:
        again.heartbeat.hello(replace(HELLO, term=4), 100.0)
    assert refused.value.reason is Reason.FRONT_SUPERSEDED
    assert again.heartbeat.hello(replace(HELLO, term=6, instance="start-2"), 100.0)


def test_a_front_on_a_copy_of_the_state_directory_is_refused() -> None:
    node = Node()
    assert node.heartbeat.hello(HELLO, 100.0)
    with pytest.raises(NodeRefused, match="copy") as refused:
        node.heartbeat.hello(replace(HELLO, instance="start-2"), 100.0)
    assert refused.value.reason is Reason.FRONT_SUPERSEDED
    assert node.heartbeat.hello(HELLO, 100.0)


def test_nothing_happens_when_the_record_cannot_be_written() -> None:
    node = Node()
    node.is_disk_full = True
    with pytest.raises(OSError, match="no space"):
        node.heartbeat.hello(HELLO, 100.0)
    assert node.heartbeat.record == node.disk == NodeRecord("instance")
    node.is_disk_full = False
    node.link_at(100.0)
    node.is_disk_full = True
    assert node.heartbeat.must_end(113.0)
    with pytest.raises(OSError, match="no space"):
        node.heartbeat.ended(113.0)
    assert node.heartbeat.epoch == 1
    assert node.heartbeat.must_end(113.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": 1},
        {"front_id": ""},
        {"front_id": "x" * 65},
        {"term": 0},
        {"lost_epoch": 2**62},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"lease_s": -1.0},
        {"lease_s": 0.9},
        {"fence_s": 0.0},
        {"report_interval_s": float("nan")},
    ],
)
def test_a_hello_out_of_range_is_refused(wrong: dict) -> None:
    node = Node()
    with pytest.raises(NodeRefused):
        node.heartbeat.hello(replace(HELLO, **wrong), 100.0)
    assert node.disk == NodeRecord("instance")
