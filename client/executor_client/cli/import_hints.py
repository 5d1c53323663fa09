"""Suggests the option that authorizes a refused import."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from executor_client._core.session_base import short_id
from executor_client.cli.console import Console
from executor_client.results import ExecutionResult, Outcome, SessionInfo
from executor_client.session import Session

_NAMES_MAX = 5


def show_end(console: Console, session: Session, result: ExecutionResult, option: str = "") -> None:
    """Prints how a program ended, and the option that would authorize a refused import."""
    console.show_end(result)
    hint = import_hint(result, session.info, option)
    if hint:
        console.remark(hint)


def import_hint(result: ExecutionResult, info: SessionInfo, option: str) -> str:
    """Returns a hint for a program that failed on a refused import; otherwise empty.

    `option` is a format for the names, such as "--imports {}"; empty if the command has no such option. The names come
    from the failed statement, not from the error's text, which the sandbox may forge.
    """
    if result.outcome is not Outcome.IMPORT_DENIED:
        return ""
    names = ",".join(_refused(result, info)) or "NAME"
    if not option:
        session_id = short_id(info.session_id, 12)
        return f"`executor repl --session {session_id} --imports {names}` authorizes it, if the policy allows"
    return f"{option.format(names)} authorizes it, if the policy allows; see `executor policy`"


def _refused(result: ExecutionResult, info: SessionInfo) -> list[str]:
    statement = "" if result.error is None else result.error.statement
    try:
        tree = ast.parse(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    authorized = {pattern.removesuffix(".*") for pattern in info.authorized_imports}
    names = [name for name in dict.fromkeys(_imported(tree)) if name not in authorized]
    return names[:_NAMES_MAX]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
