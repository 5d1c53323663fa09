"""Which modules agent code may use, in whatever way it came by one.

Two rules decide. `module_attributes` means what an import means: of `numpy` alone, `numpy.random` is not authorized.
`foreign_modules` lets a program use all of a package of which something is authorized, as Python itself does.
A module that the program made itself is its own.
"""

from __future__ import annotations

import sys
from types import ModuleType

from .imports import listed
from .language import PolicyDenied
from .standard_modules import public_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, TypeGuard

    from .referee import Referee


_DICT: Any = type.__dict__["__dict__"].__get__(ModuleType)["__dict__"]


class ModuleCheck:
    """Decides, and refuses. It remembers only what it let pass."""

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self._allowed: dict[int, ModuleType] = {}
        self._index: dict[int, set[str]] = {}
        self._indexed = 0

    def on_rules(self) -> None:
        """Other rules are in force."""
        self._allowed = {}

    def check(self, module: ModuleType, way: str = "") -> None:
        """Refuses a module that is not authorized; `way` is how the program came to it."""
        if id(module) not in self._allowed:
            if type(module) is Unauthorized:
                ModuleType.__getattribute__(module, "refuse")()
            if not self.is_allowed(module):
                self.refuse(name_of(module), way)
            self._allowed[id(module)] = module

    def is_allowed(self, module: ModuleType) -> bool:
        refused = self._referee.rules.refused
        if "module_attributes" not in refused and "foreign_modules" not in refused:
            return True
        names = self._names(module)
        if "module_attributes" in refused:
            return self._are_authorized(names or {name_of(module)})
        spec = _names_of(module).get("__spec__")
        if spec is None:
            return True  # the program itself, or what it has made
        return self.allows(names or {str(getattr(spec, "name", "") or name_of(module))})

    def is_entry_allowed(self, key: object, value: object) -> bool:
        """Decides on what sys.modules has under this key. It need not be a module: libraries put other objects there.

        Such an object is decided on by the names under which it is loaded, and not by the key that it was asked for
        with: a key of the program's own class can say that it equals any other.
        """
        if value is None:
            return True  # which only says that there is no such module
        if is_module(value):
            return self.is_allowed(value)
        refused = self._referee.rules.refused
        names = self._names(value) or {str(key) if type(key) is str else "?"}
        if "module_attributes" in refused:
            return self._are_authorized(names)
        return class_module(type(value)) == "__main__" or self.allows(names)

    def _are_authorized(self, names: set[str]) -> bool:
        rules = self._referee.rules
        return any(map(rules.authorizes, names)) and not any(map(rules.denies, names))

    def _names(self, module: object) -> set[str]:
        """Under which names it is loaded: some modules are known by several."""
        if id(module) not in self._index or len(sys.modules) != self._indexed:
            loaded = list(sys.modules.items())
            self._index, self._indexed = {}, len(loaded)
            for name, each in loaded:
                self._index.setdefault(id(each), set()).add(name)
        return {name for name in self._index.get(id(module), ()) if sys.modules.get(name) is module}

    def allows(self, names: set[str]) -> bool:
        """True when a module with these names, of which one is enough, is part of what is authorized."""
        if "foreign_modules" not in self._referee.rules.refused:
            return True
        rules = self._referee.rules
        known = names | {public_name(name) for name in names}
        tops = {name.partition(".")[0] for name in known}
        if "__main__" in tops:
            return True
        return any(map(rules.authorizes, tops)) and not any(map(rules.denies, known))

    def refuse(self, module: str, way: str = "", what: str = "the module") -> NoReturn:
        """`what` of the module it is that the program has come to."""
        refused = self._referee.rules.refused
        more = f" Authorized imports are: {listed(self._referee.rules.authorized)}"
        if "foreign_modules" in refused and "module_attributes" not in refused:
            why = f"it leads to {what} {module}, which is not authorized ({{rule}})"
            self._referee.refuse(PolicyDenied("foreign_modules", way or f"Module {module}", more, why))
        self._referee.refuse(PolicyDenied("module_attributes", f"Module {module}", more))


class Unauthorized(ModuleType):
    """Stands among others for a module that is not authorized, until the program uses it."""

    def __init__(self, name: str, check: ModuleCheck, way: str) -> None:
        super().__init__(name)

        def refuse() -> NoReturn:
            check.refuse(name, way)

        object.__setattr__(self, "refuse", refuse)

    def __getattribute__(self, name: str) -> object:
        if name[:2] == "__" and name != "__dict__":  # which is how Python itself asks what something is
            return super().__getattribute__(name)
        ModuleType.__getattribute__(self, "refuse")()
        return None


def is_module(value: object) -> TypeGuard[ModuleType]:
    """By its type: an object can say of itself that it is a module, as those of cffi do, and have nothing of one."""
    return issubclass(type(value), ModuleType)


def name_of(module: ModuleType) -> str:
    return str(_names_of(module).get("__name__"))


def class_module(cls: type) -> str:
    """The module that a class says it is from, whatever its metaclass would answer."""
    return str(type.__dict__["__module__"].__get__(cls, type))


def _names_of(module: ModuleType) -> dict[str, Any]:
    """Past what the module's own class makes of `__dict__`: some load all their parts then, or fail."""
    names: Any = _DICT.__get__(module)
    return names if type(names) is dict else {}
