"""What of an interpreter is not a variable, but is what variables refer to: its namespace, its builtins, our own hooks.

A pickle names these instead of holding them, and another interpreter puts its own in their place. So a function that
was written by one session is counted and held to the rules by the session that reads it. What a pickle names it can
also change; so it gets nothing of ours but by a stand-in, and makes functions, classes and code only as we let it.
"""

from __future__ import annotations

import builtins
import sys
import types

from .dynamic import AGENT_BUILTINS
from .imports import CALLED_IMPORT, refused_module
from .instrument import LastValue
from .state_index import NotPickled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .hooks import Hooks
    from .referee import Referee

_RESTORED = "<restored>"

HOOKS = ("load", "verify", "special", "match", "reach", "enter")
_OF_CODE = ("constant:ticks", "constant:guard", *(f"hook:{name}" for name in HOOKS), "keep")


class Standing:
    """In a pickle, what stands for code, and for something of the interpreter that only code and functions may hold.

    A pickle can change all that it names, and take it apart. So it gets this, which says nothing and can do nothing;
    `make_code` and `make_function` put the real one in its place.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


GLOBALS = Standing("globals")
"""The namespace of the program, as the globals of a function."""


class World:
    """What of an interpreter is not a variable, and what stands for it in a pickle."""

    def __init__(
        self,
        main: types.ModuleType,
        names: dict[Any, Any],
        referee: Referee,
        hooks: Hooks,
        constants: dict[str, Any],
        memory_bytes: int,
    ) -> None:
        """`names` are the builtins of agent code, `constants` what instrumented code calls, by name."""
        self.main = main
        self.namespace: dict[Any, Any] = main.__dict__  # agent code can put anything there
        self.names = names
        self.referee = referee
        self.hooks = hooks
        self.constants = constants
        self.memory_bytes = memory_bytes
        self.may_make_code = False
        """Whether what is read now may hold code."""

        # By identity, what `make_code`, `make_function` and `make_class` have made.
        self._made: dict[int, Any] = {}
        self._codes: dict[int, types.CodeType] = {}
        ours: dict[str, Callable[..., Any]] = {
            "code": self.make_code,
            "function": self.make_function,
            "settle": self.settle_function,
            "module": self.import_module,
        }
        self._makers = {name: sealed(function) for name, function in {**_OWN, **ours}.items()}

    def standing(self) -> dict[int, tuple[str, Any]]:
        """By identity, what is there in every interpreter and is not pickled; without a name, what nobody may hold."""
        ours = vars(builtins)
        known: list[tuple[str, Any]] = [("globals", GLOBALS), ("main", self.main)]
        known += [("", own) for own in (self.namespace, self.names, self.hooks, self.referee)]
        known += [(f"constant:{name}", value) for name, value in self.constants.items()]
        for name, value in list(self.names.items()):
            if isinstance(name, str) and value is not ours.get(name) and not isinstance(value, (str, int, float)):
                known.append((f"builtin:{name}", value))
        known += [(f"own:{name}", stand_in) for name, stand_in in _OWN.items()]
        return {id(value): (name, value) for name, value in reversed(known) if value is not None}

    def stood_for(self, name: object) -> Any:
        """What this name of `standing` means here. Raises NotPickled."""
        kind, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
        if name == GLOBALS.name:
            return GLOBALS
        if name in _OF_CODE:
            return Standing(name)
        if kind == "constant" and rest in self.constants:
            return self.constants[rest]
        if name == "main" or name == f"builtin:{AGENT_BUILTINS}":
            module = "__main__" if name == "main" else "builtins"
            if not self.referee.rules.authorizes(module):
                raise NotPickled(f"the import of {module} is not authorized here")
            return self.main if name == "main" else self.names[AGENT_BUILTINS]
        if kind == "builtin" and rest in self.names:
            return self.names[rest]
        if kind == "builtin":
            raise NotPickled(f"it refers to {rest}, which is not there; a tool has to be registered first")
        if kind == "own" and rest in _OWN:
            return self._makers[rest]
        raise NotPickled("it refers to what only another version has")

    def import_module(self, name: Any) -> types.ModuleType:
        """A module that a variable is: imported as the program would."""
        if type(name) is not str:
            raise NotPickled("it names no module")
        refused = refused_module(name, (), self.referee.rules)
        if refused:
            raise NotPickled(f"the import of {refused} is not authorized here")
        self.names[CALLED_IMPORT](name)
        module = sys.modules.get(name)
        if not isinstance(module, types.ModuleType):
            raise NotPickled(f"there is no module {name}")
        return module

    def make_code(self, *args: Any) -> Standing:
        """Code of the program, for functions only. Raises NotPickled where there should be none.

        Of code itself a pickle could make functions that have other builtins.
        """
        if not self.may_make_code:
            raise NotPickled("it holds code, and says that it holds none")
        parts = [tuple(map(self._placed, each)) if type(each) is tuple else each for each in args]
        make: Callable[..., types.CodeType] = types.CodeType
        standing = Standing("code")
        self._made[id(standing)] = standing
        self._codes[id(standing)] = make(*parts)
        return standing

    def make_function(self, code: Any, namespace: Any, name: Any, closure: Any) -> types.FunctionType:
        """A function of the program in this interpreter."""
        self._require_made(code, Standing)
        if namespace is not GLOBALS:
            raise NotPickled("it holds a function of another form")
        return self._function(code, self.namespace, name, None, closure)

    def make_foreign_function(
        self, code: Any, namespace: Any, name: Any, defaults: Any, closure: Any
    ) -> types.FunctionType:
        """A function that is not of the program's namespace; cloudpickle brings what it needs of its own one."""
        self._require_made(code, Standing)
        if type(namespace) is not dict:
            raise NotPickled("it holds a function of another form")
        return self._function(code, namespace, name, defaults, closure)

    def settle_function(self, function: Any, state: Any) -> None:
        """Gives a function what it had besides its code."""
        self._require_made(function, types.FunctionType)
        attributes = state.pop("__dict__", {})
        for name, value in state.items():
            if name not in _SETTLED:
                raise NotPickled("it holds a function of another form")
            setattr(function, name, value)
        function.__dict__.update(attributes)

    def settle_foreign_function(self, settle: Callable[[Any, Any], Any], function: Any, state: Any) -> None:
        """The same as cloudpickle does it, which is `settle`."""
        self._require_made(function, types.FunctionType)
        try:
            settle(function, state)
        finally:
            function.__globals__["__builtins__"] = self.names

    def make_class(self, make: Callable[..., Any], *args: Any) -> Any:
        """A class of the program, without what is in it."""
        return self._made_here(make(*args))

    def settle_class(self, settle: Callable[[Any, Any], Any], made: Any, state: Any) -> Any:
        """Gives it what is in it."""
        self._require_made(made, type)
        return settle(made, state)

    def _function(self, code: Any, namespace: dict[Any, Any], name: Any, *more: Any) -> types.FunctionType:
        namespace["__builtins__"] = self.names
        made: types.FunctionType = self._made_here(
            types.FunctionType(moved(self._codes[id(code)]), namespace, name, *more)
        )
        return made

    def _placed(self, constant: Any) -> Any:
        """A constant of code, or what it stands for."""
        if type(constant) is not Standing:
            return constant
        if id(constant) in self._codes:
            return self._codes[id(constant)]
        kind, _, rest = constant.name.partition(":")
        if constant.name not in _OF_CODE:
            raise NotPickled("its code refers to what only another version has")
        if kind == "hook":
            return getattr(self.hooks, rest)
        return LastValue().keep if kind == "keep" else self.constants[rest]

    def _made_here(self, made: Any) -> Any:
        self._made[id(made)] = made
        return made

    def _require_made(self, value: Any, kind: type) -> None:
        """What is not of this state must not be changed by it, and no code be taken from elsewhere."""
        if not isinstance(value, kind) or self._made.get(id(value)) is not value:
            raise NotPickled("it changes what is not part of it, or makes a function of it")


