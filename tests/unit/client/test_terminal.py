"""Text from a sandbox cannot control the user's terminal, and is written to a file unchanged."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from executor_client import LogEvent, Wait, WaitKind
from executor_client._core.terminal import shown
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
        (Terminal(), "[waiting for the image: 'x' is \\x1bbeing fetched, 40 %, 12 s, gives up after 600 s]\n"),
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
