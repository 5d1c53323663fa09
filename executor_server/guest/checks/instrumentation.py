"""Rewrites a syntax tree so that the program counts its operations, can be stopped, and yields its last value.

Promises
- The head of every loop body, every element of a comprehension and every entry of a function (lambdas and generators
  too) ticks. The rest, straight-line code, is bounded by the size of its source.
- The head of every `except` calls the guard, which raises control exceptions again.
- The value of the trailing expression, or of the last statement, is passed to `keep`.
- Under language rules, accesses go through hooks (accesses.py, patterns.py).
- Nothing else changes, except in patterns (patterns.py): results, scopes, laziness, docstrings, line and column
  numbers.

There are two kinds of tick. The cheapest costs no bytecode: the loop runs over `compress(iterable, ticks)`, which
takes an element and then a tick, asks for its iterator when and as often as the loop would, and never looks ahead.
Creating it costs as much as ten to twenty ticks. So it is used for outermost loops, for the first clause of a
comprehension, and for inner loops unless they surely have few iterations. It ticks before the element is assigned, so
an element that does not fit the target of such a loop is counted, too. Every other tick is a call of `next(ticks)`.
"""

from __future__ import annotations

import ast
import sys
import warnings
from _thread import allocate_lock
from ast import AST, Call, Constant, Expr, Load, expr, stmt
from types import CodeType

from .accesses import hook_accesses
from .imports import CALLED_IMPORT
from .patterns import guard_patterns
from .sentinels import Sentinels, call, position

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Sequence

    from .rules import Rules

TRAILING_EXPRESSION = "trailing_expression"
LAST_STATEMENT = "last_statement"

_builtin_compile = compile


_warnings_lock = allocate_lock()


def compile_tree(tree: AST, filename: str, mode: str = "exec", *, flags: int = 0, optimize: int = 0) -> CodeType:
    """Compiles without warnings: CPython would warn, at each sentinel, that bytes are not callable."""
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code: CodeType = _builtin_compile(tree, filename, mode, flags, True, optimize)  # type: ignore[call-overload]
        return code


def instrument(
    tree: AST,
    sentinels: Sentinels,
    *,
    rules: Rules,
    output_mode: str | None = None,
    string_annotations: bool = False,
) -> None:
    """Rewrites the tree in place.

    With `string_annotations`, or when the tree itself has `from __future__ import annotations`, the compiler turns
    annotations into text: they are not code then, and are left alone.
    """
    editor = _Editor(sentinels)
    skipped = _ANNOTATIONS if string_annotations or _has_string_annotations(tree) else ()
    nodes = list(_walk(tree, skipped))
    if rules.refused:
        if guard_patterns((node for node, _ in nodes), sentinels, rules):
            nodes = list(_walk(tree, skipped))
        hook_accesses([node for node, _ in nodes], sentinels, rules, skipped)
    if output_mode is not None and isinstance(tree, ast.Module):
        editor.keep_value(tree.body, last_statement=output_mode == LAST_STATEMENT)
    for node, in_loop in nodes:
        if type(node) is ast.For and not in_loop:
            editor.outer_for_loop(node)
            continue
        edit = _EDITS.get(type(node))
        if edit is not None:
            edit(editor, node)
    if any(type(node) is _TryStar for node, _ in nodes):
        for node, _ in nodes:
            editor.unwrap_groups(node)


# ---------------------------------------------------------------------------------------------------------------------
# The edits. Positions are those of the user's code next to them, so that a traceback points there.

# Up to this many iterations, counting in the body of an inner loop is cheaper than a counting iterator.
_FEW_TURNS = 12
_STATEMENT_LISTS = ("body", "orelse", "finalbody")
_TryStar: Any = getattr(ast, "TryStar", None)  # CPython 3.11 and later
_READABLE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.Slice),
    *(ast.expr_context, ast.operator, ast.unaryop),
)


