# Made of aio_computer.py by tools/unasync.py: change that, and run `make unasync`.
"""A session as a model's computer, of the blocking client: a shell and files, with answers in text.

The tools for smolagents and the MCP server use it. Everything that it returns is bounded. Raises ToolRefusal, with a
sentence for the model, for calls that can't be done; the client's own errors for a lost session or daemon.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from executor_client._core import computer as core
from executor_client._core.arguments import checks_calls
from executor_client._core.computer import ToolRefusal
from executor_client._core.process import KeptOutput
from executor_client._sync import OnOutput
from executor_client.errors import NotFoundError
from executor_client.session import Session

# Processes whose read position is kept; a session has at most this many.
_SEEN_MAX = 1_024
# No pager, no colours.
_ENVIRONMENT = {"TERM": "dumb", "PAGER": "cat"}
_KILL_WAIT_S = 5.0


@checks_calls
class Computer:
    """A shell and the files of a session. `find` returns the session that each call works in."""

    def __init__(self, find: Callable[[], Session]) -> None:
        self._find = find
        self._seen: dict[str, int] = {}  # by process, the number of the last event that was shown

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, command: str, timeout_s: float | None = None, on_output: OnOutput | None = None) -> str:
        """Runs a command like `processes.run` and returns its exit code and output. Kills the command if cancelled."""
        timeout_s = timeout_s or core.TIMEOUT_S
        session = self._find()
        with core.refusals("the command could not be run"):
            done = session.processes.run(
                command,
                timeout_s=timeout_s,
                max_output_bytes=core.OUTPUT_BYTES,
                env=_ENVIRONMENT,
                on_output=on_output,
            )
        return core.output_text(core.how_ended(done.result, timeout_s), done.stdout, done.stderr)

    def start(self, command: str) -> str:
        """Starts a command in the background, and returns its id and first output."""
        process_id = f"p-{secrets.token_hex(3)}"
        session = self._find()
        with core.refusals("the command could not be started"):
            session.processes.start(command, env=_ENVIRONMENT, stdin=True, process_id=process_id)
        said = self.output(process_id)
        return f"Process {process_id} has been started.\n{said}"

    def output(self, process_id: str, wait_s: float | None = None, text: str | None = None) -> str:
        """Returns the new output of a process, once it has ended or after `wait_s` seconds.

        First writes `text` to its input.
        """
        if wait_s is None:
            wait_s = core.WAIT_S
        if not 0 <= wait_s <= core.WAIT_S_MAX:
            raise ToolRefusal(f"the wait must be 0 to {core.WAIT_S_MAX:g} seconds")
        kept = KeptOutput(core.OUTPUT_BYTES)
        session = self._find()
        with core.refusals(f"the output of process {process_id} can't be read"):
            self._check(session, process_id)
            process = session.processes.attach(process_id, after_event=self._seen.get(process_id, 0))
            if text:
                process.write(text)
            for event in process.read(wait_s):
                kept.add(event)
        self._note_seen(process_id, process.last_event)
        how = f"{process_id} runs" if process.result is None else f"{process_id}: {core.how_ended(process.result)}"
        stdout, stderr = (data.decode("utf-8", "replace") for data in kept.finish())
        return core.output_text(how, stdout, stderr)

    def kill(self, process_id: str) -> str:
        """Kills a process with its descendants, and returns its last output."""
        session = self._find()
        with core.refusals(f"process {process_id} can't be killed"):
            self._check(session, process_id)
            (session.processes.attach(process_id)).kill()
        return self.output(process_id, _KILL_WAIT_S)

    def _check(self, session: Session, process_id: str) -> None:
        """Raises ToolRefusal, which lists the running processes, if this process does not exist."""
        known = session.processes.list()
        if all(each.process_id != process_id for each in known):
            running = ", ".join(each.process_id for each in known if each.running) or "none"
            raise ToolRefusal(f"There is no process {process_id[:100]!r}. Running: {running}.")

    def _note_seen(self, process_id: str, number: int) -> None:
        if len(self._seen) >= _SEEN_MAX and process_id not in self._seen:
            del self._seen[next(iter(self._seen))]
        self._seen[process_id] = number

    # -- files ---------------------------------------------------------------------------------------------------------

    def read_file(self, path: str, first_line: int | None = None, last_line: int | None = None) -> str:
        """Returns lines of a text file with their numbers."""
        return core.numbered(path, self._text_of(path), first_line, last_line)

    def write_file(self, path: str, content: str) -> str:
        """Writes a text file, whole."""
        self._write(path, content)
        return f"{path} now has {len(content.splitlines())} lines."

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replaces text that occurs in a file exactly once."""
        text, line = core.replaced_once(path, self._text_of(path), old, new)
        self._write(path, text)
        return f"Changed {path} at line {line}."

    def list_files(self, path: str | None = None, pattern: str | None = None) -> str:
        """Lists the files of the workspace, or of a directory in it, recursively."""
        session = self._find()
        with core.refusals(f"{path or 'the workspace'!r} can't be listed"):
            return core.listing(session.files.list(path or ""), pattern)

    def search_files(self, expression: str, path: str | None = None, pattern: str | None = None) -> str:
        """Searches the text files of the workspace for a regular expression; returns path, line number and line."""
        command = core.search_command(expression, path, pattern)
        session = self._find()
        with core.refusals("the search could not be run"):
            done = session.processes.run(command, timeout_s=core.TIMEOUT_S)
        if not done.succeeded:
            raise ToolRefusal(f"the search failed: {done.stderr.strip()[-500:] or done.outcome}")
        return done.stdout.rstrip("\n") or "[no matches]"

    def _text_of(self, path: str) -> str:
        session = self._find()
        with core.refusals(f"{path!r} can't be read"):
            try:
                data = session.files.read(path, max_bytes=core.FILE_BYTES_MAX + 1)
            except NotFoundError as error:
                if error.reason != "FILE_NOT_FOUND":
                    raise
                raise ToolRefusal(f"There is no file {path!r}. list_files shows the existing files.") from None
        return core.file_text(path, data)

    def _write(self, path: str, text: str) -> None:
        data = core.encoded(text)
        session = self._find()
        with core.refusals(f"{path!r} can't be written"):
            session.files.write(path, data)
