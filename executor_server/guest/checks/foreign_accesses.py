"""Rewrites the accesses of a source by which a program may reach modules that it did not import.

Ordinary accesses stay as they are and cost nothing: checking all of them would cost more than the rest of the
instrumentation. The source alone decides; `a.b` is rewritten where

- `b` is one of ENTRANCES: it leads to modules, or a call of it returns some (`__globals__`, `modules`), or
- `b` is a name that modules have, or are imported under (`_os`, `np`), or
- `a` is a name that an import of this source has bound, or an attribute of one, and `b` does not look like a constant.

In the last two cases a method that is called at once, `a.b()`, is left alone, since a module can't be called, and so is
`self.b`, which the program has set itself. `a.b` becomes a call of a hook with `a.b` and its text: the access happens
in the program's own frame, and the hook checks the result (hooks.py).
"""

from __future__ import annotations

import ast
import os
import sys
from _string import formatter_field_name_split, formatter_parser  # type: ignore[import-not-found]
from ast import AST, Attribute, Call, Constant, Load, Name

from ..wire.paths import ENVIRONMENT_PATH
from .accesses import MatchClass, call, match_case, position
from .standard_modules import standard_modules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Sequence

    from .instrumentation import Sentinels

# Functions that return modules, or objects that hold modules.
GIVERS = frozenset(
    (
        *("getmodule", "getmembers", "getmembers_static", "getattr_static", "getclosurevars"),  # inspect
        *("get_objects", "get_referrers", "get_referents"),  # gc
        *("load_module", "exec_module", "_gcd_import", "_find_and_load", "_find_and_load_unlocked"),  # importlib
        *("_load", "_load_unlocked", "_load_backward_compatible", "_load_module_shim", "create_builtin"),
        *("_importer", "_import_module", "_dot_lookup"),  # unittest.mock and similar modules
    )
)
# Attributes that lead to modules by themselves, also when they are called at once.
ENTRANCES = GIVERS | frozenset(
    (
        *("__dict__", "__globals__", "__builtins__", "__self__", "__closure__", "__getattribute__", "__subclasses__"),
        *("f_builtins", "f_globals", "f_locals", "cell_contents", "modules", "builtin_modules"),
        *("attrgetter", "methodcaller", "Formatter", "format", "format_map"),
    )
)
_FORMATS = ("format", "format_map")
_ALIASES = frozenset(
    (
        *("np", "pd", "plt", "mpl", "sp", "nx", "sns", "tf", "sm", "dt", "mp", "ET", "et"),
        *("lib", "module", "mod", "sys_", "os_"),
    )
)
# Constants and types of libraries that programs read in loops.
_CONSTANTS = frozenset(
    (
        *("ascii_letters", "ascii_lowercase", "bool_", "digits", "dtype", "e", "floating", "inf", "integer", "maxsize"),
        *("nan", "ndarray", "newaxis", "number", "object_", "pi", "str_", "tau"),
    )
)
_MAX_LISTED = 8192
_MAX_PATH_CHARS = 100
_MAX_FORMAT_CHARS = 100_000

_names: set[str] = set()


def module_names() -> set[str]:
    """Returns names of attributes that may be modules: Python's, the image's, the environment's; and usual aliases."""
    if not _names:
        for name in (*standard_modules(), *_ALIASES, *_installed()):
            _names.update((name, f"_{name}", name.lstrip("_")))
        _names.discard("")
    return _names


