"""Which modules agent code may import.

The rules are those of smolagents: a pattern names a module ("numpy", "os.path"), everything below one ("numpy.*",
which includes "numpy"), or everything ("*"). "os.path" authorizes "os" too; "numpy" does not authorize "numpy.random".
Names are compared part by part, so "re" says nothing of "reprlib".

Only imports of agent code are checked, in its source and again when they happen; what an authorized library imports for
itself is free. That is a guard-rail that tells a model what it can use; the wall is the sandbox around it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from types import FrameType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Sequence

    Authorized = Callable[[], Sequence[str]]
    """Gives the patterns that hold now."""

CALLED_IMPORT = "import()"
"""Where the builtins of agent code keep what its own name `__import__` means; not a name that a program can write."""

_PATTERN = re.compile(r"\*|[^\W\d]\w*(\.[^\W\d]\w*)*(\.\*)?")
MAX_PATTERN_CHARS = 256


class ImportDenied(ImportError):
    """Agent code imported what is not authorized."""

    __module__ = "builtins"  # so that a traceback shows its plain name

    def __init__(self, module: str, patterns: Sequence[str]) -> None:
        super().__init__(refusal(module, patterns), name=module)
        self.module = module


def validate_pattern(pattern: str) -> None:
    """Raises ValueError unless it is "*", or dotted identifiers that may end in ".*"."""
    if len(pattern) > MAX_PATTERN_CHARS or not _PATTERN.fullmatch(pattern):
        raise ValueError(
            f"not an import pattern: {pattern[:MAX_PATTERN_CHARS]!r}; allowed are like 'numpy', 'numpy.*', '*'"
        )


def is_authorized(module: str, patterns: Sequence[str]) -> bool:
    """Whether some pattern authorizes the import of the module."""
    parts = module.split(".")
    return any(_matches(parts, pattern.split(".")) for pattern in patterns)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    for index, part in enumerate(parts):
        if index == len(pattern):
            return False
        if pattern[index] == "*":
            return True
        if part != pattern[index]:
            return False
    return True


def _is_free(module: str, patterns: Sequence[str]) -> bool:
    # `from __future__` is part of the language. A relative import begins with a dot.
    return module == "__future__" or (not module.startswith(".") and is_authorized(module, patterns))


def refusal(module: str, patterns: Sequence[str]) -> str:
    """What a refused program is told; a module that begins with a dot is a relative import, which is always refused."""
    why = ": the program is in no package, so it has no relative imports" if module.startswith(".") else ""
    return f"Import of {module} is not allowed{why}. Authorized imports are: {list(patterns)}"


def find_denied(tree: ast.AST, patterns: Sequence[str]) -> list[tuple[int, str]]:
    """(line, module) of each import of the tree that is not authorized, by line."""
    denied = []
    pending = [tree]
    while pending:  # not recursive: the tree may be deeper than our stack
        node = pending.pop()
        if isinstance(node, ast.Import):
            denied += [(node.lineno, alias.name) for alias in node.names if not _is_free(alias.name, patterns)]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if not _is_free(module, patterns):
                denied.append((node.lineno, module))
        elif not isinstance(node, ast.expr):  # imports are statements; no expression holds one
            pending.extend(ast.iter_child_nodes(node))
    return sorted(denied)


# ---------------------------------------------------------------------------------------------------------------------
# At run time


def make_import(authorized: Authorized, real_import: Callable[..., Any] = builtins.__import__) -> Callable[..., Any]:
    """The `__import__` that agent code calls by name."""

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        _check(name, authorized, level)
        return real_import(name, globals, locals, fromlist, level)

    return __import__


def make_statement_import(checked: Callable[..., Any], real_import: Callable[..., Any]) -> Callable[..., Any]:
    """The `__import__` behind the import statements of agent code, and behind libraries written in C.

    C code imports (PyImport_Import) through the builtins of whatever Python frame called it, so what numpy or time need
    for themselves comes here as if the agent had asked. It always comes with a new list and the same namespace twice,
    which no statement does; code that calls `__import__` by name gets the other one.
    """

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if type(fromlist) is list and not fromlist and level == 0 and globals is not None and globals is locals:
            return real_import(name, globals, locals, fromlist, level)
        return checked(name, globals, locals, fromlist, level)

    return __import__


def guard_importlib(agent_builtins: dict[str, Any], authorized: Authorized) -> None:
    """Has importlib's functions check what agent code asks them for; libraries go on importing what they like.

    Code is the agent's when its frame has the agent's builtins, which all code of its namespace has.
    """
    import_module, dunder_import, reload = importlib.import_module, importlib.__import__, importlib.reload

    def asked_by_agent(frame: FrameType) -> bool:
        return frame.f_builtins is agent_builtins

    def checked_import_module(name: str, package: str | None = None) -> ModuleType:
        if asked_by_agent(sys._getframe(1)):
            _check(_resolve(name, package), authorized)
        return import_module(name, package)

    def checked_import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if asked_by_agent(sys._getframe(1)):
            _check(name, authorized, level)
        return dunder_import(name, globals, locals, fromlist, level)

    def checked_reload(module: ModuleType) -> ModuleType:
        if asked_by_agent(sys._getframe(1)):
            _check(module.__name__, authorized)
        return reload(module)

    importlib.import_module = checked_import_module
    importlib.__import__ = checked_import
    importlib.reload = checked_reload


def _resolve(name: Any, package: str | None) -> Any:
    if not (isinstance(name, str) and name.startswith(".") and package):
        return name
    from importlib.util import resolve_name

    return resolve_name(name, package)


def _check(name: Any, authorized: Authorized, level: int = 0) -> None:
    if not isinstance(name, str):
        return  # the real import says what is wrong with it
    module, patterns = "." * level + name, authorized()
    if not _is_free(module, patterns):
        raise ImportDenied(module, patterns)
