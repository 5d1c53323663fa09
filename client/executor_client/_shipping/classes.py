"""Classes of the user's: the class statement, run again, and then what the class has become since.

Decorators of the user's own are not run again: what they did to the class is on it. Those of a library, which make what
is no source (`dataclass`), are. A value that was computed in the body is not computed again where it can be sent.
"""

from __future__ import annotations

import abc
import ast
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

from executor_api.values import EncodeError
from executor_client._shipping.definitions import NO_SOURCE, Definitions
from executor_client._shipping.functions import annotation_edits, default_edits, is_transparent, quoted, says
from executor_client._shipping.libraries import evaluated, import_path
from executor_client._shipping.names import names_of
from executor_client._shipping.plain import is_plain
from executor_client._shipping.source import Edit, Found, cut_out, indented
from executor_client._shipping.writer import Space

_INTERNAL = frozenset({"_abc_impl", "_is_protocol", "_is_runtime_protocol"})


class Classes:
    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._writer = definitions.writer

    def define(self, class_: type, where: str) -> str:
        """Writes the class down; returns the expression that it is known by."""
        outer = self._outer(class_)
        if outer is not None:
            return f"{self._definitions.objects.ref(outer, outer.__qualname__)}.{class_.__name__}"
        functions = [each for each in _functions(class_) if self._is_of_body(class_, each)]
        namespace = functions[0].__globals__ if functions else _namespace(class_)
        found = self._definitions.files.class_(class_, functions, namespace)
        if found is None:
            if _is_called_namedtuple(class_):
                return self._namedtuple(class_, where)
            return self._writer.refuse(where, NO_SOURCE, lacks_source=True)
        return self._define(class_, found, self._writer.space(namespace))

    def _outer(self, class_: type) -> type | None:
        """The class that this one is nested in."""
        *path, name = class_.__qualname__.split(".")
        if not path or path[-1] == "<locals>" or "<locals>" in path:
            return None
        holder: Any = _namespace(class_).get(path[0])
        for each in path[1:]:
            holder = vars(holder).get(each) if isinstance(holder, type) else None
        return holder if isinstance(holder, type) and vars(holder).get(name) is class_ else None

    def _is_of_body(self, class_: type, function: types.FunctionType) -> bool:
        qualname = function.__code__.co_qualname
        is_generated = function.__code__.co_filename.startswith("<string")
        return qualname.rpartition(".")[0] == class_.__qualname__ and not is_generated

    def _namedtuple(self, class_: Any, where: str) -> str:
        defaults = [
            self._definitions.objects.ref(value, f"{where}.{name}") for name, value in class_._field_defaults.items()
        ]
        name = self._writer.fresh()
        self._writer.say(
            f"{name} = {self._writer.library('collections')}.namedtuple({class_.__name__!r}, {list(class_._fields)!r}, "
            f"defaults=[{', '.join(defaults)}], module=__name__)"
        )
        return name

    def _define(self, class_: type, found: Found, space: Space) -> str:
        node: ast.ClassDef = found.node  # type: ignore[assignment]
        closure, own = self._closure(class_, found)
        body = _Body(class_, found, self._writer, space, self._definitions)
        decorators = [each for each in node.decorator_list if self._is_librarys(each, space)]
        text = cut_out(found, body.edits(), decorators=decorators)
        at_top = not closure and not own and space.namespace.get(class_.__name__) is class_
        scope, name = self._writer.fresh(), class_.__name__ if at_top else self._writer.fresh()
        scoped = "".join([f"def {scope}({', '.join(closure)}):\n", indented(text), f"    return {node.name}\n"])
        names = names_of(text if at_top or not (closure or own) else scoped)
        if not (at_top or not (closure or own)):
            # Inside a function, what the statement needs counts as needed later.
            inner = names_of(text)
            names.first |= inner.first - {*closure, *own}
            names.own |= inner.own - {*closure, *own}
        self._definitions.use_first(space, names, but=frozenset({class_.__name__} if at_top else ()))
        if at_top:
            self._writer.define(space, f"\n{text}\n")
        else:
            values = [self._around(space, variable, value, names) for variable, value in closure.items()]
            self._writer.define(space, f"\n{scoped}\n{name} = {scope}({', '.join(values)})\n")
        expression = self._definitions.objects.remember(class_, space.named(name))
        body.restore(expression)
        self._definitions.use_later(space, names)
        return expression

    def _around(self, space: Space, variable: str, value: object, names: Any) -> str:
        """A variable around the class, under a name that the text of its module can use."""
        if isinstance(value, types.ModuleType):
            chains = names.attributes.get(variable, {()})
            expression = self._definitions.module_around(variable, value, chains)
        else:
            expression = self._definitions.objects.ref(value, variable)
        name = self._writer.fresh()
        self._writer.assign(space, name, expression)
        return name

    def _closure(self, class_: type, found: Found) -> tuple[dict[str, object], set[str]]:
        """The variables around the class statement with their values, and whether it is among them itself."""
        node: ast.ClassDef = found.node  # type: ignore[assignment]
        codes = [
            code
            for code in found.file.codes
            if code.co_qualname == class_.__qualname__ and code.co_name == node.name and not code.co_flags & 1
        ]
        variables = {name for code in codes for name in code.co_freevars}
        cells = {
            name: cell
            for function in _functions(class_)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        }
        closure: dict[str, object] = {}
        own: set[str] = set()
        for variable in sorted(variables):
            try:
                value = cells[variable].cell_contents
            except (KeyError, ValueError):
                self._writer.refuse(variable, f"is a variable around the class {class_.__name__} whose value is gone")
                continue
            if value is class_ and variable == node.name:
                own.add(variable)
            else:
                closure[variable] = value
        return closure, own

    def _is_librarys(self, decorator: ast.expr, space: Space) -> bool:
        found = evaluated(decorator, space.namespace)
        if found is None:
            self._writer.refuse(f"@{ast.unparse(decorator)}", "is a decorator of a class that can't be found from here")
            return False
        module = getattr(found, "__module__", None) or type(found).__module__
        return not self._definitions.is_users(str(module)) and not self._definitions.dialect.drops_decorator(found)


