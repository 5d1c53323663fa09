"""Values as text: as `repr` gives it, and bounded where `repr` is not."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest

from executor_client import EnumValue, OpaqueValue, Record, TupleRecord
from executor_client._core.value_text import CUT, DEPTH_MAX, text_chars, value_text

LIMIT = 1_000
HUGE = "x" * (50 << 20)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, -2.5, math.inf, 1j, "é'\n", b"\0\xff", bytearray(b"a"), "\ud800", 10**100),
        *([], (), {}, set(), frozenset(), [1], (1,), (1, 2), {1}, frozenset({1}), {"a": 1, 2: [(), {}]}, [[[None]]]),
        *(Decimal("1.50"), Fraction(1, 3), range(3), np.arange(3), np.float64(2), np.arange(10_000)),
        *(Record("m.R", {"a": 1, "fields": [2]}), TupleRecord("m.T", ["x", "y"], [1, "a"]), pd.DataFrame({"a": [1]})),
        [Record("R", {}), TupleRecord("T", [], [])],
    ],
    ids=repr,
)
def test_a_value_that_fits_is_shown_as_repr_shows_it(value: object) -> None:
    assert value_text(value, LIMIT) == repr(value)


def test_stand_ins_show_what_they_stand_for() -> None:
    assert value_text(OpaqueValue("m.T", "<T object>"), LIMIT) == "<T object>"
    assert value_text([OpaqueValue("m.T", "<T object>")], LIMIT) == "[<T object>]"
    assert value_text(EnumValue("m.Colour", "RED", 1), LIMIT) == "Colour.RED"
    assert value_text(EnumValue("m.Flag", None, [3]), LIMIT) == "EnumValue(type_name='m.Flag', value=[3])"


def test_a_value_in_itself_is_shown_once() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    assert value_text(cycle, LIMIT) == "[1, {'again': ...}]"
    shared = [1]
    assert value_text([shared, shared], LIMIT) == "[[1], [1]]"


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        HUGE,
        HUGE.encode(),
        [HUGE] * 1_000,
        {HUGE: 1},
        Record("R", {"a": [HUGE] * 1_000}),
        TupleRecord("T", ["a"], [HUGE]),
        EnumValue("E", None, HUGE),
        np.array([HUGE] * 1_000, dtype=object),
        list(range(10**6)),
        OpaqueValue("T", HUGE),
        *(OrderedDict(a=[HUGE] * 1_000), Counter({HUGE: 2}), deque([[HUGE] * 1_000])),
        "\n" * LIMIT,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_fit_is_cut_without_being_written_first(value: object) -> None:
    started_s = time.thread_time()
    text = value_text(value, LIMIT)
    assert time.thread_time() - started_s < 1
    assert text.endswith(f"{CUT} (only the first 1,000 characters are shown)")
    assert text.index(CUT) == LIMIT


def test_a_table_whose_cells_share_a_text_is_not_written() -> None:
    text = "x" * (1 << 20)
    table = pd.DataFrame({"a": [text] * 30})
    assert value_text(table, 10_000) == "<DataFrame of 30x1, too large to be shown>"
    shown = value_text([pd.Series([text])] * 1000, 100_000)
    assert shown.count("dtype") == 7 and shown.count("<Series of 1, too large to be shown>") == 993


def test_depth_is_bounded() -> None:
    assert value_text(_nested(DEPTH_MAX - 1), LIMIT) == repr(_nested(DEPTH_MAX - 1))
    assert value_text(_nested(100_000), LIMIT).count("[") == DEPTH_MAX


def test_what_repr_refuses_is_described() -> None:
    assert value_text([10**5_000], LIMIT) == "[<an integer of 16,610 bits>]"
    assert value_text(Fraction(1, 10**5_000), LIMIT) == "<a value of type Fraction that cannot be shown>"


def test_the_length_of_a_text_is_known_without_the_text() -> None:
    shared: list[Any] = [b"x" * 1_000]
    for _ in range(60):
        shared = [shared, shared]
    assert text_chars(shared) > 1_000 << 60
    assert text_chars([[Decimal("1" * 9_999)] * 10, OrderedDict(a=OpaqueValue("T", "x" * 99))]) > 99_990
    assert text_chars(Record("R", {"a": {"b": (shared,)}})) > 1_000 << 60


@pytest.mark.parametrize(
    "value", [None, 10**100, "é" * 99, [1, 2.5, None], {"a": {1: "b"}}, (b"ab",), {1, 2}, [[], {}]]
)
def test_the_length_of_a_text_is_never_taken_for_more_than_it_is(value: object) -> None:
    assert text_chars(value) <= len(repr(value)) + 2


def test_the_length_of_a_value_in_itself_is_finite() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    assert text_chars(cycle) <= len(repr(cycle)) + 2
