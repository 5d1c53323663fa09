"""Callables of plain Python, each with the calls that it is tried with."""

# The shapes are the users', who annotate some of their tools and not others.
# mypy: ignore-errors
# ruff: noqa: PTH118, RUF012, RUF005

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import logging
import os.path
import re
import xml.etree.ElementTree
from math import floor as round_down
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.shipped import helpers
from tests.support.shipped.helpers import clean as cleaned
from tests.support.shipped.helpers import counted

if TYPE_CHECKING:
    from somewhere import Unheard

RATE = 7
TABLE = {"a": [1, 2], "b": [3]}
SAME = TABLE["a"]
_MISSING = object()
_LOG = logging.getLogger("shipped")
_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
_total = 0


# Functions and what they use


def with_global(x: int) -> int:
    return x * RATE


def _first(x):
    text = """a helper of a helper
  whose second line is indented less than the code
"""
    return _second(x) + 1, text


def _second(x):
    return x * 2


def with_helpers(x):
    return _first(x)


def with_default(item, seen=[], *, table=TABLE, limit: int = -1):  # noqa: B006
    seen.append(item)
    return list(seen), table is TABLE, limit


with_default("before")


def with_missing(x=_MISSING):
    return x is _MISSING


def with_shared():
    SAME.append(9)
    return TABLE


def with_global_statement(x):
    global _total, _made_later
    _total += x
    _made_later = _total
    return _total, _made_later


with_global_statement(5)


def with_annotations(x: int | None = None, y: Unheard = 3, *args: Unheard, z: int | str = "q") -> Unheard:
    local: Unheard = y
    return x, local, z


def with_modules(text):
    root = xml.etree.ElementTree.fromstring(text)
    return root.tag, os.path.join("a", "b"), round_down(2.7), _LOG.name, _WORD.findall("Ab 1 c")


def with_values():
    return _DAY + datetime.timedelta(days=1), _PRICE * 2, sorted(_KINDS)


_DAY = datetime.date(2026, 11, 21)
_PRICE = decimal.Decimal("1.10")
_KINDS = frozenset({"x", "y"})


def with_inner_imports(n):
    import itertools
    from collections import deque

    try:
        import a_module_that_is_nowhere
    except ImportError:
        a_module_that_is_nowhere = None
    return list(itertools.islice(itertools.count(n), 2)), deque([n]), a_module_that_is_nowhere


def with_libraries():
    import cv2
    import sklearn.linear_model
    from PIL import Image

    try:
        import lxml
    except ImportError:
        lxml = None
    return cv2, sklearn, Image, lxml, os.path.sep


def with_text(name):
    def inner():
        return f"""
two lines of {name!r}
    and a third"""

    return inner(), 'it\'s "quoted" \\ ünï'


def _letters(text):
    yield from sorted(set(text))


def with_generator(text):
    return [letter for letter in _letters(text) if letter != RATE]


# Another module


def with_other_module(text):
    return cleaned(text), helpers.clean(text), helpers.RATE, RATE, helpers.area(2)


helpers.clean("before")


def with_other_class(x):
    return repr(helpers.Point(x)), repr(Point(x, x))


# Closures and wrappers


def _make_adder(n):
    def add(x):
        nonlocal n
        n += x
        return n

    return add


adder = _make_adder(5)
adder(3)


def _make_pair():
    stored = []

    def put(x):
        stored.append(x)
        return len(stored)

    def get():
        return list(stored)

    return put, get


_put, _get = _make_pair()
_put("before")


def with_pair(x):
    return _put(x), _get()


def _make_recursive():
    def walk(n):
        return [n, *walk(n - 1)] if n else [n]

    return walk


recursive = _make_recursive()


def _make_with_module():
    import json as codec

    def dump(x):
        return codec.dumps(x)

    return dump


with_module_around = _make_with_module()


@counted
def with_decorator(x):
    return x + 1


with_decorator(1)


@functools.lru_cache(maxsize=5)
def cached(n):
    return n if n < 2 else cached(n - 1) + cached(n - 2)


@contextlib.contextmanager
def _braces(text):
    yield "{" + text + "}"


def with_context(text):
    with _braces(text) as inside:
        return inside


@functools.singledispatch
def dispatched(x):
    return "anything"


@dispatched.register(int)
def _of_int(x):
    return "int"


@dispatched.register(list)
def _of_list(x):
    return "list of " + dispatched(x[0])


OPERATIONS = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "cached": cached, "self": None}
OPERATIONS["self"] = OPERATIONS


def with_table(name, *args):
    return OPERATIONS["self"][name](*args)


a_lambda = lambda x, y=RATE: (  # noqa: E731
    x,
    y,
)

partial = functools.partial(with_table, "sub", 10)


# Classes and their instances


class Base:
    """The attributes of an instance come from three places."""

    kind = os.environ.get("A_VARIABLE_THAT_IS_NOWHERE", "base")
    made = 0
    __hidden = {"secret": 1}

    def __init__(self, name):
        self.name = name
        Base.made += 1

    def __call__(self, x):
        return f"{self.name} {x} {self.kind} {self.__hidden['secret']} {Base.made}"

    @property
    def upper(self):
        return self.name.upper()

    @staticmethod
    def twice(x):
        return x * 2

    @classmethod
    def of(cls, name, extra={}):  # noqa: B006
        extra[name] = len(extra)
        return cls(name), extra


