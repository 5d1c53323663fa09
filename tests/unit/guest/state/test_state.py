"""The variables of one interpreter, written by a copy of this process and read into another namespace."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from executor_server.guest.checks.agent_builtins import Builtins
from executor_server.guest.checks.meter import Meter, OperationLimitExceeded
from executor_server.guest.checks.rules import RuleEnforcer, Rules
from executor_server.guest.checks.sentinels import Sentinels
from executor_server.guest.state import export as export_module
from executor_server.guest.state.export import export
from executor_server.guest.state.index import MAX_NAME_CHARS, MAX_NAMES_CHARS, NotPickled, omitted_entries
from executor_server.guest.state.restore import restore
from executor_server.guest.state.world import World
from executor_server.sessions.state_archive import MAX_MANIFEST_BYTES

MIB = 1024 * 1024


class Interpreter:
    """The parts of an interpreter that writing and reading variables need, with a way to run agent code."""

    def __init__(self, **rules: Any) -> None:
        self.meter = Meter()
        enforcer = RuleEnforcer(self.meter)
        enforcer.rules = Rules(**{"authorized": ("*",), **rules})
        self.builtins = Builtins(dict(vars(builtins)), enforcer, self.meter, Sentinels("mark"))
        self.names = self.builtins.names
        self.builtins.on_rules()
        self.main = types.ModuleType("__main__")
        self.main.__dict__["__builtins__"] = self.names
        self.world = World(self.main, self.builtins, self.meter.ticks, 4096 * MIB)

    def run(self, source: str) -> None:
        with self.as_main():
            self.names["exec"](source, self.main.__dict__)

    @contextlib.contextmanager
    def as_main(self) -> Iterator[None]:
        """Puts the program's module in place of `__main__`, as in a sandbox."""
        before, sys.modules["__main__"] = sys.modules["__main__"], self.main
        try:
            yield
        finally:
            sys.modules["__main__"] = before

    def export(self, max_bytes: int = 64 * MIB) -> tuple[int, dict[str, Any]]:
        with self.as_main():
            return export(self.world, max_bytes, contextlib.nullcontext, lambda: None)

    def restore(self, fd: int) -> dict[str, Any]:
        with self.as_main():
            return restore(self.world, fd, os.fstat(fd).st_size, lambda function, *args: function(*args))

    def __getitem__(self, name: str) -> Any:
        return self.main.__dict__[name]


def moved(
    source: str, *, to: Interpreter | None = None, **rules: Any
) -> tuple[Interpreter, dict[str, str], dict[str, str]]:
    """Returns an interpreter that has read the variables of a program, and the reasons for those not written or read."""
    first, second = Interpreter(**rules), to or Interpreter(**rules)
    first.run(source)
    fd, written = first.export()
    read = second.restore(fd)
    assert {*read["variables"], *reasons(read)} == set(written["variables"])
    return second, reasons(written), reasons(read)


def reasons(manifest: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["reason"] for each in manifest["omitted"]}


def test_what_two_variables_share_they_share_afterwards() -> None:
    there, omitted, _ = moved("a = [1]\nb = {'a': a}\na.append(b)\nc = (a, b)")
    assert not omitted
    assert there["b"]["a"] is there["a"] and there["a"][1] is there["b"] and there["c"][0] is there["a"]


def test_a_function_lives_in_the_new_namespace() -> None:
    there, omitted, missing = moved("n = 1\ndef f():\n    global n\n    n += 1\n    return n")
    assert not omitted and not missing
    there.run("r = f()\nn = 10\nq = f()")
    assert (there["r"], there["q"]) == (2, 11)
    assert there["f"].__globals__ is there.main.__dict__ and there["f"].__builtins__ is there.names


def test_a_restored_function_is_counted() -> None:
    there, _, _ = moved("def f():\n    while True:\n        pass")
    there.meter.start(1000)
    with pytest.raises(OperationLimitExceeded):
        there["f"]()


def test_closures_share_their_cells() -> None:
    source = "def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n    return up, lambda: n\nup, now = counter()\ndef fact(k):\n    def inner(j):\n        return 1 if j < 2 else j * inner(j - 1)\n    return inner\nfac = fact(3)"
    there, omitted, missing = moved(source)
    assert not omitted and not missing
    there["up"]()
    assert there["now"]() == 1 and there["fac"](4) == 24


