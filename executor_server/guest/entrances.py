"""Shows agent code what it may have of attributes that lead to modules: namespaces, classes, functions.

Each goes on working for what is the program's own, or of what is authorized. A namespace of a library is shown through
`Namespace`, in which a module that is not authorized is refused when it is taken; among many, as in a list of values,
something stands for it that is refused when it is used. So a program that only looks around goes on.
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

from .dynamic import AGENT_BUILTINS
from .foreign_accesses import ENTRANCES, GIVERS
from .module_check import ModuleCheck, Unauthorized, class_module, is_module, name_of

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
    """Shows agent code what it has come to."""

    def __init__(self, check: ModuleCheck, names: dict[str, Any]) -> None:
        """`names` are the builtins of agent code."""
        self._check = check
        self._names = names
        self._classes: dict[type, type] = {}

    def shown(self, value: Any, way: str) -> Any:
        """Return what the program gets in the place of the value that one of ENTRANCES has."""
        kind = type(value)
        if kind is dict:
            return self._namespace(value, way)
        if kind in _FUNCTIONS:
            return self._function(value, way)
        if kind in _DESCRIPTORS:
            return self._descriptor(value, way)
        if kind is MappingProxyType or kind.__name__ == "FrameLocalsProxy":
            return self._mapping(value, way)
        if issubclass(kind, ModuleType):
            self._check.check(value, way)
            return self._names_module(value)
        return value

    def item(self, value: Any, way: str) -> Any:
        """One value out of a namespace."""
        kind = type(value)
        if issubclass(kind, ModuleType):
            self._check.check(value, way)
            return self._names_module(value)
        if kind is dict or kind in _DESCRIPTORS:
            return self.shown(value, way)
        if kind in _FUNCTIONS:
            name = getattr(value, "__name__", "")
            if value is getattr(builtins, name if type(name) is str else "", _MISSING):
                return self._names.get(name, value)
            return self._function(value, way) if name in ENTRANCES else value
        return value

    def held(self, value: Any, way: str) -> Any:
        """The same for one among many, of which the program may want others."""
        if is_module(value) and type(value) is not Unauthorized:
            if not self._check.is_allowed(value):
                return Unauthorized(name_of(value), self._check, way)
            return self._names_module(value)
        return value

    def loaded(self, key: Any, value: Any, way: str) -> Any:
        """One value out of sys.modules, which need not be a module."""
        if not is_module(value) and not self._check.is_entry_allowed(key, value):
            self._check.refuse(str(key), way)
        return self.item(value, way)

    def held_loaded(self, key: Any, value: Any, way: str) -> Any:
        """The same for one among many."""
        if not is_module(value) and not self._check.is_entry_allowed(key, value):
            return Unauthorized(str(key), self._check, way)
        return self.held(value, way)

    def _names_module(self, module: ModuleType) -> Any:
        return self._names.get(AGENT_BUILTINS, module) if module is builtins else module

    # -- namespaces

    def _namespace(self, value: dict[Any, Any], way: str) -> Any:
        if value is vars(builtins) or value is self._names:
            return self._names
        if value is sys.modules:
            return Modules(value, self, way)
        spec = value.get("__spec__")
        if spec is not None:
            name = str(getattr(spec, "name", value.get("__name__")))
            if not self._check.allows({name}):
                self._check.refuse(name, way, "the names of the module")
            return Namespace(value, self, way)
        if value.get("__builtins__") is self._names:
            return value  # the program's own
        return self._mapping(value, way)

    def _mapping(self, value: Mapping[Any, Any], way: str) -> Any:
        """Return the names of an object, a class, or a function that runs: in a `Namespace` if some must be checked."""
        for each in list(value.values()):
            kind = type(each)
            if issubclass(kind, ModuleType) and not self._check.is_allowed(each):
                return Namespace(value, self, way)
            if kind in _DESCRIPTORS and each.__objclass__ is not type and each.__name__ not in ("__dict__",):
                if each.__name__ in ENTRANCES:
                    return Namespace(value, self, way)
            elif each is vars(builtins) or (kind in _FUNCTIONS and getattr(each, "__name__", "") in _TAKERS):
                return Namespace(value, self, way)
        return value

    # -- functions

    def _function(self, value: Any, way: str) -> Any:
        if self._is_own(value):
            return value
        name = value.__name__
        if name == "__getattribute__":
            return self._getattribute(value, way)
        if name == "__subclasses__":
            return self._subclasses(value, way)
        if name in GIVERS:
            return self._giver(value, way)
        return value

    def _is_own(self, value: Any) -> bool:
        function = getattr(value, "__func__", value)
        return type(function) is FunctionType and function.__globals__.get("__builtins__") is self._names

    def _descriptor(self, value: Any, way: str) -> Any:
        """`FunctionType.__globals__` reads the namespace of any function; those of the program's own classes do not."""
        if value.__name__ in ENTRANCES and value.__objclass__.__module__ in ("builtins", "types"):
            self._check.refuse("builtins", way, "the insides of any object, and the names of the module")
        return value

    def _getattribute(self, real: Callable[..., Any], way: str) -> Callable[..., Any]:
        def __getattribute__(*args: Any) -> Any:
            value = real(*args)
            name = args[-1]
            if isinstance(name, str):
                name = str.__getitem__(name, slice(None))
            path = f"{way}({name!r})"
            return self.shown(value, path) if name in ENTRANCES else self.item(value, path)

        return __getattribute__

    def _giver(self, real: Callable[..., Any], way: str) -> Callable[..., Any]:
        def given(*args: Any, **kwargs: Any) -> Any:
            owner = getattr(real, "__self__", None)
            name = getattr(owner, "name", None)
            if real.__name__ == "exec_module" and type(name) is str and not self._check.allows({name}):
                self._check.refuse(name, f"{way}()")
            return self._sifted(real(*args, **kwargs), f"{way}()", 0)

        given.__name__, given.__doc__ = real.__name__, real.__doc__
        return given

    def _sifted(self, value: Any, way: str, depth: int) -> Any:
        """Modules, and namespaces of modules, alone and among others."""
        kind = type(value)
        if depth == 0 and not (kind is list or issubclass(kind, tuple)):
            return self.shown(value, way)
        if kind is dict and "__spec__" in value and value.get("__builtins__") is not self._names:
            return {name: self.held(each, f"{way}[{name!r}]") for name, each in list(value.items())}
        if depth >= _MAX_DEPTH or not (kind is tuple or (depth == 0 and (kind is list or issubclass(kind, tuple)))):
            return self.held(value, way)
        sifted = [self._sifted(each, way, depth + 1) for each in value]
        if all(new is old for new, old in zip(sifted, value)):
            return value
        return sifted if kind is list else tuple.__new__(kind, sifted)

    # -- classes

    def _subclasses(self, real: Callable[..., Any], way: str) -> Callable[..., Any]:
        def __subclasses__(*args: Any) -> list[Any]:
            return [self._class(each, way) for each in real(*args) if type(each) is not _Unreachable]

        return __subclasses__

    def _class(self, cls: type, way: str) -> type:
        module = class_module(cls)
        if module in ("builtins", "__main__") or module not in sys.modules or self._check.allows({module}):
            return cls
        if cls not in self._classes:
            if len(self._classes) >= _MAX_CLASSES:
                self._classes.clear()

            def refuse() -> NoReturn:
                self._check.refuse(module, f"{way}()", f"{cls.__name__} of the module")

            self._classes[cls] = _Unreachable(
                cls.__name__, (), {"__module__": module, "__qualname__": cls.__qualname__, "__refuse": refuse}
            )
        return self._classes[cls]


