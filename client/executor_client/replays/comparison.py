"""Compares executions: two of recordings, or a recorded one and its repetition.

Only `RULES` make unequal texts alike: times, random numbers and anything else that varies are differences. Usage and
tracebacks are not compared. Text on stderr is compared, but a difference is only a note, not a divergence: progress
bars, times and notices of programs differ from run to run.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from executor_api.values import EncodeError, OpaqueValue, encode
from executor_client._core.value_text import cut_text, one_line, value_text
from executor_client.results import ExecutionResult

_LISTED = r"^([-dlbcps][-rwxsStT]{9}) +(\d+) +\S+ +\S+ +(\d+) +[A-Z][a-z]{2} +\d+ +[\d:]+ "

RULES = (
    (re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"), "0x…"),  # addresses, as in <object at 0x7f3a5c1d2e80>
    (re.compile(r"/tmp/tmp[a-z0-9_]{8}\b"), "/tmp/tmp…"),
    (re.compile(r"\bin \d+(\.\d+)? ?s\b"), "in … s"),  # durations, as test runners print them
    (re.compile(_LISTED, re.MULTILINE), r"\1 \2 … \3 … "),  # owners and times of files, as `ls -l` prints them
)
"""Replacements in both texts before they are compared."""

TEXT_CHARS_MAX = 300
_VALUE_CHARS_MAX = 100_000


@dataclass(frozen=True)
class Difference:
    """The first thing in a step that is not as expected. `step` is 0 outside of executions."""

    step: int
    what: str
    expected: str
    got: str

    def lines(self) -> list[str]:
        where = f"step {self.step}" if self.step else "session"
        return [f"{where}: {self.what}", f"  expected: {self.expected}", f"  got:      {self.got}"]


class Diverged(BaseException):
    """Something differs from the recording. Not an `Exception`: the code and the agent that run must not handle it."""

    def __init__(self, difference: Difference) -> None:
        super().__init__("\n".join(["it differs from the recording", *difference.lines()]))
        self.difference = difference

    @classmethod
    def of(cls, step: int, what: str, expected: Any, got: Any) -> Diverged:
        return cls(Difference(step, what, *_shown(expected, got)))


def difference(step: int, expected: ExecutionResult, got: ExecutionResult) -> Difference | None:
    """Returns the first difference of two results; None if there is none."""
    for what, before, after in _compared(expected, got):
        found = differing(step, what, before, after)
        if found is not None:
            return found
    return None


def notes(step: int, expected: ExecutionResult, got: ExecutionResult) -> list[Difference]:
    """Returns the differences of two results that are not a divergence."""
    found = differing(step, "text on stderr", expected.stderr, got.stderr)
    return [] if found is None else [found]


def differing(step: int, what: str, expected: Any, got: Any) -> Difference | None:
    """Returns a difference if two values are not alike."""
    return None if alike(expected, got) else Difference(step, what, *_shown(expected, got))


def _compared(expected: ExecutionResult, got: ExecutionResult) -> Iterator[tuple[str, Any, Any]]:
    yield "printed text", expected.stdout, got.stdout
    yield "outcome", _outcome(expected), _outcome(got)
    yield "variables", expected.state.value, got.state.value
    yield "value", expected.output, got.output
    yield "images", _images(expected), _images(got)
    yield "displays", [dict(each.data) for each in expected.displays], [dict(each.data) for each in got.displays]
    yield "files created or changed", _artifacts(expected), _artifacts(got)


def _outcome(result: ExecutionResult) -> str:
    error = "" if result.error is None else f": {result.error.type}: {result.error.message}"
    return f"{result.outcome.value}{error}"


def _images(result: ExecutionResult) -> list[str]:
    return [
        f"{each.width}x{each.height} {each.mime_type}, SHA-256 {hashlib.sha256(each.data).hexdigest()}"
        for each in result.image_entries
    ]


def _artifacts(result: ExecutionResult) -> list[str]:
    return [normal(each.path) for each in result.artifacts]


def normal(text: str) -> str:
    """Returns a text after the replacements of `RULES`."""
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return text


def alike(expected: Any, got: Any) -> bool:
    """True if two values are equal, apart from what `RULES` replace in their texts."""
    if type(expected) is not type(got):
        return False
    if isinstance(expected, str):
        return normal(expected) == normal(got)
    if isinstance(expected, OpaqueValue):
        return expected.type_name == got.type_name and normal(expected.repr) == normal(got.repr)
    if type(expected) is dict:
        return alike([*expected.items()], [*got.items()])
    if type(expected) in (list, tuple):
        return len(expected) == len(got) and all(map(alike, expected, got))
    try:
        return encode(expected) == encode(got)
    except EncodeError:
        return normal(value_text(expected, _VALUE_CHARS_MAX)) == normal(value_text(got, _VALUE_CHARS_MAX))


def _shown(expected: Any, got: Any) -> tuple[str, str]:
    """Returns two values as single lines, from the first line that differs if both are texts."""
    if not (isinstance(expected, str) and isinstance(got, str)):
        return cut_text(expected, TEXT_CHARS_MAX), cut_text(got, TEXT_CHARS_MAX)
    pairs = itertools.zip_longest(expected.splitlines(keepends=True), got.splitlines(keepends=True), fillvalue="")
    for number, (before, after) in enumerate(pairs, 1):
        if normal(before) != normal(after):
            where = f"line {number}: " if number > 1 else ""
            return where + cut_text(before, TEXT_CHARS_MAX), where + cut_text(after, TEXT_CHARS_MAX)
    return cut_text(expected, TEXT_CHARS_MAX), cut_text(got, TEXT_CHARS_MAX)


def call_text(name: str, arguments: str) -> str:
    """Returns a call of a tool as one line."""
    return one_line(f"{name}({arguments})", TEXT_CHARS_MAX)
