"""Reads the answer of an image's Python about itself, which is hostile input: an image may hold any program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor_server.backends.settings import OLDEST_PYTHON

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""Errors of decoding and reading JSON that does not have the form of an answer."""

WORD_CHARS = 32


class UnusablePython(Exception):
    """The guest does not run on it; the text is the rest of a sentence that begins with the image's name."""


def python_version(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the version. Raises UnusablePython, or one of UNREADABLE when the answer is malformed."""
    implementation = printable(answer["implementation"])
    version = (int(answer["version"][0]), int(answer["version"][1]))
    if implementation != "cpython" or version < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise UnusablePython(f"has {implementation} {version[0]}.{version[1]}; CPython {wanted} or newer is needed")
    return version


def printable(text: Any, max_chars: int = WORD_CHARS) -> str:
    """Returns a text that may be shown: no control characters, no lone surrogates. Raises ValueError."""
    if not isinstance(text, str) or len(text) > max_chars or not text.isprintable():
        raise ValueError("not a text to show")
    return text