class Derived(Base):
    def __init__(self, name, friend=None):
        super().__init__(name)
        self.friend = friend
        self.me = self

    def __call__(self, x):
        made, extra = type(self).of(x)
        return (
            super().__call__(x),
            self.upper,
            self.twice(x),
            self.me is self,
            self.friend and self.friend(x),
            made.name,
            extra,
        )


Base.kind = "changed"
Base.made = 40
Base._Base__hidden["secret"] = 2
instance = Derived("one", Derived("two"))
bound = instance.friend.twice


class Patched:
    def __call__(self, x):
        return self.answer(x)

    def answer(self, x):
        return "as written", x


def _other_answer(self, x):
    return "as patched", x


Patched.answer = _other_answer
Patched.note = "added"
patched = Patched()


@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int = RATE
    tags: list = dataclasses.field(default_factory=list)
    near: Point | None = None

    def __call__(self, other):
        return self < Point(*other), dataclasses.asdict(self), [field.name for field in dataclasses.fields(self)]


point = Point(1, 2, ["t"], Point(0, 0))


class Color(enum.Enum):
    RED = 1
    BLUE = "b"

    @property
    def pretty(self):
        return self.name.lower()


def with_enum(value):
    return Color(value).pretty, _DEFAULT is Color.BLUE


_DEFAULT = Color.BLUE

Pair = collections.namedtuple("Pair", ["left", "right"], defaults=[0])


class Triple(NamedTuple):
    a: int
    b: int = 2

    def total(self):
        return self.a + self.b


def with_tuples(x):
    return Pair(x)._asdict(), _PAIR.right, Triple(x).total(), _TRIPLE.total()


_PAIR = Pair(1, 2)
_TRIPLE = Triple(1, 5)


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self):
        self.left = [1]

    def __call__(self):
        return self.left, hasattr(self, "right")


slotted = Slotted()


def _make_local_class(prefix):
    class Local:
        def __init__(self, n):
            self.n = n

        def __call__(self, x):
            return prefix, self.n, Local(x).n

        def again(self):
            return Local(self.n)

    return Local


local = _make_local_class("p")(3).again()


class Words(collections.UserList):
    """Derives from a class of Python's."""


bound_method = Words(["v", "w"]).index


class Index(dict):
    def __missing__(self, key):
        return f"no {key}"


def with_collections(x):
    return _WORDS + [x], _INDEX["a"], _INDEX[x], type(_INDEX).__name__


_WORDS = Words(["w"])
_INDEX = Index(a=1)


class Outer:
    class Inner:
        def __call__(self, x):
            return "inner", x


inner = Outer.Inner()


class Meta(type):
    def __getitem__(cls, item):
        return cls.__name__, item


class WithMeta(metaclass=Meta):
    pass


def with_metaclass(x):
    return WithMeta[x]


Calls = tuple[tuple[Any, ...], ...]
ONCE: Any = ((),)
TWICE_ONE: Any = (("a",), ("b",))

CORPUS: dict[str, tuple[Any, Any]] = {
    "with_global": (with_global, ((3,),)),
    "with_helpers": (with_helpers, ((3,),)),
    "with_default": (with_default, TWICE_ONE),
    "with_missing": (with_missing, ((), (1,))),
    "with_shared": (with_shared, ((), ())),
    "with_global_statement": (with_global_statement, ((1,), (2,))),
    "with_annotations": (with_annotations, ((), (1, 2))),
    "with_modules": (with_modules, (("<a/>",),)),
    "with_values": (with_values, ONCE),
    "with_inner_imports": (with_inner_imports, ((3,),)),
    "with_text": (with_text, (("n",),)),
    "with_generator": (with_generator, (("hello",),)),
    "with_other_module": (with_other_module, ((" x ",),)),
    "with_other_class": (with_other_class, ((3,),)),
    "adder": (adder, ((1,), (2,))),
    "with_pair": (with_pair, TWICE_ONE),
    "recursive": (recursive, ((3,),)),
    "with_module_around": (with_module_around, (({"a": 1},),)),
    "with_decorator": (with_decorator, ((1,), (2,))),
    "cached": (cached, ((30,),)),
    "with_context": (with_context, (("x",),)),
    "dispatched": (dispatched, ((1,), ([2],), ("s",))),
    "with_table": (with_table, (("add", 1, 2), ("cached", 10))),
    "a_lambda": (a_lambda, ((1,), (1, 2))),
    "partial": (partial, ((3,),)),
    "instance": (instance, (("x",), ("y",))),
    "bound": (bound, (("x",),)),
    "bound_method": (bound_method, (("w",),)),
    "patched": (patched, ((1,),)),
    "point": (point, (((2, 3),),)),
    "with_enum": (with_enum, ((1,), ("b",))),
    "with_tuples": (with_tuples, ((4,),)),
    "slotted": (slotted, ONCE),
    "local": (local, ((8,),)),
    "with_collections": (with_collections, (("z",),)),
    "inner": (inner, ((1,),)),
    "with_metaclass": (with_metaclass, ((1,),)),
}
