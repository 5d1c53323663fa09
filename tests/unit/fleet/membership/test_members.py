"""The front knows its nodes by their links and reports, and declares lost what it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.fleet.membership.ids import new_session_id
from executor_server.fleet.membership.members import Link, Members, MemberState, Whereabouts
from executor_server.fleet.membership.messages import NodeHello, NodeReport, NodeSession
from executor_server.fleet.membership.store import FleetStore
from executor_server.fleet.membership.timing import NodeRefused, Timing

DATE_S = 1_700_000_000.0


class Front:
    """A front with its disk, at a time that the test moves."""

    def __init__(self, path: Path, now_s: float = 0.0) -> None:
        self.path = path
        self.store = FleetStore(path)
        self.now_s = now_s
        self.members = Members(self.store, Timing(), now_s, DATE_S)
        self.links: dict[str, Link] = {}
        self.sequences: dict[str, int] = {}

    def again(self) -> Front:
        """The front's next start."""
        self.store.close()
        return Front(self.path, self.now_s)

    def pass_time(self, seconds: float) -> list:
        lost = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.25)
            lost += self.members.tick(self.now_s)
        return lost

    def link(self, node: str = "n1", epoch: int = 1, instance: str = "i") -> Link:
        link = self.links[node] = self.members.linked(NodeHello(node, epoch, instance), self.now_s)
        return link

    def report(self, node: str = "n1", **fields: object) -> bool:
        link = self.links[node]
        self.sequences[node] = self.sequences.get(node, 0) + 1
        report = NodeReport(self.sequences[node], 1, 10, full=not link.sequence)
        return self.members.reported(link, replace(report, **fields), self.now_s)  # type: ignore[arg-type]

    def where(self, session_id: str) -> Whereabouts:
        return self.members.where(session_id, self.now_s)[0]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    front = Front(tmp_path / "fleet.db")
    yield front
    front.store.close()


def session(node: str = "n1", tenant: str = "t", request_id: str = "r", epoch: int = 1) -> NodeSession:
    return NodeSession(new_session_id(node, epoch), tenant, request_id)


def test_a_node_without_renewals_is_lost_one_second_after_its_lease(front: Front) -> None:
    front.pass_time(10)
    front.link()
    here = session()
    front.report(opened=(here,))
    assert front.where(here.session_id) is Whereabouts.NODE
    assert front.pass_time(3.75) == []
    [lost] = front.pass_time(0.25)
    assert (lost.node, lost.epoch, [each.session_id for each in lost.tombstones]) == ("n1", 1, [here.session_id])
    assert front.where(here.session_id) is Whereabouts.LOST
    assert front.members.sessions.count("t") == 0
    assert front.pass_time(60) == []


def test_a_lost_epoch_does_not_link_again(front: Front) -> None:
    front.link()
    front.report()
    front.pass_time(4)
    assert front.members.hello("n1").lost_epoch == 1
    with pytest.raises(NodeRefused) as refused:
        front.link()
    assert refused.value.is_stale
    front.link(epoch=2)
    assert front.report(epoch=2)


def test_a_lost_session_stays_lost_after_a_restart_of_the_front(tmp_path: Path) -> None:
    front = Front(tmp_path / "fleet.db")
    here = session()
    front.link()
    front.report(opened=(here,))
    front.pass_time(4)
    front = front.again()
    assert front.members.term == 2
    assert front.where(here.session_id) is Whereabouts.LOST
    with pytest.raises(NodeRefused):
        front.link()
    front.link(epoch=2)
    with pytest.raises(NodeRefused, match="epoch"):
        front.report(epoch=2, opened=(here,))
    front.store.close()


def test_a_front_that_starts_gives_its_nodes_the_time_until_they_fence_themselves(tmp_path: Path) -> None:
    front = Front(tmp_path / "fleet.db")
    front.link()
    front.report()
    front = front.again()
    assert front.pass_time(13.5) == []
    member = front.members.get("n1")
    assert member is not None
    assert member.state is MemberState.UNSEEN
    assert front.where(session().session_id) is Whereabouts.WAIT
    assert len(front.pass_time(1)) == 1
    front.store.close()


