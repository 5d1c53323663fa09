"""A row that can't be measured, or fails, is named with its reason and takes nothing from the others."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks import __main__ as command_line
from benchmarks import measuring, rows
from benchmarks.bench import Bench, Effort
from benchmarks.figures import (
    AtLeast,
    AtMost,
    AtMostMore,
    AtMostTimes,
    Figure,
    Reference,
    from_json,
    to_json,
)
from benchmarks.references import Unmeasurable

_FIGURE = Figure("a figure", "ms", (1.0, 2.0, 3.0), Reference("echo", (1.0, 1.0, 1.0)), AtMostTimes(2))
_ROWS = Path(rows.__file__).parent


def _good(_bench: Bench) -> Iterator[Figure]:
    yield _FIGURE


def _without_engine(_bench: Bench) -> Iterator[Figure]:
    raise Unmeasurable("there is no docker command")
    yield


def _breaks_after_one(_bench: Bench) -> Iterator[Figure]:
    yield _FIGURE
    raise RuntimeError("the daemon\nis gone")


def _of_another_commit(_bench: Bench) -> Iterator[Figure]:
    from executor_client import NoSuchName  # noqa: F401

    yield _FIGURE


_MADE_UP = {
    "execute": _good,
    "docker-warm": _without_engine,
    "array": _breaks_after_one,
    "lines": _of_another_commit,
}


class _NoBench:
    def drop_dead(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line over rows that are made up, without a daemon."""
    monkeypatch.setattr(measuring, "measurement", _MADE_UP.__getitem__)
    monkeypatch.setattr(command_line, "MEASUREMENTS", _MADE_UP)
    _use(monkeypatch, lambda _effort: nullcontext(_NoBench()))
    return lambda *arguments: CliRunner().invoke(command_line.main, arguments)


def _use(monkeypatch: pytest.MonkeyPatch, bench: Callable[[Effort], AbstractContextManager[object]]) -> None:
    monkeypatch.setattr(command_line, "running_bench", bench)


def test_only_of_a_row_that_cannot_be_measured_still_prints_the_others(run: Callable[..., Result]) -> None:
    result = run("--only", "docker-warm", "--only", "execute")
    assert result.exit_code == 0
    assert "a figure" in result.stdout
    assert "docker-warm: there is no docker command" in result.stdout


def test_a_row_that_fails_in_the_middle_keeps_what_it_has_measured(run: Callable[..., Result]) -> None:
    result = run("--markdown")
    assert result.exit_code == 1, "a failure must not pass for a success"
    assert result.stdout.count("| a figure |") == 2
    assert "array: failed: RuntimeError: the daemon is gone" in result.stdout


def test_a_row_that_cannot_be_imported_says_what_is_missing(run: Callable[..., Result]) -> None:
    result = run("--only", "lines")
    assert result.exit_code == 0
    assert "lines: not here: ImportError: cannot import name 'NoSuchName'" in result.stdout
    assert ".py)" not in result.stdout  # no path of this machine


def test_figures_are_printed_when_a_daemon_does_not_stop_as_it_should(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def breaks_at_the_end(_effort: Effort) -> Iterator[_NoBench]:
        yield _NoBench()
        raise RuntimeError("the daemon ended with exit code -9")

    _use(monkeypatch, breaks_at_the_end)
    result = run("--only", "execute")
    assert result.exit_code == 1
    assert "a figure" in result.stdout


def test_json_has_every_sample_and_what_is_missing(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    run("--json", str(path))
    written = json.loads(path.read_text())
    assert written["figures"][0]["samples"] == [1.0, 2.0, 3.0]
    assert set(written["missing"]) == {"docker-warm", "array", "lines"}


@pytest.mark.parametrize("aim", [None, AtMost(3), AtMostTimes(1.5), AtMostMore(2), AtLeast(60)])
def test_a_figure_survives_the_way_through_json(aim: object) -> None:
    figure = Figure("a", "ms", (1.0, 2.0), Reference("b", (3.0,)), aim, by_best=True)  # type: ignore[arg-type]
    assert from_json(json.loads(json.dumps(to_json(figure)))) == figure


def test_every_name_of_a_row_has_a_function() -> None:
    for name, place in rows.MEASUREMENTS.items():
        module, _, function = place.partition(":")
        tree = ast.parse((_ROWS / f"{module}.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions, name
