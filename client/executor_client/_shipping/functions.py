"""Ships the user's functions: their source, their closures, and later changes of them.

A function is shipped as the object that it is, not as the statement that created it: a wrapper is a closure over the
wrapped function, with the current values of its variables. For a wrapper made by a library, the library's decorator is
applied again.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import TYPE_CHECKING, Any

from executor_client._shipping.libraries import evaluated
from executor_client._shipping.names import names_of
from executor_client._shipping.source import NO_SOURCE, Edit, Found, FunctionNode, cut_out, indented
from executor_client._shipping.writer import Space

if TYPE_CHECKING:
    from executor_client._shipping.definitions import Definitions

_TRANSPARENT = frozenset({"staticmethod", "classmethod", "property", "abstractmethod", "abc.abstractmethod"})


class Functions:
    """Writes the definitions of functions."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._writer = definitions.writer
        self._cells: dict[int, str] = {}
        self._filled: set[int] = set()
        self._alive: list[types.CellType] = []

    def define(self, function: types.FunctionType, where: str) -> str:
        """Writes the definition of the function; returns the expression that refers to it."""
        of_class = self._of_class(function)
        if of_class is not None:
            class_, attribute = of_class
            return f"{self._definitions.objects.ref(class_, class_.__qualname__)}.{attribute}"
        if "__class__" in function.__code__.co_freevars:
            return self._writer.refuse(where, "is a method that uses its class, taken out of its class")
        found = self._definitions.files.function(function)
        if found is None:
            return self._writer.refuse(where, NO_SOURCE, lacks_source=True)
        return self._define(function, found, where)

    def _of_class(self, function: types.FunctionType) -> tuple[type, str] | None:
        """Returns the class whose body has the function, and its name there; None if the class can't be found."""
        *path, name = function.__code__.co_qualname.split(".")
        if "__class__" in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index("__class__")]
            holder = cell.cell_contents
        elif path and "<locals>" not in path:
            holder = function.__globals__.get(path[0])
            for each in path[1:]:
                holder = inspect.getattr_static(holder, each, None)
        else:
            return None
        there = inspect.getattr_static(holder, name, None) if isinstance(holder, type) else None
        inner = there.__func__ if isinstance(there, staticmethod) else there
        return (holder, name) if inner is function else None

    def _define(self, function: types.FunctionType, found: Found, where: str) -> str:
        node: FunctionNode = found.node  # type: ignore[assignment]
        space = self._writer.space(function.__globals__)
        edits, defaults_change = default_edits(node, function)
        text = cut_out(found, [*edits, *annotation_edits(node)])
        name = self._at_top(space, function, node, text) or self._in_scope(space, function, node, text)
        expression = self._definitions.objects.remember(function, space.named(name))
        self._definitions.cells.note(function)
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if closure:
            # One cell object for each variable, so that functions that share a variable still share it.
            cells = ", ".join(f"{variable!r}: {self._cell(cell)}" for variable, cell in closure.items())
            self._writer.say(f"{expression} = {self._writer.helper('closed')}({expression}, {{{cells}}})")
        names = names_of(self._scoped("_", function, node, text))
        for variable, cell in closure.items():
            self._fill(variable, cell, names.attributes.get(variable, {()}))
        self._restore(function, expression, where, defaults_change)
        self._definitions.use_first(space, names)
        self._definitions.use_later(space, names)
        return expression

    def _at_top(self, space: Space, function: types.FunctionType, node: FunctionNode, text: str) -> str | None:
        if isinstance(node, ast.Lambda) or function.__closure__ or space.namespace.get(node.name) is not function:
            return None
        self._writer.define(space, f"\n{text}\n")
        return node.name

    def _in_scope(self, space: Space, function: types.FunctionType, node: FunctionNode, text: str) -> str:
        scope, name = self._writer.fresh(), self._writer.fresh()
        self._writer.define(space, f"\n{self._scoped(scope, function, node, text)}\n{name} = {scope}()\n")
        return name

    def _scoped(self, scope: str, function: types.FunctionType, node: FunctionNode, text: str) -> str:
        """Returns source of the function inside another one, which declares the variables of its closure."""
        lines = [f"def {scope}():\n"]
        variables = function.__code__.co_freevars
        if variables:
            lines.append(f"    {' = '.join(variables)} = None\n")
        if isinstance(node, ast.Lambda):
            return "".join([*lines, indented(f"return (\n{text.rstrip()}\n)\n")])
        return "".join([*lines, indented(text), f"    return {node.name}\n"])

    # -----------------------------------------------------------------------------------------------------------------
    # Closures and attributes

    def _cell(self, cell: types.CellType) -> str:
        if id(cell) not in self._cells:
            self._alive.append(cell)
            name = self._cells[id(cell)] = self._writer.fresh()
            self._writer.say(f"{name} = {self._writer.library('types')}.CellType()")
        return self._cells[id(cell)]

    def _fill(self, variable: str, cell: types.CellType, chains: set[tuple[str, ...]]) -> None:
        if id(cell) in self._filled:
            return
        self._filled.add(id(cell))
        try:
            value = cell.cell_contents
        except ValueError:
            return  # the variable has no value yet, so its cell stays empty
        expression = self._definitions.closure_variable(variable, value, chains)
        self._writer.say(f"{self._cells[id(cell)]}.cell_contents = {expression}")

    def _restore(self, function: types.FunctionType, expression: str, where: str, defaults_change: bool) -> None:
        ref = self._definitions.objects.ref
        if defaults_change:
            values = function.__defaults__
            listed = "".join(f"{ref(each, f'a default of {where}')}, " for each in values or ())
            self._writer.say(f"{expression}.__defaults__ = {f'({listed})' if values is not None else None}")
            keywords = function.__kwdefaults__
            pairs = ", ".join(
                f"{key!r}: {ref(each, f'{where}, default of {key}')}" for key, each in (keywords or {}).items()
            )
            self._writer.say(f"{expression}.__kwdefaults__ = {f'{{{pairs}}}' if keywords is not None else None}")
        if function.__name__ != function.__code__.co_name:
            for name in ("__name__", "__qualname__", "__doc__"):
                self._writer.say(f"{expression}.{name} = {ref(getattr(function, name), where)}")
        for key, each in function.__dict__.items():
            self._writer.set_attribute(expression, key, ref(each, f"{where}.{key}"))

    # -----------------------------------------------------------------------------------------------------------------
    # Decorators of libraries

    def decorated_again(self, wrapper: types.FunctionType, where: str) -> str | None:
        """Applies a library's decorator to the wrapped function again. Returns None if the source shows none."""
        wrapped = getattr(wrapper, "__wrapped__", None)
        original = inspect.unwrap(wrapper)
        found = self._definitions.files.function(original)
        if wrapped is None or found is None or isinstance(found.node, ast.Lambda):
            return None
        node: Any = found.node
        layers, inner = 1, wrapped
        while inner is not original:
            layers, inner = layers + 1, inner.__wrapped__
        space = self._writer.space(original.__globals__)
        decorators = [
            each
            for each in node.decorator_list
            if not self._definitions.dialect.drops_decorator(evaluated(each, space.namespace))
        ]
        if layers > len(decorators):
            return None
        decorator = decorators[-layers]
        if not self._comes_from(evaluated(decorator, space.namespace), wrapper):
            return None
        text = ast.unparse(decorator)
        self._definitions.use_first(space, names_of(text))
        self._definitions.use_later(space, names_of(text))
        given, made = self._writer.fresh(), self._writer.fresh()
        self._writer.assign(space, given, self._definitions.objects.ref(wrapped, where))
        self._writer.define(space, f"{made} = ({text})({given})\n")
        expression = self._definitions.objects.remember(wrapper, space.named(made))
        for class_, implementation in _registered(wrapper):
            self._writer.say(
                f"{expression}.register({self._definitions.objects.ref(class_, class_.__qualname__)}, "
                f"{self._definitions.objects.ref(implementation, implementation.__qualname__)})"
            )
        return expression

    def _comes_from(self, decorator: object, wrapper: types.FunctionType) -> bool:
        """Returns True if the decorator and the wrapper belong to the same library."""
        module = getattr(decorator, "__module__", None) or type(decorator).__module__
        made_by = str(wrapper.__globals__.get("__name__"))
        return str(module).partition(".")[0] == made_by.partition(".")[0]


