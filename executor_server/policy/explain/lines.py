"""Finds the line of a policy file on which a key is written.

tomllib reports no lines. So the text, which is known to be TOML, is cut into its statements, and tomllib reads each by
itself: quoted and dotted keys and inline tables are then understood exactly as in the whole file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from executor_server.core.config import KeyPath, dotted
from executor_server.policy.inheritance import is_written

# Strings and comments, which can hide the other tokens, longest quotes first; brackets; the equals sign; a line's end.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|=|\n', re.DOTALL
)


@dataclass(frozen=True)
class Line:
    number: int
    text: str


@dataclass(frozen=True)
class FreePlace:
    """A line at which a missing key could be written."""

    line: Line
    kind: Literal["below", "within", "new"]  # below this line, in its inline table, or under a header of its own
    write: str  # the key as it would be written there; for a header of its own, the header


@dataclass(frozen=True)
class _Statement:
    line: Line
    table: KeyPath  # the table around it; for a header, the one that it opens
    key: KeyPath  # left of the equals sign; empty for a header
    says: Mapping[str, Any]  # its content, from the root of the file

    @property
    def is_header(self) -> bool:
        return not self.key


class Lines:
    """The statements of a text that is TOML."""

    def __init__(self, text: str) -> None:
        self._statements = tuple(_statements(text))

    def of_key(self, path: KeyPath) -> Line | None:
        """The first line on which a path is written, by itself or as a part of an inline table."""
        return next((each.line for each in self._statements if is_written(each.says, path)), None)

    def free_place_for(self, path: KeyPath) -> FreePlace | None:
        """Finds a line for a key that is not written; None when the file has no table around it."""
        for each in self._statements:
            whole = (*each.table, *each.key)
            if not each.is_header and whole == path[: len(whole)]:
                return FreePlace(each.line, "within", dotted(path[len(whole) :]))
        near = [each for each in self._statements if each.table and each.table == path[: len(each.table)]]
        if near:
            header = max((each for each in near if each.is_header), key=lambda each: len(each.table))
            return FreePlace(header.line, "below", dotted(path[len(header.table) :]))
        line = self.of_key(path[:2])
        return FreePlace(line, "new", f"[{dotted(path[:-1])}]") if line is not None else None

    def first_header(self) -> Line | None:
        return next((each.line for each in self._statements if each.is_header), None)


def _statements(text: str) -> Iterator[_Statement]:
    table: KeyPath = ()
    for line, source in _cut(text):
        says = tomllib.loads(source)
        if not says:  # a comment, or nothing
            continue
        if source.lstrip().startswith("["):
            table = _path_of(says)
            yield _Statement(line, table, (), says)
        else:
            yield _Statement(line, table, _path_of(_key_alone(source)), _below(table, says))


def _key_alone(source: str) -> dict[str, Any]:
    """The key of a statement, as nested tables that hold nothing else."""
    end = next(token.start() for token in _TOKEN.finditer(source) if token.group() == "=")
    return tomllib.loads(f"{source[:end]}= {{}}")


def _path_of(tables: Any) -> KeyPath:
    path: list[str] = []
    while isinstance(tables, dict) and tables:
        name, tables = next(iter(tables.items()))
        path.append(name)
    return tuple(path)


def _below(table: KeyPath, says: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in reversed(table):
        says = {str(name): says}
    return says


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
