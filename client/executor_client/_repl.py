"""`executor repl`: an interactive Python whose interpreter is in a sandbox.

What the user types is compiled here only to see whether it is complete; it runs there.
"""

from __future__ import annotations

import ast
import codeop

from executor_client._terminal import Console
from executor_client.errors import InvalidRequest
from executor_client.results import VariablesState
from executor_client.session import Session

PROMPT = ">>> "
CONTINUATION = "... "


def run(session: Session, console: Console) -> int:
    """Reads, executes and prints until the end of input. Returns the exit code."""
    _enable_line_editing()
    console.remark(f"Python {session.info.python_version} in session {session.session_id}; Ctrl-D ends it")
    while (source := _read_statement(console)) is not None:
        if source.strip() and not _execute(session, console, source):
            return 1
    return 0


def _execute(session: Session, console: Console, source: str) -> bool:
    """Whether the session can go on."""
    generation = session.generation
    try:
        result = session.execute(source, on_event=console.show_event)
    except KeyboardInterrupt:
        console.fail("cancelled")
        if session.refresh().generation != generation:
            console.remark("the interpreter was replaced, its variables are gone")
        return True
    except InvalidRequest as error:
        console.fail(str(error))
        return True
    console.show_end(result)
    if result.succeeded and result.output is not None:
        console.show_value(result.output)
    return result.state is not VariablesState.LOST


def _read_statement(console: Console) -> str | None:
    """One complete statement, however many lines; None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            lines.append(input(CONTINUATION if lines else PROMPT))
        except EOFError:
            console.remark("end")
            return None
        except KeyboardInterrupt:
            console.fail("input dropped")
            return ""
        source = "\n".join(lines)
        if _is_complete(source):
            return source


def _is_complete(source: str) -> bool:
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        return compiler(source, "<input>", "single") is not None
    except (SyntaxError, ValueError, OverflowError):
        # The sandbox's Python may be another one than ours: it is the one to judge.
        return True


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it is what makes input() editable
    except ImportError:
        # A Python built without it: lines can be typed all the same.
        return
