"""Edits by exact replacement."""

from __future__ import annotations

import pytest

from executor_client._core.computer import ToolRefusal, replaced_once


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
