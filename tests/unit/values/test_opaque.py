"""Values that stay where they are: what is shown of them, and what their own code can do to that."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from executor_api.values import EnumValue, OpaqueValue, Record, TupleRecord, decode, encode
from executor_api.values.packing import pack


class Graph:
    """As networkx has it: a text of its own for print, an address for repr."""

    def __str__(self) -> str:
        return "Graph with 3 nodes and 2 edges"


class Stubborn:
    """Raises the exception that it was made with from every method."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


class Half(Stubborn):
    """Can be shown, but not written."""

    def __repr__(self) -> str:
        return "half"

    def __str__(self) -> str:
        raise self.error


class Control(BaseException):
    """Ends the program that encodes it."""


def test_an_opaque_value_has_the_text_of_print_and_that_of_repr() -> None:
    arrived = decode(encode(Graph()))
    assert str(arrived) == arrived.str == "Graph with 3 nodes and 2 edges"
    assert "object at 0x" in arrived.repr
    assert decode(encode(arrived)) == arrived


def test_both_texts_are_bounded() -> None:
    long = type("Long", (), {"__str__": lambda self: "s" * 10_000, "__repr__": lambda self: "r" * 10_000})
    arrived = decode(encode(long()))
    assert (len(arrived.str), len(arrived.repr)) == (2_000, 2_000)
    assert len(decode(encode(OpaqueValue("T", "r" * 10_000, "s" * 10_000))).str) == 2_000


def test_receivers_of_before_read_a_value_that_has_one_text() -> None:
    assert b'["opaque",' in encode(object())
    assert decode(pack(b'["opaque","T","text"]', [])) == OpaqueValue("T", "text") == OpaqueValue("T", "text", "text")


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Control(), ValueError()], ids=lambda each: repr(each)
)
@pytest.mark.parametrize("kind", [Stubborn, Half])
def test_what_the_code_of_a_value_raises_costs_no_other_value(kind: Callable[..., Any], error: BaseException) -> None:
    one, other, last = decode(encode([1, kind(error), 3], passing=()))
    assert (one, last) == (1, 3)
    assert other.repr == "half" or type(error).__qualname__ in other.repr


def test_what_comes_from_elsewhere_passes() -> None:
    with pytest.raises(Control):
        encode([Stubborn(Control())], passing=(Control,))
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C passes by default
        encode([Half(KeyboardInterrupt())])


@pytest.mark.parametrize(
    "value",
    [
        *(OpaqueValue("\ud800", "\udc00"), OpaqueValue("T", "a\ud83d", "b\ude00"), EnumValue("\ud800", "A\ud800", 1)),
        *(Record("\ud800", {"a": 1}), TupleRecord("\ud800", ["a"], [1])),
    ],
    ids=lambda each: type(each).__name__,
)
def test_half_a_surrogate_pair_in_a_name_or_a_text_can_be_sent(value: Any) -> None:
    arrived = decode(encode([value]))[0]
    assert type(arrived) is type(value)
    assert decode(encode(arrived)) == arrived


@pytest.mark.parametrize("bits", [14_285, 20_000, 1_000_000])
def test_an_integer_that_python_does_not_write_arrives_as_its_size(bits: int) -> None:
    sent = {"n": 2 ** (bits - 1), "m": -(2 ** (bits - 1)), "shown": 2**14_283}
    arrived = decode(encode(sent))
    assert arrived["n"].repr == arrived["m"].repr == f"<an int of {bits} bits>"
    assert arrived["shown"] == sent["shown"]
    repr(arrived)


def test_a_sender_of_before_that_sends_more_digits_makes_no_value_that_cannot_be_shown() -> None:
    arrived = decode(pack(json.dumps(["list", ["int", "f" * 3_600], ["fraction", "f" * 3_600, "7"], 1]).encode(), []))
    assert [type(each) for each in arrived] == [OpaqueValue, OpaqueValue, int]
    repr(arrived)


def test_a_receiver_with_a_lower_limit_of_digits_gets_what_it_can_show() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        arrived = decode(encode([10**600, 10**700]))
        repr(arrived)
    finally:
        sys.set_int_max_str_digits(before)
    assert arrived[0] == 10**600
    assert type(arrived[1]) is OpaqueValue


def test_towards_a_sandbox_a_large_integer_goes_whole() -> None:
    packed = encode(10**5_000, fallback=lambda value: f"{value:x}".encode())
    assert decode(packed, foreign=lambda data: int(bytes(data), 16)) == 10**5_000


class Plot:
    def __repr__(self) -> str:
        return "a plot"


def test_an_opaque_value_keeps_the_texts_by_which_it_shows_itself() -> None:
    texts = {"text/html": "<p>ü</p>", "application/vnd.x+json": "{}"}
    packed = encode([Plot(), 1], stand_in=lambda value: texts if isinstance(value, Plot) else None)
    shown = decode(packed)[0]
    assert (shown.repr, shown.display) == ("a plot", texts)
    assert decode(encode(shown)) == shown and hash(shown) == hash(decode(encode(shown)))
    assert "<p>" not in repr(shown)


def test_a_stand_in_that_raises_leaves_the_text() -> None:
    def broken(value: object) -> None:
        raise ValueError

    assert decode(encode(Plot(), stand_in=broken)) == OpaqueValue(f"{__name__}.Plot", "a plot")
