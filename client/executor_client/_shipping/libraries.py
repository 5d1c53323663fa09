"""Finds the names of objects that Python or an installed package defines."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
import types
from typing import Any


def import_path(value: object, name: str | None = None) -> tuple[str, str] | None:
    """Returns a module and a dotted name in it that lead to exactly this object; None if there are none."""
    qualname = name or getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    if isinstance(qualname, str):
        for each in (module, "builtins"):
            if isinstance(each, str) and resolves(each, qualname) is value:
                return each, qualname
        top = module.partition(".")[0] if isinstance(module, str) else ""
        if top and resolves(top, qualname) is value:
            return top, qualname
    for place in (types, builtins):  # the types that have no name of their own: NoneType, function
        for each, there in vars(place).items():
            if there is value:
                return place.__name__, each
    return None


def resolves(module: str, qualname: str) -> object:
    """Returns the object of a dotted name in a loaded module; None if there is none."""
    loaded = sys.modules.get(module)
    try:
        found: object = functools.reduce(getattr, qualname.split("."), loaded)
    except AttributeError:
        return None
    return found


def imported_as(tree: ast.Module | None, name: str, value: object) -> tuple[str, str] | None:
    """Returns module and name of the tree's statement `from module import name` that imported this object."""
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name and resolves(node.module, alias.name) is value:
                return node.module, alias.name
    return None


def submodule(module: types.ModuleType, chain: tuple[str, ...]) -> list[str]:
    """Returns the submodules in a chain of attributes of this module, which must be imported as well."""
    found, name = [], module.__name__
    for attribute in chain:
        name = f"{name}.{attribute}"
        if not isinstance(sys.modules.get(name), types.ModuleType):
            break
        found.append(name)
    return found


def evaluated(node: ast.expr, namespace: dict[str, Any]) -> object:
    """Returns the object that a decorator `a`, `a.b` or `a.b(...)` names, uncalled; None if it can't be found."""
    if isinstance(node, ast.Call):
        return evaluated(node.func, namespace)
    if isinstance(node, ast.Attribute):
        return getattr(evaluated(node.value, namespace), node.attr, None)
    if isinstance(node, ast.Name):
        return namespace.get(node.id, getattr(builtins, node.id, None))
    return None