def test_a_class_and_its_instances_come_along() -> None:
    source = "import dataclasses, enum\nclass Colour(enum.Enum):\n    RED = 1\n@dataclasses.dataclass\nclass P:\n    x: int\n    def double(self):\n        return P(self.x * 2)\np = P(4)\nc = Colour.RED\nclass Q(P):\n    def double(self):\n        return super().double()\nq = Q(3)"
    there, omitted, missing = moved(source)
    assert not omitted and not missing
    there.run("ok = isinstance(p, P) and p.double() == P(8) and q.double().x == 6 and c is Colour.RED")
    assert there["ok"] is True


def test_modules_are_imported_again() -> None:
    there, omitted, _ = moved("import math as m, os.path\nfrom math import sqrt")
    import math

    assert not omitted and there["m"] is math and there["sqrt"] is math.sqrt


def test_what_cannot_be_pickled_is_named_with_its_place_and_the_rest_goes() -> None:
    source = "import threading\na = [1, 2]\nbad = {'x': [1, threading.Lock()]}\ng = (i for i in a)\nz = a"
    there, omitted, _ = moved(source)
    assert set(omitted) == {"bad", "g"}
    assert "lock" in omitted["bad"] and "['x'][1]" in omitted["bad"] and "generator" in omitted["g"]
    assert there["z"] is there["a"]


def test_what_a_failed_variable_shares_with_a_later_one_is_whole() -> None:
    there, omitted, missing = moved("s = [1, 2, 3]\nbad = [t := ['shared'], (i for i in s)]\nlate = [t]\nlast = t")
    assert set(omitted) == {"bad"} and not missing
    assert there["late"][0] == ["shared"] and there["late"][0] is there["t"] is there["last"]


