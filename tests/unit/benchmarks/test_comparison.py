"""Two sides in turns: which rows are compared, in which order, and when a difference is more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench import Effort
from benchmarks.compare import comparison, sides
from benchmarks.compare.comparison import Comparison, Pair, Verdict, compare
from benchmarks.compare.report import remarks
from benchmarks.compare.sides import NoSide, Side
from benchmarks.figures import Figure, Reference, to_json
from benchmarks.line_process import WorkerFailure


class Fake:
    """A side's process whose answers are made up."""

    def __init__(self, name: str, answers: Mapping[str, Any], turns: list[tuple[str, str]], *, is_head: bool) -> None:
        self.side = Side(name, Path("/none"), Path("/none"))
        self.is_head = is_head
        self._answers, self._turns = answers, turns

    def ask(self, request: Mapping[str, Any], _timeout_s: float = 0) -> dict[str, Any]:
        if "row" not in request:
            return {"CPython": "3.11.7", "grpcio": "1.85.0" if self.is_head else "1.80.0"}
        self._turns.append((self.side.name, request["row"]))
        answer = self._answers[request["row"]]
        if isinstance(answer, Exception):
            raise answer
        figures, missing = answer
        return {"figures": [to_json(figure) for figure in figures], "missing": missing}


def figure(name: str, *samples: float, unit: str = "ms") -> Figure:
    return Figure(name, unit, samples, Reference("echo", (1.0,)))


def compared(
    monkeypatch: pytest.MonkeyPatch, base: Mapping[str, Any], head: Mapping[str, Any], rounds: int = 6
) -> tuple[Comparison, list[tuple[str, str]]]:
    turns: list[tuple[str, str]] = []
    fakes = Fake("base", base, turns, is_head=False), Fake("head", head, turns, is_head=True)

    @contextmanager
    def workers(*_: object) -> Iterator[tuple[Fake, Fake]]:
        yield fakes

    monkeypatch.setattr(comparison, "_workers", workers)
    result = compare(
        fakes[0].side,
        fakes[1].side,
        list(base),
        effort=Effort(),
        rounds=rounds,
        time_s=60,
        say=lambda _: None,
    )
    return result, turns


def test_sides_take_turns_and_neither_is_always_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"execute": ([figure("1+1", 1.0)], ""), "array": ([figure("10 MB", 2.0)], "")}
    _, turns = compared(monkeypatch, rows, rows, rounds=2)
    warm_up, first, second = turns[:4], turns[4:8], turns[8:]
    assert first == [("base", "execute"), ("head", "execute"), ("base", "array"), ("head", "array")]
    assert second == [("head", "execute"), ("base", "execute"), ("head", "array"), ("base", "array")]
    assert sorted(warm_up) == sorted(first)


def test_the_round_that_warms_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"execute": ([figure("1+1", 1.0, 3.0)], "")}
    result, _ = compared(monkeypatch, rows, rows)
    assert result.pairs[0].ratios == (1.0,) * 6
    assert result.pairs[0].base.samples == (1.0, 3.0) * 6


def test_a_row_that_one_side_cannot_measure_is_named_and_the_others_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = {"savepoints": ([], "failed: AttributeError: no savepoint"), "execute": ([figure("1+1", 1.0)], "")}
    head = {"savepoints": ([figure("savepoint", 1.0)], ""), "execute": ([figure("1+1", 1.5)], "")}
    result, turns = compared(monkeypatch, base, head)
    assert [pair.head.name for pair in result.pairs] == ["1+1"]
    assert result.missing["savepoints"] == "base: failed: AttributeError: no savepoint"
    assert turns.count(("base", "savepoints")) == 1, "it was tried once"
    assert "worse by more than its noise: 1+1, 1.50 x (1.50 - 1.50)" in remarks(result)
    assert "packages that differ: grpcio 1.80.0 and 1.85.0" in remarks(result)


def test_figures_that_both_have_are_compared_when_a_row_breaks_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"output": ([figure("100 MB", 1.0)], "failed: RuntimeError: after that")}
    head = {"output": ([figure("100 MB", 1.0), figure("growth", 2.0)], "")}
    result, _ = compared(monkeypatch, base, head)
    assert [pair.head.name for pair in result.pairs] == ["100 MB"]
    assert "after that" in result.missing["output"]


def test_a_side_that_dies_takes_one_row_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"port": ([figure("trip", 1.0)], ""), "execute": ([figure("1+1", 1.0)], "")}
    head = {"port": WorkerFailure("it ended: killed"), "execute": ([figure("1+1", 1.0)], "")}
    result, _ = compared(monkeypatch, base, head)
    assert result.missing == {"port": "head: it ended: killed"}
    assert [pair.head.name for pair in result.pairs] == ["1+1"]
    assert "no figure is worse by more than its noise" in remarks(result)


def pair(*ratios: float, unit: str = "ms") -> Pair:
    return Pair(figure("a", 1.0, unit=unit), figure("a", 1.0, unit=unit), ratios)


def test_a_change_is_called_one_when_its_whole_interval_says_so() -> None:
    slower = (1.2, 1.1, 1.3, 1.25, 1.15, 1.2)
    assert pair(*slower).verdict is Verdict.WORSE
    assert pair(*slower, unit="1/s").verdict is Verdict.BETTER
    assert pair(*(1 / ratio for ratio in slower)).verdict is Verdict.BETTER
    assert pair(*(1 / ratio for ratio in slower), unit="MB/s").verdict is Verdict.WORSE
    assert pair(*slower[:5], 0.9).verdict is Verdict.NONE, "of six rounds, one that says otherwise is enough"
    assert pair(*slower[:5]).verdict is Verdict.NONE, "five rounds are too few"


def test_less_than_a_hundredth_is_no_change() -> None:
    assert pair(*[1.005] * 10).verdict is Verdict.NONE


def test_a_recorded_commit_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sides, "RECORDED", tmp_path / "recorded")
    with pytest.raises(NoSide, match="names no commit"):
        sides.recorded_commit()
    sides.RECORDED.write_text("# The commit.\n0123abc 2026-11-24\n")
    assert sides.recorded_commit() == "0123abc"


def test_the_recorded_commit_is_a_whole_one() -> None:
    assert len(sides.recorded_commit()) == 40
