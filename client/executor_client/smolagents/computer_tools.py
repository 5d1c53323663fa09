"""Tools for a model to use a session like a computer: a shell, and reading, writing and editing files.

They run in this process, as clients of a session: the session of a `CodeAgent`'s executor, a given session, or their
own, which starts with the first call.

`executor_client.computer` defines their results. Text from the sandbox is passed to the model unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import smolagents

from executor_client import ExecutorClientError, Session
from executor_client._core.computer import TIMEOUT_S, WAIT_S
from executor_client.computer import Computer
from executor_client.smolagents.executor import RemoteExecutor

_HOST_ONLY = "it is a client of the daemon, and works in the session of the agent"


class SandboxUnavailable(RuntimeError):
    """The session is lost, or the daemon can't be reached. Other arguments would not help."""


class SessionSource:
    """Finds the session for tools: an executor's session, a given one, or their own."""

    def __init__(self, session: Session | None = None, executor: RemoteExecutor | None = None, **kwargs: Any) -> None:
        """`kwargs` are arguments of `RemoteExecutor`, for an own session. Raises ValueError for two of these."""
        if (session is not None) + (executor is not None) + bool(kwargs) > 1:
            raise ValueError("pass a session, an executor, or the arguments of one: the tools work in one session")
        self._own = RemoteExecutor(**kwargs) if session is None and executor is None else None
        self._find = _finder(session, executor or self._own)
        self.computer = Computer(self._find)

    def __call__(self) -> Session:
        return self._find()

    def cleanup(self) -> None:
        """Ends the session when it is the tools' own. Idempotent."""
        if self._own is not None:
            self._own.cleanup()


def _finder(session: Session | None, executor: RemoteExecutor | None) -> Callable[[], Session]:
    """Returns a function that does not refer to a `SessionSource`: a cycle would keep its session alive."""
    if session is not None:
        return lambda: session
    assert executor is not None
    return lambda: executor.session


class _SessionTool(smolagents.Tool):  # type: ignore[misc]  # smolagents is untyped
    """A tool in a session. Takes the arguments of `SessionSource`, or a source that several tools share.

    A call raises ValueError, with a sentence for the model, if it can't be done, and SandboxUnavailable if the session
    or the daemon is gone.
    """

    output_type = "string"
    host_only_because = _HOST_ONLY
    skip_forward_signature_validation = True

    def __init__(self, source: SessionSource | None = None, **kwargs: Any) -> None:
        self._source = source or SessionSource(**kwargs)
        super().__init__()

    def cleanup(self) -> None:
        """Ends the session when it is the tool's own. Idempotent."""
        self._source.cleanup()

    def _do(self, work: Callable[[Computer], str]) -> str:
        try:
            return work(self._source.computer)
        except ExecutorClientError as error:
            raise SandboxUnavailable(f"the sandbox can't be used: {error.message}") from error


class ShellTool(_SessionTool):
    """Runs commands with bash, or `/bin/sh` if the image has none, in the agent's session."""

    name = "shell"
    description = (
        "Runs a command with bash in the sandbox and returns its exit code and output. Every call is a new shell "
        "that starts in the workspace: chain with `cd dir && ...`. Long output is cut in the middle. There is no "
        "terminal and no input, and the command is killed after its timeout. With background=True, for servers and "
        "long work, the command keeps running and the call returns its process id at once."
    )
    inputs = {  # noqa: RUF012
        "command": {"type": "string", "description": "The command line, such as `python -m pytest -q`."},
        "timeout": {
            "type": "integer",
            "description": (
                f"Seconds after which the command is killed; {TIMEOUT_S} by default. Not for the background."
            ),
            "nullable": True,
        },
        "background": {
            "type": "boolean",
            "description": "True to run it in the background; shell_output then shows its output.",
            "nullable": True,
        },
    }

    def forward(self, command: str, timeout: int | None = None, background: bool | None = None) -> str:
        if background:
            return self._do(lambda computer: computer.start(command))
        return self._do(lambda computer: computer.run(command, timeout))


class ShellOutputTool(_SessionTool):
    """Shows the output of a background process, and gives it input."""

    name = "shell_output"
    description = (
        "Returns the new output of a background process, and whether it still runs. Waits until it ends or the time "
        "is over. First writes `text` to its input."
    )
    inputs = {  # noqa: RUF012
        "process": {"type": "string", "description": "The id that shell returned."},
        "wait": {
            "type": "number",
            "description": f"Seconds to wait for its end; {WAIT_S:g} by default.",
            "nullable": True,
        },
        "text": {
            "type": "string",
            "description": "Text for its standard input; end a line with a line break.",
            "nullable": True,
        },
    }

    def forward(self, process: str, wait: float | None = None, text: str | None = None) -> str:
        return self._do(lambda computer: computer.output(process, wait, text))


