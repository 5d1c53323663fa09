"""The hooks that rewritten code calls in place of its accesses (accesses.py), and the checked getattr, setattr, ….

A module is useful only through its attributes, so unauthorized modules are refused there, however the program reached
one. `load`, `verify` and `special` are called all the time: a value passes at once if its type is in `_plain`, the
types known not to be modules.
"""

from __future__ import annotations

import operator
import sys
from _string import formatter_field_name_split, formatter_parser  # type: ignore[import-not-found]
from itertools import count
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType, SimpleNamespace

from .accesses import ENTRANCES, EVERYTHING, leads_on
from .entrances import Entrances
from .language import PolicyDenied, name_rule, starts_processes
from .meter import Meter
from .module_check import ModuleCheck
from .modules import is_module, name_of
from .rules import RuleEnforcer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, Callable, Iterator

_MAX_PLAIN_TYPES = 4096
_MAX_FORMAT_DEPTH = 4
_SURELY_PLAIN = (
    *(bool, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple, type, type(None)),
    *(BuiltinFunctionType, FunctionType, MethodType),
)
_getattr, _setattr, _hasattr, _delattr = getattr, setattr, hasattr, delattr
_type, _issubclass, _isinstance, _vars = type, issubclass, isinstance, vars
_FORMATS = ("format", "format_map")
_VALUE_RULES = ("foreign_modules", "module_attributes", "dangerous_functions")
_MAY_BE_A_MODULE = "its value may be an unauthorized module, and the pattern uses it before it can be checked ({rule})"
_READ_IT = " Bind the object to a name, `case C() as x`, and read the attribute in the body."
_CO_OPTIMIZED = 0x1


