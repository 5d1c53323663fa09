"""Callables in the corners of Python, each with the calls that it is tried with."""

# The shapes are the users', who annotate some of their tools and not others.
# mypy: ignore-errors
# ruff: noqa: B008, E731, F403, F405, RUF012, UP006, UP035, UP045

import abc
import collections
import dataclasses
import datetime
import enum
import functools
import operator
import os
import random
from math import *
from typing import ClassVar, Dict, Generic, NamedTuple, Optional, TypedDict, TypeVar

T = TypeVar("T")
STATE = {"before": True}
_REGISTRY = {}
_SEEN = []


# Decorators of the user's


def _twice(function):
    def run(*args):
        return [function(*args), function(*args)]

    return run


@_twice
def undocumented_wrapper(x):
    return x


def _registered(class_):
    _REGISTRY[class_.__name__] = class_
    class_.registered_as = class_.__name__
    return class_


def _with_logged_calls(class_):
    original = class_.call

    def call(self, x):
        return "logged", original(self, x)

    class_.call = call
    return class_


@_registered
@_with_logged_calls
class Decorated:
    _SEEN.append("made")
    handler = print

    def call(self, x):
        return x, self.registered_as, sorted(_REGISTRY), len(_SEEN)

    def __call__(self, x):
        return self.call(x), self.handler is print


decorated = Decorated()


class Measured:
    """Methods with decorators of Python's."""

    runs = 0

    def __init__(self):
        self.made = 0

    @functools.cached_property
    def once(self):
        self.made += 1
        return self.made

    @functools.lru_cache  # noqa: B019
    def doubled(self, x):
        return x * 2

    @classmethod
    def run(cls):
        cls.runs += 1
        return cls.runs

    @property
    def name(self):
        return "n"

    @name.setter
    def name(self, value):
        self.made = value

    def __call__(self, x):
        self.name = x
        return self.once, self.once, self.doubled(x), self.run(), self.run()


Measured.run()
measured = Measured()


@functools.total_ordering
class Version:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n

    def __lt__(self, other):
        return self.n < other.n

    def __hash__(self):
        return self.n


def with_ordering(n):
    return Version(n) >= LEAST, {LEAST: 1}[Version(3)], max(Version(n), LEAST).n


LEAST = Version(3)


# Values


def with_stars(x):
    return sqrt(x), round(pi, 3), floor(2.5)


def with_methods(x):
    return GETTER([x, 1]), UPPER("a"), NOW(2026, 1, 1).year, FROM_KEYS("ab"), FORMAT(x)


GETTER = operator.itemgetter(1)
UPPER = str.upper
NOW = datetime.datetime
FROM_KEYS = dict.fromkeys
FORMAT = "{} units".format


def with_random():
    return [GENERATOR.randrange(1000) for _ in range(3)]


GENERATOR = random.Random(4)
GENERATOR.random()


def with_numbers():
    return HUGE + 1, NOT_A_NUMBER != NOT_A_NUMBER, -INFINITE, COMPLEX * 2, ESCAPED, len(LONG)


HUGE = 10**5000 // 10**4990 + 3**200
NOT_A_NUMBER = float("nan")
INFINITE = float("inf")
COMPLEX = 2 + 1j
ESCAPED = "a\udc80\x00\n'\"\\ü"
LONG = "x" * 1000


def with_orders():
    return (
        type(ORDERED).__name__,
        [*ORDERED.items()],
        COUNTS.most_common(1),
        DEQUE,
        DEFAULTS["new"],
        sorted(CHAIN),
        CHAIN["a"](),
    )


ORDERED = collections.OrderedDict(b=1, a=2)
COUNTS = collections.Counter("aab")
DEQUE = collections.deque([1, 2], maxlen=2)


def _three():
    return 3


DEFAULTS = collections.defaultdict(_three)
CHAIN = collections.ChainMap({"a": _three}, {"b": 1})


def with_attributes(x):
    with_attributes.count += x
    return with_attributes.count, with_attributes.notes


with_attributes.count = 5
with_attributes.notes = STATE


def with_environment(x=os.environ.get("HOME")):
    return x == HOME, OnlyHere.home == HOME


HOME = os.environ.get("HOME")


class OnlyHere:
    home = os.environ.get("HOME")
    config = {"threads": len(os.environ), "made": _three}


# Functions

first, second = lambda x: x + 1, lambda x: x + 2
nested = lambda x: (lambda y: lambda: x + y)(x)()


def with_lambdas(x):
    return first(x), second(x), nested(x), CHOICES[1](x), sorted([3, 1, 2], key=lambda n: -n)


CHOICES = [lambda x: x, lambda x: -x, lambda x: x * x]

if HOME is None:

    def conditional(x):
        return "no home", x

else:

    def conditional(x):
        return "a home", x


def with_shadows(x):
    max = min
    return max(x, 3), list(x)


def list(x):
    return ["mine", x]


def with_nesting(n):
    total = 0

    class Local:
        factor = n

        def add(self, x):
            nonlocal total
            total += x * self.factor
            return total

    local = Local()
    return [local.add(each) for each in range(n)], dict.fromkeys("ab", total)


