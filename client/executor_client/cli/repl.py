"""`executor repl`: an interactive Python whose interpreter is in a sandbox.

Input is parsed here only to see whether a statement is complete, and for the repl's own commands: `help`, `exit()` and
those of `%help`. All other input runs in the sandbox, including notebook magics and `!COMMAND`.
"""

from __future__ import annotations

import ast
import codeop
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from executor_client._core.terminal import aligned
from executor_client._core.undo_history import UndoHistory
from executor_client.cli.approving import typing
from executor_client.cli.console import Console
from executor_client.cli.import_hints import show_end
from executor_client.errors import ExecutorClientError, InvalidRequest, PolicyViolationError
from executor_client.results import ExecutionResult, VariablesState
from executor_client.session import Session

PROMPT = ">>> "
CONTINUATION = "... "

# A traceback line of code from `_keeping_value`, and the marks below it.
_KEPT = re.compile(r"^    __ = (.*)(?:(\n    ) {5}(?= *[~^]))?", re.MULTILINE)
_LEAVE = frozenset({"exit", "exit()", "quit", "quit()"})

_HELP = """\
Python runs in the sandbox and keeps its variables until the session ends.
  help(NAME)         show the documentation of an object in the sandbox
  %import A, B.*     authorize more modules, if the policy allows it
  %ls [PATH]         list the files of the workspace
  %put FILE [PATH]   copy a local file into the workspace
  %get PATH [FILE]   copy a file from the workspace
  _                  the last value
  !COMMAND           run a command in the workspace; %time, %%bash and other magics work too
  %images [DIR]      save figures and images in a local directory
  %undo [N]          undo the last statement, or the last N
  %session           show this session and its limits
  exit(), Ctrl-D     end; Ctrl-C interrupts the running statement, or drops the input
  Tab completes names of the sandbox; Up finds earlier lines."""


class Reader(Protocol):
    """A source of statements."""

    def read(self, prompt: str) -> str:
        """Returns one line, or a whole statement. Raises EOFError, KeyboardInterrupt."""
        ...


class PlainReader:
    """Reads single lines from standard input, which may be a pipe."""

    def read(self, prompt: str) -> str:
        return input(prompt)


def run(session: Session, console: Console, reader: Reader | None = None) -> int:
    """Runs the repl until the input ends. Returns the exit code."""
    if reader is None:
        reader = _reader(session, console)
    console.remark(f"Python {session.info.python_version} in session {session.session_id}; type `help` for help")
    repl = _Repl(session, console)
    while True:
        with typing:
            source = _read_statement(console, reader)
        if source is None:
            return 0
        if source.strip() in _LEAVE:
            return 0
        if source.strip() and not repl.take(source):
            return 1


def _reader(session: Session, console: Console) -> Reader:
    """Returns a reader with history and completion for a terminal; a plain one for a pipe, or without the extra."""
    from executor_client.cli.line_editor import make_reader

    editor = make_reader(session, is_complete)
    if isinstance(editor, str):
        if editor:
            console.remark(editor)
        return PlainReader()
    return editor


