"""Values of the standard library that arrive exactly as they were, and what "exactly" means.

Imports neither pytest nor anything outside of the standard library: every CPython that a sandbox may have runs this file
as a program.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import math
import pathlib
import sys
import uuid
import zoneinfo
from typing import Any

from executor_api.values import decode, encode

PARIS = zoneinfo.ZoneInfo("Europe/Paris")


def same(left: Any, right: Any) -> bool:
    """True when two values have the same types, contents and order at every depth. NaN is the same as NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        if left != left:
            return bool(right != right)
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        if isinstance(left, collections.defaultdict) and left.default_factory is not right.default_factory:
            return False
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple, collections.deque)):
        if isinstance(left, collections.deque) and left.maxlen != right.maxlen:
            return False
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, decimal.Decimal):
        return same(tuple(left.as_tuple()), tuple(right.as_tuple()))
    if isinstance(left, slice):
        return same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if isinstance(left, (datetime.datetime, datetime.time)):
        return left == right and left.fold == right.fold and same(left.tzinfo, right.tzinfo)
    if isinstance(left, datetime.timezone):
        return same(left.__getinitargs__(), right.__getinitargs__())  # type: ignore[attr-defined]
    return bool(left == right)


CASES: list[Any] = [
    *(None, True, False, ...),
    *(0, -1, 2**63 - 1, -(2**63), 2**63, -(2**200), 2**14_284 - 1, -(2**14_284 - 1), 10**300),
    *(0.0, -0.0, 0.1, 1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(1 + 2j, complex(math.nan, -0.0), complex(-math.inf, 1e-300)),
    *("", "a", "é", "\0", "日本", "😀", "\ud800", "\ud83d\ude00", "a\udcff" * 2_000, 'quo"te\\', "[{", "x" * 100_000),
    *(b"", b"\0\xff", b"x" * 5_000, bytearray(b"abc"), bytearray()),
    *(range(3), range(9, -9, -2), range(2**100), slice(None), slice(1, "a", [2])),
    *([], [1, "a", None, [2.5, [True]]], (), (1,), ((1, 2), [3], {})),
    *(list(range(100)), [0.5, math.nan, -0.0] * 20, ["é", "", "\ud800", "\udc00"] * 20, [2**70] * 40, [True] * 40),
    *([*range(40), 2**64], [*range(40), True], ["list", "ref", ["ref", 0], {"set": ["set"]}]),
    *({}, {"a": 1, 2: "b", None: 3, (1, (2, "x")): 4, 1.5: 5, b"k": 6, frozenset([1]): 7, True: 8}),
    *({"__type__": "set", "tag": ["tuple", 1]}, {math.nan: 1}),
    *(set(), {1, "a", (2, 3)}, frozenset([frozenset(), 1])),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {"a": 1}),
    collections.Counter("abracadabra"),
    collections.Counter({"text": "not a number"}),
    collections.deque([1, [2]], maxlen=3),
    collections.deque(),
    *(datetime.date(1, 1, 1), datetime.date(9999, 12, 31)),
    *(datetime.time(23, 59, 59, 999999), datetime.time(1, 2, fold=1), datetime.time(3, tzinfo=PARIS)),
    datetime.datetime(2024, 2, 29, 12, 30, 1, 5),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
    datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=PARIS),
    datetime.datetime(2024, 10, 27, 2, 30, fold=0, tzinfo=PARIS),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, seconds=7), "mine\ud800")),
    *(datetime.timedelta(-1, 5, 7), datetime.timedelta.max, datetime.timezone.utc, PARIS),
    *map(decimal.Decimal, ("1.20", "-0", "1E+999999", "NaN", "sNaN12", "-Infinity", "1" * 10_000)),
    *(fractions.Fraction(-1, 3), fractions.Fraction(2**5_000, 3), uuid.UUID(int=2**127 + 1)),
    *(pathlib.Path("/a/b.txt"), pathlib.PurePosixPath("x\udcff"), pathlib.PureWindowsPath("c:/x")),
]


def failures() -> list[object]:
    return [value for value in CASES if not same(decode(encode(value)), value)]


if __name__ == "__main__":
    unexpected = {"numpy", "pandas", "PIL", "pickle", "dataclasses"} & set(sys.modules)
    sys.exit(f"wrong: {failures()!r:.2000}, loaded: {unexpected}" if failures() or unexpected else 0)