def test_a_front_that_was_stopped_waits_for_the_reports_that_lie_ready(front: Front) -> None:
    front.pass_time(10)
    front.link()
    front.report()
    front.now_s += 100
    assert front.pass_time(3) == []
    front.report()
    assert front.pass_time(3) == []


def test_a_node_that_obeys_a_copy_of_this_front_is_not_this_ones_to_lose(front: Front) -> None:
    """It serves under the other one: what this front does not hear says nothing about it."""
    front.pass_time(10)
    here = session()
    front.members.unlinked(front.link())
    front.link()
    front.report(opened=(here,))
    front.members.unlinked(front.links["n1"])
    front.members.superseded("n1")
    front.members.superseded("n2")
    assert front.pass_time(60) == []
    assert front.where(here.session_id) is Whereabouts.WAIT
    front.link()
    assert front.where(here.session_id) is Whereabouts.NODE
    assert [each.node for each in front.pass_time(60)] == ["n1"]


def test_a_relinked_node_gets_no_more_time_without_reports(front: Front) -> None:
    front.pass_time(10)
    front.link()
    front.report()
    lost = []
    for _ in range(4):
        lost += front.pass_time(1)
        if not lost:
            front.link()
    assert len(lost) == 1


def test_another_state_directory_of_the_same_name_is_refused_until_the_first_is_lost(front: Front) -> None:
    front.link()
    front.report()
    front.members.unlinked(front.links["n1"])
    with pytest.raises(NodeRefused, match="another node"):
        front.link(instance="other", epoch=9)
    front.pass_time(4)
    front.link(instance="other", epoch=9)


def test_a_second_link_is_refused_while_the_first_one_reports(front: Front) -> None:
    first = front.link()
    front.report()
    with pytest.raises(NodeRefused, match="linked already"):
        front.link()
    front.pass_time(1)
    front.link()
    with pytest.raises(NodeRefused, match="this link is over"):
        front.members.reported(first, NodeReport(2, 1, 10), front.now_s)


def test_an_old_epoch_is_refused_and_gets_a_new_one_when_the_live_one_is_lost(front: Front) -> None:
    front.link(epoch=3)
    front.members.unlinked(front.links["n1"])
    with pytest.raises(NodeRefused, match="epoch 2"):
        front.link(epoch=2)
    front.pass_time(4)
    with pytest.raises(NodeRefused) as refused:
        front.link(epoch=2)
    assert refused.value.is_stale
    assert front.members.hello("n1").lost_epoch == 3


def test_a_node_cannot_use_up_the_epochs_of_its_name(front: Front) -> None:
    front.link()
    front.members.unlinked(front.links["n1"])
    with pytest.raises(NodeRefused, match="can't follow"):
        front.link(epoch=2**31)


def test_a_session_of_an_epoch_that_is_over_is_lost_though_the_front_never_knew_it(front: Front) -> None:
    front.link()
    front.report()
    unknown = session()
    assert front.where(unknown.session_id) is Whereabouts.NODE
    front.pass_time(4)
    assert front.where(unknown.session_id) is Whereabouts.LOST
    assert front.where(session(epoch=2).session_id) is Whereabouts.UNKNOWN
    front.link(epoch=2)
    assert front.where(unknown.session_id) is Whereabouts.LOST
    assert front.where(session(epoch=2).session_id) is Whereabouts.NODE


