"""Writes objects as expressions of the shipped text: as literals, as bindings, or recreated step by step.

An object is recreated from its `__reduce_ex__`, as by `copy` and `pickle`. But its class and functions are shipped in
the text, not looked up by name, because the sandbox does not have the user's modules. Each object is created once:
shared objects stay shared, and a list, dict or object may refer to itself.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from executor_api.values import EncodeError
from executor_client._shipping.definitions import Definitions
from executor_client._shipping.dialects import Dialect
from executor_client._shipping.plain import is_plain, literal
from executor_client._shipping.writer import StandIn, Writer

_DEPTH_MAX = 100
_PROBLEMS_MAX = 30
_OBJECTS_MAX = 5_000
"""Objects that are recreated step by step; plain data does not count."""

_NOT_ELSEWHERE = "it only means something in this process"
_NO_PICKLE = re.compile(r"cannot pickle '?([\w.]+)'? object")


class Objects:
    """Returns expressions for objects, and writes each object once."""

    def __init__(self, writer: Writer, dialect: Dialect, tools: Mapping[int, str]) -> None:
        """`tools` has the names of the session's other tools, by the ids of their objects."""
        self._writer = writer
        self._dialect = dialect
        self._tools = tools
        self._definitions = Definitions(writer, dialect, self)
        self._known: dict[int, str] = {}
        self._alive: list[object] = []
        self._making: set[int] = set()
        self._late: list[Callable[[], None]] = []

    def remember(self, value: object, expression: str) -> str:
        """Makes the expression stand for the object from now on."""
        self._known[id(value)] = expression
        self._alive.append(value)  # kept alive, or another object could get its id
        return expression

    def is_tool(self, value: object) -> bool:
        return id(value) in self._tools

    def when_made(self, value: object, say: Callable[[], None]) -> None:
        """Calls `say`, which refers to the object: now, or at the end if the object is still being written."""
        if id(value) in self._making and id(value) not in self._known:
            self._late.append(say)
        else:
            say()

    def finish(self) -> None:
        """Writes the postponed lines, then refuses the problems that are known only now."""
        while self._late:
            self._late.pop(0)()
        self._definitions.finish()

    def ref(self, value: object, where: str) -> str:
        """Returns an expression for the object. `where` is the user's name for it."""
        written = literal(value)
        if written is not None:
            return written
        if isinstance(value, StandIn):
            return self._writer.stand_in(value)
        if id(value) in self._known:
            return self._known[id(value)]
        if len(self._writer.problems) >= _PROBLEMS_MAX:
            return "None"  # refused already, with enough reasons
        if id(value) in self._making:
            return self._writer.refuse(where, "refers to itself in a way that can't be made again")
        if len(self._making) >= _DEPTH_MAX or len(self._alive) > _OBJECTS_MAX:
            return self._writer.refuse(where, "holds too many objects; put them into a file or a variable")
        self._making.add(id(value))
        try:
            expression = self._expression(value, where)
        finally:
            self._making.discard(id(value))
        return self._known.get(id(value)) or self.remember(value, expression)

    def _expression(self, value: object, where: str) -> str:
        if self.is_tool(value):
            return f"{self._writer.helper('other')}({self._tools[id(value)]!r})"
        stand_in = self._dialect.stand_in(value)
        if stand_in is not None:
            return self._writer.stand_in(stand_in)
        refusal = self._dialect.refusal(value)
        if refusal is not None:
            return self._writer.refuse(where, refusal)
        reduced = self._dialect.reduced(value)
        if reduced is not None:
            return self._from_reduced(value, reduced, where)
        handler = self._handler(value)
        if handler is not None:
            return handler(value, where)
        try:
            if is_plain(value):
                return self._writer.bind(value)
        except EncodeError as error:
            return self._writer.refuse(where, f"is too large to be shipped: {error}")
        return self._step_by_step(value, where)

    def _handler(self, value: object) -> Callable[[Any, str], str] | None:
        definitions = self._definitions
        match value:
            case types.FunctionType():
                return definitions.function
            case types.ModuleType():
                return definitions.module_as_value
            case type():
                return definitions.class_
            case functools._lru_cache_wrapper():
                return definitions.cached
            case types.BuiltinFunctionType() if value.__self__ is None or isinstance(value.__self__, types.ModuleType):
                return definitions.of_library
            case types.MethodType():
                return self._method
            case re.Pattern():
                return self._pattern
            case TypeVar():
                return self._type_variable
        return None

    def _step_by_step(self, value: Any, where: str) -> str:
        if type(value) is list:
            return self._list(value, where)
        if type(value) is dict:
            return self._dict(value, where)
        if type(value) is tuple:
            return _tuple(self.ref(each, f"{where}[{number}]") for number, each in enumerate(value))
        if isinstance(value, enum.Enum):
            return f"{self.ref(type(value), type(value).__qualname__)}({self.ref(value.value, where)})"
        try:
            reduced = _reduced(value)
        except Exception as error:  # noqa: BLE001 - `__reduce__` of a user's class may raise anything
            return self._writer.refuse(where, _why(value, error))
        if isinstance(reduced, str):
            return self._definitions.of_library(value, where, name=reduced)
        before = len(self._writer.problems)
        made = self._from_reduced(value, reduced, where)
        if not self._definitions.is_users(type(value).__module__):
            self._sum_up(before, value, where)
        return made

    def _sum_up(self, before: int, value: object, where: str) -> None:
        """Replaces the problems inside a library's object by one that names the object, which the user knows."""
        problems = self._writer.problems
        inner = [problem for problem in problems[before:] if problem.name.startswith(f"{where}.")]
        if inner:
            problems[before:] = [problem for problem in problems[before:] if problem not in inner]
            self._writer.refuse(where, f"a {_kind(value)} can't be shipped: {_NOT_ELSEWHERE}")

    # -----------------------------------------------------------------------------------------------------------------

    def _list(self, value: list[Any], where: str) -> str:
        name = self.remember(value, self._writer.fresh())
        self._writer.say(f"{name} = []")
        items = [self._item(name, each, repr(number), f"{where}[{number}]") for number, each in enumerate(value)]
        self._writer.say(f"{name} += [{', '.join(items)}]")
        return name

    def _item(self, name: str, value: object, key: str, where: str) -> str:
        """Returns an expression for an item of a container; "None", to be set later, for a cycle."""
        if id(value) not in self._making or id(value) in self._known:
            return self.ref(value, where)
        self._late.append(lambda: self._writer.say(f"{name}[{key}] = {self.ref(value, where)}"))
        return "None"

    def _dict(self, value: dict[Any, Any], where: str) -> str:
        name = self.remember(value, self._writer.fresh())
        self._writer.say(f"{name} = {{}}")
        for key, each in value.items():
            key_expression = self.ref(key, f"a key of {where}")
            item = self._item(name, each, key_expression, f"{where}[{_short(key)}]")
            self._writer.say(f"{name}[{key_expression}] = {item}")
        return name

    def _method(self, value: types.MethodType, where: str) -> str:
        of = self.ref(value.__self__, f"{where}.__self__")
        if getattr(type(value.__self__), value.__name__, None) is value.__func__ or isinstance(value.__self__, type):
            return f"{of}.{value.__name__}"
        return f"{self._writer.library('types')}.MethodType({self.ref(value.__func__, where)}, {of})"

    def _pattern(self, value: re.Pattern[Any], _where: str) -> str:
        return f"{self._writer.library('re')}.compile({value.pattern!r}, {int(value.flags)})"

    def _type_variable(self, value: TypeVar, where: str) -> str:
        constraints = "".join(f", {self.ref(each, where)}" for each in value.__constraints__)
        bound = f", bound={self.ref(value.__bound__, where)}" if value.__bound__ is not None else ""
        variance = "".join(f", {name}=True" for name in ("covariant", "contravariant") if getattr(value, f"__{name}__"))
        return f"{self._writer.library('typing')}.TypeVar({value.__name__!r}{constraints}{bound}{variance})"

    def _from_reduced(self, value: Any, reduced: tuple[Any, ...], where: str) -> str:
        function, arguments, state, items, pairs, setter = (*reduced, None, None, None, None, None)[:6]
        name = self._writer.fresh()
        self._writer.say(f"{name} = {self._call(function, arguments, where)}")
        self.remember(value, name)
        if items is not None:
            for number, each in enumerate(items):
                self._writer.say(f"{name}.append({self.ref(each, f'{where}[{number}]')})")
        if pairs is not None:
            for key, each in pairs:
                key_expression = self.ref(key, f"a key of {where}")
                self._writer.say(f"{name}[{key_expression}] = {self.ref(each, f'{where}[{_short(key)}]')}")
        if setter is not None:
            self._writer.say(f"{self.ref(setter, where)}({name}, {self.ref(state, where)})")
        elif state is not None:
            self._writer.say(f"{self._writer.helper('state')}({name}, {self._state(state, where)})")
        return name

    def _call(self, function: Any, arguments: tuple[Any, ...], where: str) -> str:
        if function in (copyreg.__newobj__, copyreg.__newobj_ex__):  # type: ignore[attr-defined]
            class_, *rest = arguments
            keywords = {}
            if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
                rest, keywords = list(rest[0]), rest[1]
            made = self.ref(class_, class_.__qualname__)
            given = [made, *(self.ref(each, where) for each in rest)]
            given += [f"{key}={self.ref(each, where)}" for key, each in keywords.items()]
            return f"{made}.__new__({', '.join(given)})"
        called = self.ref(function, where)
        return f"{called}({', '.join(self.ref(each, where) for each in arguments)})"

    def _state(self, state: Any, where: str) -> str:
        if type(state) is tuple and len(state) == 2 and all(isinstance(each, dict | None) for each in state):
            return _tuple(self._state(each, where) for each in state)
        if type(state) is not dict or not all(isinstance(key, str) for key in state):
            return self.ref(state, where)
        # One reference for each attribute, so that a refusal names the attribute.
        members = [f"{key!r}: {self.ref(each, f'{where}.{key}')}" for key, each in state.items()]
        return f"{{{', '.join(members)}}}"


def _reduced(value: Any) -> Any:
    """Returns the object in the form of `__reduce__`. Raises any exception of its class."""
    kind = type(value)
    reducer = copyreg.dispatch_table.get(kind)
    if reducer is not None:
        return reducer(value)
    if issubclass(kind, BaseException) and kind.__reduce__ is BaseException.__reduce__:
        # Its `__reduce__` calls the class with `args`, which need not be the arguments of its `__init__`.
        return copyreg.__newobj__, (kind, *value.args), vars(value) or None  # type: ignore[attr-defined]
    return value.__reduce_ex__(4)


def _tuple(items: Any) -> str:
    listed = list(items)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, str | int | float | bool | bytes) else type(key).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


def _why(value: object, error: Exception) -> str:
    known = _NO_PICKLE.search(str(error))
    return f"a {_kind(value)} can't be shipped: {_NOT_ELSEWHERE if known else f'{type(error).__name__}: {error}'}"


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
