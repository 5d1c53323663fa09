"""An agent on a real terminal: its prints appear completely between, above and beside smolagents' panels."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.support.daemon import Daemon
from tests.support.screen import Shown, run_on_terminal

COLUMNS = 80
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shown(daemon: Daemon) -> Shown:
    command = [sys.executable, "-m", "tests.integration.talking_agent", json.dumps(daemon.access)]
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    seen = run_on_terminal(command, environment, columns=COLUMNS)
    assert seen.exit_code == 0, seen.raw
    return seen


def between(lines: list[str], start: str, end: str) -> list[str]:
    first = next(number for number, line in enumerate(lines) if start in line)
    last = next(number for number, line in enumerate(lines) if number > first and end in line)
    return lines[first + 1 : last]


def test_no_row_is_wider_than_the_terminal(shown: Shown) -> None:
    assert max(map(cell_len, shown.lines)) <= COLUMNS


def rows_of_step(number: int, shown: Shown) -> list[str]:
    """Returns the rows between the code of a step and the logs that end it."""
    step = between(shown.lines, f" Step {number} ━", "Execution logs")
    rule = max(number for number, line in enumerate(step) if line.strip(" ─") == "" and "─" in line)
    return step[rule + 1 :]


def test_what_a_step_prints_stands_under_its_code_with_a_bar_before_each_row(shown: Shown) -> None:
    rows = rows_of_step(1, shown)
    assert all(row.startswith("|") for row in rows)
    assert rows[0] == "| red [bold]markup[/bold]"
    bar = [row for row in rows if "%|" in row]
    assert bar[-1] == f"| 100%|{'#' * 20}|" and len(bar) <= 4
    wide = [row.removeprefix("| ") for row in rows if "文" in row]
    assert "".join(wide) == "文字" * 40 and [cell_len(row) for row in wide] == [78, 78, 4]
    assert [len(row) - 2 for row in rows if "y" in row and "y" * 10 in row] == [78, 72]


def test_megabytes_are_shown_up_to_a_limit_that_is_announced(shown: Shown) -> None:
    rows = rows_of_step(2, shown)
    assert rows[-1] == "| ... the rest is not shown live" and 500 < len(rows) < 1000
    assert set(rows[:-1]) == {f"| {'z' * 63}"}


def test_what_is_printed_beside_a_streaming_model_loses_nothing_and_takes_nothing(shown: Shown) -> None:
    waiting = [line for line in shown.lines if line.startswith("| waiting")]
    assert len(waiting) > 5 and waiting == [f"| waiting {n + 1}" for n in range(len(waiting))]
    assert [line for line in shown.lines if "I help." in line] == ["Thought: I help."]
    words = between(shown.lines, "Thought: I help.", "Executing parsed code")
    # On a slow machine the manager's wait for its helper is shown, too.
    said = [word for word in words if word and not word.startswith(("|", "waiting for the tool"))]
    assert said == ["Let me", "think", "of it  print('inner')"]
    assert shown.lines.count("| inner") == 1
