"""Defines the names of a tool's source in the shipped text.

Modules, and objects of Python or of an installed package, are imported. The user's definitions are written again by
`functions` and `classes`. Everything else is written by `objects`.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

from executor_client._shipping.cells import Cells
from executor_client._shipping.classes import Classes
from executor_client._shipping.dialects import Dialect
from executor_client._shipping.functions import Functions
from executor_client._shipping.libraries import import_path, imported_as, submodule
from executor_client._shipping.names import Names
from executor_client._shipping.owners import Owner, owner_of
from executor_client._shipping.source import SourceFiles
from executor_client._shipping.writer import PREFIX, Space, Writer

if TYPE_CHECKING:
    from executor_client._shipping.objects import Objects

_EVERY_MODULES = frozenset(
    {"__name__", "__doc__", "__package__", "__builtins__", "__annotations__", "__module__", "__qualname__", "__dict__"}
)
_OF_FILES = frozenset({"__file__", "__path__", "__spec__", "__loader__", "__cached__"})


class Definitions:
    """The names of every module that a tool's source comes from."""

    def __init__(self, writer: Writer, dialect: Dialect, objects: Objects) -> None:
        self.writer = writer
        self.dialect = dialect
        self.objects = objects
        self._functions = Functions(self)
        self._classes = Classes(self)
        self.files = SourceFiles()
        self.cells = Cells()
        self._defined: set[tuple[int, str]] = set()
        self._missing: list[tuple[Space, str]] = []
        self._stored: set[tuple[int, str]] = set()
        self._closures: dict[str, Any] = {"__name__": "closures"}

    def is_users(self, module: str) -> bool:
        """Returns True if the source of this module's objects is shipped."""
        return self.dialect.ships_module(module) or owner_of(module) in (Owner.USER, Owner.UNKNOWN)

    def function(self, value: types.FunctionType, where: str) -> str:
        if self.is_users(str(value.__globals__.get("__name__", "__main__"))):
            return self._functions.define(value, where)
        return self.of_library(value, where)

    def class_(self, value: type, where: str) -> str:
        if self.is_users(value.__module__):
            return self._classes.define(value, where)
        return self.of_library(value, where)

    def cached(self, value: Any, where: str) -> str:
        """Returns an expression for a function in `functools.lru_cache` or `cache`, with an empty cache."""
        if not self.is_users(value.__module__):
            return self.of_library(value, where)
        parameters = ", ".join(f"{key}={setting!r}" for key, setting in value.cache_parameters().items())
        return (
            f"{self.writer.library('functools')}.lru_cache({parameters})({self.objects.ref(value.__wrapped__, where)})"
        )

    def of_library(self, value: object, where: str, *, name: str | None = None) -> str:
        """Imports an object of Python or of an installed package; recreates a wrapper by decorating again."""
        path = import_path(value, name)
        if path is not None and not self.is_users(path[0]):
            return self._imported(*path)
        if isinstance(value, types.FunctionType) and isinstance(inspect.unwrap(value), types.FunctionType):
            redone = self._functions.decorated_again(value, where)
            if redone is not None:
                return redone
        kind = type(value).__qualname__
        origin = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None) or "a library"
        return self.writer.refuse(where, f"a {kind} that {origin} made can't be found again by name")

    def _imported(self, module: str, qualname: str) -> str:
        if module == "builtins":
            return f"{self.writer.library('builtins')}.{qualname}"
        self.writer.modules[module] = None
        name = self.writer.fresh()
        self.writer.say(f"import {module} as {name}")
        return f"{name}.{qualname}"

    # -----------------------------------------------------------------------------------------------------------------
    # Names

    def use_first(self, space: Space, names: Names, *, but: frozenset[str] = frozenset()) -> None:
        """Defines the names that a piece of source needs when it runs."""
        self._stored.update((id(space.namespace), name) for name in names.stored)
        self._use_imports(names)
        for name in sorted(names.first - but):
            self._use(space, name, names)
        for name in sorted((names.own & space.namespace.keys()) - but):
            self._use(space, name, names)

    def use_later(self, space: Space, names: Names) -> None:
        """Defines the names that a piece of source needs when its definitions are used."""
        for name in sorted(names.later):
            self._use(space, name, names)

    def _use(self, space: Space, name: str, names: Names) -> None:
        if name in _EVERY_MODULES or name.startswith(PREFIX):
            return
        if name in _OF_FILES:
            self.writer.refuse(name, "names a file of this machine, which the sandbox does not have")
        elif name not in space.namespace:
            if not hasattr(builtins, name):
                self._missing.append((space, name))
        elif isinstance(value := space.namespace[name], types.ModuleType):
            self._module(space, name, value, names.attributes.get(name, {()}))
        elif self._is_new(space, name):
            self._name(space, name, value)

    def _is_new(self, space: Space, name: str) -> bool:
        """Returns True for the first use of a name, which has to define it."""
        before = len(self._defined)
        self._defined.add((id(space.namespace), name))
        return len(self._defined) > before

    def _name(self, space: Space, name: str, value: object) -> None:
        known = self.objects.is_tool(value) or self.dialect.stand_in(value) or self.dialect.reduced(value)
        statement = None if known else imported_as(self.files.module(space.namespace), name, value)
        if statement is not None and not self.is_users(statement[0]) and self.dialect.refusal(value) is None:
            module, attribute = statement
            self.writer.modules[module] = None
            self.writer.define(space, f"from {module} import {attribute} as {name}\n")
            return
        self.writer.assign(space, name, self.objects.ref(value, name))

    def finish(self) -> None:
        """Refuses undefined names and separated variables, which are known only after everything was followed."""
        self.cells.finish(self.writer)
        for space, name in self._missing:
            if (id(space.namespace), name) not in self._stored:
                self.writer.refuse(
                    name, "is not defined here; what exists in the sandbox only must be imported inside the tool"
                )

    # -----------------------------------------------------------------------------------------------------------------
    # Modules

    def _module(self, space: Space, name: str, module: types.ModuleType, chains: set[tuple[str, ...]]) -> None:
        if sys.modules.get(module.__name__) is not module and sys.modules.get(_spec_name(module)) is not module:
            self.writer.refuse(name, "is a module that was made at run time")
        elif self.is_users(module.__name__):
            self._users_module(space, name, module, chains)
        else:
            self._import_as(space, name, module)
            for each in sorted({below for chain in chains for below in submodule(module, chain)}):
                self.writer.modules[each] = None
                self.writer.define(space, f"import {each} as {self.writer.fresh()}\n")

    def _import_as(self, space: Space, name: str, module: types.ModuleType) -> None:
        if self._is_new(space, name):
            self.writer.modules[module.__name__] = None
            self.writer.define(space, f"import {module.__name__} as {name}\n")

    def _users_module(self, space: Space, name: str, module: types.ModuleType, chains: set[tuple[str, ...]]) -> None:
        """Ships the attributes of a user's module that the source names."""
        there = self.writer.space(module.__dict__)
        if self._is_new(space, name):
            self.writer.assign(space, name, there.expression)
        for chain in sorted(chains):
            if not chain:
                self.writer.refuse(name, "is a module of your own, of which only names can be shipped: name.attribute")
            else:
                names = Names(attributes={chain[0]: {chain[1:]}})
                self._use(there, chain[0], names)

    def closure_variable(self, variable: str, value: object, chains: set[tuple[str, ...]]) -> str:
        """Returns an expression for the value of a closure's variable. `chains` are the attributes read of a module."""
        if not isinstance(value, types.ModuleType):
            return self.objects.ref(value, variable)
        holder = self.writer.space(self._closures)
        name = self.writer.fresh()
        self._module(holder, name, value, chains)
        return holder.named(name)

    def module_as_value(self, module: types.ModuleType, where: str) -> str:
        """Returns an expression for a module that an object refers to, not a name in the source."""
        if sys.modules.get(module.__name__) is not module or self.is_users(module.__name__):
            return self.writer.refuse(where, "is a module of your own, of which only names can be shipped")
        self.writer.modules[module.__name__] = None
        name = self.writer.fresh()
        self.writer.say(f"import {module.__name__} as {name}")
        return name

    def _use_imports(self, names: Names) -> None:
        for each in names.imports:
            if each.level:
                name = "." * each.level + each.module
                self.writer.refuse(name, "is imported inside the tool, relative to its module; import it at the top")
            elif owner_of(each.module) is Owner.USER or self.dialect.ships_module(each.module):
                why = "is not in the sandbox and is imported inside the tool; import it at the top"
                self.writer.refuse(each.module, why)
            elif not each.optional:
                self.writer.modules[each.module] = None


def _spec_name(module: types.ModuleType) -> str:
    return str(getattr(getattr(module, "__spec__", None), "name", ""))