class _Editor:
    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels

    def outer_for_loop(self, node: Any) -> None:
        node.iter = self._counting(node.iter, node)

    def for_loop(self, node: Any) -> None:
        if type(node) is ast.For and not _is_short(node.iter):
            self.outer_for_loop(node)
        else:
            node.body.insert(0, self._tick_statement(node.iter))

    def while_loop(self, node: Any) -> None:
        node.body.insert(0, self._tick_statement(node.test))

    def comprehension(self, node: Any) -> None:
        first, *others = node.generators
        if first.is_async:
            others.append(first)
        else:
            first.iter = self._counting(first.iter, node)
        for each in others:
            each.ifs.insert(0, self._tick(each.target))  # always true

    def lambda_(self, node: Any) -> None:
        body = node.body
        node.body = ast.BoolOp(op=ast.And(), values=[self._tick(body), body], **position(body))

    def function(self, node: Any) -> None:
        node.body.insert(1 if _is_docstring(node.body[0]) else 0, self._tick_statement(node))

    def handler(self, node: Any) -> None:
        node.body.insert(0, _statement(call(self._sentinels.guard, [], node)))

    def name(self, node: Any) -> None:
        if node.id == "__import__" and isinstance(node.ctx, Load):
            node.id = CALLED_IMPORT

    def unwrap_groups(self, node: Any) -> None:
        """Guards each `except*` from outside: it passes control exceptions on in a group, which the guard unwraps."""
        for name in _STATEMENT_LISTS:
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            for index, statement in enumerate(block):
                if type(statement) is _TryStar:
                    block[index] = self._guarded(statement)

    def keep_value(self, body: list[stmt], *, last_statement: bool) -> None:
        if not body or not (last_statement or isinstance(body[-1], Expr)):
            return
        if len(body) == 1 and _is_docstring(body[0]):
            body.append(_statement(self._keep(body[0].value)))  # type: ignore[attr-defined]
            return
        tail = body[-1:]
        self._keep_all(tail)
        body[-1:] = tail

    def _keep_all(self, statements: list[stmt]) -> None:
        """Passes the value of each statement to `keep`, which stores the last that is not None.

        As in smolagents' local executor, the value of `for` and `if` is the last value inside them; `while`, `with` and
        `try` have none.
        """
        pending = [statements]
        while pending:
            block = pending.pop()
            kept: list[stmt] = []
            for statement in block:
                kept.append(statement)
                if isinstance(statement, (Expr, ast.Assign, ast.AnnAssign)):
                    if statement.value is not None:
                        statement.value = self._keep(statement.value)
                elif isinstance(statement, ast.AugAssign):
                    if all(isinstance(node, _READABLE) or _is_hook(node) for node in ast.walk(statement.target)):
                        kept.append(_statement(self._keep(_loaded(statement.target))))
                elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    name = ast.Name(id=statement.name, ctx=Load(), **position(statement))
                    kept.append(_statement(self._keep(name)))
                elif isinstance(statement, (ast.If, ast.For, ast.AsyncFor)):
                    pending += [statement.body, statement.orelse]
            block[:] = kept

    def _keep(self, value: expr) -> Call:
        return call(self._sentinels.keep, [value], value)

    def _counting(self, iterable: expr, node: Any) -> Call:
        at = iterable if sys.version_info >= (3, 13) else node  # where CPython itself says "not iterable"
        return call(self._sentinels.compress, [iterable, self._ticks(at)], at)

    def _tick(self, at: Any) -> Call:
        return call(self._sentinels.next, [self._ticks(at)], at)

    def _ticks(self, at: Any) -> Constant:
        return Constant(value=self._sentinels.ticks, kind=None, **position(at))

    def _tick_statement(self, at: Any) -> stmt:
        return _statement(self._tick(at))

    def _guarded(self, statement: Any) -> stmt:
        at = position(statement)
        handler = ast.ExceptHandler(type=None, name=None, body=[ast.Raise(exc=None, cause=None, **at)], **at)
        self.handler(handler)
        return ast.Try(body=[statement], handlers=[handler], orelse=[], finalbody=[], **at)


_EDITS: dict[type, Callable[[_Editor, Any], None]] = {
    ast.For: _Editor.for_loop,
    ast.AsyncFor: _Editor.for_loop,
    ast.While: _Editor.while_loop,
    ast.ListComp: _Editor.comprehension,
    ast.SetComp: _Editor.comprehension,
    ast.DictComp: _Editor.comprehension,
    ast.GeneratorExp: _Editor.comprehension,
    ast.Lambda: _Editor.lambda_,
    ast.FunctionDef: _Editor.function,
    ast.AsyncFunctionDef: _Editor.function,
    ast.ExceptHandler: _Editor.handler,
    ast.Name: _Editor.name,
}


def _statement(value: expr) -> stmt:
    return Expr(value=value, **position(value))


def _is_docstring(statement: Any) -> bool:
    return (
        isinstance(statement, Expr) and isinstance(statement.value, Constant) and isinstance(statement.value.value, str)
    )


def _is_short(iterable: expr) -> bool:
    """True if the loop surely has too few iterations for a counting iterator to pay off."""
    if isinstance(iterable, (ast.Tuple, ast.List)):
        return len(iterable.elts) <= _FEW_TURNS and not any(type(each) is ast.Starred for each in iterable.elts)
    if type(iterable) is Call and type(iterable.func) is ast.Name and iterable.func.id == "range":
        stop = iterable.args[-1] if len(iterable.args) == 1 else None
        return type(stop) is Constant and type(stop.value) is int and stop.value <= _FEW_TURNS
    return False


