"""The interpreter's own objects that variables refer to: its namespace, its builtins, the hooks and the meter.

A pickle names these instead of holding them, and another interpreter puts its own in their place. So a function that
one session wrote is counted and held to the rules by the session that reads it.

Invariant: a pickle holds no reference to an object of the guest. It could change whatever it refers to (BUILD sets
attributes, REDUCE calls), for example the builtins that hold the checked `__import__`. So it gets a `Placeholder`, or a
function without attributes (`sealed`), and only `World` puts the real object into the code and functions that it makes.
The attack that this stops: code with other builtins, made from a code object that a pickle got hold of.
"""

from __future__ import annotations

import builtins
import sys
import types
from itertools import compress

from ..checks.control import guard
from ..checks.imports import AGENT_BUILTINS, CALLED_IMPORT, refused_module
from ..checks.sentinels import HOOKS, LastValue
from .index import NotPickled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    from ..checks.agent_builtins import Builtins

_RESTORED = "<restored>"

_IN_CODE = ("constant:ticks", "constant:guard", *(f"hook:{name}" for name in HOOKS), "keep")


class Placeholder:
    """Stands in a pickle for code, and for objects of the interpreter that only code and functions may hold.

    It has nothing to change or to call; `make_code` and `make_function` put the real object in its place.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


# The namespace of the program, as the globals of a function.
GLOBALS = Placeholder("globals")


class World:
    """Names the interpreter's own objects for a pickle, and finds them by these names for another one."""

    def __init__(
        self, main: types.ModuleType, agent_builtins: Builtins, ticks: Iterator[bool], memory_bytes: int
    ) -> None:
        self.main = main
        self.namespace: dict[Any, Any] = main.__dict__  # agent code can put anything there
        self.names: dict[Any, Any] = agent_builtins.names
        self.enforcer = agent_builtins.enforcer
        self.hooks = agent_builtins.hooks
        # The other objects that instrumented code calls, by name.
        self.constants: dict[str, Any] = {"ticks": ticks, "guard": guard, "next": next, "compress": compress}
        self.memory_bytes = memory_bytes
        self.may_make_code = False  # true while a segment is read that may hold code
        # The results of `make_code`, `make_function` and `make_class`, by identity.
        self._made: dict[int, Any] = {}
        self._codes: dict[int, types.CodeType] = {}
        ours: dict[str, Callable[..., Any]] = {
            "code": self.make_code,
            "function": self.make_function,
            "settle": self.settle_function,
            "module": self.import_module,
        }
        self._factories = {name: sealed(function) for name, function in {**_OWN, **ours}.items()}

    def named_objects(self) -> dict[int, tuple[str, Any]]:
        """Returns the objects of every interpreter that are named in a pickle, by identity.

        One with an empty name must not be in a pickle at all.
        """
        ours = vars(builtins)
        known: list[tuple[str, Any]] = [("globals", GLOBALS), ("main", self.main)]
        known += [("", own) for own in (self.namespace, self.names, self.hooks, self.enforcer)]
        known += [(f"constant:{name}", value) for name, value in self.constants.items()]
        for name, value in list(self.names.items()):
            if type(name) is not str or value is ours.get(name):
                continue
            if not issubclass(type(value), (str, int, float)):  # not isinstance, which asks the value itself
                known.append((f"builtin:{name}", value))
        known += [(f"own:{name}", stand_in) for name, stand_in in _OWN.items()]
        return {id(value): (name, value) for name, value in reversed(known) if value is not None}

    def resolve(self, name: object) -> Any:
        """Returns what this name of `named_objects` means here. Raises NotPickled."""
        kind, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
        if name == GLOBALS.name:
            return GLOBALS
        if name in _IN_CODE:
            return Placeholder(name)
        if kind == "constant" and rest in self.constants:
            return self.constants[rest]
        if name == "main" or name == f"builtin:{AGENT_BUILTINS}":
            module = "__main__" if name == "main" else "builtins"
            if not self.enforcer.rules.authorizes(module):
                raise NotPickled(f"the import of {module} is not authorized here")
            return self.main if name == "main" else self.names[AGENT_BUILTINS]
        if kind == "builtin" and rest in self.names:
            return self.names[rest]
        if kind == "builtin":
            raise NotPickled(f"it refers to {rest}, which is missing here; register the tool first")
        if kind == "own" and rest in _OWN:
            return self._factories[rest]
        raise NotPickled("it refers to what only another version has")

    def import_module(self, name: Any) -> types.ModuleType:
        """Imports a module that is the value of a variable, as the program would. Raises NotPickled."""
        if type(name) is not str:
            raise NotPickled("it names no module")
        refused = refused_module(name, (), self.enforcer.rules, self.enforcer.own)
        if refused:
            raise NotPickled(f"the import of {refused} is not authorized here")
        self.names[CALLED_IMPORT](name)
        module = sys.modules.get(name)
        if not isinstance(module, types.ModuleType):
            raise NotPickled(f"there is no module {name}")
        return module

    def make_code(self, *args: Any) -> Placeholder:
        """Makes code for functions of the program. Raises NotPickled in a segment that declares none.

        The pickle gets a placeholder: from the code object itself it could make functions that have other builtins.
        """
        if not self.may_make_code:
            raise NotPickled("it holds code, and declares that it holds none")
        parts = [tuple(map(self._placed, each)) if type(each) is tuple else each for each in args]
        make: Callable[..., types.CodeType] = types.CodeType
        placeholder = Placeholder("code")
        self._made[id(placeholder)] = placeholder
        self._codes[id(placeholder)] = make(*parts)
        return placeholder

    def make_function(self, code: Any, namespace: Any, name: Any, closure: Any) -> types.FunctionType:
        """Makes a function of the program's own namespace."""
        self._require_made(code, Placeholder)
        if namespace is not GLOBALS:
            raise NotPickled("it holds a function of another form")
        return self._function(code, self.namespace, name, None, closure)

    def make_foreign_function(
        self, code: Any, namespace: Any, name: Any, defaults: Any, closure: Any
    ) -> types.FunctionType:
        """Makes a function of another namespace; cloudpickle brings the part of it that the function needs."""
        self._require_made(code, Placeholder)
        if type(namespace) is not dict:
            raise NotPickled("it holds a function of another form")
        return self._function(code, namespace, name, defaults, closure)

    def settle_function(self, function: Any, state: Any) -> None:
        """Gives a function its attributes, defaults and annotations."""
        self._require_made(function, types.FunctionType)
        attributes = state.pop("__dict__", {})
        for name, value in state.items():
            if name not in _SETTLED:
                raise NotPickled("it holds a function of another form")
            setattr(function, name, value)
        function.__dict__.update(attributes)

    def settle_foreign_function(self, settle: Callable[[Any, Any], Any], function: Any, state: Any) -> None:
        """Does the same for a function of another namespace, by cloudpickle's own function `settle`."""
        self._require_made(function, types.FunctionType)
        try:
            settle(function, state)
        finally:
            function.__globals__["__builtins__"] = self.names

    def make_class(self, make: Callable[..., Any], *args: Any) -> Any:
        """Makes an empty class of the program."""
        return self._made_here(make(*args))

    def settle_class(self, settle: Callable[[Any, Any], Any], made: Any, state: Any) -> Any:
        """Gives a class its attributes."""
        self._require_made(made, type)
        return settle(made, state)

    def _function(self, code: Any, namespace: dict[Any, Any], name: Any, *more: Any) -> types.FunctionType:
        namespace["__builtins__"] = self.names
        made: types.FunctionType = self._made_here(
            types.FunctionType(moved(self._codes[id(code)]), namespace, name, *more)
        )
        return made

    def _placed(self, constant: Any) -> Any:
        """Returns a constant of code, or the object that a placeholder stands for."""
        if type(constant) is not Placeholder:
            return constant
        if id(constant) in self._codes:
            return self._codes[id(constant)]
        kind, _, rest = constant.name.partition(":")
        if constant.name not in _IN_CODE:
            raise NotPickled("its code refers to what only another version has")
        if kind == "hook":
            return getattr(self.hooks, rest)
        return LastValue().keep if kind == "keep" else self.constants[rest]

    def _made_here(self, made: Any) -> Any:
        self._made[id(made)] = made
        return made

    def _require_made(self, value: Any, kind: type) -> None:
        """Raises NotPickled for an object that this state did not make: it must not change one, or take its code."""
        if not isinstance(value, kind) or self._made.get(id(value)) is not value:
            raise NotPickled("it changes what is not part of it, or makes a function of it")