def test_a_loss_is_returned_though_another_one_could_not_be_written(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("n1", "n2"):
        front.link(node)
    write = front.store.write_nodes

    def fail_second(nodes: list, *rest: object) -> None:
        if nodes[0].node == "n2":
            raise OSError("disk")
        write(nodes, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(front.store, "write_nodes", fail_second)
        with pytest.raises(OSError, match="disk"):
            front.pass_time(4)
    assert [lost.node for lost in front.pass_time(0.25)] == ["n1", "n2"]


def test_the_sessions_of_a_node_that_comes_with_a_higher_epoch_are_lost(front: Front) -> None:
    here = session()
    front.link()
    front.report(opened=(here,))
    front.members.unlinked(front.links["n1"])
    front.link(epoch=2)
    assert front.where(here.session_id) is Whereabouts.LOST
    assert front.members.hello("n1").lost_epoch == 1


def test_a_report_that_comes_twice_is_answered_once(front: Front) -> None:
    front.link()
    assert front.report()
    assert not front.report(sequence=1)


def test_a_missing_report_ends_the_link(front: Front) -> None:
    front.link()
    front.report()
    with pytest.raises(NodeRefused, match="missing"):
        front.report(sequence=3)
    with pytest.raises(NodeRefused, match="over"):
        front.report(sequence=4)


def test_full_reports_end_what_they_do_not_list(front: Front) -> None:
    first, second = session(request_id="1"), session(request_id="2")
    front.link()
    front.report(opened=(first, second))
    assert front.members.sessions.count("t") == 2
    front.report(closed=(first.session_id,))
    front.members.unlinked(front.links["n1"])
    front.link()
    front.report(opened=())
    assert front.members.sessions.count("t") == 0
    assert len(front.members.sessions) == 0


@pytest.mark.parametrize(
    "lie",
    [
        {"epoch": 2},
        {"full": False},
        {"opened": (session(epoch=2),)},
    ],
)
def test_a_lie_costs_the_node_its_link_and_the_front_nothing(front: Front, lie: dict) -> None:
    front.link()
    with pytest.raises(NodeRefused):
        front.report(**lie)
    assert len(front.members.sessions) == 0
    member = front.members.get("n1")
    assert member is not None
    assert member.state is MemberState.ABSENT


def test_sessions_are_bounded_over_all_reports(front: Front) -> None:
    front.link()
    for part in range(32):
        front.report(opened=tuple(session(request_id=f"{part}-{number}") for number in range(1024)))
    with pytest.raises(NodeRefused, match="32768"):
        front.report(opened=(session(),))
    assert len(front.members.sessions) == 32_768


def test_a_session_cannot_change_its_tenant(front: Front) -> None:
    here = session()
    front.link()
    front.report(opened=(here,))
    with pytest.raises(NodeRefused, match="owner"):
        front.report(opened=(replace(here, tenant="other"),))


def test_nothing_is_lost_while_it_cannot_be_written(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    here = session()
    front.link()
    front.report(opened=(here,))

    def fail(*_: object) -> None:
        raise OSError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(front.store, "write_nodes", fail)
        with pytest.raises(OSError, match="disk"):
            front.pass_time(4)
        assert front.where(here.session_id) is Whereabouts.NODE
    assert len(front.pass_time(0.25)) == 1


def test_ids_of_no_node_lead_nowhere(front: Front) -> None:
    front.pass_time(3)
    for wrong in ("", "abc", "n1-", "n1-xyz", "-" + "0" * 32, "0" * 32, "N1-" + "0" * 32):
        assert front.where(wrong) is Whereabouts.UNKNOWN


def test_a_front_that_starts_waits_for_its_nodes_before_it_places_sessions(tmp_path: Path) -> None:
    front = Front(tmp_path / "fleet.db")
    for node in ("n1", "n2"):
        front.link(node)
        front.report(node)
    front = front.again()
    assert not front.members.is_settled(front.now_s)
    front.link("n1")
    front.report("n1")
    front.link("n2")
    front.members.unlinked(front.links["n2"])
    assert not front.members.is_settled(front.now_s), "a node that was linked and has not reported is not known"
    front.link("n2")
    front.report("n2")
    assert front.members.is_settled(front.now_s)
    front = front.again()
    assert not front.members.is_settled(front.now_s + 1.9)
    assert front.members.is_settled(front.now_s + 2.0), "it waits no longer for nodes that do not come"
    front.store.close()
