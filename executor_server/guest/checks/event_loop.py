"""Finds programs that need a running event loop although they await nothing, as in a notebook.

`task = asyncio.create_task(work())` may stand in a step of its own. CPython's REPL for asyncio and notebooks run it,
since their loop runs all the time. A program that runs a loop itself, as by `asyncio.run`, can't be in another one.
"""

from __future__ import annotations

import ast

_NEED = frozenset({"create_task", "ensure_future", "gather", "get_running_loop", "current_task"})
_RUN = frozenset({"run", "Runner", "run_until_complete", "run_forever"})


def run_in_loop(tree: ast.Module, source: str) -> None:
    """Gives such a program an `await` that is never reached: it is compiled to a coroutine."""
    if not any(name in source for name in _NEED) or not _needs_loop(tree):
        return
    never = ast.Expr(value=ast.Await(value=ast.Constant(value=None)))
    dead = ast.copy_location(ast.If(test=ast.Constant(value=False), body=[never], orelse=[]), tree.body[-1])
    tree.body.insert(-1, ast.fix_missing_locations(dead))  # imports of the future, if any, stay first


def _needs_loop(tree: ast.Module) -> bool:
    needs = False
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            name, of_asyncio = _called(node.func)
            if name in _RUN and (of_asyncio or name.startswith("run_")):
                return False
            needs = needs or (of_asyncio and name in _NEED)
        pending.extend(ast.iter_child_nodes(node))
    return needs


def _called(function: ast.expr) -> tuple[str, bool]:
    """Returns the name, and whether it is one of asyncio's: an attribute of that module, or a name by itself."""
    if isinstance(function, ast.Attribute):
        return function.attr, isinstance(function.value, ast.Name) and function.value.id == "asyncio"
    return (function.id, True) if isinstance(function, ast.Name) else ("", False)