def _registered(wrapper: Any) -> list[tuple[type, Any]]:
    """Returns the implementations registered with a `functools.singledispatch` function."""
    registry = getattr(wrapper, "registry", None)
    if wrapper.__globals__.get("__name__") != "functools" or registry is None:
        return []
    return [(class_, implementation) for class_, implementation in registry.items() if class_ is not object]


# ---------------------------------------------------------------------------------------------------------------------
# Shared with methods of classes


def annotation_edits(node: ast.AST) -> list[Edit]:
    """Returns edits that turn annotations into strings, since the sandbox may lack the names in them."""
    if isinstance(node, ast.Lambda):
        return []
    function: Any = node
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [each.annotation for each in every if each is not None] + [function.returns]
    return [quoted(each) for each in annotations if each is not None and not isinstance(each, ast.Constant)]


def quoted(annotation: ast.expr) -> Edit:
    return Edit(annotation, repr(ast.unparse(annotation)))


def is_transparent(decorators: list[ast.expr]) -> bool:
    """Returns True if none of the decorators reads the function that it decorates."""
    return all(ast.unparse(each) in _TRANSPARENT or ast.unparse(each).endswith(".setter") for each in decorators)


def default_edits(node: Any, function: types.FunctionType) -> tuple[list[Edit], bool]:
    """Returns edits that remove computed defaults, and True if the defaults must be set afterwards."""
    positional, keywords = node.args.defaults, node.args.kw_defaults
    values = function.__defaults__ or ()
    named = function.__kwdefaults__ or {}
    pairs = list(zip(positional, values, strict=False))
    pairs += [
        (each, named[argument.arg])
        for argument, each in zip(node.args.kwonlyargs, keywords, strict=True)
        if each is not None and argument.arg in named
    ]
    expressions = [*positional, *(each for each in keywords if each is not None)]
    same = {id(each) for each, value in pairs if is_literal_of(each, value)}
    edits = [Edit(each, "None") for each in expressions if not isinstance(each, ast.Constant | ast.UnaryOp)]
    changed = len(positional) != len(values) or len(pairs) != len(expressions) or len(same) != len(expressions)
    return edits, changed


def is_literal_of(node: ast.expr, value: object) -> bool:
    """Returns True if the expression is a literal for exactly this immutable value."""
    try:
        literal = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    if type(literal) is not type(value) or not isinstance(value, str | bytes | int | float | complex | bool | None):
        return False
    return repr(literal) == repr(value)
