"""The progress of an environment on a person's screen: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import io

import pytest

from executor_client import Progress, Wait, WaitKind
from executor_client.cli.console import Console
from tests.support.screen import Screen

STEPS = (
    Progress("resolving"),
    Progress("installing", 3, 23, "packages"),
    Progress("installing", 17, 23, "packages"),
    Progress("first import\x1b[2J"),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(console: Console, progress: Progress) -> None:
    console.show_wait(Wait(WaitKind.IMAGE, "the environment", "", 1.0, 600.0, progress))


def on_terminal(monkeypatch: pytest.MonkeyPatch, kind: str = "xterm") -> Terminal:
    """Makes stderr a terminal. Not a fixture: pytest replaces stderr after those."""
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def test_without_a_terminal_each_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    for progress in STEPS:
        report(console, progress)
    console.end_wait()
    console.remark("done")
    assert capsys.readouterr().err.splitlines() == [
        "[building the environment: resolving]",
        "[building the environment: installing, 3 of 23 packages]",
        "[building the environment: first import\\x1b[2J]",
        "[done]",
    ]


def test_a_terminal_shows_a_bar_that_goes_when_something_else_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, console = on_terminal(monkeypatch), Console()
    for progress in STEPS:
        report(console, progress)
    console.remark("done")
    screen = Screen()
    screen.feed(terminal.getvalue())
    assert [line for line in screen.lines() if line] == ["[done]"]
    for shown in ("the environment: installing", "17 of 23 packages", "the environment: first import\\x1b[2J"):
        assert shown in terminal.getvalue()


def test_a_bar_that_was_removed_comes_back_with_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, console = on_terminal(monkeypatch), Console()
    report(console, STEPS[1])
    console.end_wait()
    console.end_wait()
    begun = len(terminal.getvalue())
    report(console, STEPS[2])
    console.end_wait()
    assert "17 of 23 packages" in terminal.getvalue()[begun:]


def test_a_terminal_that_can_not_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, console = on_terminal(monkeypatch, "dumb"), Console()
    for progress in STEPS[:3]:
        report(console, progress)
    assert terminal.getvalue().splitlines() == [
        "[building the environment: resolving]",
        "[building the environment: installing, 3 of 23 packages]",
    ]