@pytest.mark.parametrize(
    ("reduce", "why"),
    [
        ("import os\n        os._exit(3)", "exit code 3"),
        ("import os\n        os.kill(os.getpid(), 9)", "signal 9"),
        ("while True: pass", "takes longer"),
        ("raise KeyError('no')", "KeyError"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_a_reduce_costs_its_own_variable_only(monkeypatch: pytest.MonkeyPatch, reduce: str, why: str) -> None:
    if "longer" in why:
        monkeypatch.setattr(export_module, "VARIABLE_TIME_S", 0.3)
    source = f"a = 1\nclass C:\n    def __reduce__(self):\n        {reduce}\nc = C()\nb = [2]"
    there, omitted, missing = moved(source)
    assert set(omitted) == {"c"} and why in omitted["c"] and not missing
    assert there["a"] == 1 and there["b"] == [2]


def test_many_deadly_variables_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os\nok = 1\nclass C:\n    def __reduce__(self):\n        os._exit(1)\nfor i in range(40):\n    exec(f'c{i} = C()')"
    first = Interpreter()
    first.run(source)
    fd, written = first.export()
    os.close(fd)
    assert len(reasons(written)) >= 40


def test_a_value_that_cannot_be_read_costs_itself_and_what_is_made_of_it() -> None:
    source = "import os\nclass C:\n    def __init__(self, n):\n        self.n = n\n    def __setstate__(self, state):\n        raise ValueError('not here')\nbefore = [1]\nbad = C(before)\ninner = [bad]\nafter = [before]"
    there, omitted, missing = moved(source)
    assert not omitted and set(missing) == {"bad", "inner"}
    assert "ValueError: not here" in missing["bad"]
    assert there["after"][0] is there["before"]


def test_a_value_whose_reading_never_ends_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_server.guest.state.restore.READ_TIME_S", 0.2)
    source = "class C:\n    n = 1\n    def __setstate__(self, state):\n        while True:\n            pass\nbad = C()\nbad.x = 1\nafter = 2"
    there, _, missing = moved(source)
    assert set(missing) == {"bad"} and "takes longer" in missing["bad"] and there["after"] == 2


def test_the_rules_of_the_new_session_hold_for_what_a_state_names() -> None:
    source = "import os, collections, pathlib\nsystem = os.system\nd = collections.OrderedDict(a=1)\np = pathlib.PurePosixPath('a')\nn = os"
    _, _, missing = moved(source, to=Interpreter(authorized=("collections",)))
    assert set(missing) == {"os", "system", "pathlib", "p", "n"}
    assert "not authorized" in missing["os"]
    _, _, missing = moved(source, to=Interpreter(denied=("collections",)))
    assert set(missing) == {"collections", "d"}


def test_code_of_laxer_rules_is_not_taken_over() -> None:
    _, _, missing = moved("def f():\n    return ().__class__\nx = 1", to=Interpreter(refused=("dunder_access",)))
    assert set(missing) == {"f"} and "dunder_access" in missing["f"]


def test_builtins_are_those_of_the_session_that_reads() -> None:
    there, omitted, missing = moved("e = eval\nl = len\nf = frozenset([1])\nx = ValueError('a')")
    assert not omitted and not missing
    assert there["e"] is there.names["eval"] and there["l"] is len and there["f"] == {1}


def test_a_tool_is_the_tool_of_the_session_that_reads() -> None:
    first, second, third = Interpreter(), Interpreter(), Interpreter()
    first.builtins.add({"search": lambda: 1})
    second.builtins.add({"search": lambda: 2})
    first.run("s = search\ndef f():\n    return search()")
    assert moved_on(first, second) == {} and second["s"]() == 2 and second["f"]() == 2
    assert "search" in moved_on(first, third)["s"]


def moved_on(first: Interpreter, second: Interpreter) -> dict[str, str]:
    return reasons(second.restore(first.export()[0]))


def test_what_does_not_fit_is_left_out() -> None:
    first = Interpreter()
    first.run("small = 1\nlarge = bytes(5_000_000)\nother = [2]")
    fd, written = first.export(max_bytes=MIB)
    assert set(reasons(written)) == {"large"} and os.fstat(fd).st_size < MIB
    os.close(fd)


def test_without_cloudpickle_every_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    _, omitted, _ = moved("a = 1\nb = 2")
    assert set(omitted) == {"a", "b"} and "no cloudpickle" in omitted["a"]


def test_code_of_another_python_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Interpreter(), Interpreter()
    first.run("def f():\n    return 1\nx = [1]\ny = [f]")
    fd, _ = first.export()
    newer = types.SimpleNamespace(version_info=(3, 99, 0), modules=sys.modules)
    monkeypatch.setattr("executor_server.guest.state.restore.sys", newer)
    missing = reasons(second.restore(fd))
    assert set(missing) == {"f", "y"} and "compiled by Python" in missing["f"] and second["x"] == [1]


def state_file(data: bytes) -> int:
    fd = os.memfd_create("state")
    os.write(fd, data)
    return fd


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0", b"\xff" * 64, b"{}\0\0\0\2", b"[]\0\0\0\2"])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(NotPickled):
        Interpreter().restore(state_file(data))


def test_threads_of_the_program_do_not_hinder() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        there, omitted, _ = moved("a = 1")
    finally:
        stop.set()
        thread.join()
    assert there["a"] == 1 and not omitted


def test_entries_of_omitted_variables_fit_whatever_their_names_are() -> None:
    """Names of control characters and astral ones take up to twelve bytes of JSON for each character."""
    for character in ("\U0001f40d", "\0", '"', "\\", "é"):
        odd = {f"{number:03}" + character * 253: character * 300 for number in range(600)}
        names = [character * (MAX_NAME_CHARS - 1)] * (MAX_NAMES_CHARS // MAX_NAME_CHARS)
        entries = omitted_entries(odd)
        assert len(json.dumps({"variables": names, "omitted": entries})) <= MAX_MANIFEST_BYTES
        assert all(each["name"].isascii() and len(each["name"]) <= MAX_NAME_CHARS for each in entries)


def test_a_variable_whose_name_is_no_text_is_left_out() -> None:
    first = Interpreter()
    first.run("globals()['a\\ud800'] = 1\nb = 2")
    fd, written = first.export()
    os.close(fd)
    assert written["variables"] == ["b"] and list(reasons(written)) == ["a\\ud800"]


def test_what_cannot_say_its_class_spoils_no_variable() -> None:
    """Asked for its class, it raised, and nothing was written."""
    first = Interpreter()
    first.run("class Lazy: __class__ = property(lambda self: 1 / 0)\nglobals()[Lazy()] = 1\nb = 2")
    first.names["lazy"] = first["Lazy"]()
    fd, written = first.export()
    os.close(fd)
    assert "b" in written["variables"]


def test_a_name_too_long_to_be_written_takes_no_room_from_others() -> None:
    first = Interpreter()
    first.run(f"globals()['a' * {MAX_NAMES_CHARS}] = 1\nb = 2")
    fd, written = first.export()
    os.close(fd)
    assert written["variables"] == ["b"]


@pytest.mark.parametrize("program", ["f'v{n:05}' * 4, bytes(n)", "f'é{n:05}' * 4, 'x' * n", "f'v{n}', (i for i in [])"])
def test_a_state_with_its_index_is_no_larger_than_it_may_be(program: str) -> None:
    """The supervisor treats a larger file as an attack and ends the interpreter."""
    first = Interpreter()
    first.run(f"for n in range(900):\n    globals().update([({program})])\ndel n")
    for max_bytes in (200_000, 20_000, 4_000):
        fd, written = first.export(max_bytes=max_bytes)
        size = os.fstat(fd).st_size
        second = Interpreter()
        read = second.restore(fd)
        assert size <= max_bytes and written["omitted"]
        assert read["variables"] == written["variables"]
    assert second.main.__dict__.keys() >= set(written["variables"])


VALUES = """
import abc, array, collections, dataclasses, datetime, decimal, enum, fractions, functools, http, ipaddress, itertools
import io, numbers, operator, random, re, statistics, string, time, types, typing, urllib.parse, uuid, zoneinfo
T = typing.TypeVar("T")
Point = collections.namedtuple("Point", "x y")
class Colour(enum.Enum):
    RED = 1
class Bits(enum.Flag):
    A = 1
    B = 2
class Base(abc.ABC):
    @abc.abstractmethod
    def f(self): pass
class Thing(Base, typing.Generic[T]):
    def f(self): return super().__init__
    @property
    def p(self): return 1
    @classmethod
    def c(cls): return cls
class Slots:
    __slots__ = ("a",)
class Mapped(collections.abc.Mapping):
    def __getitem__(self, key): return key
    def __iter__(self): return iter(())
    def __len__(self): return 0
class Error(Exception): pass
values = [
    collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("aa"),
    collections.deque([1], 3), collections.ChainMap({1: 2}), collections.UserDict(a=1),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.date(2026, 1, 2), datetime.timedelta(1),
    decimal.Decimal("1.5"), fractions.Fraction(1, 2), uuid.UUID(int=5), array.array("d", [1]), random.Random(1),
    functools.partial(int, base=2), operator.itemgetter(1), range(3), slice(1, 2), string.Template("$a"),
    ipaddress.ip_address("1.1.1.1"), types.SimpleNamespace(a=1), types.MappingProxyType({1: 2}),
    typing.List[int], typing.Optional[int], typing.Dict[str, int], http.HTTPStatus.OK, urllib.parse.urlparse("http://a/b"),
    {1: 2}.keys(), {1: 2}.items(), collections.OrderedDict(a=1).values(), memoryview(b"a"), bytearray(b"a"), 1j,
    ValueError("a"), KeyError(1), UnicodeDecodeError("a", b"a", 0, 1, "x"), type(None), type(...), NotImplemented,
    time.localtime(), io.StringIO("a"), io.BytesIO(b"a"), statistics.NormalDist(), "a".upper, [].append, str.upper,
    re.compile("a"), re.I, iter([1]), itertools.chain([1], [2]), itertools.count(3), enumerate([1]),
    Point(1, 2), Colour.RED, Bits.A | Bits.B, Thing(), Thing().c, Thing[int], Slots(), Mapped(), Error("a"),
]
for place, value in enumerate(values):
    globals()[f"value_{place}_{type(value).__name__}"] = value
del values, value, place
"""


def test_ordinary_values_need_no_imports() -> None:
    there, omitted, missing = moved(VALUES, to=Interpreter(authorized=()))
    assert not omitted
    assert {name: why for name, why in missing.items() if type(sys.modules.get(name)) is not types.ModuleType} == {}
    assert sum(name.startswith("value_") for name in there.main.__dict__) > 60


@pytest.mark.parametrize(("own", "why"), [("g = globals()", "its namespace"), ("g = [__builtins__]", "its builtins")])
def test_what_is_the_interpreters_own_is_no_variable(own: str, why: str) -> None:
    _, omitted, _ = moved(f"{own}\nx = 1")
    assert list(omitted) == ["g"] and why in omitted["g"]
