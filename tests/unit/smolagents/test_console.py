"""The agent's console while its code runs: prints, and waits of the client."""

from __future__ import annotations

import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from smolagents.monitoring import AgentLogger, LogLevel

from executor_client import Progress, Wait, WaitKind
from executor_client.smolagents import RemoteExecutor
from executor_client.smolagents.console import (
    LINE_CHARS_MAX,
    REWRITTEN_SHOWN_EVERY_S,
    LogStream,
    WaitLog,
    escape,
    show_wait,
)
from tests.support.clock import Clock
from tests.support.fake_daemon import TOKEN, serve


class Shown:
    """A console that is written to a string, and the stream that is shown on it."""

    def __init__(self, *, width: int = 200, chars_max: int = 10_000, encoding: str = "utf-8") -> None:
        self._raw = io.BytesIO()
        file = io.TextIOWrapper(self._raw, encoding=encoding, write_through=True)
        self.console = Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False)
        self.logger = AgentLogger(console=self.console)
        self.clock = Clock(100.0)
        self.stream = LogStream(self.logger, chars_max, self.clock)
        self._encoding = encoding

    def text(self) -> str:
        return self._raw.getvalue().decode(self._encoding)


def shown(*pieces: str, chars_max: int = 10_000, width: int = 200) -> str:
    console = Shown(width=width, chars_max=chars_max)
    for piece in pieces:
        console.stream.feed(piece)
    console.stream.close()
    return console.text()


def test_pieces_become_whole_lines() -> None:
    assert shown("one\ntw", "o\r", "\nthree\n\nfour", "") == "| one\n| two\n| three\n| \n| four\n"


def test_streams_have_lines_of_their_own() -> None:
    console = Shown()
    for text, stream in [("a", "stdout"), ("x", "stderr"), ("b\n", "stdout"), ("y\n", "stderr"), ("c", "stdout")]:
        console.stream.feed(text, stream)
    console.stream.close()
    assert console.text() == "| ab\n| xy\n| c\n"


def test_nothing_printed_can_steer_the_terminal_or_rich() -> None:
    text = shown("\x1b[2J[bold red]markup[/bold red] \x9b31m \u202egnp.exe\x07\x1b]0;title\x07\x1b[5;1H\n")
    visible = "| \\x1b[2J[bold red]markup[/bold red] \\x9b31m \\u202egnp.exe\\x07\\x1b]0;title\\x07\\x1b[5;1H\n"
    assert text == visible


def test_colours_and_what_progress_bars_draw_with_are_left_out() -> None:
    assert shown("\x1b[1;31mred\x1b[0m \x1b[38;2;1;2;3mtrue\x1b[m\x1b[K\x1b[?25l\x1b[A\n") == "| red true\n"


def test_sequence_in_two_pieces_is_left_out_all_the_same() -> None:
    assert shown("\x1b[3", "1mred\x1b", "[0m\n") == "| red\n"


def test_endless_output_without_a_line_break_is_bounded() -> None:
    text = shown(*["x" * 1000] * 100, chars_max=20_000)
    assert len(text) < 30_000
    assert text.endswith("| ... the rest is not shown live\n")


def test_ten_megabytes_cost_no_more_than_what_is_shown() -> None:
    lines = shown(*["0123456789abcde\n" * 4096] * 160, chars_max=50_000).splitlines()
    assert len(lines) == 50_000 // 16 + 1


def test_line_that_is_too_long_is_cut() -> None:
    assert shown("x" * (LINE_CHARS_MAX + 1) + "\n", width=3000) == f"| {'x' * LINE_CHARS_MAX} ...\n"


def test_each_row_of_a_wide_line_has_its_bar() -> None:
    """Without a bar, a program could print text at the place of the agent's own lines."""
    assert shown("x" * 20 + " Final answer: 42\n", width=22) == f"| {'x' * 20}\n| Final answer: 42\n"
    assert shown("x" * 45, width=22) == f"| {'x' * 20}\n| {'x' * 20}\n| {'x' * 5}\n"


def test_wide_characters_fill_the_row_and_no_more() -> None:
    rows = shown("文字" * 20, width=22).splitlines()
    assert rows == [f"| {'文字' * 5}"] * 4


def test_escaping_leaves_ordinary_text_alone() -> None:
    assert escape("naïve\ttext — 文字 🎈\n") == "naïve\ttext — 文字 🎈\n"
    assert len(escape("\x1b" * LINE_CHARS_MAX)) == 4 * LINE_CHARS_MAX


def test_tab_moves_to_the_next_stop() -> None:
    assert shown("a\tb\n") == "| a       b\n"


def test_text_that_the_console_cannot_encode_breaks_no_execution() -> None:
    console = Shown(encoding="ascii")
    console.stream.feed("é文\n")
    assert console.text() == "| \\xe9\\u6587\n"


def test_nothing_is_shown_to_who_wants_no_output() -> None:
    console = Shown()
    console.logger.level = LogLevel.ERROR
    console.stream.feed("text\n")
    assert console.text() == ""


# ---------------------------------------------------------------------------------------------------------------------
# Lines that are rewritten


