"""Finds the names that a piece of source reads from its module: when it runs, and when its definitions are used."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

from executor_client._shipping.source import compiled

_OPTIMIZED = 0x1
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_FORGIVEN = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@dataclass(frozen=True)
class Import:
    """An import statement inside a function or class."""

    module: str
    level: int
    optional: bool
    """True if its failure is caught."""


@dataclass
class Names:
    """The names that a piece of source reads from its module.

    `first` are needed when it runs, `later` when its definitions are used; `stored` are globals that it sets itself.
    `attributes` has the chains of attributes that are read of each name; an empty chain is the name alone.
    """

    first: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    """Names that a class body both reads and sets. It may read the module's name before it sets its own."""
    attributes: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)


def names_of(text: str, *, in_scope: bool = False) -> Names:
    """Returns the names in a piece of source that compiles. `in_scope`: it is a function that is called at once."""
    names = Names()
    tree, code = compiled(text)
    _read_code(code, names, now=True, is_class=False)
    if in_scope:
        scope = next(each for each in code.co_consts if isinstance(each, types.CodeType))
        _read_code(scope, names, now=True, is_class=False)
    names.imports.extend(_imports(tree.body, optional=False))
    for chain_name, chain in _chains(tree):
        names.attributes.setdefault(chain_name, set()).add(chain)
    return names


def _read_code(code: types.CodeType, names: Names, *, now: bool, is_class: bool) -> None:
    read, written = set(), set()
    for instruction in dis.get_instructions(code):
        name, operation = instruction.argval, instruction.opname
        if operation in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            read.add(name)
        elif operation == "STORE_NAME":
            written.add(name)
        elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            names.stored.add(name)
    if is_class:
        names.own.update(read & written)
    (names.first if now else names.later).update(read - written if not code.co_flags & _OPTIMIZED else read)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            is_body = not constant.co_flags & _OPTIMIZED
            runs_now = now and (is_body or constant.co_name in _COMPREHENSIONS)
            _read_code(constant, names, now=runs_now, is_class=is_body)


def _chains(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in ast.iter_child_nodes(tree):
        chain: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield inner.id, tuple(reversed(chain))
        else:
            yield from _chains(node)


def _imports(nodes: list[ast.stmt], *, optional: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, 0, optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.module or "", node.level, optional)
        elif isinstance(node, ast.Try):
            forgiving = any(_forgives(handler) for handler in node.handlers)
            yield from _imports(node.body, optional=optional or forgiving)
            for part in (*(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                # An import in the handler replaces the one that failed, so neither is required.
                yield from _imports(part, optional=optional or forgiving)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, optional=optional)
        else:
            for name in ("body", "orelse", "finalbody"):
                inside = getattr(node, name, None)
                if isinstance(inside, list):
                    yield from _imports(inside, optional=optional)
            for case in getattr(node, "cases", ()):
                yield from _imports(case.body, optional=optional)


def _forgives(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    if any(isinstance(statement, ast.Raise) for statement in handler.body):
        return False  # it only raises a better error
    each = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return caught is None or any(isinstance(name, ast.Name) and name.id in _FORGIVEN for name in each)
