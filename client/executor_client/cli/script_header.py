"""The header of a script that names the packages it needs, as a comment (PEP 723).

    # /// script
    # requires-python = ">=3.11"
    # dependencies = ["polars", "scikit-learn>=1.5"]
    # ///

Reading it does not run the script. Other tools read the same header, so mistakes in it are errors here too.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from executor_client.errors import InvalidRequest

_OPENING = re.compile(r"# /// ([a-zA-Z0-9-]+)")
_CLOSING = "# ///"
_TYPE = "script"
_KEYS = ("requires-python", "dependencies", "tool")


@dataclass(frozen=True)
class ScriptHeader:
    """The contents of a script's header; empty without a header."""

    name: str  # the script's, for messages
    dependencies: tuple[str, ...] = ()
    requires_python: str = ""
    requires_python_line: int = 0
    unclosed_line: int = 0
    """The line of a header without an end, which PEP 723 ignores; 0 if there is none."""

    def check_python(self, python_version: str, image: str) -> None:
        """Raises InvalidRequest if the script does not support the session's Python."""
        with contextlib.suppress(InvalidVersion):
            if not SpecifierSet(self.requires_python).contains(Version(python_version), prereleases=True):
                raise InvalidRequest(
                    f"{self.name}, line {self.requires_python_line}: the script needs Python {self.requires_python}, "
                    f"but the image {image!r} has {python_version}; choose another with --image (`executor policy` "
                    "lists them)"
                )


@dataclass(frozen=True)
class _Block:
    line: int  # the first comment's, from 1
    text: str


def read_header(source: str, name: str) -> ScriptHeader:
    """Returns the header of a script. Raises InvalidRequest, with the line, if it is invalid."""
    lines = source.splitlines()
    blocks, unclosed_line = _blocks(lines)
    if not blocks:
        return ScriptHeader(name, unclosed_line=unclosed_line)
    if len(blocks) > 1:
        raise _wrong(name, blocks[1].line, f"a second header; the first is in line {blocks[0].line}")
    block = blocks[0]
    content = _parsed(block, name)
    for key in content:
        if key not in _KEYS:
            raise _wrong(name, _line_of(block, key), f"unknown key {key!r}; a header has {', '.join(_KEYS)}")
    dependencies = content.get("dependencies", [])
    if not isinstance(dependencies, list) or not all(isinstance(each, str) for each in dependencies):
        raise _wrong(name, _line_of(block, "dependencies"), "dependencies is not a list of strings")
    requires_python, line = content.get("requires-python", ""), _line_of(block, "requires-python")
    _check_requires_python(requires_python, name, line)
    return ScriptHeader(name, tuple(dependencies), requires_python, line, unclosed_line)


def _blocks(lines: Sequence[str]) -> tuple[list[_Block], int]:
    """Returns the headers of a script, and the line of a header without an end."""
    blocks: list[_Block] = []
    unclosed_line = index = 0
    while index < len(lines):
        opening = _OPENING.fullmatch(lines[index])
        index += 1
        if opening is None:
            continue
        comments = list(_comments(lines, index))
        closings = [offset for offset, comment in enumerate(comments) if comment == _CLOSING]
        if not closings:
            unclosed_line = unclosed_line or (index if opening[1] == _TYPE else 0)
            continue
        # PEP 723: the last possible line ends the header.
        if opening[1] == _TYPE:
            text = "\n".join(comment[2:] for comment in comments[: closings[-1]])
            blocks.append(_Block(index, text))
        index += closings[-1] + 1
    return blocks, unclosed_line


def _comments(lines: Sequence[str], index: int) -> Iterator[str]:
    for line in lines[index:]:
        if line != "#" and not line.startswith("# "):
            return
        yield line


def _parsed(block: _Block, name: str) -> Mapping[str, Any]:
    try:
        # The empty lines make the parser report line numbers of the script.
        return tomllib.loads("\n" * block.line + block.text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(name, block.line, f"the header is not valid TOML: {error}") from error


def _line_of(block: _Block, key: str) -> int:
    """Returns the line of a top-level key; the first line of the block if it is unclear."""
    begins = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[.=\]]")
    for offset, line in enumerate(block.text.split("\n")):
        if begins.match(line):
            return block.line + 1 + offset
    return block.line


def _check_requires_python(value: object, name: str, line: int) -> None:
    if not isinstance(value, str):
        raise _wrong(name, line, "requires-python is not a string")
    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise _wrong(name, line, f"requires-python is not a version specifier such as >=3.11: {error}") from error


def _wrong(name: str, line: int, text: str) -> InvalidRequest:
    return InvalidRequest(f"{name}, line {line}: {text}")
