"""The imports of agent code: checked in its source, and again when they happen.

Only imports of agent code are checked; what a library imports for itself is free. Both checks come to the same verdict.
The first sees what never runs too, as `import` in a branch that is not taken: such a program is refused as a whole. A
refusal is no ImportError: a program that handled it as one would go on as if the module were merely missing.

What is there already is no import: who authorizes `sys` authorizes `sys.modules`, and a module's attributes are looked
at by the rule language.module_attributes only (hooks.py).
"""

from __future__ import annotations

import ast
import builtins

from .control import Refusal
from .run import MAX_IMPORT_CHARS, MAX_IMPORTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Sequence

    from .referee import Referee
    from .rules import Rules

    Given = Callable[[Any, str, Any], Any]

CALLED_IMPORT = "import()"
"""Where the builtins of agent code keep what its own name `__import__` means; not a name that a program can write."""

# Of what a result says that its source imports.
_MAX_REPORTED_BYTES = 4096
# What a refused program is told; policies can be long, and names of modules.
_MAX_NAME_CHARS = 200
_MAX_LISTED_CHARS = 4000


class ImportDenied(Refusal):
    """Agent code imported what is not authorized."""

    __module__ = "builtins"  # so that a traceback shows its plain name
    outcome = "import_denied"

    def __init__(self, module: str, rules: Rules) -> None:
        super().__init__(refusal(module, rules))
        self.module = module


def refusal(module: str, rules: Rules) -> str:
    """What a refused program is told; a module that begins with a dot is a relative import, which is always refused."""
    why = ""
    if module.startswith("."):
        why = ": the program is in no package, so it has no relative imports"
    elif rules.denies(module):
        why = ": the policy denies it"
    name = module if len(module) <= _MAX_NAME_CHARS else f"{module[:_MAX_NAME_CHARS]}…"
    return f"Import of {name} is not allowed{why}. Authorized imports are: {listed(rules.authorized)}"


def listed(patterns: Sequence[str]) -> str:
    text = str(list(patterns))
    if len(text) <= _MAX_LISTED_CHARS:
        return text
    cut = text.rfind(",", 0, _MAX_LISTED_CHARS)
    return f"{text[:cut]}, …] ({len(patterns)} in all)"


def refused_module(module: str, names: Iterable[str], rules: Rules) -> str:
    """Of `import module`, or `from module import names`: the module that is not authorized; empty when all are."""
    if module == "__future__":
        return ""  # part of the language
    if module.startswith(".") or not rules.authorizes(module):
        return module
    if rules.denied:
        for name in names:
            below = rules.denied_below(module) if name == "*" else f"{module}.{name}"
            if below and rules.denies(below):
                return below
    return ""


class Imports:
    """The imports of a syntax tree: `denied` are (line, module) of those refused, by line."""

    def __init__(self, tree: ast.AST, rules: Rules) -> None:
        self.denied: list[tuple[int, str]] = []
        self._modules: set[str] = set()
        self._rules = rules
        pending = [tree]
        while pending:  # not recursive: the tree may be deeper than our stack
            node = pending.pop()
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._note(node.lineno, alias.name, ())
            elif isinstance(node, ast.ImportFrom):
                self._note(node.lineno, "." * node.level + (node.module or ""), [alias.name for alias in node.names])
            elif not isinstance(node, ast.expr):  # imports are statements; no expression holds one
                pending.extend(ast.iter_child_nodes(node))
        self.denied.sort()

    def _note(self, line: int, module: str, names: Sequence[str]) -> None:
        self._modules.add(module)
        refused = refused_module(module, names, self._rules)
        if refused:
            self.denied.append((line, refused))

    @property
    def reported(self) -> list[str]:
        """The modules, sorted; so many, and so long, as a result has room for."""
        names: list[str] = []
        room = _MAX_REPORTED_BYTES
        for name in sorted(self._modules):
            size = len(name.encode("utf-8", "replace"))
            if len(name) <= MAX_IMPORT_CHARS and size <= room and len(names) < MAX_IMPORTS:
                names.append(name)
                room -= size
        return names


# ---------------------------------------------------------------------------------------------------------------------
# At run time


def make_import(
    referee: Referee, given: Given, real_import: Callable[..., Any] = builtins.__import__
) -> Callable[..., Any]:
    """The `__import__` that agent code calls by name; `given` makes of a module what agent code gets."""

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        check_import(referee, name, fromlist, level)
        return given(real_import(name, globals, locals, fromlist, level), name, fromlist)

    return __import__


def make_statement_import(
    checked: Callable[..., Any], members: Callable[[Any, Any], Any], real_import: Callable[..., Any]
) -> Callable[..., Any]:
    """The `__import__` behind the import statements of agent code, and behind libraries written in C.

    `members` makes of a module what `from module import names` takes them from.

    C code imports (PyImport_Import) through the builtins of whatever Python frame called it, so what numpy or time need
    for themselves comes here as if the agent had asked. It always comes with a new list and the same namespace twice,
    which no statement does; code that calls `__import__` by name gets the other one.
    """

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if type(fromlist) is list and not fromlist and level == 0 and globals is not None and globals is locals:
            return real_import(name, globals, locals, fromlist, level)
        module = checked(name, globals, locals, fromlist, level)
        return members(module, fromlist) if fromlist else module

    return __import__


def check_import(referee: Referee, name: Any, names: Any = (), level: int = 0) -> None:
    """Refuses an import that agent code asks for, unless it is authorized."""
    if not isinstance(name, str) or not isinstance(level, int):
        return  # the real import says what is wrong with it
    if type(name) is not str:
        name = str.__getitem__(name, slice(None))  # what it is, whatever it says of itself
    listed = [each for each in names if isinstance(each, str)] if isinstance(names, (list, tuple)) else ()
    refused = refused_module("." * level + name, listed, referee.rules)
    if refused:
        referee.refuse(ImportDenied(refused, referee.rules))
