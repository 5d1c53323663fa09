"""What of an interpreter is not a variable, but is what variables refer to: its namespace, its builtins, our own hooks.

A pickle names these instead of holding them, and another interpreter puts its own in their place. So a function that
was written by one session is counted and held to the rules by the session that reads it.
"""

from __future__ import annotations

import builtins
import sys
import types

from .imports import CALLED_IMPORT, refused_module
from .instrument import LastValue
from .language import starts_processes
from .state_index import NotPickled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .hooks import Hooks
    from .referee import Referee

_RESTORED = "<restored>"

HOOKS = ("load", "verify", "special", "match")
_PUBLIC = {
    "posix": "os",
    "nt": "os",
    "_io": "io",
    "_socket": "socket",
    "_ctypes": "ctypes",
    "_posixsubprocess": "subprocess",
    "_frozen_importlib": "importlib",
    "_frozen_importlib_external": "importlib",
    "_pickle": "pickle",
}
# Modules by which a pickle could reach what the rules are about; named only where the program may import them.
_GUARDED = frozenset(
    (
        *("code", "codeop", "ctypes", "gc", "importlib", "inspect", "io", "marshal", "multiprocessing", "os"),
        *(
            "pathlib",
            "pickle",
            "pty",
            "runpy",
            "shutil",
            "signal",
            "socket",
            "subprocess",
            "sys",
            "threading",
            "_thread",
        ),
    )
)


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

    def standing(self) -> dict[int, tuple[str, Any]]:
        """By identity, what is there in every interpreter and is not pickled."""
        ours = vars(builtins)
        known = [("globals", self.namespace), ("main", self.main), ("builtins", self.names), ("hooks", self.hooks)]
        known += [(f"constant:{name}", value) for name, value in self.constants.items()]
        for name, value in list(self.names.items()):
            if isinstance(name, str) and value is not ours.get(name) and not isinstance(value, (str, int, float)):
                known.append((f"builtin:{name}", value))
        known += [(f"own:{name}", stand_in) for name, stand_in in _OWN.items()]
        return {id(value): (name, value) for name, value in reversed(known) if value is not None}

    def stood_for(self, name: object) -> Any:
        """What this name of `standing` means here. Raises NotPickled."""
        kind, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
        if kind in ("globals", "main", "builtins", "hooks"):
            return {"globals": self.namespace, "main": self.main, "builtins": self.names, "hooks": self.hooks}[kind]
        if kind == "constant" and rest in self.constants:
            return self.constants[rest]
        if kind == "hook" and rest in HOOKS:
            return getattr(self.hooks, rest)
        if kind == "keep":
            return LastValue().keep
        if kind == "builtin" and rest in self.names:
            return self.names[rest]
        if kind == "builtin":
            raise NotPickled(f"it refers to {rest}, which is not there; a tool has to be registered first")
        if kind == "own" and rest in _OWN:
            if rest == "function":
                return lambda *args: make_function(self.names, *args)
            return self.import_module if rest == "module" else _OWN[rest]
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

    def check_named(self, module: str, name: str) -> None:
        """Raises NotPickled for a class or function that the rules keep from the program."""
        rules = self.referee.rules
        public = _PUBLIC.get(module, module)
        if rules.denies(public):
            raise NotPickled(f"the policy denies {public}")
        if public.partition(".")[0] in _GUARDED and not rules.authorizes(public):
            raise NotPickled(f"it needs {public}.{name}, and the import of {public} is not authorized here")
        if "dangerous_functions" in rules.refused and starts_processes(public, name):
            raise NotPickled(f"it needs {public}.{name}, which language.dangerous_functions refuses")


def make_function(
    names: dict[str, Any], code: types.CodeType, namespace: dict[str, Any], name: str, closure: Any
) -> types.FunctionType:
    """A function of the program in this interpreter."""
    namespace["__builtins__"] = names
    return types.FunctionType(moved(code), namespace, name, None, closure)


def settle_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Gives a function what it had besides its code."""
    attributes = state.pop("__dict__", {})
    for name, value in state.items():
        setattr(function, name, value)
    function.__dict__.update(attributes)


def make_cell() -> types.CellType:
    """A cell of a closure, without a value."""
    return types.CellType()


def fill_cell(cell: types.CellType, contents: Any) -> None:
    """Gives it its value: a tuple of one, empty where it had none."""
    if contents:
        cell.cell_contents = contents[0]


def module_named(name: str) -> types.ModuleType:
    """In a pickle, what stands for importing a module: each interpreter does that in its own way."""
    raise NotPickled(name)


_OWN: dict[str, Callable[..., Any]] = {
    "function": make_function,
    "settle": settle_function,
    "cell": make_cell,
    "fill": fill_cell,
    "module": module_named,
}
_ATTRIBUTES = ("__defaults__", "__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__")


def reduced_function(function: types.FunctionType) -> tuple[Any, ...]:
    state = {name: getattr(function, name) for name in _ATTRIBUTES}
    if hasattr(function, "__type_params__"):
        state["__type_params__"] = function.__type_params__
    state["__dict__"] = dict(function.__dict__)
    made_of = (function.__code__, function.__globals__, function.__name__, function.__closure__)
    return make_function, made_of, state, None, None, settle_function


def moved(code: types.CodeType) -> types.CodeType:
    """Its lines are those of a source that this session does not have; another one has that name."""
    constants = tuple(moved(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=_RESTORED, co_consts=constants)