def test_progress_bar_is_shown_now_and_then_and_at_its_end() -> None:
    console = Shown()
    for percent in range(101):
        console.stream.feed(f"\r{percent:3}%|", "stderr")
        console.clock.now_s += REWRITTEN_SHOWN_EVERY_S / 40
    console.stream.feed("\n", "stderr")
    assert console.text() == "|   0%|\n|  40%|\n|  80%|\n| 100%|\n"


@pytest.mark.parametrize("text", ["\r10%\r20%\r30%\n", "10%\r20%\r30%\r\n", "10%\r20%\r30%\r"])
def test_of_a_line_that_was_rewritten_at_once_only_the_end_is_shown(text: str) -> None:
    """The same for every division into pieces: in a complete line only the last state is valid."""
    assert shown(text).splitlines()[-1] == "| 30%"
    assert len(shown(text).splitlines()) <= 2


def test_state_that_was_shown_is_not_shown_again_at_the_end() -> None:
    console = Shown()
    console.stream.feed("\r99%\r100%")
    console.clock.now_s += REWRITTEN_SHOWN_EVERY_S
    console.stream.feed("\r100%\r")
    console.stream.feed("\n")
    assert console.text() == "| 99%\n| 100%\n"


def test_rewriting_without_end_is_bounded() -> None:
    console = Shown(chars_max=1000)
    for _ in range(10_000):
        console.stream.feed("\r" + "x" * 70)
        console.clock.now_s += REWRITTEN_SHOWN_EVERY_S
    assert len(console.text()) < 1200


# ---------------------------------------------------------------------------------------------------------------------
# Beside live parts of rich, and waits


def test_lines_stand_above_what_is_live_and_leave_it_whole() -> None:
    """A managed agent streams its model's words while the manager's code prints."""
    console = Shown(width=40)
    with Live("thinking", console=console.console, auto_refresh=False) as live:
        console.stream.feed("printed\n")
        live.update("answer", refresh=True)
    rows = [row.rpartition("\x1b[2K")[2] for row in console.text().replace("\r", "").splitlines()]
    assert rows.index("| printed") < rows.index("answer") and rows[-1] in ("answer", "\x1b[?25h")


class _Terminal(io.StringIO):
    """Calls `at_answer` once, before a piece of text with the answer is written."""

    at_answer: Callable[[], None] | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "answer" in text and (call := self.at_answer) is not None:
            self.at_answer = None
            call()
        return super().write(text)


def test_a_line_waits_for_the_last_text_of_another_agents_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """A display that ends restores `sys.stdout` first. A line that came then was written into its last row."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    others = Console(width=40, force_terminal=True, color_system=None)
    stream = LogStream(AgentLogger(console=Console(width=40, force_terminal=True, color_system=None)), 1000)
    writer = threading.Thread(target=stream.feed, args=("late\n",))

    def print_meanwhile() -> None:
        writer.start()
        writer.join(0.05)

    with Live("thinking", console=others, auto_refresh=False) as live:
        stream.feed("early\n")
        live.update("answer")
        terminal.at_answer = print_meanwhile
    writer.join()
    text = terminal.getvalue()
    assert text.index("| early") < text.index("answer") < text.index("| late")


def test_wait_is_one_line_that_steers_nothing() -> None:
    console = Shown()
    show_wait(console.logger, Wait(WaitKind.TOOL, "the tool '[red]\x1b[2J'", "", 12.4, None))
    assert console.text() == "waiting for the tool '[red]\\x1b[2J' (12 s)\n"


def test_executor_shows_what_its_client_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_client._core.waiting.WAIT_REPORTED_AFTER_S", 0.02)
    console = Shown()
    with tempfile.TemporaryDirectory(prefix="fake") as directory, serve(Path(directory)) as daemon:
        barrier = daemon.barriers["CreateSession"] = threading.Event()

        class Logger(AgentLogger):
            def log(self, *args: Any, **kwargs: Any) -> None:
                super().log(*args, **kwargs)
                barrier.set()

        logger = Logger(console=console.console)
        with RemoteExecutor(logger=logger, address=daemon.address, token=TOKEN, image="data") as executor:
            executor("1")
    assert console.text().startswith("waiting for a sandbox of image 'data' (0 s, timeout 120 s)\n")


def test_wait_without_a_console_is_not_shown() -> None:
    show_wait(None, Wait(WaitKind.TOOL, "the tool", "", 1, None))


def test_wait_with_progress_is_a_line_for_each_step_and_now_and_then() -> None:
    console, log = Shown(), WaitLog()
    steps = [
        ("resolving", 1, 0),
        ("installing", 2, 1),
        ("installing", 3, 9),
        ("installing", 7, 20),
        ("first import", 8, 0),
    ]
    for step, waited_s, done in steps:
        progress = Progress(step, done, 23 if done else 0, "packages")
        log.show(console.logger, Wait(WaitKind.IMAGE, "the environment", str(progress), waited_s, None, progress))
    log.show(console.logger, Wait(WaitKind.TOOL, "the tool", "", 1, None))
    shown = [line.removeprefix("waiting for ") for line in console.text().splitlines()]
    assert shown == [
        "the environment: resolving (1 s)",
        "the environment: installing, 1 of 23 packages (2 s)",
        "the environment: installing, 20 of 23 packages (7 s)",
        "the environment: first import (8 s)",
        "the tool (1 s)",
    ]
