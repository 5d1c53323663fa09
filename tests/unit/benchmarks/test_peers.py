"""The table of peers: what is measured of whom, and what stands where a peer can't do something."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from benchmarks.line_process import WorkerFailure
from benchmarks.peers import run
from benchmarks.peers.environments import DRIVERS, Peer, read_catalogue
from benchmarks.peers.report import peers_markdown
from benchmarks.peers.run import FIGURES, Measured, Row, measure_peers

CATALOGUE = read_catalogue()
ADD = Row("add", 3, 2, ("1+1",))
LINES = Row("lines", 2, 1, ("first of 1,000 lines", "1,000 lines"))


@pytest.mark.parametrize("peer", CATALOGUE.peers, ids=lambda peer: peer.name)
def test_each_peer_is_measured_or_says_why_not(peer: Peer) -> None:
    assert peer.isolates
    assert peer.beside in {each.name for each in CATALOGUE.peers if each.is_ours}
    if peer.unavailable:
        assert not peer.driver
        return
    assert (DRIVERS / peer.driver).is_file()
    if not peer.is_ours:
        pinned = {requirement.split("==")[0].split("[")[0] for requirement in peer.requirements if "==" in requirement}
        assert peer.main in pinned, "its version is in the file"


class Fake:
    """A driver's process whose answers are made up."""

    def __init__(self, command: list[str], **_: object) -> None:
        self._name = Path(command[1]).stem

    def ask(self, request: dict[str, Any], _timeout_s: float) -> dict[str, Any]:
        if request["row"] == "version":
            return {"figures": {}}
        TURNS.append((self._name, request["row"]))
        answer = ANSWERS[self._name][request["row"]]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        pass


TURNS: list[tuple[str, str]] = []
ANSWERS: dict[str, dict[str, Any]] = {}


def measured(monkeypatch: pytest.MonkeyPatch, answers: dict[str, dict[str, Any]], *rows: Row) -> list[Measured]:
    TURNS.clear()
    ANSWERS.clear()
    ANSWERS.update(answers)
    monkeypatch.setattr(run, "LineProcess", Fake)
    monkeypatch.setattr(run, "_ready", lambda _measured: Path("/none"))
    found = [Measured(Peer(name, name, "a wall", "ours", driver=f"{name}.py")) for name in answers]
    measure_peers(found, rows, lambda _: None)
    return found


def test_peers_take_turns_and_none_is_always_first(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: dict[str, Any] = {"add": {"figures": {"1+1": [1.0, 2.0]}}}
    found = measured(monkeypatch, {"ours": answer, "a": answer, "b": answer}, ADD)
    assert [name for name, _ in TURNS] == ["ours", "a", "b", "a", "b", "ours", "b", "ours", "a"]
    assert found[1].samples == {"1+1": [1.0, 2.0] * 3}


def test_what_a_peer_cannot_do_is_a_reason_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, dict[str, Any]] = {
        "ours": {"add": {"figures": {"1+1": [1.0]}}, "lines": {"figures": {"1,000 lines": [3.0]}}},
        "a": {"add": {"cannot": "it has no sums"}, "lines": {"figures": {"1,000 lines": [2.0]}}},
    }
    ours, other = measured(monkeypatch, answers, ADD, LINES)
    assert other.reasons["1+1"] == "it has no sums"
    assert TURNS.count(("a", "add")) == 1
    assert ours.reasons["first of 1,000 lines"] == "it gives all output at the end"
    assert other.samples["1,000 lines"] == [2.0, 2.0]


def test_a_turn_that_fails_once_is_named_and_the_figure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"figures": {"1+1": [1.0]}}
    (other,) = measured(monkeypatch, {"a": {"add": [good, WorkerFailure("it ended: killed"), good]}}, ADD)
    assert other.samples["1+1"] == [1.0, 1.0]
    assert other.failures == {"add": ["it ended: killed"]}


def test_a_peer_that_fails_again_is_through_with_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (other,) = measured(monkeypatch, {"a": {"add": {"failed": "BrokenPipeError: too much"}}}, ADD)
    assert TURNS == [("a", "add")] * 2
    assert other.reasons["1+1"] == "failed: BrokenPipeError: too much"


def test_the_table_has_factors_reasons_and_what_is_isolated() -> None:
    ours = Measured(Peer("ours", "ours", "a wall", "ours"), samples={"1+1": [2.0, 2.0]})
    other = Measured(Peer("a", "a peer", "nothing", "ours"), "1.2", samples={"1+1": [50.0, 54.0]})
    third = Measured(Peer("b", "a service", "a machine", "ours", unavailable="no package"))
    third.cannot("no package", FIGURES)
    printed = peers_markdown([ours, other, third], date(2026, 11, 24), load=0.1)
    assert "| ours | 2 ms | a wall |" in printed
    assert "| a peer 1.2 | 52 ms (26 x) | nothing |" in printed
    assert "| a service | - (1) | a machine |" in printed
    assert "1. no package" in printed