def sealed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for a pickle to call, and to ask for nothing else: it has no attributes to be read or set."""

    class Sealed:
        __slots__ = ()

        def __call__(self, *args: Any) -> Any:
            return function(*args)

    return Sealed()


def make_code(*_: Any) -> types.CodeType:
    """In a pickle, what stands for `World.make_code`."""
    raise NotPickled("code")


def make_function(*_: Any) -> types.FunctionType:
    """In a pickle, what stands for `World.make_function`."""
    raise NotPickled("a function")


def settle_function(*_: Any) -> None:
    """In a pickle, what stands for `World.settle_function`."""
    raise NotPickled("a function")


def make_cell() -> types.CellType:
    """A cell of a closure, without a value."""
    return types.CellType()


def fill_cell(cell: types.CellType, contents: Any) -> None:
    """Gives it its value: a tuple of one, empty where it had none."""
    if contents and type(cell) is types.CellType:
        cell.cell_contents = contents[0]


def module_named(name: str) -> types.ModuleType:
    """In a pickle, what stands for importing a module: each interpreter does that in its own way."""
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
    state = {name: getattr(function, name) for name in _ATTRIBUTES}
    if hasattr(function, "__type_params__"):
        state["__type_params__"] = function.__type_params__
    state["__dict__"] = dict(function.__dict__)
    made_of = (function.__code__, GLOBALS, function.__name__, function.__closure__)
    return make_function, made_of, state, None, None, settle_function


def moved(code: types.CodeType) -> types.CodeType:
    """Its lines are those of a source that this session does not have; another one has that name."""
    constants = tuple(moved(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=_RESTORED, co_consts=constants)