def _is_hook(node: AST) -> bool:
    return isinstance(node, Call) and isinstance(node.func, Constant)


def _loaded(target: Any) -> expr:
    """Returns a copy of an assignment's target that reads it."""
    fields: dict[str, Any] = {name: getattr(target, name) for name in target._fields}
    fields["ctx"] = Load()
    return type(target)(**fields, **position(target))  # type: ignore[no-any-return]


def _has_string_annotations(tree: AST) -> bool:
    statements = tree.body if isinstance(tree, (ast.Module, ast.Interactive)) else []
    return any(
        isinstance(statement, ast.ImportFrom)
        and statement.module == "__future__"
        and any(alias.name == "annotations" for alias in statement.names)
        for statement in statements
    )


_ANNOTATIONS = ("annotation", "returns")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _walk(tree: AST, skipped: Sequence[str]) -> Iterator[tuple[AST, bool]]:
    """Yields all nodes, with true for those in a loop of their function; not recursive, as trees may be very deep."""
    pending = [(tree, False)]
    while pending:
        node, in_loop = pending.pop()
        yield node, in_loop
        in_loop = (in_loop or isinstance(node, _LOOPS)) and not isinstance(node, _FUNCTIONS)
        for name in node._fields:
            if name in skipped:
                continue
            value = getattr(node, name, None)
            if isinstance(value, AST):
                pending.append((value, in_loop))
            elif isinstance(value, list):
                pending.extend((item, in_loop) for item in value if isinstance(item, AST))


# ---------------------------------------------------------------------------------------------------------------------


def spans(tree: ast.Module) -> list[list[int]]:
    """Returns the first and last line of each top-level statement with its decorators; call it before `instrument`."""
    return [[_first_line(statement), statement.end_lineno or statement.lineno] for statement in tree.body]


def _first_line(statement: stmt) -> int:
    decorators: list[expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


# ---------------------------------------------------------------------------------------------------------------------
# Programs that need a running event loop although they await nothing, as in a notebook: `task = create_task(work())`
# may stand in a step of its own. A program that runs a loop itself, as with `asyncio.run`, can't run in another one.

_NEED = frozenset({"create_task", "ensure_future", "gather", "get_running_loop", "current_task"})
_RUN = frozenset({"run", "Runner", "run_until_complete", "run_forever"})
_AWAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)


def run_in_loop(tree: ast.Module, source: str) -> list[str]:
    """Gives such a program an `await` that is never reached, so that it compiles to a coroutine.

    Returns names that the source calls and does not bind. If there are any, the program needs a loop only if one of
    them is asyncio's, by an import of an earlier program.
    """
    if not any(name in source for name in _NEED):
        return []
    needs_loop, names = _needs_loop(tree)
    if needs_loop or names:
        never = ast.Expr(value=ast.Await(value=ast.Constant(value=None)))
        dead = ast.copy_location(ast.If(test=ast.Constant(value=False), body=[never], orelse=[]), tree.body[-1])
        tree.body.insert(-1, ast.fix_missing_locations(dead))  # imports of the future, if any, stay first
    return [] if needs_loop else sorted(names)


def _needs_loop(tree: ast.Module) -> tuple[bool, set[str]]:
    """Returns whether the program surely needs a loop, and the names that decide otherwise."""
    needs = False
    unbound: set[str] = set()
    imported, bound = _bindings(tree)
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            name, of_asyncio = _called(node.func, imported)
            if name in _RUN and (of_asyncio or name.startswith("run_")):
                return False, set()
            needs = needs or (of_asyncio and name in _NEED)
            if isinstance(node.func, ast.Name) and name in _NEED and name not in imported | bound:
                unbound.add(name)
        needs = needs or isinstance(node, _AWAITS) or getattr(node, "is_async", 0) == 1
        pending.extend(ast.iter_child_nodes(node))
    return needs, unbound


def _called(function: ast.expr, imported: set[str]) -> tuple[str, bool]:
    """Returns the name, and whether it is one of asyncio's: an attribute of that module, or imported from it."""
    if isinstance(function, ast.Attribute):
        return function.attr, isinstance(function.value, ast.Name) and function.value.id == "asyncio"
    return (function.id, function.id in imported) if isinstance(function, ast.Name) else ("", False)


def _bindings(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Returns the names that the source imports from asyncio, and those that it binds in other ways, in any scope."""
    imported: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "asyncio" and not node.level:
            imported.update(
                *((_NEED | _RUN) if each.name == "*" else {each.asname or each.name} for each in node.names)
            )
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update(each.asname or each.name for each in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, Load):
            bound.add(node.id)
    return imported, bound
