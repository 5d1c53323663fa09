"""The front's actor and the nodes of Ray, with a Ray that does what a test says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from executor_server.fleet.membership import issue_front, request_certificate
from executor_server.fleet.ray.engine import EngineError, RayNode
from executor_server.fleet.ray.layout import FleetFiles, FrontFiles
from executor_server.fleet.ray.roster import CALL_TIME_S, FORGET_AFTER_S, STATUS_INTERVAL_S, Roster


@dataclass
class FakeRay:
    """Answers each call of an actor from `answers`; a call without an answer stays under way."""

    there: list[RayNode] = field(default_factory=list)
    answers: dict[tuple[str, str], Callable[..., Any]] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def nodes(self) -> list[RayNode]:
        return self.there

    def node_actor(self, node: str, kind: type, settings: object) -> str:
        self.made.append(node)
        return node

    def call(self, actor: str, method: str, *arguments: object) -> Any:
        self.calls.append((actor, method))
        return actor, method, arguments

    def poll(self, reference: Any) -> tuple[bool, Any]:
        actor, method, arguments = reference
        answer = self.answers.get((actor, method))
        return (False, None) if answer is None else (True, answer(*arguments))

    def end(self, actor: str) -> None:
        self.ended.append(actor)

    def add(self, node: str, name: str, link: str, directory: Path) -> None:
        """A node with an actor that answers all that is asked."""
        status = {"name": name, "link": link, "pid": 1, "certified": True, "problem": ""}
        self.there.append(RayNode(node, "127.0.0.1", {"zone": "a"}))
        self.answers |= {
            (node, "hello"): lambda: {"name": name, "request": request_certificate(directory / name, name)},
            (node, "certify"): lambda authority, certificate: status,
            (node, "status"): lambda: status,
            (node, "stop"): lambda: True,
        }


@pytest.fixture
def files(tmp_path: Path) -> FrontFiles:
    front = FleetFiles(tmp_path).front
    issue_front(front.authority)
    return front


def roster_of(ray: FakeRay, files: FrontFiles, **selector: str) -> Roster:
    return Roster(ray, files, object, lambda node: node, selector)


def addresses(files: FrontFiles) -> list[str]:
    return files.addresses.read_text().split()


def test_each_node_of_ray_gets_an_actor_a_certificate_and_a_line_for_the_front(
    files: FrontFiles, tmp_path: Path
) -> None:
    ray = FakeRay()
    for number in (1, 2):
        ray.add(f"r{number}", f"n{number}", f"127.0.0.{number}:50061", tmp_path)
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), None)
    assert addresses(files) == ["127.0.0.1:50061", "127.0.0.2:50061"]
    assert ray.made == ["r1", "r2"]
    assert ("r1", "certify") in ray.calls
    assert [node["name"] for node in roster.describe()] == ["n1", "n2"]


def test_nodes_without_the_labels_that_were_asked_get_no_actor(files: FrontFiles, tmp_path: Path) -> None:
    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", tmp_path)
    roster_of(ray, files, zone="b").step(0.0, None)
    assert ray.made == []
    roster_of(ray, files, zone="a").step(0.0, None)
    assert ray.made == ["r1"]


def test_a_daemon_stays_listed_when_its_ray_node_is_gone_until_the_front_has_not_heard_of_it_for_long(
    files: FrontFiles, tmp_path: Path
) -> None:
    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", tmp_path)
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), ["n1"])
    ray.there.clear()
    roster.step(10.0, ["n1"])
    roster.step(10 * FORGET_AFTER_S, ["n1"])
    assert addresses(files) == ["127.0.0.1:50061"]
    assert roster.describe()[0]["problem"]
    roster.step(10 * FORGET_AFTER_S + 1, [])
    roster.step(11 * FORGET_AFTER_S, None)
    assert addresses(files) == ["127.0.0.1:50061"]  # a front that does not answer says nothing
    roster.step(11 * FORGET_AFTER_S + 2, [])
    assert addresses(files) == []


def test_the_next_actor_of_the_front_knows_the_daemons_before_ray_has_said_a_word(
    files: FrontFiles, tmp_path: Path
) -> None:
    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", tmp_path)
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), None)
    files.addresses.unlink()
    roster_of(FakeRay(), files)
    assert addresses(files) == ["127.0.0.1:50061"]


def test_a_released_node_gets_no_actor_again(files: FrontFiles, tmp_path: Path) -> None:
    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", tmp_path)
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), None)
    roster.release("n1")
    for step in range(4, 8):
        roster.step(float(step), None)
    assert ray.ended == ["r1"]
    assert addresses(files) == []
    after = len(ray.made)
    roster_of(ray, files).step(9.0, None)
    assert len(ray.made) == after


def certified_node(files: FrontFiles, directory: Path) -> tuple[FakeRay, Roster]:
    """A node that has its certificate after the steps 0 to 3, one for each look at its state."""
    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", directory)
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(step * STATUS_INTERVAL_S, None)
    return ray, roster


def test_a_node_whose_certificate_ends_soon_gets_another_while_its_actor_lives(
    files: FrontFiles, tmp_path: Path
) -> None:
    ray, roster = certified_node(files, tmp_path)
    assert ray.calls.count(("r1", "certify")) == 1
    status = ray.answers["r1", "status"]
    ray.answers["r1", "status"] = lambda: {**status(), "certified": False}
    for step in range(4, 8):
        roster.step(step * STATUS_INTERVAL_S, None)
    assert ray.calls.count(("r1", "certify")) == 2
    assert [node["name"] for node in roster.describe()] == ["n1"]


def test_a_renewal_that_can_not_be_signed_is_shown_and_tried_again_and_the_node_stays(
    files: FrontFiles, tmp_path: Path
) -> None:
    ray, roster = certified_node(files, tmp_path)
    ray.answers["r1", "status"] = lambda: {"name": "n1", "link": "127.0.0.1:50061", "certified": False}
    ray.answers["r1", "hello"] = lambda: {"name": "n1", "request": b"x"}
    hellos = []
    for step in range(4, 12):
        roster.step(step * STATUS_INTERVAL_S, None)
        hellos.append(ray.calls.count(("r1", "hello")))
    assert hellos[-1] >= hellos[0] + 2
    assert addresses(files) == ["127.0.0.1:50061"]
    assert [node["name"] for node in roster.describe()] == ["n1"]


def test_two_ray_nodes_of_one_name_do_not_both_get_a_certificate(files: FrontFiles, tmp_path: Path) -> None:
    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", tmp_path)
    ray.add("r2", "n1", "127.0.0.2:50061", tmp_path)
    roster = roster_of(ray, files)
    for step in range(6):
        roster.step(float(step), None)
    assert addresses(files) == ["127.0.0.1:50061"]
    assert ("r2", "certify") not in ray.calls
    assert "n1" in roster.describe()[1]["problem"]


@pytest.mark.parametrize("name", ["", "../x"])
def test_a_name_that_no_node_may_have_gets_no_certificate(files: FrontFiles, name: str) -> None:
    ray = FakeRay([RayNode("r1", "127.0.0.1")], {("r1", "hello"): lambda: {"name": name, "request": b"x"}})
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), None)
    assert ("r1", "certify") not in ray.calls
    assert roster.describe()[0]["problem"]


def test_a_request_that_is_none_gets_no_certificate(files: FrontFiles) -> None:
    ray = FakeRay([RayNode("r1", "127.0.0.1")], {("r1", "hello"): lambda: {"name": "n1", "request": b"x" * 100_000}})
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), None)
    assert ("r1", "certify") not in ray.calls


def test_an_actor_that_does_not_answer_is_looked_up_again(files: FrontFiles) -> None:
    ray = FakeRay([RayNode("r1", "127.0.0.1")])
    roster = roster_of(ray, files)
    roster.step(0.0, None)
    roster.step(CALL_TIME_S + 1, None)
    roster.step(CALL_TIME_S + 2, None)
    assert ray.made == ["r1", "r1"]


def test_an_actor_that_fails_keeps_no_other_from_being_asked(files: FrontFiles, tmp_path: Path) -> None:
    def fail() -> None:
        raise EngineError("the actor has died")

    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", tmp_path)
    ray.add("r2", "n2", "127.0.0.2:50061", tmp_path)
    ray.answers["r1", "hello"] = fail
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step) * STATUS_INTERVAL_S, None)
    assert addresses(files) == ["127.0.0.2:50061"]
    assert "died" in roster.describe()[0]["problem"]


@pytest.mark.parametrize("link", ["unix:/x", "a\nb:1"])
def test_an_address_that_is_none_is_not_listed(files: FrontFiles, tmp_path: Path, link: str) -> None:
    ray = FakeRay()
    ray.add("r1", "n1", link, tmp_path)
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), None)
    assert addresses(files) == []


@pytest.mark.parametrize("text", ["", "[]", '{"links": 5, "released": []}'])
def test_a_registry_that_can_not_be_read_is_made_anew(files: FrontFiles, tmp_path: Path, text: str) -> None:
    files.registry.write_text(text)
    ray = FakeRay()
    ray.add("r1", "n1", "127.0.0.1:50061", tmp_path)
    roster = roster_of(ray, files)
    for step in range(4):
        roster.step(float(step), None)
    assert json.loads(files.registry.read_text())["links"] == {"n1": "127.0.0.1:50061"}
