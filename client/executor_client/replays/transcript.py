"""Writes the frames of a recording as lines of a terminal, with times, and as an asciicast for its players.

Each text of the recording is escaped: the only control characters are newlines, and in an asciicast our own colours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from executor_client._core.terminal import shown
from executor_client.replays.timeline import Frame, FrameKind

PAUSE_S_MAX = 5.0
"""The longest time that a player waits for the next frame, in seconds."""
COLUMNS, ROWS = 110, 32

_MARGIN = " " * 11 + "│ "
_STYLES = {
    FrameKind.NOTE: "dim",
    FrameKind.CODE: "cyan",
    FrameKind.ERRORS: "red",
    FrameKind.CALL: "magenta",
    FrameKind.ANSWER: "magenta",
    FrameKind.MODEL: "blue",
    FrameKind.FAILURE: "red",
    FrameKind.END: "dim",
}
_COLOURS = {"dim": "2", "bold": "1", "red": "31", "blue": "34", "magenta": "35", "cyan": "36"}


@dataclass(frozen=True)
class Piece:
    """Text to write `at_s` seconds after the start, and its style: the name of a colour, "dim" or "bold", or ""."""

    at_s: float
    text: str
    style: str = ""


def pieces(frames: Iterable[Frame]) -> Iterator[Piece]:
    """Yields the text of a transcript. Printed text continues its line; each other frame begins one, with its time."""
    open_for: tuple[int, FrameKind] | None = None  # the step and kind whose line is unfinished
    for frame in frames:
        printed = frame.kind in (FrameKind.OUTPUT, FrameKind.ERRORS)
        text = shown(frame.text)
        if open_for is not None and open_for != (frame.step, frame.kind):
            yield Piece(frame.at_s, "\n")
            open_for = None
        if printed and not text:
            continue
        if frame.kind is FrameKind.CODE:
            yield Piece(frame.at_s, f"{_time(frame.at_s)}step {frame.step}\n", "bold")
            text = _MARGIN + text.rstrip("\n")
        elif open_for is None:
            text = _time(frame.at_s) + text
        ends_line = text.endswith("\n") or not printed
        text = text.removesuffix("\n").replace("\n", "\n" + _MARGIN) + ("\n" if ends_line else "")
        open_for = None if ends_line else (frame.step, frame.kind)
        yield Piece(frame.at_s, text, _STYLES.get(frame.kind, ""))
    if open_for is not None:
        yield Piece(frame.at_s, "\n")


def _time(at_s: float) -> str:
    return f"{at_s:9.2f}s │ "


def cast_lines(title: str, begin_s: float, frames: Iterable[Frame]) -> Iterator[str]:
    """Yields the lines of an asciicast of version 2. `begin_s` is in seconds since 1970."""
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "timestamp": int(begin_s),
        "idle_time_limit": PAUSE_S_MAX,
        "title": shown(title),
    }
    yield json.dumps(header) + "\n"
    for piece in pieces(frames):
        text = piece.text.replace("\n", "\r\n")
        if piece.style:
            text = f"\x1b[{_COLOURS[piece.style]}m{text}\x1b[0m"
        yield json.dumps([round(piece.at_s, 6), "o", text]) + "\n"
