"""Where in a policy file a key is written.

TOML's reader tells no lines. So the text, which is known to be TOML, is cut into its statements, and each is read by
itself: what it says, quoted and dotted keys and inline tables included, is then as sure as the reader is.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from executor_server.policy_inheritance import is_written
from executor_server.settings import KeyPath

# What can hide a bracket or the end of a line; brackets; ends of lines. Longest quotes first.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n', re.DOTALL
)


@dataclass(frozen=True)
class Line:
    number: int
    text: str


@dataclass(frozen=True)
class _Statement:
    line: Line
    table: KeyPath  # in which it stands
    says: Mapping[str, Any]
    opens_table: bool


class Lines:
    """The statements of a text that is TOML."""

    def __init__(self, text: str) -> None:
        self._statements = tuple(_statements(text))

    def of_key(self, path: KeyPath) -> Line | None:
        """The line where what is at a path begins, by itself or as a part of an inline table."""
        return next((each.line for each in self._statements if _says(each, path)), None)

    def of_table(self, path: KeyPath) -> tuple[KeyPath, Line] | None:
        """The innermost table around a path that is written, and the line where it begins."""
        for depth in range(len(path) - 1, 0, -1):
            around = path[:depth]
            saying = [each for each in self._statements if _says(each, around)]
            opening = [each for each in saying if each.opens_table and _opened(each) == around]
            if saying:
                return around, (opening or saying)[0].line
        return None

    def first_table(self) -> Line | None:
        return next((each.line for each in self._statements if each.opens_table), None)


def _says(statement: _Statement, path: KeyPath) -> bool:
    depth = len(statement.table)
    return path[:depth] == statement.table and len(path) > depth and is_written(statement.says, path[depth:])


def _statements(text: str) -> Iterator[_Statement]:
    table: KeyPath = ()
    for line, source in _cut(text):
        says = tomllib.loads(source)
        if not says:  # a comment, or nothing
            continue
        opens_table = source.lstrip().startswith("[")
        statement = _Statement(line, () if opens_table else table, says, opens_table)
        if opens_table:
            table = _opened(statement)
        yield statement


def _opened(statement: _Statement) -> KeyPath:
    path: list[str] = []
    inner: Any = statement.says
    while isinstance(inner, dict) and inner:
        name, inner = next(iter(inner.items()))
        path.append(name)
    return tuple(path)


def _cut(text: str) -> Iterator[tuple[Line, str]]:
    """Each statement with its first line."""
    number, start, depth, newlines = 1, 0, 0, 0
    for token in _TOKEN.finditer(text):
        found = token.group()
        newlines += found.count("\n")
        if found in ("[", "{"):
            depth += 1
        elif found in ("]", "}"):
            depth -= 1
        elif found == "\n" and depth == 0:
            source = text[start : token.end()]
            yield Line(number, source.partition("\n")[0].strip()), source
            number, start = 1 + newlines, token.end()
    if start < len(text):
        yield Line(number, text[start:].partition("\n")[0].strip()), text[start:]
