"""Ships the user's classes: their class statement runs again, then later changes of the class are applied.

The user's own decorators don't run again, because their effect is in the class already. Decorators of a library, which
generate methods without source (`dataclass`), do.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from executor_client._shipping.bodies import Body
from executor_client._shipping.libraries import evaluated
from executor_client._shipping.names import Names, names_of
from executor_client._shipping.source import NO_SOURCE, Found, cut_out, indented
from executor_client._shipping.writer import Space

if TYPE_CHECKING:
    from executor_client._shipping.definitions import Definitions


class Classes:
    """Writes the definitions of classes."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._writer = definitions.writer

    def define(self, class_: type, where: str) -> str:
        """Writes the definition of the class; returns the expression that refers to it."""
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
        self._refuse_hooks(class_)
        return self._define(class_, found, self._writer.space(namespace))

    def _refuse_hooks(self, class_: type) -> None:
        """Refuses the user's hooks that would run again and, for example, register the class twice."""
        hooks: list[tuple[type, tuple[str, ...]]] = [(base, ("__init_subclass__",)) for base in class_.__mro__[1:]]
        hooks += [(base, ("__new__", "__init__", "__prepare__")) for base in inspect.getmro(type(class_))]
        for holder, names in hooks:
            if self._definitions.is_users(holder.__module__) and self._definitions.dialect.stand_in(holder) is None:
                for name in names:
                    if name in vars(holder):
                        self._writer.refuse(f"{holder.__qualname__}.{name}", f"would run again for {class_.__name__}")

    def _outer(self, class_: type) -> type | None:
        """Returns the class in which this one is nested, if any."""
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
        decorators = [each for each in node.decorator_list if self._is_librarys(each, space)]
        body = Body(class_, found, space, self._definitions, decorated_by_library=bool(decorators))
        text = cut_out(found, body.edits(), decorators=decorators)
        closure, own = self._closure(class_, found, text)
        at_top = not closure and not own and space.namespace.get(class_.__name__) is class_
        scope, name = self._writer.fresh(), class_.__name__ if at_top else self._writer.fresh()
        scoped = "".join([f"def {scope}({', '.join(closure)}):\n", indented(text), f"    return {node.name}\n"])
        in_scope = bool(closure or own)
        names = names_of(scoped, in_scope=True) if in_scope else names_of(text)
        names.first |= body.annotation_names
        self._definitions.use_first(space, names, but=frozenset({class_.__name__} if at_top else ()))
        if at_top:
            self._writer.define(space, f"\n{text}\n")
        else:
            values = [self._closure_variable(space, *each, names) for each in closure.items()]
            self._writer.define(space, f"\n{scoped}\n{name} = {scope}({', '.join(values)})\n")
        expression = self._definitions.objects.remember(class_, space.named(name))
        body.restore(expression)
        self._definitions.use_later(space, names)
        return expression

    def _closure_variable(self, space: Space, variable: str, value: object, names: Names) -> str:
        """Returns a name in the class's module for a variable that the class statement closes over."""
        expression = self._definitions.closure_variable(variable, value, names.attributes.get(variable, {()}))
        name = self._writer.fresh()
        self._writer.assign(space, name, expression)
        return name

    def _closure(self, class_: type, found: Found, text: str) -> tuple[dict[str, object], set[str]]:
        """Returns the variables that the class statement closes over, and those that are the class itself."""
        node: ast.ClassDef = found.node  # type: ignore[assignment]
        codes = [
            code
            for code in found.file.codes
            if code.co_qualname == class_.__qualname__ and code.co_name == node.name and not code.co_flags & 1
        ]
        # A variable that was used only in replaced expressions is not needed.
        named = {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
        variables = {name for code in codes for name in code.co_freevars if name in named}
        cells = {
            name: cell
            for function in _functions(class_)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        }
        for function in _functions(class_):
            self._definitions.cells.note(function, of_class=True)
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


def _functions(class_: type) -> Iterator[types.FunctionType]:
    """Yields the functions in the class, and those that wrappers of its methods wrap."""
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
