"""Values whose class the receiver does not have, and the sender's fallback with its counterpart."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import pickle
import threading
from collections.abc import Callable

import pytest

from executor_api.values import DecodeError, EnumValue, OpaqueValue, Record, TupleRecord, ValueLimits, decode, encode


class Color(enum.Enum):
    RED = (1, 2)


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Point:
    x: int
    tags: list[object]


@dataclasses.dataclass(frozen=True)
class Cell:
    x: int
    y: int


Pair = collections.namedtuple("Pair", ["count", "other"])


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("a subclass must not run")


class Items(list):
    def __iter__(self) -> object:  # type: ignore[override]
        raise RuntimeError("a subclass must not run")


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no repr")


class Alike:
    def __repr__(self) -> str:
        return "alike"


class UnhashableType(type):
    def __eq__(cls, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_an_enum_member_arrives_with_its_type_name_and_value() -> None:
    received = decode(encode([Color.RED, Level.LOW, Level.LOW | Level.HIGH]))
    assert received[0] == EnumValue(f"{__name__}.Color", "RED", (1, 2))
    assert (received[1].name, received[1].value, received[2].value) == ("LOW", 1, 3)
    assert str(received[0]) == "Color.RED"


def test_a_dataclass_arrives_as_a_record_with_its_fields() -> None:
    received = decode(encode(Point(1, ["a"])))
    assert (received.x, received.tags, received.type_name) == (1, ["a"], f"{__name__}.Point")
    assert repr(received) == "Point(x=1, tags=['a'])"
    assert received == Record(f"{__name__}.Point", {"x": 1, "tags": ["a"]})
    assert received != Record(f"{__name__}.Point", {"x": 2, "tags": ["a"]})
    with pytest.raises(AttributeError):
        received.x = 2
    with pytest.raises(AttributeError, match="no field 'y'"):
        _ = received.y


def test_a_record_can_contain_itself() -> None:
    point = Point(1, [])
    point.tags.append(point)
    received = decode(encode(point))
    assert received.tags[0] is received
    assert repr(received) == "Point(x=1, tags=[Record(...)])"


def test_a_field_wins_over_the_names_of_a_record() -> None:
    record = Record("T", {"fields": 1, "type_name": 2})
    assert (record.fields, record.type_name) == (1, 2)


def test_a_named_tuple_arrives_with_its_fields() -> None:
    received = decode(encode(Pair(1, [2])))
    assert received == (1, [2])
    assert (received.count, received.other, received._fields) == (1, [2], ("count", "other"))
    assert received._asdict() == {"count": 1, "other": [2]}
    assert repr(received) == "Pair(count=1, other=[2])"


@pytest.mark.parametrize(
    "value",
    [OpaqueValue("T", "t"), EnumValue("T", "N", [1]), Record("T", {"a": 1}), TupleRecord("T", ["a"], [1])],
    ids=lambda value: type(value).__name__,
)
def test_a_generic_value_survives_the_way_back_and_being_copied(value: object) -> None:
    for other in (decode(encode(value)), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(other) is type(value)
        assert other == value
        assert repr(other) == repr(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Text("abc"), "abc"),
        (Items([1, 2]), [1, 2]),
        (type("D", (dict,), {})(a=1), {"a": 1}),
        (type("S", (set,), {})([1]), {1}),
        (type("F", (frozenset,), {})([1]), frozenset([1])),
        (type("I", (int,), {})(5), 5),
        (type("X", (float,), {})("inf"), float("inf")),
        (type("C", (complex,), {})(1j), 1j),
        (type("B", (bytes,), {})(b"x"), b"x"),
        (type("A", (bytearray,), {})(b"x"), bytearray(b"x")),
        (type("T", (tuple,), {})((1, 2)), (1, 2)),
        (collections.defaultdict(lambda: 1, {"a": 1}), {"a": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_of_a_builtin_arrives_as_the_builtin(value: object, expected: object) -> None:
    received = decode(encode(value))
    assert type(received) is type(expected)
    assert received == expected


def test_anything_else_arrives_as_its_type_name_and_repr() -> None:
    lock = threading.Lock()
    assert decode(encode({"lock": lock})) == {"lock": OpaqueValue("_thread.lock", repr(lock))}


def test_a_repr_is_cut_and_one_that_raises_is_told_about() -> None:
    long = decode(encode(type("Long", (), {"__repr__": lambda self: "x\ud800" * 10_000})()))
    assert len(long.repr) == 2_000
    assert decode(encode(Broken())).repr == f"<{__name__}.Broken, whose repr raised ValueError>"


def test_classes_that_lie_about_themselves_do_no_harm() -> None:
    odd = UnhashableType("Odd", (), {"__class__": property(lambda self: str), "__module__": 5})()
    named = type("Decimal", (), {"__module__": "decimal"})()
    received = decode(encode([odd, named, {1: odd}, [odd] * 40]))
    assert (received[0].type_name, received[1].type_name) == ("Odd", "decimal.Decimal")


@pytest.mark.parametrize(
    "make",
    [
        lambda: {Alike(), Alike()},
        lambda: {Alike(): 1, Alike(): 2},
        lambda: {(Alike(),): n for n in range(2)},
        lambda: {Pair(1, Alike()), Pair(1, Alike())},
    ],
)
def test_keys_that_cannot_stay_different_make_an_opaque_container_not_a_smaller_one(make: Callable) -> None:
    received = decode(encode(["here", make()]))
    assert received[0] == "here"
    assert isinstance(received[1], OpaqueValue)


def test_keys_of_unknown_classes_stay_keys() -> None:
    received = decode(encode({Color.RED: 1, Pair(1, 2): 2, Alike(): 3}))
    assert received[EnumValue(f"{__name__}.Color", "RED", (1, 2))] == 1
    assert (received[(1, 2)], received[OpaqueValue(f"{__name__}.Alike", "alike")]) == (2, 3)


def test_many_records_can_be_members_of_a_set() -> None:
    received = decode(encode({Cell(x, y) for x in range(20) for y in range(20)}))
    assert (type(received), len(received)) == (set, 400)
    assert Record(f"{__name__}.Cell", {"x": 3, "y": 4}) in received


def test_the_fallback_is_asked_for_what_has_no_exact_form_and_for_nothing_else() -> None:
    asked: list[object] = []
    exact = [1, "a", {"k": (1, {2})}, b"x" * 2_000, 2**70]
    inexact = [Color.RED, Point(1, []), Pair(1, 2), Text("t"), Broken(), len, threading]
    encode([exact, inexact], fallback=asked.append)
    assert list(map(id, asked)) == list(map(id, inexact))


def test_foreign_values_arrive_through_the_receivers_function() -> None:
    value = {"point": Point(1, ["a"]), "class": Point, "same": [Color.RED] * 2}
    packed = encode(value, fallback=pickle.dumps)
    assert decode(packed, foreign=pickle.loads) == value
    with pytest.raises(DecodeError, match="not accepted here"):
        decode(packed)


def test_containers_beyond_the_limits_go_through_the_fallback() -> None:
    limits = ValueLimits(nodes=10)
    value = {"large": [1, "a"] * 100}
    assert decode(encode(value, limits, pickle.dumps), limits, pickle.loads) == value


def test_a_foreign_value_that_cannot_be_made_is_a_decode_error_that_says_why() -> None:
    packed = encode(Color.RED, fallback=lambda value: b"not a pickle")
    with pytest.raises(DecodeError, match=r"cannot be made: .*UnpicklingError"):
        decode(packed, foreign=pickle.loads)

    def absent(packed: memoryview) -> object:
        raise ModuleNotFoundError("No module named 'polars'")

    with pytest.raises(DecodeError, match=r"No module named 'polars'\. Use an image that has it"):
        decode(packed, foreign=absent)


def test_a_fallback_without_an_answer_leaves_the_generic_form() -> None:
    assert decode(encode(Color.RED, fallback=lambda value: None)).name == "RED"