def _shared_counter():
    count = 0

    def up():
        nonlocal count
        count += 1
        return count

    class Reader:
        def __init__(self, up):
            self.up = up

        def __call__(self):
            return self.up()

    return Reader(up)


counter = _shared_counter()
counter()


def even(n):
    return True if n == 0 else odd(n - 1)


def odd(n):
    return False if n == 0 else even(n - 1)


def with_async(x):
    import asyncio

    async def wait():
        await asyncio.sleep(0)
        return await _later(x)

    return asyncio.run(wait())


async def _later(x):
    return x + 1


# Classes


class Shape(abc.ABC):
    shapes: ClassVar[Dict[str, int]] = {"square": 4}

    @abc.abstractmethod
    def area(self) -> float: ...

    def __call__(self) -> Optional[float]:
        return self.area(), self.shapes


class Square(Shape, Generic[T]):
    side: T

    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side**2


square = Square[int](3)


class Mode(enum.IntFlag):
    READ = enum.auto()
    WRITE = enum.auto()
    BOTH = READ | WRITE
    OF_HERE = 8 if HOME else 16


class Planet(enum.Enum):
    EARTH = (1, 2.0)
    MARS = (3, 4.0)

    def __init__(self, order, mass):
        self.order = order
        self.mass = mass


def with_enums(x):
    return (
        int(Mode(x)),
        Mode.BOTH in MODES,
        int(Mode.OF_HERE),
        Planet.MARS.mass,
        PLANETS[Planet.EARTH],
        Planet((1, 2.0)).order,
    )


MODES = [Mode.READ | Mode.WRITE]
PLANETS = {Planet.EARTH: "home"}


class Movie(TypedDict, total=False):
    name: str
    year: int


class Row(NamedTuple):
    a: int
    home: Optional[str] = HOME
    b: int = len(STATE)


def with_types(x):
    return Movie(name=x), Row(1).home == HOME, Row(1).b, Row._field_defaults.keys() >= {"b"}


@dataclasses.dataclass(frozen=True)
class Frozen:
    limit: ClassVar[int] = 5
    name: str = "n"
    made: dict = dataclasses.field(default_factory=lambda: dict(STATE), compare=False)
    home: Optional[str] = HOME

    def __call__(self, x):
        return (
            dataclasses.replace(self, name=x) == self,
            self.made,
            [field.name for field in dataclasses.fields(self)],
            self.limit,
        )


frozen = Frozen("x")


class Tree:
    __slots__ = ("__dict__", "left", "parent")

    def __init__(self, parent=None):
        self.parent = parent
        self.left = None
        self.extra = {"me": self}

    def __call__(self):
        return self.left.parent is self, self.extra["me"] is self, self.left.extra["me"] is self.left


tree = Tree()
tree.left = Tree(tree)


class Failure(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


def with_errors(x):
    try:
        raise Failure(x) from KeyError("inner")
    except Failure as failure:
        return failure.code, repr(failure.__cause__), str(LAST), LAST.code, isinstance(LAST, Failure)


LAST = Failure(9)


class Proxy:
    """Answers for names that it does not have."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        if name.startswith("__") or name == "target":
            raise AttributeError(name)
        return getattr(self.target, name)

    def __call__(self, x):
        return self.upper(), x


proxy = Proxy("text")


class Single:
    """Is made once."""

    instance = None

    def __new__(cls):
        if cls.instance is None:
            cls.instance = super().__new__(cls)
        return cls.instance

    def __call__(self):
        return Single() is self, Single.instance is self


single = Single()

ONCE = ((),)
CORPUS = {
    "undocumented_wrapper": (undocumented_wrapper, ((1,),)),
    "decorated": (decorated, ((1,),)),
    "measured": (measured, ((1,), (2,))),
    "with_ordering": (with_ordering, ((3,), (5,))),
    "with_stars": (with_stars, ((4,),)),
    "with_methods": (with_methods, ((4,),)),
    "with_random": (with_random, ONCE),
    "with_numbers": (with_numbers, ONCE),
    "with_orders": (with_orders, ONCE),
    "with_attributes": (with_attributes, ((1,), (1,))),
    "with_environment": (with_environment, ONCE),
    "with_lambdas": (with_lambdas, ((4,),)),
    "conditional": (conditional, ((4,),)),
    "with_shadows": (with_shadows, ((4,),)),
    "with_nesting": (with_nesting, ((4,),)),
    "counter": (counter, ((), ())),
    "even": (even, ((4,), (3,))),
    "with_async": (with_async, ((4,),)),
    "square": (square, ONCE),
    "with_enums": (with_enums, ((3,),)),
    "with_types": (with_types, (("n",),)),
    "frozen": (frozen, (("x",), ("y",))),
    "tree": (tree, ONCE),
    "with_errors": (with_errors, ((4,),)),
    "proxy": (proxy, ((4,),)),
    "single": (single, ONCE),
    "math_function": (sqrt, ((4,),)),
    "a_type": (Version, ()),
}
