"""Decides which modules agent code may use, however it got hold of one.

Two rules decide. `module_attributes` works like an import: `numpy` alone does not authorize `numpy.random`.
`foreign_modules` allows a whole package when a part of it is authorized, as Python itself does. A module that the
program made itself is its own.
"""

from __future__ import annotations

import sys
from types import ModuleType

from .imports import authorized
from .language import PolicyDenied
from .modules import class_module, is_module, name_of, names_of, public_name, source_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .rules import RuleEnforcer


class ModuleCheck:
    """Decides on modules and refuses them. Only allowed modules are cached."""

    def __init__(self, enforcer: RuleEnforcer) -> None:
        self._enforcer = enforcer
        self._allowed: dict[int, ModuleType] = {}
        self._index: dict[int, set[str]] = {}
        self._indexed = 0

    def on_rules(self) -> None:
        """Applies new rules."""
        self._allowed = {}

    def check(self, module: ModuleType, path: str = "") -> None:
        """Refuses an unauthorized module; `path` is how the program reached it."""
        if id(module) not in self._allowed:
            if type(module) is Unauthorized:
                ModuleType.__getattribute__(module, "refuse")()
            if not self.is_allowed(module):
                self.refuse(name_of(module), path)
            self._allowed[id(module)] = module

    def is_allowed(self, module: ModuleType) -> bool:
        if self._enforcer.own.owns(module):
            return not self._enforcer.rules.denies(name_of(module))
        refused = self._enforcer.rules.refused
        if "module_attributes" not in refused and "foreign_modules" not in refused:
            return True
        names = self._names(module)
        if "module_attributes" in refused:
            return self._are_authorized(names or {name_of(module)})
        spec = names_of(module).get("__spec__")
        if spec is None:
            return True  # the program itself, or what it has made
        return self.allows(names or {str(getattr(spec, "name", "") or name_of(module))})

    def owns_names(self, names: dict[str, Any]) -> bool:
        """True for the names of a module of the program's own."""
        return self._enforcer.own.owns_names(names)

    def is_entry_allowed(self, key: object, value: object) -> bool:
        """Decides on an entry of sys.modules. It need not be a module: libraries put other objects there.

        The names under which it is loaded decide, not the key of the lookup: a key of the program's own class can
        claim to equal any other.
        """
        if value is None:
            return True  # None marks a module that does not exist
        if is_module(value):
            return self.is_allowed(value)
        refused = self._enforcer.rules.refused
        names = self._names(value) or {str(key) if type(key) is str else "?"}
        if "module_attributes" in refused:
            return self._are_authorized(names)
        return class_module(type(value)) == "__main__" or self.allows(names)

    def _are_authorized(self, names: set[str]) -> bool:
        rules = self._enforcer.rules
        return any(map(rules.authorizes, names)) and not any(map(rules.denies, names))

    def _names(self, module: object) -> set[str]:
        """Returns the names under which a module is loaded: some have several."""
        if id(module) not in self._index or len(sys.modules) != self._indexed:
            loaded = list(sys.modules.items())
            self._index, self._indexed = {}, len(loaded)
            for name, each in loaded:
                self._index.setdefault(id(each), set()).add(name)
        return {name for name in self._index.get(id(module), ()) if sys.modules.get(name) is module}

    def allows(self, names: set[str]) -> bool:
        """True when one of these names of a module belongs to an authorized package."""
        if "foreign_modules" not in self._enforcer.rules.refused:
            return True
        rules = self._enforcer.rules
        known = names | {public_name(name) for name in names}
        tops = {name.partition(".")[0] for name in known}
        if "__main__" in tops:
            return True
        may = any(map(rules.authorizes, tops)) or any(map(self._enforcer.own.has, tops))
        return may and not any(map(rules.denies, known))

    def may_fill(self, loader: Any, name: str, modules: tuple[Any, ...]) -> bool:
        """True when a loader may run the code of the module `name` in these module objects."""
        path, own = source_file(loader), self._enforcer.own
        if path is not None and own.owns_path(path):
            return all(is_module(each) and own.owns(each) for each in modules)
        return self.allows({name})

    def refuse(self, module: str, path: str = "", what: str = "the module") -> NoReturn:
        """Refuses `what` of a module that the program reached by `path`."""
        refused = self._enforcer.rules.refused
        more = f" {authorized(self._enforcer.rules)}"
        if "foreign_modules" in refused and "module_attributes" not in refused:
            why = f"it leads to {what} {module}, which is not authorized ({{rule}})"
            self._enforcer.refuse(PolicyDenied("foreign_modules", path or f"Module {module}", more, why))
        self._enforcer.refuse(PolicyDenied("module_attributes", f"Module {module}", more))


class Unauthorized(ModuleType):
    """Stands for an unauthorized module among others; refused when the program uses it."""

    def __init__(self, name: str, check: ModuleCheck, path: str) -> None:
        super().__init__(name)

        def refuse() -> NoReturn:
            check.refuse(name, path)

        object.__setattr__(self, "refuse", refuse)

    def __getattribute__(self, name: str) -> object:
        if name[:2] == "__" and name != "__dict__":  # Python itself reads these to find out what an object is
            return super().__getattribute__(name)
        ModuleType.__getattribute__(self, "refuse")()
        return None
