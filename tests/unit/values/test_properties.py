"""Every value arrives; any bytes give a value or a DecodeError."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
import json

import dateutil.tz  # type: ignore[import-untyped]  # comes with pandas, without types
import numpy as np
import pandas as pd
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from executor_api.values import DecodeError, EncodeError, ValueLimits, arrays, decode, encode, frames, images
from executor_api.values.decode import KINDS as PLAIN_KINDS
from executor_api.values.packing import pack
from tests.unit.values import cases

KINDS = {**PLAIN_KINDS, **arrays.KINDS, **frames.KINDS, **images.KINDS}
TEXT = st.text(st.characters(codec=None, categories=None), max_size=8)
ZONES: st.SearchStrategy = st.one_of(st.none(), st.timezones())
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.binary(max_size=5),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
SCALARS = st.one_of(
    *(KEYS, st.integers(-(2**70), 2**70), st.floats(), st.complex_numbers(), st.binary(max_size=20).map(bytearray)),
    *(st.dates(), st.times(timezones=ZONES), st.timedeltas(), st.uuids()),
    st.datetimes(datetime.datetime(1900, 1, 1), timezones=ZONES),
    *(st.decimals(), st.fractions().map(lambda value: fractions.Fraction(value))),
    *(st.just(decimal.Decimal("sNaN")), st.slices(9), st.builds(range, st.integers(), st.integers(), st.integers(1))),
    *(st.lists(st.integers(), min_size=32, max_size=40), st.lists(TEXT, min_size=32, max_size=40)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(KEYS, max_size=4),
    ),
    max_leaves=12,
)


class Odd:
    """An instance of a class that only this test has; some have equal hashes, all have one repr."""

    def __repr__(self) -> str:
        return "odd"


@given(VALUES)
def test_any_value_arrives_as_it_was(value: object) -> None:
    assert cases.same(decode(encode(value)), value)


@st.composite
def graphs(draw: st.DrawFn) -> object:
    """Containers that contain each other, and themselves, at random."""
    made: list = [[] for _ in range(draw(st.integers(1, 3)))] + [{} for _ in range(draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(0, 8))):
        target = draw(st.sampled_from(made))
        item = draw(st.sampled_from(made) | st.integers(0, 3))
        item = draw(st.sampled_from([item, (item,), (item, (item, 1))]))
        if isinstance(target, list):
            target.append(item)
        else:
            target[len(target)] = item
    return made


def outline(root: object) -> list[object]:
    """A value as what is met on a walk through it: two values have one outline when they have one shape."""
    seen: dict[int, int] = {}
    met: list[object] = []
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, (list, dict)) and id(value) in seen:
            met.append(("again", seen[id(value)]))
            continue
        if isinstance(value, (list, dict)):
            seen[id(value)] = len(seen)
        if isinstance(value, (list, tuple, dict)):
            items = [*value.items()] if isinstance(value, dict) else [*value]
            met.append((type(value), len(items)))
            stack.extend(items)
        else:
            met.append(value)
    return met


@given(graphs())
def test_sharing_and_cycles_arrive_as_they_were(value: object) -> None:
    assert outline(decode(encode(value))) == outline(value)


@given(
    st.recursive(
        SCALARS | st.builds(Odd) | st.builds(lambda: [Odd] * 40),
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.tuples(inner, inner).map(lambda pair: [pair, pair])
            | st.dictionaries(KEYS | st.builds(Odd) | st.tuples(st.builds(Odd)), inner, max_size=4)
            | st.sets(st.builds(Odd), max_size=3)
        ),
        max_leaves=10,
    ),
    st.builds(ValueLimits, depth=st.integers(1, 4), nodes=st.integers(1, 20), total_bytes=st.integers(100, 10_000)),
)
@example([""] * 32, ValueLimits(depth=1, nodes=1, total_bytes=301))  # one node of texts, which has two buffers
def test_what_was_encoded_within_limits_is_decoded_within_them(value: object, limits: ValueLimits) -> None:
    with contextlib.suppress(EncodeError):
        decode(encode(value, limits), limits)


LIBRARY_VALUES = [
    np.zeros(0, "U99999999"),
    np.zeros(2, {"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2]}),
    np.zeros(2, [(("title", "a"), "<i4")]),
    np.zeros(1, [("a", [("a", [("a", [("a", [("a", [("a", [("a", [("a", "i1")])])])])])])])]),
    np.zeros((1,) * 20),
    [np.zeros((1, 1, 1, 1, 1)) for _ in range(30)],
    np.array([[1, "a"], [None, Odd()]], object),
    pd.DataFrame({"a": [1, 2], "b": ["x", None], "c": pd.Categorical(["u", "v"]), "d": pd.cut([1, 2], 2)}),
    pd.DataFrame(np.ones((2, 2)), columns=pd.MultiIndex.from_product([["a"], [1, 2]])),
    pd.DataFrame({"a": np.ones(2, np.longdouble)}),
    pd.DataFrame(index=pd.RangeIndex(10**15)),
    pd.Series(["a", "b"], name=Odd()),
    pd.Series(pd.date_range("2024", periods=2, tz="dateutil/Europe/Paris")),
    pd.Timestamp("2024", tz="dateutil/Europe/Paris"),
    pd.Interval(pd.Timestamp("2024"), pd.Timestamp("2025")),
    datetime.datetime(2024, 1, 1, tzinfo=dateutil.tz.gettz("Europe/Paris")),
    datetime.time(1, tzinfo=dateutil.tz.gettz("Europe/Paris")),
    datetime.datetime(2024, 1, 1, tzinfo=dateutil.tz.tzoffset("x", 3_600)),
    [Image.new("L", (10, 10)), Image.new("RGB", (10, 10)), Image.new("F", (10, 10))],
    range(True),
]


@given(
    st.sampled_from(LIBRARY_VALUES),
    st.builds(ValueLimits, depth=st.integers(1, 5), nodes=st.integers(1, 60), image_pixels=st.integers(100, 300))
    | st.just(ValueLimits()),
)
def test_values_of_libraries_within_limits_are_decoded_within_them(value: object, limits: ValueLimits) -> None:
    decode(encode(["here", value], limits), limits)


SEEDS = [
    encode([1, 2.5, "é", None, {"a": (1, {2}), 3: [b"x" * 2_000, 2**70]}, [1, 2] * 20, ["a"] * 40]),
    encode(np.zeros(3, [("a", "<f8"), ("b", "<U2")])),
    encode([np.array([None, "x"], object), np.float32(1.5), np.zeros((2, 2), order="F")]),
    encode(
        pd.DataFrame(
            {"a": [1, 2], "b": ["x", None], "c": pd.Categorical(["u", "v"])}, index=pd.date_range("2024", periods=2)
        )
    ),
    encode(pd.Series(pd.array([1, None], "Int64"), name=("a", 1))),
    encode([Image.new("P", (4, 4)), Image.new("F", (2, 2))]),
]


def check_shown(packed: bytes) -> None:
    """Asserts that a value that arrives can be shown, compared and sent on, whatever the bytes are.

    So no caller has to guard against it.
    """
    try:
        value = decode(packed)
    except DecodeError:
        return
    repr(value), str(value)
    _ = value == value
    again = decode(encode(value))
    assert type(again) is type(value)
    repr(again)


@given(st.data())
def test_changed_bytes_give_a_value_or_a_decode_error(data: st.DataObject) -> None:
    mutated = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        replacement = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"-1", b"[]", b'"', b"null", b"9" * 30, b'["ref",0]'])
        )
        mutated[at : at + data.draw(st.integers(0, 3))] = replacement
    check_shown(bytes(mutated))


LEAVES: dict[type, st.SearchStrategy] = {
    str: st.sampled_from(
        [
            *(
                "",
                "a",
                "nan",
                "inf",
                "1e999",
                "f" * 3_600,
                "-1",
                "UTC",
                "Europe/Paris",
                "\ud800",
                "<M8",
                "<M8[s]",
                "<m8[as]",
            ),
            *("s", "ns", "C", "M", "D", "int", "PosixPath", "2024-01-01", "0001-01-01T00:00:00", "9999-12-31T23:59:59"),
            *("NA", "python", "both", "1E999999", "!!", "AAAAAAAAAIA=", "/////////38=", "AQAAAAAAAAA=", "q", "d"),
        ]
    ),
    int: st.sampled_from([0, 1, -1, 2, 86_399, -86_399, 2**40, -(2**40), 2**62, -(2**62), 2**63 - 1, -(2**63 - 1)]),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    type(None): st.none(),
    list: st.lists(st.integers(0, 2), max_size=2),
}


@st.composite
def nodes(draw: st.DrawFn, depth: int = 4) -> object:
    """Trees whose nodes are of the form that their tag fixes, with what may be in them at random."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(LEAVES[str], LEAVES[int], LEAVES[float], st.none(), st.just(["ref", 1])))
    tag = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[tag]
    header = [draw(st.one_of(*(LEAVES[each] for each in types))) for types in kind.header]
    count = kind.children if kind.children >= 0 else 2 * draw(st.integers(0, 2))
    return [tag, *header, *(draw(nodes(depth - 1)) for _ in range(count))]


@given(nodes(), st.binary(min_size=8, max_size=24).map(lambda data: data[: len(data) // 8 * 8]))
def test_what_comes_of_any_node_can_be_shown_compared_and_sent_on(tree: object, buffer: bytes) -> None:
    check_shown(pack(json.dumps(tree).encode(), [buffer, buffer]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.builds(
            lambda tag, rest: [tag, *rest],
            st.sampled_from([*KINDS, "ref"]),
            st.lists(inner, max_size=5),
        )
    ),
    max_leaves=20,
)


@given(JSON, st.lists(st.binary(max_size=20), max_size=3))
def test_any_tree_gives_a_value_or_a_decode_error(tree: object, buffers: list[bytes]) -> None:
    check_shown(pack(json.dumps(tree).encode(), buffers))