class _Repl:
    def __init__(self, session: Session, console: Console) -> None:
        self._session = session
        self._console = console
        self._takes_savepoints = True  # until the policy refuses them
        self._history = UndoHistory()
        self._may_do_all = "*" in session.info.authorized_imports and not session.info.denied_imports
        self._commands: dict[str, Callable[[str], None]] = {
            "images": self._keep_images,
            "import": self._import,
            "ls": self._list_files,
            "put": self._put,
            "get": self._get,
            "undo": self._undo,
            "session": self._show_session,
            "help": lambda _: console.show_lines(_HELP.splitlines()),
        }

    def take(self, source: str) -> bool:
        """Runs a command or a statement. Returns False if the session is lost."""
        text = source.strip()
        if text in ("help", "help()"):
            self._commands["help"]("")
            return True
        name, _, argument = text[1:].partition(" ")
        if text.startswith("%") and name in self._commands:
            self._run_command(name, argument)
            return True
        return self._execute(source, _help_code(text, whole=self._may_do_all) or _keeping_value(source))

    def _execute(self, typed: str, source: str) -> bool:
        session, console = self._session, self._console
        generation = session.generation
        try:
            result = self._run(source)
        except KeyboardInterrupt:
            console.fail("cancelled")
            savepoints = session.savepoints() if self._takes_savepoints else []
            has_savepoint = self._history.note_interrupted(typed, savepoints)
            if session.refresh().generation != generation:
                if has_savepoint:
                    self._history.undone(1)
                kept = "and variables are as before" if has_savepoint else "and its variables are lost"
                console.remark(f"the interpreter was restarted, {kept}")
            return True
        except InvalidRequest as error:
            console.fail(str(error))
            return True
        self._history.note(typed, result)
        if result.error is not None and source != typed:
            traceback = _KEPT.sub(r"    \1\2", result.error.traceback)
            result = replace(result, error=replace(result.error, traceback=traceback))
        show_end(console, session, result, "%import {}")
        if result.succeeded:
            console.show_value(result.output)
        return result.state is not VariablesState.LOST

    def _run(self, source: str) -> ExecutionResult:
        try:
            return self._session.execute(source, on_event=self._console.show_event, savepoint=self._takes_savepoints)
        except PolicyViolationError:
            if not self._takes_savepoints:
                raise
            self._takes_savepoints = False
            return self._run(source)

    def _undo(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            raise InvalidRequest("%undo takes a number of statements: %undo 2")
        steps = int(argument or 1)
        back = self._session.rollback(self._history.before(steps))
        names = ", ".join(f"`{name}`" for name in self._history.undone(steps))
        self._console.remark(f"undone: {names}; variables and files are as before")
        for line in (*back.savepoint.left_out, *back.left_out):
            self._console.remark(f"not restored: {line}")

    def _run_command(self, name: str, argument: str) -> None:
        try:
            self._commands[name](argument.strip())
        except (InvalidRequest, OSError) as error:
            self._console.fail(str(error))
        except ExecutorClientError as error:
            if error.reason == "SESSION_NOT_FOUND":
                raise
            self._console.fail(error.message)

    def _import(self, argument: str) -> None:
        names = [name.strip() for name in argument.replace(",", " ").split()]
        if not names:
            raise InvalidRequest("%import takes names of modules: %import os, numpy.*")
        self._session.authorize_imports(names)
        self._console.remark(f"authorized: {', '.join(names)}")

    def _list_files(self, path: str) -> None:
        files = self._session.files.list(path)
        self._console.show_lines(aligned([(f"{file.size_bytes:,}", file.path) for file in files]) if files else [])

    def _put(self, argument: str) -> None:
        source, target = _two_names(argument, "%put FILE [PATH]")
        self._session.files.put(source, target)

    def _get(self, argument: str) -> None:
        source, target = _two_names(argument, "%get PATH [FILE]")
        self._session.files.get(source, target)

    def _keep_images(self, directory: str) -> None:
        self._console.keep_images(Path(directory or "."))

    def _show_session(self, argument: str) -> None:
        info = self._session.refresh()
        limits = [(name, f"{value:,}") for name, value in vars(info.limits).items() if value is not None]
        rows = [("session", info.session_id), ("image", info.image), ("backend", info.backend), *limits]
        rows += [("imports", ", ".join(info.authorized_imports)), ("network", ", ".join(info.network) or "none")]
        self._console.show_lines(aligned(rows))


def _two_names(argument: str, form: str) -> tuple[str, str]:
    """Returns source and target; the default target is the last part of the source."""
    names = argument.split()
    if len(names) not in (1, 2):
        raise InvalidRequest(f"write {form}")
    return names[0], names[-1] if len(names) == 2 else names[0].rstrip("/").rpartition("/")[2]


def _keeping_value(source: str) -> str:
    """Returns code that also assigns the value of the last expression to `_`, unless it is None."""
    try:
        last = ast.parse(source).body[-1]
    except (SyntaxError, ValueError, RecursionError, MemoryError, IndexError):
        return source
    if not isinstance(last, ast.Expr):
        return source
    encoded = source.encode()  # columns of the tree are bytes
    starts_at = sum(map(len, encoded.splitlines(keepends=True)[: last.lineno - 1])) + last.col_offset
    before, text = encoded[:starts_at].decode(), ast.get_source_segment(source, last)
    return f"{before}__ = {text}\nif __ is not None: _ = __\n__"


def _help_code(text: str, *, whole: bool) -> str:
    """Returns code that prints the documentation of NAME, for `help(NAME)`; otherwise empty.

    A sandbox has no `help`, because it does not load Python's site module. If imports are restricted, only the
    docstring is printed.
    """
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    if not (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "help"
        and len(call.args) == 1
        and not call.keywords
    ):
        return ""
    argument = ast.get_source_segment(text, call.args[0]) or ""
    if whole:
        return f"import pydoc\nprint(pydoc.render_doc({argument}, '%s', renderer=pydoc.plaintext))"
    return f"print(type({argument}), getattr({argument}, '__doc__', None) or 'It has no documentation.', sep='\\n')"


def _read_statement(console: Console, reader: Reader) -> str | None:
    """Reads one complete statement. Returns None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            lines.append(reader.read(CONTINUATION if lines else PROMPT))
        except EOFError:
            console.remark("end")
            return None
        except KeyboardInterrupt:
            console.fail("input dropped")
            return ""
        source = "\n".join(lines)
        if is_complete(source):
            return source


def is_complete(source: str) -> bool:
    """Returns True if the source can be executed, or if no further line would make it valid."""
    if source.lstrip().startswith("%%"):  # a cell magic ends with an empty line
        return source.endswith("\n")
    if source.lstrip().startswith("%"):
        return True
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        return compiler(source, "<input>", "single") is not None
    except (SyntaxError, ValueError, OverflowError):
        # The sandbox may run another Python version, so it decides.
        return True