_TAKERS = frozenset(("__getattribute__", "__subclasses__"))
_SHOWN_OF_CLASSES = frozenset(("__class__", "__doc__", "__hash__", "__eq__", "__module__", "__name__", "__qualname__"))


class _Unreachable(type):
    """Stands in a list of classes for one of a module that is not authorized, until the program uses it."""

    def __getattribute__(cls, name: str) -> Any:
        if name not in _SHOWN_OF_CLASSES:
            type.__getattribute__(cls, "__refuse")()
        return type.__getattribute__(cls, name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        type.__getattribute__(cls, "__refuse")()


class Namespace(dict):  # type: ignore[type-arg]  # a plain class at run time on 3.9
    """The names of a module, or the modules themselves, as agent code sees and changes them.

    What it stores is a copy, which loops and functions of C see. Names that are asked for are read from the real one,
    and changes go to both, but for `__builtins__`: what is run in here must not make a library's code the program's.
    """

    __slots__ = ("_entrances", "_real", "_way")

    def __init__(self, real: Mapping[Any, Any], entrances: Entrances, way: str) -> None:
        self._real: Any = real
        self._entrances = entrances
        self._way = way
        super().__init__(self.items())

    def __getitem__(self, key: Any) -> Any:
        return self._taken(key, self._real[key], f"{self._way}[{key!r}]")

    def _taken(self, _key: Any, value: Any, way: str) -> Any:
        return self._entrances.item(value, way)

    def _held(self, _key: Any, value: Any, way: str) -> Any:
        return self._entrances.held(value, way)

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
        real, way = list(self._real.items()), self._way
        return {name: self._held(name, each, f"{way}[{name!r}]") for name, each in real}.items()

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
    """sys.modules."""

    __slots__ = ()

    def _taken(self, key: Any, value: Any, way: str) -> Any:
        return self._entrances.loaded(key, value, way)

    def _held(self, key: Any, value: Any, way: str) -> Any:
        return self._entrances.held_loaded(key, value, way)
