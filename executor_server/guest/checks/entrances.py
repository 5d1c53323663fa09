"""Replaces attributes that lead to modules (namespaces, classes, functions) by forms that agent code may have.

The program's own objects, and those of authorized modules, work as always. A library's namespace is shown through
`Namespace`, which refuses an unauthorized module when it is taken out. In a list of values, a placeholder stands for
such a module and is refused when it is used. So a program that only looks around keeps running.
"""

from __future__ import annotations

import builtins
import sys
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)

from .accesses import ENTRANCES, GIVERS
from .imports import AGENT_BUILTINS
from .module_check import ModuleCheck, Unauthorized
from .modules import class_module, is_module, name_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, NoReturn

_FUNCTIONS = frozenset(
    (BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, MethodWrapperType, WrapperDescriptorType)
)
_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_MAX_DEPTH = 4
_MAX_CLASSES = 8192
_MISSING: Any = object()


class Entrances:
    """Decides in which form agent code gets a value."""

    def __init__(self, check: ModuleCheck, names: dict[str, Any]) -> None:
        """`names` are the builtins of agent code."""
        self._check = check
        self._names = names
        self._classes: dict[type, type] = {}

    def shown(self, value: Any, path: str) -> Any:
        """Returns the form of the value of an attribute of ENTRANCES; `path` is how the program reached it."""
        kind = type(value)
        if kind is dict:
            return self._namespace(value, path)
        if kind in _FUNCTIONS:
            return self._function(value, path)
        if kind in _DESCRIPTORS:
            return self._descriptor(value, path)
        if kind is MappingProxyType or kind.__name__ == "FrameLocalsProxy":
            return self._mapping(value, path)
        if issubclass(kind, ModuleType):
            self._check.check(value, path)
            return self._names_module(value)
        return value

    def item(self, value: Any, path: str) -> Any:
        """Returns the form of one value taken out of a namespace."""
        kind = type(value)
        if issubclass(kind, ModuleType):
            self._check.check(value, path)
            return self._names_module(value)
        if kind is dict or kind in _DESCRIPTORS:
            return self.shown(value, path)
        if kind in _FUNCTIONS:
            name = getattr(value, "__name__", "")
            if value is getattr(builtins, name if type(name) is str else "", _MISSING):
                return self._names.get(name, value)
            return self._function(value, path) if name in ENTRANCES else value
        return value

    def held(self, value: Any, path: str) -> Any:
        """Returns the form of one value among many: a placeholder for an unauthorized module."""
        if is_module(value) and type(value) is not Unauthorized:
            if not self._check.is_allowed(value):
                return Unauthorized(name_of(value), self._check, path)
            return self._names_module(value)
        return value

    def loaded(self, key: Any, value: Any, path: str) -> Any:
        """Returns the form of one value taken out of sys.modules. It need not be a module."""
        if not is_module(value) and not self._check.is_entry_allowed(key, value):
            self._check.refuse(str(key), path)
        return self.item(value, path)

    def held_loaded(self, key: Any, value: Any, path: str) -> Any:
        """Returns the form of one value among many of sys.modules."""
        if not is_module(value) and not self._check.is_entry_allowed(key, value):
            return Unauthorized(str(key), self._check, path)
        return self.held(value, path)

    def _names_module(self, module: ModuleType) -> Any:
        return self._names.get(AGENT_BUILTINS, module) if module is builtins else module

    # -- namespaces

    def _namespace(self, value: dict[Any, Any], path: str) -> Any:
        if value is vars(builtins) or value is self._names:
            return self._names
        if value is sys.modules:
            return Modules(value, self, path)
        spec = value.get("__spec__")
        if spec is not None and not self._check.owns_names(value):
            name = str(getattr(spec, "name", value.get("__name__")))
            if not self._check.allows({name}):
                self._check.refuse(name, path, "the names of the module")
            return Namespace(value, self, path)
        if value.get("__builtins__") is self._names:
            return value  # the program's own
        return self._mapping(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        """Returns the names of an object, a class or a running function: a `Namespace` when some must be checked."""
        for each in list(value.values()):
            kind = type(each)
            if issubclass(kind, ModuleType) and not self._check.is_allowed(each):
                return Namespace(value, self, path)
            if kind in _DESCRIPTORS and each.__objclass__ is not type and each.__name__ not in ("__dict__",):
                if each.__name__ in ENTRANCES:
                    return Namespace(value, self, path)
            elif each is vars(builtins) or (kind in _FUNCTIONS and getattr(each, "__name__", "") in _TAKERS):
                return Namespace(value, self, path)
        return value

    # -- functions

    def _function(self, value: Any, path: str) -> Any:
        if self._is_own(value):
            return value
        name = value.__name__
        if name == "__getattribute__":
            return self._getattribute(value, path)
        if name == "__subclasses__":
            return self._subclasses(value, path)
        if name in GIVERS:
            return self._giver(value, path)
        return value

    def _is_own(self, value: Any) -> bool:
        function = getattr(value, "__func__", value)
        return type(function) is FunctionType and function.__globals__.get("__builtins__") is self._names

    def _descriptor(self, value: Any, path: str) -> Any:
        """Refuses descriptors such as `FunctionType.__globals__`, which reads the namespace of any function."""
        if value.__name__ in ENTRANCES and value.__objclass__.__module__ in ("builtins", "types"):
            self._check.refuse("builtins", path, "the internals of any object, and the names of the module")
        return value

    def _getattribute(self, real: Callable[..., Any], path: str) -> Callable[..., Any]:
        def __getattribute__(*args: Any) -> Any:
            value = real(*args)
            name = args[-1]
            if isinstance(name, str):
                name = str.__getitem__(name, slice(None))
            called = f"{path}({name!r})"
            return self.shown(value, called) if name in ENTRANCES else self.item(value, called)

        return __getattribute__

    def _giver(self, real: Callable[..., Any], path: str) -> Callable[..., Any]:
        def given(*args: Any, **kwargs: Any) -> Any:
            owner = getattr(real, "__self__", None)
            name = getattr(owner, "name", None)
            if real.__name__ == "exec_module" and type(name) is str and not self._check.may_fill(owner, name, args):
                self._check.refuse(name, f"{path}()")
            return self._sifted(real(*args, **kwargs), f"{path}()", 0)

        given.__name__, given.__doc__ = real.__name__, real.__doc__
        return given

    def _sifted(self, value: Any, path: str, depth: int) -> Any:
        """Replaces modules and namespaces of modules, alone and in lists and tuples."""
        kind = type(value)
        if depth == 0 and not (kind is list or issubclass(kind, tuple)):
            return self.shown(value, path)
        if kind is dict and "__spec__" in value and value.get("__builtins__") is not self._names:
            return {name: self.held(each, f"{path}[{name!r}]") for name, each in list(value.items())}
        if depth >= _MAX_DEPTH or not (kind is tuple or (depth == 0 and (kind is list or issubclass(kind, tuple)))):
            return self.held(value, path)
        sifted = [self._sifted(each, path, depth + 1) for each in value]
        if all(new is old for new, old in zip(sifted, value)):
            return value
        return sifted if kind is list else tuple.__new__(kind, sifted)

    # -- classes

    def _subclasses(self, real: Callable[..., Any], path: str) -> Callable[..., Any]:
        def __subclasses__(*args: Any) -> list[Any]:
            return [self._class(each, path) for each in real(*args) if type(each) is not _Unreachable]

        return __subclasses__

    def _class(self, cls: type, path: str) -> type:
        module = class_module(cls)
        if module in ("builtins", "__main__") or module not in sys.modules or self._check.allows({module}):
            return cls
        if cls not in self._classes:
            if len(self._classes) >= _MAX_CLASSES:
                self._classes.clear()

            def refuse() -> NoReturn:
                self._check.refuse(module, f"{path}()", f"{cls.__name__} of the module")

            self._classes[cls] = _Unreachable(
                cls.__name__, (), {"__module__": module, "__qualname__": cls.__qualname__, "__refuse": refuse}
            )
        return self._classes[cls]


_TAKERS = frozenset(("__getattribute__", "__subclasses__"))
_SHOWN_OF_CLASSES = frozenset(("__class__", "__doc__", "__hash__", "__eq__", "__module__", "__name__", "__qualname__"))


class _Unreachable(type):
    """Stands in a list of classes for one of an unauthorized module; refused when it is used."""

    def __getattribute__(cls, name: str) -> Any:
        if name not in _SHOWN_OF_CLASSES:
            type.__getattribute__(cls, "__refuse")()
        return type.__getattribute__(cls, name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        type.__getattribute__(cls, "__refuse")()


class Namespace(dict):  # type: ignore[type-arg]  # a plain class at run time on 3.9
    """The names of a module, or sys.modules, as agent code sees and changes them.

    It stores a copy for loops and C functions. Lookups read the real namespace, and changes go to both. Only
    `__builtins__` stays in the copy: code that runs in this namespace must not make library code the program's.
    """

    __slots__ = ("_entrances", "_path", "_real")

    def __init__(self, real: Mapping[Any, Any], entrances: Entrances, path: str) -> None:
        self._real: Any = real
        self._entrances = entrances
        self._path = path
        super().__init__(self.items())

    def __getitem__(self, key: Any) -> Any:
        return self._taken(key, self._real[key], f"{self._path}[{key!r}]")

    def _taken(self, _key: Any, value: Any, path: str) -> Any:
        return self._entrances.item(value, path)

    def _held(self, _key: Any, value: Any, path: str) -> Any:
        return self._entrances.held(value, path)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self._real else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self._real:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self._real:
            value = self[key]
            del self[key]
            return value
        return self._real.pop(key, *default)

    def popitem(self) -> Any:
        key = next(reversed(self._real))
        return key, self.pop(key)

    def items(self) -> Any:
        real, path = list(self._real.items()), self._path
        return {name: self._held(name, each, f"{path}[{name!r}]") for name, each in real}.items()

    def values(self) -> Any:
        return dict(self.items()).values()

    def copy(self) -> Any:
        return dict(self.items())

    def __contains__(self, key: object) -> bool:
        return key in self._real

    def __setitem__(self, key: Any, value: Any) -> None:
        if key != "__builtins__":
            self._real[key] = value
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        del self._real[key]
        super().pop(key, None)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def clear(self) -> None:
        self._real.clear()
        super().clear()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(self._real)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (self.copy(),)


class Modules(Namespace):
    """sys.modules as agent code sees and changes it."""

    __slots__ = ()

    def _taken(self, key: Any, value: Any, path: str) -> Any:
        return self._entrances.loaded(key, value, path)

    def _held(self, key: Any, value: Any, path: str) -> Any:
        return self._entrances.held_loaded(key, value, path)