class _Body:
    """What is in a class, compared with what its statement puts there."""

    def __init__(self, class_: type, found: Found, writer: Any, space: Space, definitions: Definitions) -> None:
        self._class = class_
        self._found = found
        self._node: ast.ClassDef = found.node  # type: ignore[assignment]
        self._writer = writer
        self._space = space
        self._definitions = definitions
        self._restored: list[tuple[str, types.FunctionType]] = []
        self._placed: set[str] = set()
        self._is_enum = issubclass(class_, enum.Enum)

    def edits(self) -> list[Edit]:
        made: list[Edit] = []
        for statement in self._node.body:
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if is_transparent(statement.decorator_list):
                    made += annotation_edits(statement)
                    made += self._defaults(statement)
                case ast.AnnAssign() if self._found.file.quotes_annotations:
                    if not isinstance(statement.annotation, ast.Constant):
                        made.append(quoted(statement.annotation))
                    made += self._value(statement)
                case ast.Assign() | ast.AnnAssign():
                    made += self._value(statement)
        return made

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
        """Puts the value in the place of the expression that computed it, where it is data."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if len(targets) != 1 or not isinstance(targets[0], ast.Name) or statement.value is None or self._is_enum:
            return []
        name = targets[0].id
        if _is_dunder(name) or sum(1 for each in _assigned(self._node) if each == name) != 1:
            return []
        value = vars(self._class).get(_mangled(self._class, name), ...)
        if value is ... or says(statement.value, value) or not _is_data(value):
            return []
        given = self._writer.fresh()
        self._writer.assign(self._space, given, self._definitions.objects.ref(value, self._label(name)))
        self._placed.add(_mangled(self._class, name))
        return [Edit(statement.value, given)]

    # -----------------------------------------------------------------------------------------------------------------

    def restore(self, expression: str) -> None:
        """Sets what the class has and its statement does not give it."""
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
        made_by_library = bool(self._node.decorator_list) or type(self._class) not in (type, abc.ABCMeta)
        for name, value in list(vars(self._class).items()):
            if name in _INTERNAL or name in self._placed or self._is_given(name, value, name in in_body):
                continue
            if made_by_library and name not in in_body and not isinstance(value, types.FunctionType):
                continue
            self._writer.say(f"{expression}.{name} = {self._changed(name, value)}")

    def _changed(self, name: str, value: object) -> str:
        ref = self._definitions.objects.ref
        if isinstance(value, staticmethod | classmethod):
            kind = f"{self._writer.library('builtins')}.{type(value).__name__}"
            return f"{kind}({ref(value.__func__, self._label(name))})"
        return ref(value, self._label(name))

    def _is_given(self, name: str, value: object, in_body: bool) -> bool:
        """Whether the class statement, run again, gives the class this."""
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
        return statement is not None and says(statement, value)

    def _is_given_function(self, name: str, function: types.FunctionType, in_body: bool) -> bool:
        seen = function
        while True:
            if self._is_from(seen) or self._definitions.dialect.is_machinery(seen):
                return True
            wrapped = seen.__dict__.get("__wrapped__")
            if not isinstance(wrapped, types.FunctionType):
                break
            seen = wrapped
        is_users = self._definitions.is_users(str(function.__globals__.get("__name__")))
        if is_users:
            generated = _is_dunder(name) and function.__code__.co_filename.startswith("<")
        else:
            # What makes classes (dataclass, NamedTuple) gives them functions that no name leads to.
            generated = _is_dunder(name) or import_path(function) is None
        return generated or (in_body and self._is_decorated(name))

    def _is_decorated(self, name: str) -> bool:
        return any(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name and each.decorator_list
            for each in self._node.body
        )

    def _is_from(self, function: types.FunctionType) -> bool:
        code = function.__code__
        last = self._node.end_lineno or 0
        return self._node.lineno <= code.co_firstlineno <= last and any(code == each for each in self._found.file.codes)

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


def _functions(class_: type) -> Iterator[types.FunctionType]:
    """The functions in the class, and those inside its methods' wrappers."""
    for value in vars(class_).values():
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        candidates = [inner.fget, inner.fset, inner.fdel] if isinstance(inner, property) else [inner]
        for each in candidates:
            while isinstance(each, types.FunctionType):
                yield each
                each = each.__dict__.get("__wrapped__")


def _namespace(class_: type) -> dict[str, Any]:
    module = sys.modules.get(class_.__module__)
    return {} if module is None else module.__dict__


def _is_called_namedtuple(class_: type) -> bool:
    return issubclass(class_, tuple) and class_.__bases__ == (tuple,) and hasattr(class_, "_field_defaults")


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


def _is_data(value: object) -> bool:
    try:
        return is_plain(value)
    except EncodeError:
        return False
