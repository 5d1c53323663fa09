"""Checks the imports of agent code, in its source and again when they happen.

A library's own imports are not checked. Both checks reach the same verdict. The first also sees imports in branches
that are never taken; such a program is refused as a whole. A refusal is not an ImportError, because a program that
handled one would go on as if the module were merely missing.

Using a loaded module is not an import. Authorizing `sys` authorizes `sys.modules`; only the rules
language.module_attributes and language.foreign_modules check attributes (hooks.py).
"""

from __future__ import annotations

import ast
import builtins
import sys

from ..wire.messages import MAX_IMPORT_CHARS, MAX_IMPORTS
from .control import ControlException, Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Optional, Sequence

    from .own_modules import NoModules
    from .rules import RuleEnforcer, Rules

    Given = Callable[[Any, str, Any], Any]

# Key, in the builtins of agent code, of the `__import__` that it calls by name. No source can spell it.
CALLED_IMPORT = "import()"
# Key of the module that `import builtins` returns.
AGENT_BUILTINS = "builtins()"

# Bytes of the names of imported modules in a result.
_MAX_REPORTED_BYTES = 4096
# Characters in a refusal: of the module's name, and of the authorized imports. Both can be long.
_MAX_NAME_CHARS = 200
_MAX_LISTED_CHARS = 4000


class ImportDenied(Refusal):
    """Agent code imported an unauthorized module."""

    __module__ = "builtins"  # so that a traceback shows its plain name
    outcome = "import_denied"

    def __init__(self, module: str, rules: Rules, why: str = "") -> None:
        super().__init__(refusal(module, rules, why))


def refusal(module: str, rules: Rules, why: str = "") -> str:
    """Returns the message of a refusal. A leading dot marks a relative import of the program itself."""
    if module.startswith("."):
        why = ": relative imports need a package, and the program is in none"
    elif rules.denies(module):
        why = ": the policy denies it"
    name = module if len(module) <= _MAX_NAME_CHARS else f"{module[:_MAX_NAME_CHARS]}…"
    return f"Import of {name} is not allowed{why}. {authorized(rules)}"


def authorized(rules: Rules) -> str:
    """Returns the end of a refusal: what may be imported."""
    more = " and modules of the workspace" if rules.workspace else ""
    return f"Authorized imports are: {listed(rules.authorized)}{more}"


def listed(patterns: Sequence[str]) -> str:
    """Returns the patterns as a list, bounded."""
    text = str(list(patterns))
    if len(text) <= _MAX_LISTED_CHARS:
        return text
    cut = text.rfind(",", 0, _MAX_LISTED_CHARS)
    return f"{text[:cut]}, …] ({len(patterns)} in all)"


def refused_module(module: str, names: Iterable[str], rules: Rules, own: NoModules) -> str:
    """Returns the refused module of `[from] module import [names]`; empty when all are allowed.

    `own` knows the program's own modules.
    """
    if module == "__future__":
        return ""  # part of the language
    if module.startswith(".") or not (rules.authorizes(module) or (rules.authorizes_own(module) and own.has(module))):
        return module
    if rules.denied:
        for name in names:
            below = rules.denied_below(module) if name == "*" else f"{module}.{name}"
            if below and rules.denies(below):
                return below
    return ""


