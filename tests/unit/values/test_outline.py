"""The one-line description of a call for the person who approves it; a program chose the bytes."""

from __future__ import annotations

import datetime
import random

import pytest

from executor_api.values import encode
from executor_api.values.outline import OUTLINE_CHARS_MAX, OUTLINE_OF_UNKNOWN, outline_call
from executor_api.values.packing import pack


@pytest.mark.parametrize(
    ("positional", "keywords", "shown"),
    [
        ((), {}, ""),
        (("a.txt", 1, None, 1.5, True), {"mode": "w"}, '"a.txt", 1, None, 1.5, True, mode="w"'),
        (([1, (2, {"k": b"x"})],), {}, '[1, (2, {"k": b"x"})]'),
        (("\x1b[31m\u202e\u0430\x7f\\",), {}, '"\\u001b[31m\\u202e\\u0430\\u007f\\\\"'),
        (('"...', "b"), {}, '"\\"...", "b"'),
        ((), {"a=1, b": 2}, '"a=1, b"=2'),
        (("x" * 5000,), {}, f'"{"x" * 240}"...'),
        ((list(range(20)),), {}, f"[{', '.join(map(str, range(16)))}, ...]"),
        ((datetime.date(2026, 1, 2), object()), {}, 'date("2026-01-02"), <opaque>'),
        (([["x"] * 3, ["y"] * 1000],), {}, '[["x", "x", "x"], <texts>]'),
    ],
)
def test_a_call_is_shown_as_it_would_be_written(
    positional: tuple[object, ...], keywords: dict[str, object], shown: str
) -> None:
    assert outline_call(encode((positional, keywords))) == shown


def test_a_value_that_is_met_again_is_not_shown_as_another_one() -> None:
    twice = [1]
    assert outline_call(encode(((twice, twice), {}))) == "[1], <as before>"


def test_any_bytes_give_a_short_printable_line() -> None:
    good = encode((("a", [1, {"x": (2,)}], b"q" * 2000, "z" * 3000), {f"k{n}": "v" * 200 for n in range(15)}))
    assert outline_call(good).endswith(" ...") and len(outline_call(good)) == OUTLINE_CHARS_MAX
    assert outline_call(b"") == outline_call(encode(1)) == outline_call(encode(([1] * 9000, {}))) == OUTLINE_OF_UNKNOWN
    chosen = random.Random(1)
    for _ in range(2000):
        changed = bytearray(good)
        for _ in range(chosen.randint(1, 4)):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        shown = outline_call(bytes(changed))
        assert shown.isascii() and shown.isprintable() and len(shown) <= OUTLINE_CHARS_MAX


def test_an_object_of_json_is_no_value() -> None:
    """Its text would stand outside of quotes, in the sender's letters."""
    tree = '["tuple",["tuple",{"\u0430":1}],["dict"]]'
    assert outline_call(pack(tree.encode(), [])) == "<unknown>"
