"""Modes that programs switch in a terminal are undone; questions in old output are removed."""

from __future__ import annotations

import pytest

from executor_client.cli.detach_keys import DetachKeys, parse_keys
from executor_client.cli.terminal_modes import ModeTracker, ReplayFilter


def undo(*pieces: bytes) -> bytes:
    tracker = ModeTracker()
    for piece in pieces:
        tracker.feed(piece)
    return tracker.undo()


@pytest.mark.parametrize(
    ("output", "undone"),
    [
        (b"plain \x1b[31mred\x1b[0m", b""),
        (b"\x1b[?1049h\x1b[?25l\x1b[?1049l\x1b[?25h", b""),
        (b"\x1b[?1049h\x1b[?1h\x1b=", b"\x1b>\x1b[?1l\x1b[?1049l"),
        (b"\x1b[?1000;1006h", b"\x1b[?1000l\x1b[?1006l"),
        (b"\x1b[?7l", b"\x1b[?7h"),
        (b"\x1b[5;20r", b"\x1b7\x1b[r\x1b8"),
        (b"\x1b[5;20r\x1b[r", b""),
        (b"\x1b[>4;2m", b"\x1b[>4m"),
        (b"\x1b[>4;2m\x1b[>4m", b""),
        (b"\x1b[3 q\x1b(0", b"\x1b[0 q\x1b(B"),
        (b"\x1b[?1049h\x1b[?25l\x1bc", b""),
        (b"\x1b[?99999h\x1b[?;;h", b""),
    ],
)
def test_what_a_program_switched_is_undone(output: bytes, undone: bytes) -> None:
    assert undo(output) == undone
    assert undo(*(output[i : i + 1] for i in range(len(output)))) == undone, "in pieces"


def test_an_endless_sequence_is_not_kept() -> None:
    tracker = ModeTracker()
    for _ in range(1_000):
        tracker.feed(b"\x1b[?" + b"1" * 1_000)
    assert len(tracker._unfinished) < 100


QUERIES = [
    b"\x1b[c", b"\x1b[>c", b"\x1b[0c", b"\x1b[6n", b"\x1b[?6n", b"\x1b[?2026$p", b"\x1b[>q", b"\x1b[21t", b"\x1b[?u",
    b"\x1b]11;?\x1b\\", b"\x1b]52;c;?\x07", b"\x1bP+q544e\x1b\\", b"\x1bP$qm\x1b\\", b"\x05", b"\x1bZ",
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
def test_old_output_asks_nothing(query: bytes) -> None:
    whole = ReplayFilter()
    assert whole.feed(b"a" + query + b"b") + whole.finish() == b"ab"
    pieces = ReplayFilter()
    text = b"a\x1b[1m" + query + b"b"
    assert b"".join(pieces.feed(text[i : i + 1]) for i in range(len(text))) + pieces.finish() == b"a\x1b[1mb"


def test_output_that_asks_nothing_is_replayed_unchanged() -> None:
    text = b"\x1b[?1049h\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m\xff\x00\x1b[?25l"
    replay = ReplayFilter()
    assert replay.feed(text) + replay.finish() == text


@pytest.mark.parametrize(
    ("text", "sequence"),
    [("ctrl-]", b"\x1d"), ("ctrl-p,ctrl-q", b"\x10\x11"), ("Ctrl-P,q", b"\x10q"), ("none", b""), ("ctrl-@", b"\0")],
)
def test_keys_are_parsed(text: str, sequence: bytes) -> None:
    assert parse_keys(text) == sequence


@pytest.mark.parametrize("text", ["", "ctrl-", "ctrl-1", "é", ",", "a," * 9, "ctrl-p;ctrl-q"])
def test_keys_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_keys(text)


@pytest.mark.parametrize(
    ("sequence", "typed", "passed"),
    [
        (b"\x10\x11", [b"a\x10", b"\x11b"], b"a"),
        (b"\x10\x10\x11", [b"\x10\x10\x10\x11"], b"\x10"),
        (b"\x1d", [b"\x1d\x1d"], b""),
    ],
)
def test_keys_are_found_across_reads(sequence: bytes, typed: list[bytes], passed: bytes) -> None:
    keys = DetachKeys(sequence)
    results = [keys.feed(piece) for piece in typed]
    assert b"".join(piece for piece, _ in results) == passed and results[-1][1]
    assert keys.feed(b"on") == (b"on", False)
