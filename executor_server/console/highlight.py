"""Highlights Python on the server: spans with fixed classes, from the standard library's tokenizer.

The code is untrusted. The tokenizer only reads it, and where it gives up, the rest is shown plain.
"""

from __future__ import annotations

import builtins
import io
import keyword
import token
import tokenize
from collections.abc import Iterator

from markupsafe import Markup, escape

from executor_server.console.text import clean

LINE_CHARS_MAX = 4096
"""Code with a longer line is data; it is not highlighted."""
TOKENS_MAX = 5_000
"""Tokens that get a class in one text; the rest is shown plain."""

_BUILTINS = frozenset(name for name in dir(builtins) if not name.startswith("_"))
_SOFT = frozenset(keyword.softkwlist) - {"_", "type"}
_CLASSES = {token.STRING: "string", token.NUMBER: "number", tokenize.COMMENT: "comment"}
_F_STRINGS = {
    kind: "string"
    for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END", "TSTRING_START", "TSTRING_MIDDLE", "TSTRING_END")
    if (kind := getattr(token, name, None)) is not None  # from 3.12 on, and from 3.14 on
}


def highlight(code: str) -> Markup:
    """Returns code as HTML: text, and spans of the classes keyword, builtin, name, string, number and comment."""
    text = str(clean(code))
    lines = text.split("\n")
    if max(map(len, lines)) > LINE_CHARS_MAX:
        return escape(text)
    pieces: list[str] = []
    row, column = 1, 0  # up to where the text is written

    def write_to(end_row: int, end_column: int, style: str = "") -> None:
        nonlocal row, column
        if (end_row, end_column) <= (row, column) or end_row > len(lines):
            return
        between = [lines[row - 1][column:], *lines[row : end_row - 1], lines[end_row - 1][:end_column]]
        piece = lines[row - 1][column:end_column] if row == end_row else "\n".join(between)
        pieces.append(f'<span class="{style}">{escape(piece)}</span>' if style else str(escape(piece)))
        row, column = end_row, end_column

    for style, begin, end in _styled(text):
        write_to(*begin)
        write_to(*end, style)
    write_to(len(lines), len(lines[-1]))
    return Markup("".join(pieces))


def _styled(text: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yields class, begin and end (line from 1, column from 0) of the tokens that have a class."""
    before = ""
    try:
        for number, found in enumerate(tokenize.generate_tokens(io.StringIO(text, newline="\n").readline)):
            if number >= TOKENS_MAX:
                return
            style = _CLASSES.get(found.type) or _F_STRINGS.get(found.type, "")
            if found.type == token.NAME:
                style = _name(found.string, before)
            if style:
                yield style, found.start, found.end
            before = found.string if found.type in (token.NAME, token.OP) else ""
    except (tokenize.TokenError, SyntaxError, ValueError, RecursionError):
        return  # the code is not Python, or is cut


def _name(name: str, before: str) -> str:
    if keyword.iskeyword(name) or (name in _SOFT and not before):
        return "keyword"
    if before in ("def", "class"):
        return "name"
    return "builtin" if name in _BUILTINS and before != "." else ""
