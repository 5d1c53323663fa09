"""The line editor of `executor repl`: history, colours, several lines, and completion of names from the sandbox.

Uses prompt_toolkit, which is an extra (`cli`), since scripts and agents don't need it.
"""

from __future__ import annotations

import builtins
import keyword
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor_client._core.completion import listing, names_of
from executor_client._core.endpoint import state_dir
from executor_client.errors import ExecutorClientError
from executor_client.session import Session

if TYPE_CHECKING:
    from executor_client.cli.repl import Reader

NO_EDITOR = "for history and completion: pip install 'remote-executor[cli]'"
COMPLETION_TIMEOUT_S = 2.0
"""Seconds that the sandbox may take to list names for a completion."""
COMMANDS = ("%import", "%ls", "%put", "%get", "%images", "%undo", "%session", "%help", "help", "exit()")


def make_reader(session: Session, is_complete: Callable[[str], bool]) -> Reader | str:
    """Returns an editor for the terminal, or why there is none: empty if stdin or stdout is not a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    try:
        import prompt_toolkit
    except ModuleNotFoundError:
        return NO_EDITOR
    del prompt_toolkit
    return _editor(session, is_complete)


def _editor(session: Session, is_complete: Callable[[str], bool], **streams: Any) -> Reader:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    history = _history_file()
    prompts: PromptSession[str] = PromptSession(
        history=InMemoryHistory() if history is None else FileHistory(str(history)),
        completer=_completer(session),
        complete_while_typing=False,  # each completion is an execution in the sandbox, so only with Tab
        lexer=_lexer(),
        multiline=True,
        key_bindings=_key_bindings(is_complete),
        prompt_continuation=lambda width, *_: "... ".rjust(width),
        **streams,
    )

    class Editor:
        def read(self, prompt: str) -> str:
            return _ended(prompts.prompt(prompt))

    return Editor()


def _ended(text: str) -> str:
    """Removes the indentation of the empty last line, which ends a block."""
    return text.rstrip() + "\n" if "\n" in text else text


def _history_file() -> Path | None:
    """Returns a file that only this user can read, since lines may hold secrets. None if it can't be created."""
    path = state_dir() / "repl-history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError:
        return None
    return path


def _lexer() -> Any:
    from prompt_toolkit.lexers import PygmentsLexer

    try:
        from pygments.lexers.python import PythonLexer
    except ModuleNotFoundError:
        return None
    return PygmentsLexer(PythonLexer)


def _key_bindings(is_complete: Callable[[str], bool]) -> Any:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        document = buffer.document
        at_end = not document.text_after_cursor.strip()
        text = buffer.text if document.current_line.strip() else _ended(buffer.text)
        if at_end and is_complete(text):
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=True)
            if document.text_before_cursor.rstrip().endswith(":"):
                buffer.insert_text("    ")

    @bindings.add("tab")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.strip():
            buffer.start_completion(insert_common_part=True)
        else:
            buffer.insert_text("    ")

    return bindings


def _completer(session: Session) -> Any:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class SandboxCompleter(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            for name, typed in completions(session, document.text_before_cursor):
                yield Completion(name, start_position=-typed)

    return SandboxCompleter()


def completions(session: Session, text: str) -> Iterator[tuple[str, int]]:
    """Yields completions for the end of the text, each with the number of characters already typed.

    The part before the last dot is evaluated in the sandbox, like in Python's own completer, but only if it consists of
    names joined by dots, so that nothing is called.
    """
    if text.startswith("%") or text in ("h", "he", "hel", "help", "e", "ex", "exi", "exit"):
        yield from ((command, len(text)) for command in COMMANDS if command.startswith(text))
        if text.startswith("%"):
            return
    found = listing(text)
    if found is None:
        return
    expression, typed = found
    names = _names_in_sandbox(session, expression)
    if expression == "dir()":
        names |= {*keyword.kwlist, *dir(builtins)}
    for name in sorted(names, key=lambda each: (each.startswith("_"), each)):
        if name.startswith(typed) and (typed.startswith("_") or not name.startswith("_")):
            yield name, len(typed)


def _names_in_sandbox(session: Session, expression: str) -> set[str]:
    try:
        return names_of(session.evaluate(expression, timeout_s=COMPLETION_TIMEOUT_S))
    except ExecutorClientError:
        return set()  # unknown name, or refused by the policy
