"""Makes text from a sandbox safe for a terminal, and shows to a model what a terminal would show.

Control characters can make a terminal hide text, rewrite lines, set titles, even type. So they are shown as escapes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

# Control characters except newline and tab; marks that change the direction of text; line separators; lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Sequences that rewrite a line: a return, a backspace, "up" and "erase"; then the pieces of a text with such sequences.
_REWRITES = re.compile(r"\r(?![\r\n])|\x08|\x1b\[\d*[AK]")
_PIECE = re.compile(
    r"(?P<end>\r*\n)|(?P<start>\r+)|(?P<back>\x08+)|\x1b\[(?P<by>\d{0,4})(?P<moves>[AK])|[^\r\n\x08\x1b]+|.", re.DOTALL
)
_ROWS = 100
"""Lines that "up" can reach."""


def last_states(text: str) -> str:
    """Returns the text as a terminal shows it in the end, without overwritten text, such as that of progress bars.

    Takes time and memory in proportion to the text.
    """
    if not _REWRITES.search(text):
        return text
    done, rows, row, at = io.StringIO(), [bytearray()], 0, 0  # UTF-32, which is overwritten in place; `at` in bytes
    for found in _PIECE.finditer(text):
        line = rows[row]
        if found["end"]:
            row, at = row + 1, 0
            if row == len(rows):
                rows.append(bytearray())
            if row == 2 * _ROWS:
                done.writelines(f"{_row(each)}\n" for each in rows[:_ROWS])
                del rows[:_ROWS]
                row -= _ROWS
        elif found["start"]:
            at = 0
        elif found["back"]:
            at = max(0, at - 4 * len(found["back"]))
        elif found["moves"] == "A":
            row = max(0, row - int(found["by"] or 1))
            at = min(at, len(rows[row]))
        elif found["moves"]:
            at = 0 if found["by"] == "2" else at
            del line[at:]
        else:
            piece = found.group().encode("utf-32-le", "surrogatepass")
            line[at : at + len(piece)] = piece
            at += len(piece)
    return done.getvalue() + "\n".join(map(_row, rows))


def _row(line: bytearray) -> str:
    return line.decode("utf-32-le", "surrogatepass").rstrip(" ")


def shown(text: str) -> str:
    """Returns the text with every character that controls a terminal written as an escape."""
    return escaped(text.replace("\r\n", "\n"))


def escaped(text: str) -> str:
    """Returns the text with each unsafe character made visible, as `\\x1b` or `\\u202e`."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def encodable(text: str, encoding: str) -> str:
    """Returns the text with each character that the encoding lacks written as an escape."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def sendable(text: str) -> str:
    """Returns the text with lone surrogates, which file names and values may contain and JSON cannot, escaped."""
    return encodable(text, "utf-8")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: one for each row, whatever its cells contain."""
    safe = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in safe]
