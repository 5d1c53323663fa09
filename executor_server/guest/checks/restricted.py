"""The builtins of agent code under the rules of the language: checked, or refused when they are used.

A refused builtin still exists, since a name may be read without harm, as in an annotation. Calling it, deriving from
it, and isinstance with it are refused.
"""

from __future__ import annotations

import builtins

from .dynamic import AGENT_BUILTINS
from .imports import CALLED_IMPORT
from .language import LISTED_BUILTINS, NAMESPACES, RUNNERS, PolicyDenied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .hooks import Hooks
    from .rule_enforcer import RuleEnforcer

_HOOKED = frozenset(("dunder_access", "namespaces", "module_attributes", "dangerous_functions"))
_IMPORTS = frozenset(("__import__", CALLED_IMPORT))


class Builtins:
    """Owns the builtins of agent code under the rules in force, and the additions, such as tools."""

    def __init__(self, names: dict[str, Any], enforcer: RuleEnforcer, hooks: Hooks) -> None:
        """`names` is the dict that code runs with; it changes with the rules."""
        self._names = names
        self._enforcer = enforcer
        self._hooks = hooks
        self._ordinary = dict(names)
        self._added: dict[str, Any] = {}
        self._placed = set(names)
        hooks.open(names)

    def add(self, added: dict[str, Any]) -> None:
        """Replaces the additions."""
        self._added = dict(added)
        self.on_rules()

    def on_rules(self) -> None:
        """Applies the rules in force. Entries of the program itself stay."""
        restricted = self._restricted()
        wanted = {**self._ordinary, **restricted, **self._added}
        for name in self._placed - set(wanted):
            self._names.pop(name, None)
        self._names.update(wanted)
        self._placed = set(wanted)
        self._hooks.on_rules(self._given(restricted))

    def _restricted(self) -> dict[str, Any]:
        refused = self._enforcer.rules.refused
        restricted: dict[str, Any] = {}
        if not refused:
            return restricted
        if refused & _HOOKED:
            restricted.update(self._hooks.builtins())
        elif "foreign_modules" in refused:
            restricted["getattr"] = self._hooks.foreign_getattr()
        if "foreign_modules" in refused:
            restricted["vars"] = self._hooks.foreign_vars()
        for name, value in self._ordinary.items():
            rule = _rule_of(name, value)
            if rule in refused:
                restricted[name] = _Refused(self._enforcer, rule, name)
        return restricted

    def _given(self, restricted: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Returns pairs of an object that a library may hold, and the one that agent code gets in its place."""
        if not self._enforcer.rules.refused:
            return []
        changed = {**self._ordinary, **restricted}
        given = [
            (real, changed[name])
            for name, real in vars(builtins).items()
            if callable(real) and name not in _IMPORTS and changed[name] is not real
        ]
        return [(builtins, self._ordinary[AGENT_BUILTINS]), *given]


def _rule_of(name: str, value: Any) -> str:
    """Returns the rule that refuses a builtin when it is in force; empty for a builtin that none refuses."""
    if name in RUNNERS:
        return "dynamic_code"
    if name in NAMESPACES:
        return "namespaces"
    if name == "open":
        return "open"
    if (
        name in LISTED_BUILTINS
        or name == "get_ipython"
        or name.startswith("_")
        or name in _IMPORTS
        or not callable(value)
    ):
        return ""
    return "" if isinstance(value, type) and issubclass(value, BaseException) else "unlisted_builtins"


class _Refused:
    """A builtin that may not be used."""

    def __init__(self, enforcer: RuleEnforcer, rule: str, name: str) -> None:
        self._enforcer = enforcer
        self._rule = rule
        self.__name__ = self.__qualname__ = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._enforcer.refuse(PolicyDenied(self._rule, f"Builtin {self.__name__}"))

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself asks for these
        self._refuse()

    def __or__(self, other: Any) -> Any:
        return self  # part of an annotation

    __ror__ = __getitem__ = __or__

    def __repr__(self) -> str:
        return f"<builtin {self.__name__}, refused by language.{self._rule}>"
