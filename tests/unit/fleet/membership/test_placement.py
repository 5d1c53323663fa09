"""Placement draws few nodes, prefers warm ones and idle ones, and knows why there is none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.fleet.membership.messages import NodeBackend, NodeHello, NodeReport, WarmKind
from executor_server.fleet.membership.placement import Placement, Wanted
from executor_server.fleet.membership.reservations import Reservations
from executor_server.policy import QuotasTable
from tests.unit.fleet.membership.test_members import Front

LOCAL = (NodeBackend("local", images=("base", "data")),)
KIND = WarmKind("local", "base")


class Site:
    def __init__(self, path: Path) -> None:
        self.front = Front(path)
        self.placement = Placement(self.front.members, random.Random(1))
        self.creations = Reservations(self.front.members, lambda tenant: QuotasTable())

    def node(self, name: str, labels: dict[str, str] | None = None, **fields: object) -> None:
        front = self.front
        hello = NodeHello(name, 1, "i", labels=labels or {})
        front.links[name] = front.members.linked(hello, front.now_s)
        front.report(name, **{"backends": LOCAL, **fields})

    def chosen(self, wanted: Wanted | None = None, tried: tuple[str, ...] = ()) -> str:
        member = self.placement.choose(wanted or Wanted(), tried)
        return member.name if member is not None else ""

    def place(self, node: str) -> None:
        number = len(self.front.members.sessions.tenants()) + random.getrandbits(60)
        self.creations.place(self.creations.begin("t", str(number), self.front.now_s), node)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "fleet.db")
    yield site
    site.front.store.close()


@pytest.mark.parametrize(
    "unfit",
    [
        {"draining": True},
        {"max_sessions": 0},
        {"backends": (NodeBackend("local", ready=False),)},
        {"backends": (NodeBackend("docker"),)},
        {"backends": (NodeBackend("local", images=("data",)),)},
        {"control_fingerprint": "other"},
        {"labels": {"zone": "b"}},
    ],
)
def test_a_node_that_does_not_fit_is_never_chosen(site: Site, unfit: dict) -> None:
    site.placement.set_fingerprint("ours")
    site.node("n1", **{"control_fingerprint": "ours", "labels": {"zone": "a"}, **unfit})
    wanted = Wanted(("local",), "base", {"zone": "a"})
    assert site.chosen(wanted) == ""
    site.node("n2", {"zone": "a"}, control_fingerprint="ours")
    assert {site.chosen(wanted) for _ in range(20)} == {"n2"}


def test_a_node_with_a_warm_sandbox_comes_first_until_creations_take_it(site: Site) -> None:
    site.node("n1", load=3.0, warm={KIND: 1})
    for number in range(2, 20):
        site.node(f"n{number}")
    wanted = Wanted(("local",), "base", kind=KIND)
    assert {site.chosen(wanted) for _ in range(20)} == {"n1"}
    site.place("n1")
    assert site.chosen(wanted) != "n1"


def test_creations_under_way_count_as_load(site: Site) -> None:
    site.node("n1")
    site.node("n2")
    placed: Counter[str] = Counter()
    for _ in range(20):
        node = site.chosen()
        placed[node] += 1
        site.place(node)
    assert placed == {"n1": 10, "n2": 10}
    assert site.chosen() == "", "all places are taken"


def test_creations_spread_over_many_nodes_between_two_reports(site: Site) -> None:
    for number in range(100):
        site.node(f"n{number}")
    placed: Counter[str] = Counter()
    for _ in range(200):
        node = site.chosen()
        placed[node] += 1
        site.place(node)
    assert max(placed.values()) <= 4


def test_the_next_node_is_one_that_was_not_tried(site: Site) -> None:
    names = {f"n{number}" for number in range(30)}
    for name in names:
        site.node(name)
    tried: list[str] = []
    while node := site.chosen(tried=tuple(tried)):
        tried.append(node)
    assert sorted(tried) == sorted(names)


def test_a_node_that_refused_for_want_of_room_is_tried_again_after_its_next_report(site: Site) -> None:
    site.node("n1")
    creation = site.creations.begin("t", "r", 0)
    site.creations.place(creation, "n1")
    site.creations.refused(creation, is_full=True)
    assert site.chosen() == ""
    site.front.report("n1", backends=LOCAL)
    assert site.chosen() == "n1"


def test_backends_are_tried_in_order_of_preference(site: Site) -> None:
    site.node("n1", backends=(NodeBackend("docker"),))
    site.node("n2", backends=(NodeBackend("local"),))
    assert site.chosen(Wanted(("local", "docker"))) == "n2"
    assert site.chosen(Wanted(("local", "docker")), tried=("n2",)) == "n1"


def test_a_node_that_is_gone_leaves_no_entry(site: Site) -> None:
    site.node("n1", warm={KIND: 3})
    assert site.chosen(Wanted(kind=KIND)) == "n1"
    site.front.members.unlinked(site.front.links["n1"])
    assert site.chosen(Wanted(kind=KIND)) == ""
    assert not site.placement.explain(Wanted()).is_full


def test_the_reason_names_what_there_is(site: Site) -> None:
    assert site.placement.explain(Wanted()).nodes == 0
    site.node("n1", {"zone": "a"}, max_sessions=0)
    nowhere = site.placement.explain(Wanted(("local",), "base"))
    assert (nowhere.is_full, nowhere.nodes) == (True, 1)
    nowhere = site.placement.explain(Wanted(("e2b",), "other"))
    assert not nowhere.is_full
    assert (nowhere.backends, nowhere.images, nowhere.labels) == (("local",), ("base", "data"), ("zone=a",))


def test_a_report_is_needed_before_a_node_is_chosen(site: Site) -> None:
    site.front.link("n1")
    assert site.chosen() == ""
    link = site.front.links["n1"]
    site.front.members.reported(link, NodeReport(1, 1, 1, backends=LOCAL, full=True), 0)
    assert site.chosen() == "n1"
