"""The builtins of agent code under the rules of the language: checked, or refused when they are used.

A builtin that is refused is still there, since a name may be read without harm, as in an annotation. It refuses to be
called, to be a base class, or to be asked whether something is its instance.
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
    from .referee import Referee

_HOOKED = frozenset(("dunder_access", "namespaces", "module_attributes", "dangerous_functions"))
_IMPORTS = frozenset(("__import__", CALLED_IMPORT))


class Builtins:
    """Owns them: what they are under the rules of now, and what is among them besides, as tools are."""

    def __init__(self, names: dict[str, Any], referee: Referee, hooks: Hooks) -> None:
        """`names` is what code runs with; it changes with the rules."""
        self._names = names
        self._referee = referee
        self._hooks = hooks
        self._ordinary = dict(names)
        self._added: dict[str, Any] = {}
        self._placed = set(names)
        hooks.open(names)

    def add(self, added: dict[str, Any]) -> None:
        """These are there besides, and those that were added before no more."""
        self._added = dict(added)
        self.on_rules()

    def on_rules(self) -> None:
        """Makes them what the rules of now say. What the program itself put there stays."""
        restricted = self._restricted()
        wanted = {**self._ordinary, **restricted, **self._added}
        for name in self._placed - set(wanted):
            self._names.pop(name, None)
        self._names.update(wanted)
        self._placed = set(wanted)
        self._hooks.on_rules(self._given(restricted))

    def _restricted(self) -> dict[str, Any]:
        refused = self._referee.rules.refused
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
                restricted[name] = _Refused(self._referee, rule, name)
        return restricted

    def _given(self, restricted: dict[str, Any]) -> list[tuple[Any, Any]]:
        """(what a library may hold, what agent code gets in its place)."""
        if not self._referee.rules.refused:
            return []
        changed = {**self._ordinary, **restricted}
        given = [
            (real, changed[name])
            for name, real in vars(builtins).items()
            if callable(real) and name not in _IMPORTS and changed[name] is not real
        ]
        return [(builtins, self._ordinary[AGENT_BUILTINS]), *given]


def _rule_of(name: str, value: Any) -> str:
    """The rule that refuses a builtin when it is in force."""
    if name in RUNNERS:
        return "dynamic_code"
    if name in NAMESPACES:
        return "namespaces"
    if name == "open":
        return "open"
    if name in LISTED_BUILTINS or name.startswith("_") or name in _IMPORTS or not callable(value):
        return ""
    return "" if isinstance(value, type) and issubclass(value, BaseException) else "unlisted_builtins"


class _Refused:
    """A builtin that may not be used."""

    def __init__(self, referee: Referee, rule: str, name: str) -> None:
        self._referee = referee
        self._rule = rule
        self.__name__ = self.__qualname__ = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._referee.refuse(PolicyDenied(self._rule, f"Builtin {self.__name__}"))

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # which is how Python itself asks what something can do
        self._refuse()

    def __or__(self, other: Any) -> Any:
        return self  # part of an annotation

    __ror__ = __getitem__ = __or__

    def __repr__(self) -> str:
        return f"<builtin {self.__name__}, refused by language.{self._rule}>"
