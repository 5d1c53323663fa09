"""The body of a class statement, compared with the class as it is now.

A value that the body computed is not computed again: data replaces its expression. All other attributes that the
statement alone would not give the class are set on it afterwards.
"""

from __future__ import annotations

import abc
import ast
import dataclasses
import enum
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from executor_api.values import EncodeError
from executor_client._shipping.functions import annotation_edits, default_edits, is_literal_of, is_transparent, quoted
from executor_client._shipping.libraries import import_path
from executor_client._shipping.plain import is_plain
from executor_client._shipping.source import Edit, Found
from executor_client._shipping.writer import Space

if TYPE_CHECKING:
    from executor_client._shipping.definitions import Definitions

_INTERNAL = frozenset({"_abc_impl", "_is_protocol", "_is_runtime_protocol"})
_NOTHING = object()


class Body:
    """The attributes of a class, compared with those that its statement gives it."""

    def __init__(
        self, class_: type, found: Found, space: Space, definitions: Definitions, *, decorated_by_library: bool
    ) -> None:
        self._class = class_
        self._found = found
        self._node: ast.ClassDef = found.node  # type: ignore[assignment]
        self._writer = definitions.writer
        self._space = space
        self._definitions = definitions
        self._restored: list[tuple[str, types.FunctionType]] = []
        self._placed: set[str] = set()
        self._is_enum = issubclass(class_, enum.Enum)
        self._is_made_by_library = decorated_by_library or type(class_) not in (type, abc.ABCMeta)
        self.annotation_names: set[str] = set()
        """Names in annotations that define fields (ClassVar, InitVar): dataclasses looks them up in the module."""

    def edits(self) -> list[Edit]:
        edits: list[Edit] = []
        for statement in self._node.body:
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if is_transparent(statement.decorator_list):
                    edits += annotation_edits(statement)
                    edits += self._defaults(statement)
                case ast.AnnAssign() if self._found.file.quotes_annotations:
                    if not isinstance(statement.annotation, ast.Constant):
                        edits.append(quoted(statement.annotation))
                        self._note_annotation(statement.annotation)
                    edits += self._value(statement)
                case ast.Expr() if not isinstance(statement.value, ast.Constant):
                    edits.append(Edit(statement, "pass"))  # its effect is in the class already
                case ast.Assign() | ast.AnnAssign():
                    edits += self._value(statement)
        return edits

    def _note_annotation(self, annotation: ast.expr) -> None:
        for each in ast.walk(annotation):
            if isinstance(each, ast.Name):
                value = self._space.namespace.get(each.id)
                module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                if module in ("typing", "dataclasses"):
                    self.annotation_names.add(each.id)

    def _defaults(self, statement: Any) -> list[Edit]:
        there = vars(self._class).get(_mangled(self._class, statement.name))
        function = there.__func__ if isinstance(there, staticmethod | classmethod) else there
        if not isinstance(function, types.FunctionType) or not self._is_from(function):
            return []
        edits, changed = default_edits(statement, function)
        if changed:
            self._restored.append((statement.name, function))
        return edits if changed else []

    def _value(self, statement: Any) -> list[Edit]:
        """Replaces the expression of an assignment by the value that the class has now."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if len(targets) != 1 or not isinstance(targets[0], ast.Name) or statement.value is None:
            return []
        name = targets[0].id
        if _is_dunder(name) or sum(1 for each in _assigned(self._node) if each == name) != 1:
            return []
        value = self._current(name)
        if value is _NOTHING or is_literal_of(statement.value, value):
            return []
        if _is_data(value):
            given = self._writer.fresh()
            self._writer.assign(self._space, given, self._definitions.objects.ref(value, self._label(name)))
            self._placed.add(_mangled(self._class, name))
            return [Edit(statement.value, given)]
        if self._is_made_by_library or self._is_enum or _is_made_by_body(value):
            return []
        return [Edit(statement.value, "None")]  # until it is restored

    def _current(self, name: str) -> object:
        """Returns the value that the class has from a statement `name = ...` in its body, or `_NOTHING`."""
        class_: Any = self._class
        if self._is_enum:
            computed = not {"__new__", "__init__"}.isdisjoint(vars(class_)) and "_generate_next_value_" not in name
            member = class_.__members__.get(name)
            return _NOTHING if member is None or computed else member.value
        if issubclass(class_, tuple) and hasattr(class_, "_field_defaults"):
            return class_._field_defaults.get(name, _NOTHING)
        field = vars(class_).get("__dataclass_fields__", {}).get(name)
        if field is not None:
            return _NOTHING if field.default is dataclasses.MISSING else field.default
        return vars(class_).get(_mangled(class_, name), _NOTHING)

    # -----------------------------------------------------------------------------------------------------------------

    def restore(self, expression: str) -> None:
        """Sets the attributes of the class that its statement does not give it."""
        ref = self._definitions.objects.ref
        for name, function in self._restored:
            target = f"{expression}.{name}"
            if isinstance(vars(self._class).get(name), classmethod):
                target += ".__func__"
            listed = "".join(f"{ref(each, self._label(name))}, " for each in function.__defaults__ or ())
            self._writer.say(f"{target}.__defaults__ = ({listed})")
            if function.__kwdefaults__:
                pairs = [f"{key!r}: {ref(each, self._label(name))}" for key, each in function.__kwdefaults__.items()]
                self._writer.say(f"{target}.__kwdefaults__ = {{{', '.join(pairs)}}}")
        if self._is_enum:
            return
        in_body = {_mangled(self._class, name) for name in _assigned(self._node)}
        for name, value in list(vars(self._class).items()):
            if name in _INTERNAL or name in self._placed or self._is_given(name, value, name in in_body):
                continue
            if self._is_made_by_library and name not in in_body and not isinstance(value, types.FunctionType):
                continue
            self._set(expression, name, value)

    def _set(self, target: str, name: str, value: object) -> None:
        def say() -> None:
            self._writer.set_attribute(target, name, self._changed(name, value))

        self._definitions.objects.when_made(value, say)

    def _changed(self, name: str, value: object) -> str:
        ref = self._definitions.objects.ref
        if isinstance(value, staticmethod | classmethod):
            kind = f"{self._writer.library('builtins')}.{type(value).__name__}"
            return f"{kind}({ref(value.__func__, self._label(name))})"
        return ref(value, self._label(name))

    def _is_given(self, name: str, value: object, in_body: bool) -> bool:
        """Returns True if the class statement gives the class this attribute when it runs again."""
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(inner, types.FunctionType):
            return self._is_given_function(name, inner, in_body)
        if _is_dunder(name):
            return True
        if isinstance(inner, type):
            return in_body
        if hasattr(type(inner), "__get__"):
            return in_body or isinstance(inner, types.MemberDescriptorType | types.GetSetDescriptorType)
        statement = self._statement(name)
        return statement is not None and is_literal_of(statement, value)

    def _is_given_function(self, name: str, function: types.FunctionType, in_body: bool) -> bool:
        if self._is_from(function) or self._definitions.dialect.is_machinery(function):
            return True
        is_users = self._definitions.is_users(str(function.__globals__.get("__name__")))
        if is_users:
            generated = _is_dunder(name) and function.__code__.co_filename.startswith("<")
        else:
            # dataclass and NamedTuple give a class functions that can't be found by name.
            generated = _is_dunder(name) or import_path(function) is None
        return generated or (in_body and self._is_decorated(name))

    def _is_decorated(self, name: str) -> bool:
        return any(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name and each.decorator_list
            for each in self._node.body
        )

    def _is_from(self, function: types.FunctionType) -> bool:
        line, last = function.__code__.co_firstlineno, self._node.end_lineno or 0
        return self._node.lineno <= line <= last and self._found.file.compiles_to(function.__code__)

    def _statement(self, name: str) -> ast.expr | None:
        for each in self._node.body:
            if isinstance(each, ast.Assign):
                targets = each.targets
            elif isinstance(each, ast.AnnAssign):
                targets = [each.target]
            else:
                continue
            if any(isinstance(target, ast.Name) and _mangled(self._class, target.id) == name for target in targets):
                return each.value
        return None

    def _label(self, name: str) -> str:
        return f"{self._class.__qualname__.rpartition('<locals>.')[2]}.{name}"


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        match each:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield each.name
            case _:
                for inner in ast.walk(each):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        yield inner.id


def _mangled(class_: type, name: str) -> str:
    if name.startswith("__") and not name.endswith("__"):
        return f"_{class_.__name__.lstrip('_')}{name}"
    return name


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_made_by_body(value: object) -> bool:
    """Returns True for functions, classes and descriptors, which statements of the body create."""
    return isinstance(value, type | types.FunctionType) or hasattr(type(value), "__get__")


def _is_data(value: object) -> bool:
    try:
        return is_plain(value)
    except EncodeError:
        return False