class Imports:
    """The imports of a syntax tree. `denied` has (line, module) of each refused one, by line.

    `package` is the one that relative imports refer to; empty in a module outside of packages, None in the program.
    """

    def __init__(self, tree: ast.AST, rules: Rules, own: NoModules, package: Optional[str] = None) -> None:
        self.denied: list[tuple[int, str]] = []
        self._modules: set[str] = set()
        self._rules = rules
        self._own = own
        self._package = package
        pending = [tree]
        while pending:  # not recursive: the tree may be deeper than our stack
            node = pending.pop()
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._note(node.lineno, alias.name, ())
            elif isinstance(node, ast.ImportFrom):
                module = absolute("." * node.level + (node.module or ""), self._package)
                self._note(node.lineno, module, [alias.name for alias in node.names])
            elif not isinstance(node, ast.expr):  # imports are statements; no expression holds one
                pending.extend(ast.iter_child_nodes(node))
        self.denied.sort()

    def _note(self, line: int, module: str, names: Sequence[str]) -> None:
        if not module:
            return  # Python itself refuses it
        self._modules.add(module)
        refused = refused_module(module, names, self._rules, self._own)
        if refused:
            self.denied.append((line, refused))

    @property
    def reported(self) -> list[str]:
        """Returns the modules, sorted, as many as fit into a result."""
        names: list[str] = []
        left_bytes = _MAX_REPORTED_BYTES
        for name in sorted(self._modules):
            size = len(name.encode("utf-8", "replace"))
            if len(name) <= MAX_IMPORT_CHARS and size <= left_bytes and len(names) < MAX_IMPORTS:
                names.append(name)
                left_bytes -= size
        return names


def absolute(module: str, package: Any) -> str:
    """Returns the absolute name of a module relative to the package; empty when it leads out of the package.

    Without a package the name stays relative: the program has no relative imports.
    """
    name = module.lstrip(".")
    level = len(module) - len(name)
    if not level or type(package) is not str:
        return module
    parts = package.split(".") if package else []
    if level > len(parts):
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


# ---------------------------------------------------------------------------------------------------------------------
# At run time


def make_import(
    enforcer: RuleEnforcer, given: Given, real_import: Callable[..., Any] = builtins.__import__
) -> Callable[..., Any]:
    """Returns the `__import__` that agent code calls by name; `given` turns a module into the object that it gets."""

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        package = globals.get("__package__") if type(globals) is dict and level else None
        check_import(enforcer, name, fromlist, level, package)
        loaded = None if type(name) is str and name in sys.modules else set(sys.modules)
        try:
            module = real_import(name, globals, locals, fromlist, level)
        except ControlException:
            if loaded is not None:
                _forget(sys.modules.keys() - loaded)
            raise
        return given(module, name, fromlist)

    return __import__


def _forget(modules: set[str]) -> None:
    """Removes the modules of an interrupted import: some are half initialized, and others lack their submodules.

    Modules in C stay, as many can't be loaded twice.
    """
    for name in modules:
        loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
        if type(loader).__name__ != "ExtensionFileLoader":
            sys.modules.pop(name, None)


def make_statement_import(
    checked: Callable[..., Any], members: Callable[[Any, Any], Any], real_import: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the `__import__` behind the import statements of agent code, and behind libraries written in C.

    `members` turns a module into the object that `from module import names` reads.

    C code imports (PyImport_Import) through the builtins of the Python frame that called it, so imports by numpy or
    time arrive here as if they were the agent's. They always pass a new list, and the same namespace twice, which no
    statement does. Code that calls `__import__` by name gets the other function.
    """

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if type(fromlist) is list and not fromlist and level == 0 and globals is not None and globals is locals:
            return real_import(name, globals, locals, fromlist, level)
        module = checked(name, globals, locals, fromlist, level)
        return members(module, fromlist) if fromlist else module

    return __import__


def check_import(enforcer: RuleEnforcer, name: Any, names: Any = (), level: int = 0, package: Any = None) -> None:
    """Refuses an import by agent code, unless it is authorized or loads one of the program's own modules."""
    if not isinstance(name, str) or not isinstance(level, int):
        return  # the real import raises the TypeError
    if type(name) is not str:
        name = str.__getitem__(name, slice(None))  # a subclass could compare equal to any name
    listed = [each for each in names if isinstance(each, str)] if isinstance(names, (list, tuple)) else ()
    module = absolute("." * level + name, package)
    if module not in sys.modules:
        enforcer.own.refresh()
    refused = module and refused_module(module, listed, enforcer.rules, enforcer.own)
    if refused:
        enforcer.refuse(ImportDenied(refused, enforcer.rules))
