"""Text from a sandbox cannot control the user's terminal, and is written to a file unchanged."""

from __future__ import annotations

import io
import os
import time
from typing import Any

import pytest
from tqdm import tqdm  # type: ignore[import-untyped]

from executor_client import LogEvent, Wait, WaitKind
from executor_client._core.terminal import last_states, shown
from executor_client.cli.console import Console


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\n\ttext é 漢 👩‍🚀\n", "plain\n\ttext é 漢 👩‍🚀\n"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2Jgone\x9b31m", "\\x1b[2Jgone\\x9b31m"),
        ("good\rbad\r\n\x08", "good\\rbad\n\\x08"),
        ("a\u202eb\u2066c\u2028", "a\\u202eb\\u2066c\\u2028"),
        ("\x00\x7f\x85\ud800", "\\x00\\x7f\\x85\\ud800"),
    ],
)
def test_control_characters_are_shown_not_sent(text: str, expected: str) -> None:
    assert shown(text) == expected


@pytest.mark.parametrize(("stream", "expected"), [(Terminal(), "\\x1b[31m"), (io.StringIO(), "\x1b[31m")])
def test_only_a_terminal_is_protected(monkeypatch: pytest.MonkeyPatch, stream: Any, expected: str) -> None:
    monkeypatch.setattr("sys.stdout", stream)
    Console(image_dir=None).show_event(LogEvent(1, "stdout", "\x1b[31m"))
    assert stream.getvalue() == expected


def test_a_pipe_beside_a_terminal_is_protected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `executor run x.py | tail`, the terminal interprets the output of tail."""
    for terminal, raw, expected in (
        (Terminal(), False, "\\x1b[31m"),
        (Terminal(), True, "\x1b[31m"),
        (io.StringIO(), False, "\x1b[31m"),
    ):
        reading, writing = os.pipe()
        with os.fdopen(reading) as ours, os.fdopen(writing, "w") as theirs:
            monkeypatch.setattr("sys.stdout", theirs)
            monkeypatch.setattr("sys.stderr", terminal)
            Console(raw=raw).show_event(LogEvent(1, "stdout", "\x1b[31m"))
            theirs.close()
            assert ours.read() == expected


def test_our_own_lines_have_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, variable, expected in (
        (Terminal(), "", "\x1b[1;31mexecutor: [red] \\x1b\x1b[0m\n"),
        (Terminal(), "1", "executor: [red] \\x1b\n"),
        (io.StringIO(), "", "executor: [red] \x1b\n"),
    ):
        monkeypatch.setenv("NO_COLOR", variable)
        monkeypatch.setattr("sys.stderr", stream)
        Console().fail("[red] \x1b")
        assert stream.getvalue() == expected


def test_text_that_the_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(raw, encoding="ascii"))
    Console(image_dir=None).show_event(LogEvent(1, "stderr", "é\ud800\n"))
    assert raw.getvalue() == b"\\xe9\\ud800\n"


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (Terminal(), "[waiting for the image: 'x' is \\x1bbeing fetched, 40 % (12 s, timeout 600 s)]\n"),
        (io.StringIO(), ""),
    ],
)
def test_wait_is_one_line_for_a_person_and_nothing_for_a_file(
    monkeypatch: pytest.MonkeyPatch, stream: Any, expected: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stderr", stream)
    wait = Wait(WaitKind.IMAGE, "the image", "'x' is \x1bbeing\nfetched, 40 %", 12.3, 600)
    Console(image_dir=None).show_wait(wait)
    assert stream.getvalue() == expected


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain\r\ntext\r\n", "plain\r\ntext\r\n"),
        ("\x1b[31mred\x1b[0m  \n", "\x1b[31mred\x1b[0m  \n"),
        ("0%\r50%\r100%\ndone\n", "100%\ndone\n"),
        ("50%\r\r\nnext", "50%\r\r\nnext"),
        ("a\r50%\r\r\nnext\r", "50%\nnext"),
        ("abc\rd", "dbc"),
        ("long frame\r          \rshort\n", "short\n"),
        ("long\r\x1b[Kx\nlong\x1b[2K\ry\n", "x\ny\n"),
        ("|\b/\b-\bdone\n", "done\n"),
        ("outer 1\ninner 1\r\x1b[Aouter 2\n\rinner 2\nend \ud800", "outer 2\ninner 2\nend \ud800"),
        ("a\n" * 500 + "b\x1b[9999Ac\r", None),
    ],
)
def test_a_model_sees_the_last_state_of_a_line(text: str, seen: str | None) -> None:
    assert last_states(text) == seen or (seen is None and last_states(text).count("a") >= 498)


def test_bars_of_tqdm_within_one_another_end_as_one_line() -> None:
    shown_by_tqdm = io.StringIO()
    for _ in tqdm(range(3), file=shown_by_tqdm, mininterval=0):
        for _ in tqdm(range(20), file=shown_by_tqdm, mininterval=0, leave=False):
            pass
    assert (
        last_states(shown_by_tqdm.getvalue()).startswith("100%|")
        and "\n" not in last_states(shown_by_tqdm.getvalue())[:-1]
    )


@pytest.mark.parametrize(
    "text",
    [
        "\ra" * 300_000,
        "a" * 500_000 + "\ra" * 100_000,
        "a\n" * 300_000 + "\x1b[Ab" * 100_000,
        "a" * 300_000 + "\n\x1b[A" * 100_000,
        "a\x1b[Kb\x1b[2K\x08" * 50_000,
    ],
)
def test_hostile_rewriting_takes_time_in_proportion(text: str) -> None:
    started_s = time.monotonic()
    last_states(text)
    assert time.monotonic() - started_s < 10
