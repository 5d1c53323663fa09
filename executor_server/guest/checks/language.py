"""The language rules that a policy can set, and the check of a source against them.

Names and attributes are refused in the source, even where they would never run. Builtins are refused when they are
used: only then is it known whether `compile` is the builtin or the program's own function.

This is a guard-rail for honest programs and careless models. A program written to evade it may succeed; the sandbox is
the wall.
"""

from __future__ import annotations

import ast

from .control import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from .rules import Rules

ALLOWED_DUNDERS = frozenset(("__init__", "__name__", "__repr__", "__str__"))
# Attributes of frames, and of objects that lead to frames: a frame has all names of the code that runs in it.
FRAME_ATTRIBUTES = frozenset(
    (
        *("ag_await", "ag_code", "ag_frame", "cr_await", "cr_code", "cr_frame", "cr_origin"),
        *("f_back", "f_builtins", "f_code", "f_generator", "f_globals", "f_locals", "f_trace"),
        *("gi_code", "gi_frame", "gi_yieldfrom", "tb_frame"),
    )
)
# Builtins of smolagents' local executor (BASE_PYTHON_TOOLS), and its syntax.
LISTED_BUILTINS = frozenset(
    (
        *("abs", "all", "any", "bool", "callable", "chr", "classmethod", "complex", "dict", "divmod", "enumerate"),
        *("filter", "float", "getattr", "hasattr", "int", "isinstance", "issubclass", "iter", "len", "list", "map"),
        *("max", "min", "next", "ord", "pow", "print", "property", "range", "reversed", "round", "set", "setattr"),
        *("sorted", "staticmethod", "str", "sum", "super", "tuple", "type", "zip"),
    )
)
RUNNERS = frozenset(("eval", "exec", "compile"))
NAMESPACES = frozenset(("globals", "locals", "vars"))

_STARTERS = {
    "os": ("fork", "forkpty", "popen", "startfile", "system"),
    "subprocess": ("Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "run"),
    "pty": ("fork", "spawn"),
    "_posixsubprocess": ("fork_exec",),
}
_STARTER_BEGINNINGS = ("exec", "posix_spawn", "spawn")

_WHY = {
    "dunder_access": "names of the form __x__ are refused ({rule}), except " + ", ".join(sorted(ALLOWED_DUNDERS)),
    "dynamic_code": "a program may not run text as code ({rule}). Write the code as part of the program",
    "namespaces": "a program may not inspect namespaces ({rule}). Use variables by their names",
    "foreign_modules": "it leads to an unauthorized module ({rule})",
    "module_attributes": "an unauthorized module can't be reached through another one ({rule})",
    "dangerous_functions": "starting processes and loading native code are refused ({rule})",
    "open": "a program may not open files ({rule})",
    "file_writing": "files can't be opened for writing ({rule}); they can be read",
    "unlisted_builtins": "only some builtins are allowed ({rule}): " + ", ".join(sorted(LISTED_BUILTINS)),
}
_MAX_WHAT_CHARS = 200


class PolicyDenied(Refusal):
    """Agent code broke a language rule."""

    __module__ = "builtins"  # so that a traceback shows its plain name
    outcome = "policy_denied"

    def __init__(self, rule: str, what: str, more: str = "", why: str = "") -> None:
        super().__init__(explanation(rule, what, why) + more)


def explanation(rule: str, what: str, why: str = "") -> str:
    """Returns the message to a refused program; `why` replaces the general text of the rule."""
    what = what if len(what) <= _MAX_WHAT_CHARS else f"{what[:_MAX_WHAT_CHARS]}…"
    return f"{what} is not allowed: {(why or _WHY[rule]).format(rule=f'language.{rule}')}."


def name_rule(name: str, rules: Rules) -> str:
    """Returns the rule that refuses this name or attribute; empty when none does."""
    if name[:2] == "__" and name[-2:] == "__" and len(name) > 4:
        return "dunder_access" if "dunder_access" in rules.refused and name not in ALLOWED_DUNDERS else ""
    return "namespaces" if name in FRAME_ATTRIBUTES and "namespaces" in rules.refused else ""


def starts_processes(module: str, name: str) -> bool:
    """True for a function that starts processes."""
    module = "os" if module in ("posix", "nt") else module
    return name in _STARTERS.get(module, ()) or (module == "os" and name.startswith(_STARTER_BEGINNINGS))


def find_refused(tree: ast.AST, rules: Rules) -> list[tuple[int, str, str]]:
    """Returns (line, rule, what) of each refused use in the tree, by line."""
    found: list[tuple[int, str, str]] = []
    names = bool(rules.refused & {"dunder_access", "namespaces"})
    starters = "dangerous_functions" in rules.refused
    if not (names or starters):
        return found
    modules = _imported_modules(tree) if starters else {}
    for node, in_class in _walk(tree):
        line = getattr(node, "lineno", 0)
        if names:
            for name in _names_of(node, in_class):
                rule = name_rule(name, rules)
                if rule:
                    found.append((line, rule, f"{'Attribute' if isinstance(node, ast.Attribute) else 'Name'} {name}"))
        if starters:
            found += [(line, "dangerous_functions", what) for what in _starters_of(node, modules)]
    return sorted(found)


def _names_of(node: Any, in_class: bool) -> Iterator[str]:
    """Yields the names that a node reads or binds, except those defined by a class body, such as __len__."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        if not (in_class and isinstance(node.ctx, ast.Store)):
            yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if not in_class:
            yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield from (name for alias in node.names for name in (alias.name, alias.asname or ""))
    elif isinstance(node, ast.Import):
        yield from (alias.asname or "" for alias in node.names)
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, _NAMED):
        yield node.name or ""
    elif isinstance(node, _MAPPING_PATTERNS):
        yield node.rest or ""
    elif isinstance(node, _CLASS_PATTERNS):
        yield from node.kwd_attrs


# Patterns: CPython 3.10 and later.
_NAMED: Any = (ast.ExceptHandler, *(getattr(ast, name) for name in ("MatchAs", "MatchStar") if hasattr(ast, name)))
_MAPPING_PATTERNS: Any = (ast.MatchMapping,) if hasattr(ast, "MatchMapping") else ()
_CLASS_PATTERNS: Any = (ast.MatchClass,) if hasattr(ast, "MatchClass") else ()


def _imported_modules(tree: ast.AST) -> dict[str, str]:
    """Returns the imported modules by the names that they have in the source."""
    modules: dict[str, str] = {}
    for node, _ in _walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                modules[alias.asname or top] = alias.name if alias.asname else top
    return modules


def _starters_of(node: Any, modules: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [alias.name for alias in node.names if starts_processes(node.module or "", alias.name)]
        yield from (f"Function {node.module}.{name}" for name in names)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = modules.get(node.value.id, "")
        if starts_processes(module, node.attr):
            yield f"Function {module}.{node.attr}"


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yields all nodes, with true for those in the body of a class; not recursive, as trees may be very deep."""
    pending = [(tree, False)]
    while pending:
        node, in_class = pending.pop()
        yield node, in_class
        inside = (in_class or isinstance(node, ast.ClassDef)) and not isinstance(node, _FUNCTIONS)
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))