def sealed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that a pickle can only call it: it has no attributes to be read or set."""

    class Sealed:
        __slots__ = ()

        def __call__(self, *args: Any) -> Any:
            return function(*args)

    return Sealed()


def make_code(*_: Any) -> types.CodeType:
    """Stands for `World.make_code` in a pickle."""
    raise NotPickled("code")


def make_function(*_: Any) -> types.FunctionType:
    """Stands for `World.make_function` in a pickle."""
    raise NotPickled("a function")


def settle_function(*_: Any) -> None:
    """Stands for `World.settle_function` in a pickle."""
    raise NotPickled("a function")


def make_cell() -> types.CellType:
    """Makes an empty cell of a closure."""
    return types.CellType()


def fill_cell(cell: types.CellType, contents: Any) -> None:
    """Gives a cell its value: a tuple of one, empty where it had none."""
    if contents and type(cell) is types.CellType:
        cell.cell_contents = contents[0]


def module_named(name: str) -> types.ModuleType:
    """Stands for `World.import_module` in a pickle."""
    raise NotPickled(name)


_OWN: dict[str, Callable[..., Any]] = {
    "code": make_code,
    "function": make_function,
    "settle": settle_function,
    "cell": make_cell,
    "fill": fill_cell,
    "module": module_named,
}
_ATTRIBUTES = ("__defaults__", "__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__")
_SETTLED = frozenset((*_ATTRIBUTES, "__type_params__"))


def reduced_function(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns the reduced form in which pickle writes a function of the program's namespace."""
    state = {name: getattr(function, name) for name in _ATTRIBUTES}
    if hasattr(function, "__type_params__"):
        state["__type_params__"] = function.__type_params__
    state["__dict__"] = dict(function.__dict__)
    made_of = (function.__code__, GLOBALS, function.__name__, function.__closure__)
    return make_function, made_of, state, None, None, settle_function


def moved(code: types.CodeType) -> types.CodeType:
    """Returns code under another file name: an execution of this session may have the one that it was written with."""
    constants = tuple(moved(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=_RESTORED, co_consts=constants)
