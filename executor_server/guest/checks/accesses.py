"""Rewrites accesses to attributes, items and results of calls so that the hooks of the language rules see them.

Only accesses that the rules in force need are rewritten. Values, order of evaluation and line numbers stay the same.

**Names, and everything.** `a.b` becomes a call of the hook `load` with `a` and "b". The results of `a[b]` and `a(b)` go
through `verify`; the call itself stays, so that a function that looks at its caller's frame, as `super()` does, still
sees the program's. An attribute named `format`, or another of SPECIAL_ATTRIBUTES, goes through `special`.

**Foreign modules.** Ordinary accesses stay as they are and cost nothing: checking all of them would cost more than the
rest of the instrumentation. The source alone decides; `a.b` is rewritten where

- `b` is one of ENTRANCES: it leads to modules, or a call of it returns some (`__globals__`, `modules`), or
- `b` is a name that modules have, or are imported under (`_os`, `np`), or
- `a` is a name that an import of this source has bound, or an attribute of one, and `b` does not look like a constant.

In the last two cases a method that is called at once, `a.b()`, is left alone, since a module can't be called, and so is
`self.b`, which the program has set itself. `a.b` becomes a call of a hook with `a.b` and its text: the access happens
in the program's own frame, and the hook checks the result (hooks.py). patterns.py has the attributes of patterns.
"""

from __future__ import annotations

import ast
import os
import sys
from _string import formatter_field_name_split, formatter_parser  # type: ignore[import-not-found]
from ast import AST, Attribute, Call, Constant, Load, Name, Subscript

from ..wire.paths import ENVIRONMENT_PATH
from .modules import standard_modules
from .sentinels import call, position

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, Sequence

    from .rules import Rules
    from .sentinels import Sentinels

# Attributes of strings and modules that take names of attributes as text.
SPECIAL_ATTRIBUTES = frozenset(("format", "format_map", "attrgetter", "methodcaller"))

# Rules that need all values, and rules that need names of attributes.
EVERYTHING = frozenset(("module_attributes", "dangerous_functions"))
NAMES = frozenset(("dunder_access", "namespaces"))
_match_case: Any = getattr(ast, "match_case", ())  # CPython 3.10 and later
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
# Attributes that lead to modules, even when they are called at once.
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


def hook_accesses(nodes: list[AST], sentinels: Sentinels, rules: Rules, skipped: Sequence[str] = ()) -> None:
    """Rewrites the nodes of a tree in place; parents come before children. Leaves fields named in `skipped` alone."""
    if "foreign_modules" in rules.refused:
        nodes = _hook_foreign(nodes, sentinels, skipped)
    everything = bool(rules.refused & EVERYTHING)
    if not (everything or rules.refused & NAMES):
        return
    patterns = _in_patterns(nodes)
    editor = _Editor(sentinels, skipped, everything=everything)
    for node in reversed(nodes):  # inner nodes first, because the replacement of an outer access contains them
        if id(node) not in patterns:
            editor.edit_below(node)


def _in_patterns(nodes: list[AST]) -> set[int]:
    """Returns the identities of the nodes in patterns, which name values and have no place for a call."""
    cases: list[Any] = [node for node in nodes if isinstance(node, _match_case)]
    return {id(inside) for case in cases for inside in ast.walk(case.pattern)}


# ---------------------------------------------------------------------------------------------------------------------
# Names, and everything


class _Editor:
    def __init__(self, sentinels: Sentinels, skipped: Sequence[str], *, everything: bool) -> None:
        self._sentinels = sentinels
        self._skipped = skipped
        self._everything = everything

    def edit_below(self, node: AST) -> None:
        for name in node._fields:
            if name in self._skipped:
                continue
            value = getattr(node, name, None)
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, AST):
                        value[index] = self._hooked(item)
            elif isinstance(value, AST):
                setattr(node, name, self._hooked(value))

    def _hooked(self, node: Any) -> Any:
        kind = type(node)
        if kind is Attribute and isinstance(node.ctx, Load):
            if node.attr in SPECIAL_ATTRIBUTES:
                return self._load(self._sentinels.special, node)
            if self._everything and not node.attr.startswith("__"):
                return self._load(self._sentinels.load, node)
            # The compiler mangles a private name of a class, so the access itself must stay.
            return call(self._sentinels.verify, [node], node) if self._everything else node
        if not self._everything:
            return node
        if (kind is Subscript and isinstance(node.ctx, Load)) or (kind is Call and type(node.func) is not Constant):
            return call(self._sentinels.verify, [node], node)
        return node

    def _load(self, sentinel: bytes, node: Attribute) -> Call:
        name = Constant(value=node.attr, kind=None, **position(node))
        return call(sentinel, [node.value, name], node)


# ---------------------------------------------------------------------------------------------------------------------
# Foreign modules

_names: set[str] = set()


def module_names() -> set[str]:
    """Returns names of attributes that may be modules: Python's, the image's, the environment's; and usual aliases."""
    if not _names:
        for name in (*standard_modules(), *_ALIASES, *_installed()):
            _names.update((name, f"_{name}", name.lstrip("_")))
        _names.discard("")
    return _names


def leads_on(name: str) -> bool:
    """True for an attribute that may be a module, or leads to some, by its name."""
    return name in ENTRANCES or name in module_names()


def _installed() -> list[str]:
    """Lists installed modules that are not Python's own. A directory that is missing, or can't be read, has none."""
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


def _hook_foreign(nodes: list[AST], sentinels: Sentinels, skipped: Sequence[str]) -> list[AST]:
    """Rewrites the nodes in place and returns them with the calls added; parents come before children."""
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


def _replaced(nodes: list[AST], hooked: dict[int, Call], skipped: Sequence[str]) -> list[AST]:
    in_patterns = _in_patterns(nodes)
    all_nodes: list[AST] = []
    for node in nodes:
        if id(node) in hooked and id(node) not in in_patterns:
            all_nodes.append(hooked[id(node)])
        all_nodes.append(node)
        if id(node) not in in_patterns:
            replace_below(node, hooked, skipped)
    return all_nodes


def replace_below(node: AST, hooked: Mapping[int, Any], skipped: Sequence[str] = ()) -> None:
    """Replaces children of a node, by their identity."""
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


def _call(sentinel: bytes, node: Attribute) -> Call:
    text = Constant(value=_path(node), kind=None, **position(node))
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
