"""Makes text from a sandbox safe for a terminal.

Control characters can make a terminal hide text, rewrite lines, set titles, even type. So they are shown as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters but newline and tab; those that turn the direction of text; line separators; lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """Returns the text with every character that controls a terminal written as an escape."""
    return escaped(text.replace("\r\n", "\n"))


def escaped(text: str) -> str:
    """Returns the text with each unsafe character made visible, as `\\x1b` or `\\u202e`."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def encodable(text: str, encoding: str) -> str:
    """Returns the text with each character that the encoding lacks written as an escape."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: one for each row, whatever its cells contain."""
    safe = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in safe]
