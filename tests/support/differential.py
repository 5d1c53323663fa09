"""Runs every program of the corpus plain, instrumented, and with its accesses hooked; prints the differences as JSON.

A script of its own, so that each CPython at hand can run it, with the repository and its `proto` as PYTHONPATH.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from tests.support.agent_program import BUDGET, Agent
from tests.support.corpus import programs

FILENAME = "<execution-1>"


def main() -> None:
    differences: list[Any] = []
    corpus = programs("ordinary")
    for name, source in corpus.items():
        linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
        plain, instrumented, again = _plain(source), _instrumented(source), _instrumented(source)
        hooked = _instrumented(source, refused=("module_attributes", "dangerous_functions"))
        if plain != instrumented[0]:
            differences.append([name, plain, instrumented[0]])
        if instrumented != again:
            differences.append([name, instrumented, again])
        guarded = _instrumented(source, denied=("nothing",), refused=("foreign_modules",))
        for other in (hooked, guarded):
            if instrumented != other:
                differences.append([name, instrumented, other])
    sys.stdout.write(json.dumps({"ran": len(corpus), "differences": differences}))


def _plain(source: str) -> list[str]:
    tree = ast.parse(source, FILENAME)
    tail: Any = tree.body[-1] if isinstance(tree.body[-1], ast.Expr) else None
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if tail is not None and len(tree.body) > 1:
        tree.body.pop()

    def go() -> Any:
        exec(compile(tree, FILENAME, "exec", dont_inherit=True), namespace)
        return (
            None
            if tail is None
            else eval(compile(ast.Expression(tail.value), FILENAME, "eval", dont_inherit=True), namespace)
        )

    return _observed(go, namespace)


def _instrumented(source: str, denied: Sequence[str] = (), refused: Sequence[str] = ()) -> tuple[list[str], int]:
    agent = Agent(denied=denied, refused=refused)
    ended: list[Any] = []

    def go() -> Any:
        ended.append(agent.run(source, BUDGET))
        if ended[0].error is not None:
            raise ended[0].error
        return ended[0].value

    return _observed(go, agent.namespace), ended[0].operations


def _observed(go: Any, namespace: dict[str, Any]) -> list[str]:
    """Output, value or traceback, and variables."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        try:
            value = repr(go())
        except Exception as error:  # noqa: BLE001 (the border of the programs)
            value = _own_traceback(error)
    variables = {name: repr(value) for name, value in namespace.items() if name != "__builtins__"}
    return [_no_addresses(text) for text in (stdout.getvalue(), value, str(sorted(variables.items())))]


def _own_traceback(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILENAME:
        trace = trace.tb_next
    captured = traceback.TracebackException(type(error), error, trace)
    captured.stack[:] = [frame for frame in captured.stack if not frame.filename.endswith("/guest/checks/hooks.py")]
    return "".join(captured.format())


def _no_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


if __name__ == "__main__":
    main()
