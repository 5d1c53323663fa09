"""Tells how a refused import can be authorized, with the very option to type."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from executor_client.results import ExecutionResult, Outcome, SessionInfo

_NAMES_MAX = 5


def import_hint(result: ExecutionResult, info: SessionInfo, option: str) -> str:
    """A sentence for a program that ended at an import; empty for any other.

    `option` has a place for the names, as in "--imports {}"; empty where the session is another's to authorize for.
    The names are those of the statement that failed, not of the error's text, which the sandbox may have made up.
    """
    if result.outcome is not Outcome.IMPORT_DENIED:
        return ""
    names = ",".join(_refused(result, info)) or "NAME"
    if not option:
        return f"`executor repl --session {info.session_id[:12]} --imports {names}` authorizes it, if the policy allows"
    return f"{option.format(names)} authorizes it, if the policy allows; `executor policy` tells"


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