def _installed() -> list[str]:
    """Lists modules beside those of Python. A directory that is missing, or can't be read, has none."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    roots = {sys.prefix, os.path.dirname(os.path.dirname(sys.executable)), "/usr", "/usr/local"}
    below = (f"{version}/site-packages", f"{version}/dist-packages", "python3/dist-packages")
    found: set[str] = set()
    for directory in (f"{ENVIRONMENT_PATH}/site", *(f"{root}/lib/{each}" for root in roots for each in below)):
        try:
            entries = os.listdir(directory)
        except OSError:
            continue
        names = (entry.partition(".")[0] for entry in entries[:_MAX_LISTED] if not entry.endswith("-info"))
        found.update(name for name in names if name.isidentifier())
    return sorted(found)


def hook_foreign(nodes: list[AST], sentinels: Sentinels, skipped: Sequence[str] = ()) -> list[AST]:
    """Rewrites the nodes in place and returns them with the calls added; each comes before those below it."""
    if not any(type(node) is Attribute for node in nodes):
        return nodes
    roots = _imported(nodes)
    called = {id(node.func) for node in nodes if type(node) is Call}
    names = module_names()
    hooked: dict[int, Call] = {}
    for node in nodes:
        if type(node) is Attribute and type(node.ctx) is Load:
            kind = _sentinel(node, id(node) in called, roots, names, sentinels)
            if kind is not None:
                hooked[id(node)] = _call(kind, node)
    if hooked:
        nodes = _replaced(nodes, hooked, skipped)
    _check_captures(nodes, names, sentinels)
    return nodes


def _sentinel(node: Attribute, is_called: bool, roots: set[str], names: set[str], sentinels: Sentinels) -> Any:
    """Returns the sentinel of the hook that this access needs; None when it needs none."""
    name, base = node.attr, node.value
    if name in ENTRANCES:
        if name in _FORMATS and type(base) is Constant and not _has_attributes(base.value):
            return None
        return sentinels.enter
    if is_called:
        return None
    if name in names:
        is_own = type(base) is Name and base.id == "self" and name[0] != "_"
        return None if is_own else sentinels.reach
    if name in _CONSTANTS or name[:1].isupper() or name[-1:].isdigit():
        return None
    while type(base) is Attribute:
        base = base.value
    return sentinels.reach if type(base) is Name and base.id in roots else None


def _imported(nodes: list[AST]) -> set[str]:
    """Returns the names that imports bind."""
    names: set[str] = set()
    for node in nodes:
        if type(node) is ast.Import:
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif type(node) is ast.ImportFrom:
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _has_attributes(text: object) -> bool:
    """True when a format reads attributes; an invalid or a very long one counts as one that does."""
    if type(text) is not str or "." not in text:
        return False
    if len(text) > _MAX_FORMAT_CHARS:
        return True
    pending = [text]
    try:
        while pending:
            for _, field, spec, _ in formatter_parser(pending.pop()):
                if field and any(is_attribute for is_attribute, _ in formatter_field_name_split(field)[1]):
                    return True
                if spec and "{" in spec:
                    pending.append(spec)
    except ValueError:
        return True
    return False


# ---------------------------------------------------------------------------------------------------------------------

_PATTERNS: Any = tuple(
    getattr(ast, name) for name in ("MatchValue", "MatchClass", "MatchMapping") if hasattr(ast, name)
)


def _replaced(nodes: list[AST], hooked: dict[int, Call], skipped: Sequence[str]) -> list[AST]:
    in_patterns = {
        id(inside) for node in nodes if _PATTERNS and isinstance(node, _PATTERNS) for inside in ast.walk(node)
    }
    all_nodes: list[AST] = []
    for node in nodes:
        if id(node) in hooked and id(node) not in in_patterns:
            all_nodes.append(hooked[id(node)])
        all_nodes.append(node)
        if id(node) not in in_patterns:  # a pattern names values; it has no place for a call
            _replace_below(node, hooked, skipped)
    return all_nodes


def _replace_below(node: AST, hooked: dict[int, Call], skipped: Sequence[str]) -> None:
    for name in node._fields:
        if name in skipped:
            continue
        value = getattr(node, name, None)
        if type(value) is list:
            for index, item in enumerate(value):
                if id(item) in hooked:
                    value[index] = hooked[id(item)]
        elif id(value) in hooked:
            setattr(node, name, hooked[id(value)])


def _check_captures(nodes: list[AST], names: set[str], sentinels: Sentinels) -> None:
    """Checks the values that patterns bind from attributes, `case object(_os=name)`, before any use of them."""
    if match_case is None:
        return
    for node in nodes:
        if not isinstance(node, match_case):
            continue
        checks: list[Any] = []
        for inside in ast.walk(node.pattern):
            if isinstance(inside, MatchClass):
                for attribute, pattern in zip(inside.kwd_attrs, inside.kwd_patterns):
                    bound: Optional[str] = getattr(pattern, "name", None)
                    if bound and (attribute in names or attribute in ENTRANCES):
                        kind = sentinels.enter if attribute in ENTRANCES else sentinels.reach
                        read = Name(id=bound, ctx=Load(), **position(pattern))
                        checks.append(_call(kind, read, f"a pattern with {attribute}"))
        if checks and node.guard is not None:
            truths = [ast.Tuple(elts=[check], ctx=Load(), **position(check)) for check in checks]
            node.guard = ast.BoolOp(op=ast.And(), values=[*truths, node.guard], **position(node.guard))
        elif checks:
            node.body[:0] = [ast.Expr(value=check, **position(check)) for check in checks]


def _call(sentinel: bytes, node: Any, path: str = "") -> Call:
    text = Constant(value=path or _path(node), kind=None, **position(node))
    return call(sentinel, [node, text], node)


def _path(node: Any) -> str:
    """Returns the access as the program wrote it, as far as it is a dotted name."""
    parts: list[str] = []
    while type(node) is Attribute and len(parts) < _MAX_PATH_CHARS:
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if type(node) is Name else "…")
    text = ".".join(reversed(parts))
    return text if len(text) <= _MAX_PATH_CHARS else f"…{text[-_MAX_PATH_CHARS:]}"
