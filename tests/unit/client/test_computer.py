"""Edits by exact replacement, and searches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor_client import FileList
from executor_client._core.computer import (
    FILE_BYTES_MAX,
    PATTERN_CHARS_MAX,
    ToolRefusal,
    listing,
    replaced_once,
    search_command,
)


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        ("a\r\nb\r\nc\r\n", "a\nb\n", "1\n2\n", "1\r\n2\r\nc\r\n"),
        ("a\r\nb\r\n", "b", "2\n3", "a\r\n2\r\n3\r\n"),
        ("a\r\nb\r\n", "a\r\nb", "1\r\n2", "1\r\n2\r\n"),
        ("a\nb\r\nc\n", "b\nc", "2\n3", "a\n2\r\n3\n"),
        ("a\nb\r\n", "a", "1\n2", "1\n2\nb\r\n"),
        ("a\nb\n", "b", "2\n3", "a\n2\n3\n"),
        ("\ufeffa\r\n", "a", "b", "\ufeffb\r\n"),
    ],
)
def test_an_edit_keeps_the_ends_of_lines(text: str, old: str, new: str, result: str) -> None:
    edited, _ = replaced_once("f", text, old, new)
    assert edited == result


def test_what_is_not_there_is_refused_whatever_its_ends() -> None:
    with pytest.raises(ToolRefusal, match="not in 'f'"):
        replaced_once("f", "a\r\nb\r\n", "a\nc", "x")


@pytest.mark.parametrize(
    ("text", "old", "places"),
    [
        ("a\na\n\na", "a", "3 times in 'f', at lines 1, 2, 4:"),
        ("aaa", "aa", "2 times in 'f', at lines 1, 1:"),
        ("a\n" * 20, "a", f"20 times in 'f', at lines {', '.join(map(str, range(1, 21)))}:"),
        ("a\n" * 21, "a", f"more than 20 times in 'f', at lines {', '.join(map(str, range(1, 21)))}:"),
    ],
)
def test_text_that_occurs_more_than_once_is_refused_with_its_lines(text: str, old: str, places: str) -> None:
    with pytest.raises(ToolRefusal, match=f"occurs {places}"):
        replaced_once("f", text, old, "x")


class Counted(str):
    """A text that counts its searches, and the characters in which it counts lines."""

    finds = 0
    chars = 0

    def find(self, *arguments: Any) -> int:
        self.finds += 1
        return super().find(*arguments)

    def count(self, part: str, start: Any = 0, end: Any = None) -> int:
        self.chars += (len(self) if end is None else end) - start
        return super().count(part, start, end)


@pytest.mark.parametrize("old", [",", "missing\n1"])
def test_a_refused_edit_reads_the_text_a_limited_number_of_times(old: str) -> None:
    """It took time by the square of the file, and every tenant of an MCP server waited."""
    text = Counted("1,2\n" * 50_000 + "missing\n")
    with pytest.raises(ToolRefusal, match=r"occurs more than 20 times|first line is at line 50001"):
        replaced_once("f", text, old, "x")
    assert 0 < text.finds <= 25
    assert text.chars <= len(text)


@pytest.mark.parametrize("pair", [("\n" * (FILE_BYTES_MAX + 1), "x"), ("a", "\n" * (FILE_BYTES_MAX + 1))])
def test_an_edit_longer_than_any_file_is_refused_before_it_is_searched(pair: tuple[str, str]) -> None:
    text = Counted("a\r\n")
    with pytest.raises(ToolRefusal, match="use the shell for longer ones"):
        replaced_once("f", text, *pair)
    assert text.finds == 0


@pytest.mark.parametrize(
    "expression", ["(", "a{99999999999999}", "(" * 1900 + ")" * 1900], ids=["syntax", "number", "depth"]
)
def test_the_sandbox_reports_an_expression_that_is_not_one(expression: str, tmp_path: Path) -> None:
    """The client compiled it, on the event loop, and only expected some of the exceptions."""
    _, *rest = search_command(expression, None, None)
    done = subprocess.run([sys.executable, *rest], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(repr(expression[:100]) + " is not a regular expression: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda long: search_command(long, None, None),
        lambda long: search_command("x", None, long),
        lambda long: listing(FileList(()), long),
    ],
)
def test_a_pattern_that_is_too_long_is_refused_before_it_is_compiled(use: Callable[[str], object]) -> None:
    use("x" * PATTERN_CHARS_MAX)
    with pytest.raises(ToolRefusal, match="may have 4,000 characters, not 4,001; use a shorter one"):
        use("x" * (PATTERN_CHARS_MAX + 1))
