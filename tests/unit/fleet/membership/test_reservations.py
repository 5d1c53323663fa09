"""Creations through a front are made once, counted once, and moved only when no other node can have made them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.core import ResourceExhausted, TooManySessions
from executor_server.fleet.membership.ids import new_session_id
from executor_server.fleet.membership.members import MemberState, Whereabouts
from executor_server.fleet.membership.messages import NodeSession, TenantUse
from executor_server.fleet.membership.reservations import Reservations
from executor_server.fleet.membership.session_index import Creation
from executor_server.policy import QuotasTable
from tests.unit.fleet.membership.test_members import Front


class Site:
    """A front with two nodes and the creations that it makes there."""

    def __init__(self, path: Path) -> None:
        self.front = Front(path)
        self.quotas = QuotasTable(sessions=3, creations_per_minute=5)
        self.creations = Reservations(self.front.members, lambda tenant: self.quotas)
        self.sessions = self.front.members.sessions
        for node in ("n1", "n2"):
            self.front.link(node)
            self.front.report(node)

    def begin(self, request_id: str = "r", node: str = "n1") -> Creation:
        creation = self.creations.begin("t", request_id, self.front.now_s)
        self.creations.place(creation, node)
        return creation

    def make(self, request_id: str = "r", node: str = "n1") -> str:
        creation, session_id = self.begin(request_id, node), new_session_id(node, 1)
        assert self.creations.answered(creation, session_id, self.front.now_s)
        return session_id


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "fleet.db")
    yield site
    site.front.store.close()


def test_a_session_counts_once_from_its_reservation_to_its_end(site: Site) -> None:
    creation = site.begin()
    assert site.sessions.count("t") == 1
    here = NodeSession(new_session_id("n1", 1), "t", "r")
    site.front.report(opened=(here,))
    assert site.sessions.count("t") == 1
    assert site.creations.answered(creation, here.session_id, site.front.now_s)
    assert site.sessions.count("t") == 1
    site.front.report(closed=(here.session_id,))
    assert site.sessions.count("t") == 0


def test_a_session_that_ended_before_its_answer_came_is_not_counted_for_ever(site: Site) -> None:
    creation, session_id = site.begin(), new_session_id("n1", 1)
    site.front.report(closed=(session_id,))
    assert site.creations.answered(creation, session_id, site.front.now_s)
    assert site.sessions.count("t") == 0


def test_a_session_that_began_and_ended_between_two_reports_is_not_counted_for_ever(site: Site) -> None:
    site.make()
    for _ in range(7):
        site.front.report()
        site.front.pass_time(0.5)
    assert site.sessions.count("t") == 1
    site.front.report()
    assert site.sessions.count("t") == 0


def test_the_quota_of_sessions_is_exact(site: Site) -> None:
    site.make("1")
    site.begin("2")
    other = site.creations.begin("t", "3", site.front.now_s)
    with pytest.raises(TooManySessions, match="quota sessions"):
        site.creations.begin("t", "4", site.front.now_s)
    site.creations.end(other)
    site.creations.begin("t", "4", site.front.now_s)


def test_the_quota_of_creations_is_exact_over_a_restart_of_the_front(site: Site) -> None:
    site.quotas = QuotasTable(creations_per_minute=5)
    for number in range(3):
        site.make(str(number))
    site.front.store.close()
    again = Front(site.front.path, site.front.now_s)
    creations = Reservations(again.members, lambda tenant: site.quotas)
    again.link()
    again.report(tenants={"t": TenantUse(creations=3)})
    again.report(tenants={"t": TenantUse(creations=3)})
    creations.begin("t", "4", again.now_s)
    creations.begin("t", "5", again.now_s)
    with pytest.raises(ResourceExhausted, match="creations_per_minute"):
        creations.begin("t", "6", again.now_s)
    again.now_s += 62
    creations.begin("t", "6", again.now_s)
    again.store.close()


def test_a_repeated_request_finds_what_there_is(site: Site) -> None:
    assert site.creations.find("t", "r") is None
    creation = site.begin()
    found = site.creations.find("t", "r")
    assert found is not None and found.creation is creation
    session_id = new_session_id("n1", 1)
    site.creations.answered(creation, session_id, site.front.now_s)
    found = site.creations.find("t", "r")
    assert found is not None and found.node == "n1"
    assert site.creations.find("other", "r") is None
    site.front.pass_time(4)
    found = site.creations.find("t", "r")
    assert found is not None and found.tombstone is not None
    assert found.tombstone.session_id == session_id


def test_a_creation_of_an_earlier_front_is_found_on_its_node(site: Site) -> None:
    site.front.report(creating=(NodeSession("", "t", "r"),))
    found = site.creations.find("t", "r")
    assert found is not None and found.node == "n1"
    assert site.sessions.count("t") == 1
    site.front.report()
    assert site.creations.find("t", "r") is None
    assert site.sessions.count("t") == 0


def test_another_node_is_asked_only_when_the_first_refused_or_is_lost(site: Site) -> None:
    creation = site.begin()
    assert not site.creations.may_move(creation)
    site.front.members.unlinked(site.front.links["n1"])
    assert not site.creations.may_move(creation)
    for _ in range(8):
        site.front.report("n2")
        site.front.pass_time(0.5)
    member = site.front.members.get("n1")
    assert member is not None and member.state is MemberState.LOST
    assert site.creations.may_move(creation)
    site.creations.place(creation, "n2")
    site.creations.refused(creation, is_full=True)
    assert site.creations.may_move(creation)
    full = site.front.members.get("n2")
    assert full is not None and full.is_full


def test_an_answer_of_a_node_that_was_lost_meanwhile_is_not_handed_out(site: Site) -> None:
    creation, session_id = site.begin(), new_session_id("n1", 1)
    site.front.pass_time(4)
    assert not site.creations.answered(creation, session_id, site.front.now_s)
    assert site.front.where(session_id) is Whereabouts.LOST
    assert site.sessions.count("t") == 1, "the creation goes on"
    site.front.link("n2", epoch=2)
    site.front.report("n2", epoch=2)
    site.creations.place(creation, "n2")
    assert not site.creations.answered(creation, session_id, site.front.now_s), "an id of another node"
    site.creations.place(creation, "n2")
    assert site.creations.answered(creation, new_session_id("n2", 2), site.front.now_s)
    assert site.sessions.count("t") == 1


def test_a_session_that_was_lost_with_its_node_counts_again_where_it_is_made_next(site: Site) -> None:
    creation, here = site.begin(), NodeSession(new_session_id("n1", 1), "t", "r")
    site.front.report(opened=(here,))
    for _ in range(8):
        site.front.report("n2")
        site.front.pass_time(0.5)
    assert site.sessions.count("t") == 0
    site.creations.place(creation, "n2")
    assert site.sessions.count("t") == 1
    site.creations.end(creation)
    assert site.sessions.count("t") == 0


def test_a_session_whose_request_another_node_has_answered_is_surplus(site: Site) -> None:
    session_id = site.make(node="n1")
    late = NodeSession(new_session_id("n2", 1), "t", "r")
    site.front.report("n2", opened=(late,))
    assert site.front.members.take_surplus("n2", site.front.now_s) == [late.session_id]
    assert site.front.members.take_surplus("n2", site.front.now_s) == []
    assert site.front.where(session_id) is Whereabouts.NODE
    found = site.creations.find("t", "r")
    assert found is not None and found.node == "n1"


def test_the_answer_of_the_node_that_was_asked_last_makes_an_earlier_report_of_another_surplus(site: Site) -> None:
    creation = site.begin(node="n1")
    lie, here = NodeSession(new_session_id("n1", 1), "t", "r"), NodeSession(new_session_id("n2", 1), "t", "r")
    site.front.report("n1", opened=(lie,))
    site.creations.refused(creation, is_full=True)
    site.creations.place(creation, "n2")
    site.front.report("n2", opened=(here,))  # before its answer
    assert site.creations.answered(creation, here.session_id, site.front.now_s)
    site.front.pass_time(1)
    site.front.link("n2")  # the full report describes it anew
    site.front.report("n2", opened=(here,))
    site.front.report("n1", opened=(lie,))
    assert site.front.members.take_surplus("n2", site.front.now_s) == []
    assert site.front.members.take_surplus("n1", site.front.now_s) == [lie.session_id]
    found = site.creations.find("t", "r")
    assert found is not None and found.node == "n2"


def test_a_surplus_session_is_ended_again_until_its_node_has_done_so(site: Site) -> None:
    """The simulation found it in one of 10,000 runs: a node that was stopped has no lease yet, and refused."""
    site.make(node="n1")
    late = NodeSession(new_session_id("n2", 1), "t", "r")
    site.front.report("n2", opened=(late,))
    ended = []
    for _ in range(8):
        ended += site.front.members.take_surplus("n2", site.front.now_s)
        site.front.pass_time(1)
        site.front.report("n1")
        site.front.report("n2")
    assert ended == [late.session_id] * 3
    site.front.report("n2", closed=(late.session_id,))
    site.front.pass_time(3)
    assert site.front.members.take_surplus("n2", site.front.now_s) == []


def test_a_full_report_that_is_older_than_an_answer_does_not_end_its_session(site: Site) -> None:
    site.front.pass_time(1)
    site.front.link()
    session_id = site.make()
    site.front.report(opened=())
    assert site.sessions.find(session_id) is not None
    site.front.pass_time(1)
    site.front.link()
    site.front.report(opened=())
    assert site.sessions.find(session_id) is None


def test_a_tenant_without_a_quota_leaves_as_many_places_of_the_fleet_as_it_has(site: Site) -> None:
    site.quotas = QuotasTable()
    shared = Reservations(site.front.members, lambda tenant: site.quotas, lambda: True)
    places = sum(member.report.max_sessions for member in site.front.members if member.report is not None)
    for number in range(places // 2):
        shared.begin("t", str(number), site.front.now_s)
    with pytest.raises(TooManySessions, match="must leave as many free as it holds"):
        shared.begin("t", "one more", site.front.now_s)
    shared.begin("other", "1", site.front.now_s)