class Hooks:
    """The hooks of one interpreter. `given` has what agent code gets in place of an object, by its identity."""

    def __init__(self, enforcer: RuleEnforcer, names: dict[str, Any]) -> None:
        """`names` are the builtins of agent code."""
        self._enforcer = enforcer
        self._plain: set[type] = set(_SURELY_PLAIN)
        self._check = ModuleCheck(enforcer)
        self._entrances = Entrances(self._check, names)
        self.given: dict[int, tuple[Any, Any]] = {}

    def on_rules(self, given: list[tuple[Any, Any]]) -> None:
        """Applies new rules; `given` has pairs of an object and its replacement for agent code."""
        self._check.on_rules()
        self.given = {id(real): (real, ours) for real, ours in (*given, *self._substitutes(bool(given)))}

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle ships functions with their constants (joblib does). In another process nothing is refused.
        return (elsewhere, ())

    def members(self, module: Any, names: Any) -> Any:
        """Returns the object that `from module import names` reads: the module, or its allowed part."""
        if not self.given:
            return module
        taken = SimpleNamespace()
        if "*" in names:
            names = taken.__all__ = _public_names(module)
        is_star = "__all__" in vars(taken)
        for name in names:
            value = _getattr(module, name, self)
            if value is self:
                return module  # the import statement raises for the missing name
            _setattr(taken, name, self._member(module, name, value, is_star=is_star))
        return taken

    def _member(self, module: Any, name: str, value: Any, *, is_star: bool) -> Any:
        path = f"from {name_of(module)} import {name}" if is_module(module) else f"import of {name}"
        if is_star:  # a module among all names is refused when it is used
            return self._entrances.held(self.given.get(id(value), (value, value))[1], path)
        if name in ENTRANCES:
            return self.enter(value, path)
        if is_module(value):
            return self._inspected(value, path)
        return self.load(module, name)

    # -- called by rewritten code

    def reach(self, value: Any, path: str) -> Any:
        """Checks an attribute that may be a module; `path` is the access as the source has it."""
        return value if _type(value) in self._plain else self._inspected(value, path)

    def enter(self, value: Any, path: str) -> Any:
        """Checks an attribute that leads to modules: one of ENTRANCES."""
        if "foreign_modules" not in self._enforcer.rules.refused:
            return value
        kind = _type(value)
        if id(value) in self.given and not _issubclass(kind, ModuleType):
            return self.given[id(value)][1]
        if kind is BuiltinFunctionType and value.__name__ in _FORMATS and _isinstance(value.__self__, str):
            return _Formatting(self, value, value.__self__)
        if kind is MethodDescriptorType and value.__name__ in _FORMATS and value.__objclass__ is str:
            return _Formatting(self, value)
        return self._entrances.shown(value, path)

    def load(self, obj: Any, name: str) -> Any:
        """Evaluates obj.name."""
        plain = self._plain
        if _type(obj) in plain:
            value = _getattr(obj, name)
            if _type(value) in plain:
                return value
            return self._inspected(value, f"….{name}")
        if _issubclass(_type(obj), ModuleType):
            self._check.check(obj)
            return self._inspected_member(_getattr(obj, name), f"{name_of(obj)}.{name}")
        self._learn(_type(obj))
        value = _getattr(obj, name)
        return value if _type(value) in plain else self._inspected(value, f"….{name}")

    def verify(self, value: Any) -> Any:
        """Checks an item or the result of a call."""
        return value if _type(value) in self._plain else self._inspected(value)

    def special(self, obj: Any, name: str) -> Any:
        """Evaluates obj.name for one of SPECIAL_ATTRIBUTES."""
        if _isinstance(obj, str) and name in ("format", "format_map"):
            return _Formatting(self, _getattr(obj, name), obj)
        if _isinstance(obj, type) and _issubclass(obj, str) and name in ("format", "format_map"):
            return _Formatting(self, _getattr(obj, name))
        value = self.load(obj, name)
        return self.enter(value, f"….{name}") if name in ENTRANCES else value

    def match(self, cls: Any, *passed_on: Any) -> bool:
        """Checks the attributes of a class before a pattern takes it apart. Never true.

        `passed_on` are the names and positions of attributes whose values the pattern passes on unchecked.
        """
        for name in _match_args(cls):
            self.check_name(name)
        for each in passed_on:
            name = _attribute(cls, each)
            if self._is_checked(name) and not _is_own(cls):
                what = f"Attribute {name} in a pattern of {_getattr(cls, '__name__', '…')}"
                self._enforcer.refuse(PolicyDenied(self._value_rule(name), what, _READ_IT, _MAY_BE_A_MODULE))
        return False

    def part(self, obj: Any, part: Any, cls: Any) -> Any:
        """Evaluates the attribute of an object that a pattern of this class has matched, by name or position."""
        name = self.check_name(_attribute(cls, part))
        if not name:
            return obj  # `int(x)` binds the number itself
        if self._enforcer.rules.refused & EVERYTHING:
            return self.special(obj, name)
        value = _getattr(obj, name)
        if _type(value) in self._plain and name not in ENTRANCES:
            return value
        path = f"{name_of(obj)}.{name}" if is_module(obj) else f"….{name}"
        return self.enter(value, path) if name in ENTRANCES else self.reach(value, path)

    def _is_checked(self, name: str) -> bool:
        refused = self._enforcer.rules.refused
        if refused & EVERYTHING:
            return bool(name)
        return "foreign_modules" in refused and leads_on(name)

    def _value_rule(self, name: str) -> str:
        rules = _VALUE_RULES if leads_on(name) else _VALUE_RULES[1:]
        return next(rule for rule in rules if rule in self._enforcer.rules.refused)

    # -- called by checked builtins

    def foreign_getattr(self) -> Callable[..., Any]:
        """Returns the getattr of agent code for rules that are not about names."""
        plain, reach, enter = self._plain, self.reach, self.enter

        def getattr(obj: Any, name: str, /, *default: Any) -> Any:
            """getattr(object, name[, default]) -> value"""
            if _type(name) is not str and _isinstance(name, str):
                name = str.__getitem__(name, slice(None))
            value = _getattr(obj, name, *default)
            if name in ENTRANCES:
                return enter(value, f"getattr(…, {name!r})")
            if _type(value) in plain:
                return value
            label = f"the module {name_of(obj)}" if is_module(obj) else "…"
            return reach(value, f"getattr({label}, {name!r})")

        return getattr

    def foreign_vars(self) -> Callable[..., Any]:
        """Returns the vars of agent code, which shows the names of modules too."""

        def vars(*args: Any) -> Any:
            """vars([object]) -> dictionary"""
            if not args:
                return locals_of(sys._getframe(1))
            return self.enter(_vars(*args), "vars(…)")

        return vars

    def check_name(self, name: Any) -> Any:
        """Returns the name of an attribute as plain text, or refuses it."""
        if not _isinstance(name, str):
            return name  # its user raises the TypeError
        if _type(name) is not str:
            name = str.__getitem__(name, slice(None))
        rule = name_rule(name, self._enforcer.rules)
        if rule:
            self._enforcer.refuse(PolicyDenied(rule, f"Attribute {name}"))
        return name

    def builtins(self) -> dict[str, Callable[..., Any]]:
        """Returns the checked getattr, hasattr, setattr and delattr."""
        hooks = self

        def getattr(obj: Any, name: str, /, *default: Any) -> Any:
            """getattr(object, name[, default]) -> value"""
            name = hooks.check_name(name)
            if len(default) > 1 or not _isinstance(name, str):
                return _getattr(obj, name, *default)
            try:
                return hooks.special(obj, name)
            except AttributeError:
                if not default:
                    raise
                return default[0]

        def hasattr(obj: Any, name: str, /) -> bool:
            """Return whether the object has an attribute with the given name."""
            return _hasattr(obj, hooks.check_name(name))

        def setattr(obj: Any, name: str, value: Any, /) -> None:
            """Sets the named attribute on the given object to the specified value."""
            _setattr(obj, hooks.check_name(name), value)

        def delattr(obj: Any, name: str, /) -> None:
            """Deletes the named attribute from the given object."""
            _delattr(obj, hooks.check_name(name))

        return {each.__name__: each for each in (getattr, hasattr, setattr, delattr)}

    def _substitutes(self, needed: bool) -> list[tuple[Any, Any]]:
        """Returns checked versions of library functions that take names of attributes as text."""
        if not needed:
            return []
        import string

        return [
            (operator.attrgetter, self._attrgetter),
            (operator.methodcaller, self._methodcaller),
            (string.Formatter, self._formatter()),
        ]

    def _attrgetter(self, *names: Any) -> Callable[[Any], Any]:
        """operator.attrgetter"""
        operator.attrgetter(*names)  # raises for invalid names
        paths = [[self.check_name(part) for part in name.split(".")] for name in names]

        def walked(obj: Any, path: list[str]) -> Any:
            for part in path:
                obj = self.special(obj, part)
            return obj

        if len(paths) == 1:
            return lambda obj: walked(obj, paths[0])
        return lambda obj: tuple(walked(obj, path) for path in paths)

    def _methodcaller(self, name: Any, /, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """operator.methodcaller"""
        operator.methodcaller(name)
        name = self.check_name(name)
        return lambda obj: self.verify(self.special(obj, name)(*args, **kwargs))

    def _formatter(self) -> type:
        import string

        hooks = self

        class Formatter(string.Formatter):
            def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
                first, rest = formatter_field_name_split(field_name)
                value = self.get_value(first, args, kwargs)
                for is_attribute, key in rest:
                    value = hooks.special(value, hooks.check_name(key)) if is_attribute else hooks.verify(value[key])
                return value, first

        return Formatter

    # -- formats

    def check_fields(self, text: str, value_of: Callable[[Any], Any], numbers: Iterator[int], depth: int = 0) -> None:
        """Checks the values that the fields of a format reach; `value_of` returns the argument of a name or number.

        Raises what `str.format` raises for an invalid format.
        """
        for _, field, spec, _ in formatter_parser(text):
            if field is not None:
                first, rest = formatter_field_name_split(field)
                value = value_of(next(numbers) if first == "" else first)
                for is_attribute, key in rest:
                    value = self.special(value, self.check_name(key)) if is_attribute else self.verify(value[key])
            if spec and depth < _MAX_FORMAT_DEPTH:
                self.check_fields(spec, value_of, numbers, depth + 1)

    # -- values

    def _inspected(self, value: Any, path: str = "") -> Any:
        kind = _type(value)
        if _issubclass(kind, ModuleType):
            self._check.check(value, path)
            return self.given.get(id(value), (value, value))[1]
        self._learn(kind)
        return value

    def _inspected_member(self, value: Any, path: str) -> Any:
        """Checks an attribute of a module."""
        kind = _type(value)
        if id(value) in self.given and not _issubclass(kind, ModuleType):
            return self.given[id(value)][1]
        if kind is BuiltinFunctionType or kind is FunctionType or kind is type:
            module, name = _getattr(value, "__module__", None), value.__name__
            if "dangerous_functions" in self._enforcer.rules.refused and starts_processes(str(module), name):
                self._enforcer.refuse(PolicyDenied("dangerous_functions", f"Function {module}.{name}"))
            return value
        return value if kind in self._plain else self._inspected(value, path)

    def _learn(self, kind: type) -> None:
        if len(self._plain) >= _MAX_PLAIN_TYPES:  # bounded: a program may make types without end
            self._plain.clear()
            self._plain.update(_SURELY_PLAIN)
        self._plain.add(kind)


def _match_args(cls: Any) -> tuple[Any, ...]:
    """Returns the names of the attributes that a pattern of this class reads by position."""
    names = _getattr(cls, "__match_args__", ())
    return names if _type(names) is tuple else ()


def _attribute(cls: Any, part: Any) -> str:
    """Returns the name of an attribute in a pattern; empty for the object itself, as in `int(x)`."""
    if _type(part) is str:
        return str(part)
    names = _match_args(cls)
    name = names[part] if part < len(names) else ""
    return name if _type(name) is str else ""  # CPython accepts no other names, and no other tuples


def _is_own(cls: Any) -> bool:
    """True for a class of the program whose instances are the program's objects, and not modules or others."""
    if not _isinstance(cls, type) or _issubclass(cls, ModuleType) or cls.__module__ != "__main__":
        return False
    # Only the plain test: one that asks the class (`__subclasshook__`, `register`) takes a module for an instance.
    check: Any = _type(cls).__instancecheck__
    return bool(check == type.__instancecheck__)


def locals_of(frame: FrameType) -> Any:
    """Returns what `locals()` gives in this frame."""
    if sys.version_info >= (3, 13) and frame.f_code.co_flags & _CO_OPTIMIZED:
        return dict(frame.f_locals)  # a snapshot, as exec takes one there; f_locals itself would write through
    return frame.f_locals


def _public_names(module: Any) -> list[str]:
    """Returns the names that `from module import *` binds."""
    names = _getattr(module, "__all__", None)
    return [name for name in vars(module) if name[:1] != "_"] if names is None else list(names)


class _Formatting:
    """A checked str.format or str.format_map, bound to a text or not."""

    def __init__(self, hooks: Hooks, method: Callable[..., str], text: str | None = None) -> None:
        self._hooks = hooks
        self._method = method
        self._text = text
        self.__name__ = method.__name__
        self.__doc__ = method.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        text: Any = self._text
        given = args
        if text is None and args:
            text, given = args[0], args[1:]
        if _isinstance(text, str):
            self._check(str.__getitem__(text, slice(None)), given, kwargs)
        return self._method(*args, **kwargs)

    def _check(self, text: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if "." not in text and "[" not in text:
            return
        values: Any = named
        if self.__name__ == "format_map":
            values, given = (given[0] if given else {}), ()

        def value_of(key: Any) -> Any:
            return given[key] if _isinstance(key, int) else values[key]

        try:
            self._hooks.check_fields(text, value_of, count())
        except Exception:  # noqa: BLE001 (the program's values, or an invalid format: the method itself raises it again)
            return

    def __repr__(self) -> str:
        return repr(self._method)


def elsewhere() -> Hooks:
    """Returns hooks that refuse nothing."""
    return Hooks(RuleEnforcer(Meter()), {})
