"""Text from sandboxes and clients, made safe to show. HTML is escaped by the templates; this removes the rest."""

from __future__ import annotations

import re

from markupsafe import Markup

TEXT_CHARS_MAX = 64 * 1024
"""Longer values are cut. Split longer texts into lines or pages first."""

# CSI, then OSC, DCS, SOS, PM and APC up to their end, then other sequences, in seven and in eight bits.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# Controls except tab and newline, surrogates, bidi marks, and characters that take no room or look like a space.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_MARKS = "\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
_STACKED = re.compile(f"([{_MARKS}]{{3}})[{_MARKS}]+")


def clean(value: object) -> object:
    """Returns a value as a template may show it; every expression of a template passes through here.

    Terminal escapes, controls, bidi marks and invisible characters are removed, stacked marks thinned out, and long
    texts cut with the cut announced. Markup is the templates' own.
    """
    if isinstance(value, Markup | int | float):
        return value
    text = cut(str(value), TEXT_CHARS_MAX)
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPES.sub("", text.replace("\r\n", "\n"))
    return _STACKED.sub(r"\1", _INVISIBLE.sub("", text))


def cut(text: str, most: int) -> str:
    """Returns at most this many characters of a text, and how many more it has."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"