class ShellKillTool(_SessionTool):
    """Kills a background process."""

    name = "shell_kill"
    description = "Kills a background process with its descendants, and returns its last output."
    inputs = {  # noqa: RUF012
        "process": {"type": "string", "description": "The id that shell returned."},
    }

    def forward(self, process: str) -> str:
        return self._do(lambda computer: computer.kill(process))


class ReadFileTool(_SessionTool):
    name = "read_file"
    description = "Returns a text file of the workspace with line numbers, or a range of its lines."
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "The path, relative to the workspace."},
        "first_line": {"type": "integer", "description": "The first line, counted from 1.", "nullable": True},
        "last_line": {"type": "integer", "description": "The last line.", "nullable": True},
    }

    def forward(self, path: str, first_line: int | None = None, last_line: int | None = None) -> str:
        return self._do(lambda computer: computer.read_file(path, first_line, last_line))


class WriteFileTool(_SessionTool):
    name = "write_file"
    description = "Writes a text file of the workspace; replaces an existing file and creates missing directories."
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "The path, relative to the workspace."},
        "content": {"type": "string", "description": "The whole text of the file."},
    }

    def forward(self, path: str, content: str) -> str:
        return self._do(lambda computer: computer.write_file(path, content))


class EditFileTool(_SessionTool):
    name = "edit_file"
    description = (
        "Replaces text in a file. `old` must occur in the file exactly once, with its spaces and line breaks and "
        "without line numbers: include enough lines around it."
    )
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "The path, relative to the workspace."},
        "old": {"type": "string", "description": "The text to replace, exactly as in the file."},
        "new": {"type": "string", "description": "The replacement."},
    }

    def forward(self, path: str, old: str, new: str) -> str:
        return self._do(lambda computer: computer.edit_file(path, old, new))


class ListFilesTool(_SessionTool):
    name = "list_files"
    description = "Lists the files of the workspace, or of a directory in it, recursively."
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "A directory; empty for the workspace.", "nullable": True},
        "pattern": {"type": "string", "description": "A glob that paths must match: `*.py`.", "nullable": True},
    }

    def forward(self, path: str | None = None, pattern: str | None = None) -> str:
        return self._do(lambda computer: computer.list_files(path, pattern))


class SearchFilesTool(_SessionTool):
    name = "search_files"
    description = (
        "Searches the text files of the workspace for a regular expression; returns path, line number and line."
    )
    inputs = {  # noqa: RUF012
        "expression": {"type": "string", "description": "A regular expression of Python."},
        "path": {"type": "string", "description": "A directory; empty for the workspace.", "nullable": True},
        "pattern": {"type": "string", "description": "A glob that paths must match: `*.py`.", "nullable": True},
    }

    def forward(self, expression: str, path: str | None = None, pattern: str | None = None) -> str:
        return self._do(lambda computer: computer.search_files(expression, path, pattern))


class _Tools(list[smolagents.Tool]):
    """Several tools that share one session. Takes the arguments of `SessionSource`."""

    _KINDS: Sequence[Callable[..., _SessionTool]] = ()

    def __init__(self, source: SessionSource | None = None, **kwargs: Any) -> None:
        self._source = source or SessionSource(**kwargs)
        super().__init__(kind(self._source) for kind in self._KINDS)

    def cleanup(self) -> None:
        """Ends the session when it is the tools' own. Idempotent."""
        self._source.cleanup()


class ShellTools(_Tools):
    """A shell with background processes: shell, shell_output, shell_kill.

    Takes the arguments of `SessionSource`, like a single tool.
    """

    _KINDS = (ShellTool, ShellOutputTool, ShellKillTool)


class FileTools(_Tools):
    """Tools for files that share one session: read, write, edit by exact replacement, list, search.

    Takes the arguments of `SessionSource`. `CodeAgent(tools=[*ShellTools(executor=e), *FileTools(executor=e)],
    executor=e)` works in the session of the agent's code.
    """

    _KINDS = (ReadFileTool, WriteFileTool, EditFileTool, ListFilesTool, SearchFilesTool)
