"""Receivers of the output of commands in a sandbox."""

from __future__ import annotations

from collections.abc import Callable

READ_CHARS = 8_192
"""Characters that are read of an output or an error; of what follows nothing is kept."""


def collected(texts: list[str]) -> Callable[[str], None]:
    """Returns a receiver of output that keeps the beginning only."""

    def take(text: str) -> None:
        if sum(map(len, texts)) < READ_CHARS:
            texts.append(text[:READ_CHARS])

    return take


def ignored(_text: str) -> None:
    """Receives output that is not read."""
