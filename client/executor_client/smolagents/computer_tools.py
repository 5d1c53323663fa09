"""Tools with which a model works in a session as on a computer: a shell, and files that it reads, writes and edits.

They run in this process, as clients of the session, beside the agent's code: with the executor of a `CodeAgent` they
work in the session of its code, with a session in that, and else in one of their own, which begins with the first call.

What they return is bounded and made for a model: line numbers to refer to, head and tail of what is too long, and
errors that say what is there instead. What comes from the sandbox is text as any other; the model decides about it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import Any

import smolagents

from executor_client import ExecutorClientError, NotFoundError, Session
from executor_client.smolagents.executor import RemoteExecutor

OUTPUT_BYTES = 30_000
"""Bytes of each stream of a command that the model sees, head and tail."""
FILE_BYTES_MAX = 4 << 20
"""Bytes of a file that is read, edited or searched."""
LINES_SHOWN_MAX = 2_000
LINE_CHARS_MAX = 1_000
SHOWN_CHARS_MAX = 60_000
MATCHES_MAX = 200
ENTRIES_MAX = 500
TIMEOUT_S = 120

_HOST_ONLY = "it is a client of the daemon, and works in the session of the agent"


class SessionSource:
    """Finds the session that tools work in: that of an executor, one that was given, or one of their own."""

    def __init__(self, session: Session | None = None, executor: RemoteExecutor | None = None, **kwargs: Any) -> None:
        """`kwargs` are those of `RemoteExecutor`, for a session of their own. Raises ValueError for two of these."""
        if (session is not None) + (executor is not None) + bool(kwargs) > 1:
            raise ValueError("pass a session, an executor, or the arguments of one: the tools work in one session")
        self._session = session
        self._executor = executor or (RemoteExecutor(**kwargs) if session is None else None)
        self._is_own = executor is None and session is None

    def __call__(self) -> Session:
        if self._session is not None:
            return self._session
        assert self._executor is not None
        return self._executor.session

    def cleanup(self) -> None:
        """Ends the session when it is the tools' own. Idempotent."""
        if self._is_own and self._executor is not None:
            self._executor.cleanup()


class _SessionTool(smolagents.Tool):  # type: ignore[misc]  # smolagents is untyped
    """A tool in a session. The arguments are those of `SessionSource`, or such a source that several tools share."""

    output_type = "string"
    host_only_because = _HOST_ONLY
    skip_forward_signature_validation = True

    def __init__(self, source: SessionSource | None = None, **kwargs: Any) -> None:
        self._source = source or SessionSource(**kwargs)
        super().__init__()

    def cleanup(self) -> None:
        """Ends the session when it is the tool's own. Idempotent."""
        self._source.cleanup()

    def _read(self, path: str) -> str:
        """Returns the text of a file. Raises ValueError with a sentence for the model."""
        try:
            data = self._source().files.read(path, max_bytes=FILE_BYTES_MAX)
        except NotFoundError:
            raise ValueError(f"There is no file {path!r}. list_files shows what there is.") from None
        except ExecutorClientError as error:
            raise ValueError(f"{path!r} can't be read: {error.message}") from error
        if b"\0" in data[:8192]:
            raise ValueError(f"{path!r} is no text: a binary file of {len(data):,} bytes.")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path!r} is no UTF-8 text, at byte {error.start}: use the shell for it.") from error

    def _write(self, path: str, text: str) -> None:
        try:
            self._source().files.write(path, text.encode())
        except UnicodeEncodeError as error:
            raise ValueError("the text has half a surrogate pair, which no file can hold") from error
        except ExecutorClientError as error:
            raise ValueError(f"{path!r} can't be written: {error.message}") from error


class ShellTool(_SessionTool):
    """Runs commands by `/bin/sh` in the agent's session."""

    name = "shell"
    description = (
        "Runs a command with /bin/sh in the sandbox and returns its exit code and output. Every call is a new shell "
        "that begins in the workspace: chain with `cd dir && ...`. Output is cut in the middle when it is long. There "
        "is no terminal and no input; a command that does not end is ended after its timeout. Start servers in the "
        "background with `nohup cmd > log 2>&1 &`."
    )
    inputs = {  # noqa: RUF012
        "command": {"type": "string", "description": "The command line, such as `python -m pytest -q`."},
        "timeout": {
            "type": "integer",
            "description": f"Seconds after which the command is ended; {TIMEOUT_S} by default.",
            "nullable": True,
        },
    }

    def forward(self, command: str, timeout: int | None = None) -> str:
        try:
            done = self._source().processes.run(
                command, timeout_s=timeout or TIMEOUT_S, max_output_bytes=OUTPUT_BYTES, env={"TERM": "dumb"}
            )
        except ExecutorClientError as error:
            raise ValueError(f"the command could not be run: {error.message}") from error
        how = {
            "exited": f"exit code {done.exit_code}",
            "signalled": f"ended by signal {done.result.signal}",
            "timeout": f"ended after its timeout of {timeout or TIMEOUT_S} seconds",
            "lost": f"lost: {done.result.lost_reason}",
        }[done.outcome]
        parts = [f"[{how}]", done.stdout.rstrip("\n")]
        if done.stderr.strip():
            parts += ["[stderr]", done.stderr.rstrip("\n")]
        return "\n".join(part for part in parts if part)


class ReadFileTool(_SessionTool):
    name = "read_file"
    description = "Returns a text file of the workspace with line numbers, or a range of its lines."
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "The path, relative to the workspace."},
        "first_line": {"type": "integer", "description": "The first line to show, from 1 on.", "nullable": True},
        "last_line": {"type": "integer", "description": "The last line to show.", "nullable": True},
    }

    def forward(self, path: str, first_line: int | None = None, last_line: int | None = None) -> str:
        # Only "\\n" ends a line, as for the line numbers of edit_file and search_files.
        lines = self._read(path).removesuffix("\n").split("\n")
        first, last = first_line or 1, last_line or len(lines)
        if not 1 <= first <= min(last, len(lines)):
            raise ValueError(f"{path!r} has the lines 1 to {len(lines)}, and {first} to {last} were asked for.")
        last = min(last, len(lines), first + LINES_SHOWN_MAX - 1)
        while first < last and sum(map(len, lines[first - 1 : last])) > SHOWN_CHARS_MAX:
            last = first + (last - first) // 2
        width = len(str(last))
        shown = [
            f"{number:>{width}}  {_short(line)}" for number, line in enumerate(lines[first - 1 : last], start=first)
        ]
        if last < len(lines):
            shown.append(f"[lines {last + 1} to {len(lines)} are not shown]")
        return "\n".join(shown)


class WriteFileTool(_SessionTool):
    name = "write_file"
    description = "Writes a text file of the workspace, whole; directories are made. A file that is there is replaced."
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "The path, relative to the workspace."},
        "content": {"type": "string", "description": "The whole text of the file."},
    }

    def forward(self, path: str, content: str) -> str:
        self._write(path, content)
        return f"{path} has {len(content.splitlines())} lines now."


class EditFileTool(_SessionTool):
    name = "edit_file"
    description = (
        "Replaces a piece of text in a file by another. `old` must be in the file exactly once, with its spaces and "
        "line breaks and without line numbers: include enough lines around it."
    )
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "The path, relative to the workspace."},
        "old": {"type": "string", "description": "The text to be replaced, exactly as it is in the file."},
        "new": {"type": "string", "description": "The text in its place."},
    }

    def forward(self, path: str, old: str, new: str) -> str:
        text = self._read(path)
        count = len(re.findall(f"(?={re.escape(old)})", text)) if old else 0  # overlapping ones too
        if count != 1:
            raise ValueError(_why_not_once(path, text, old, count))
        line = text[: text.index(old)].count("\n") + 1
        self._write(path, text.replace(old, new))
        return f"{path} was changed at line {line}."


def _why_not_once(path: str, text: str, old: str, count: int) -> str:
    if not old:
        return "`old` is empty. write_file makes a new file."
    if count:
        lines = [text[: found.start()].count("\n") + 1 for found in re.finditer(f"(?={re.escape(old)})", text)]
        where = ", ".join(map(str, lines[:20]))
        return f"`old` is {count} times in {path!r}, at the lines {where}: include more around it."
    first = old.strip().splitlines()[0].strip() if old.strip() else ""
    near = [number for number, line in enumerate(text.splitlines(), start=1) if first and first in line]
    if "\r\n" in text and "\r\n" not in old and old.replace("\n", "\r\n") in text:
        return f"`old` is not in {path!r}: its lines end in \\r\\n, and those of `old` in \\n."
    hint = f" Its first line is at line {near[0]}; the rest differs, perhaps in spaces." if near else ""
    return f"`old` is not in {path!r}.{hint} read_file shows the file."


class ListFilesTool(_SessionTool):
    name = "list_files"
    description = "Lists the files of the workspace, or of a directory in it, with everything below."
    inputs = {  # noqa: RUF012
        "path": {"type": "string", "description": "A directory; empty for the workspace.", "nullable": True},
        "pattern": {"type": "string", "description": "A glob that paths must match: `*.py`.", "nullable": True},
    }

    def forward(self, path: str | None = None, pattern: str | None = None) -> str:
        try:
            listed = self._source().files.list(path or "")
        except ExecutorClientError as error:
            raise ValueError(f"{path or 'the workspace'!r} can't be listed: {error.message}") from error
        files = [each for each in listed if not each.is_directory and _matches(each.path, pattern)]
        lines = [f"{each.path}  {each.size_bytes:,} B" for each in files[:ENTRIES_MAX]]
        if len(files) > ENTRIES_MAX:
            lines.append(f"[{len(files) - ENTRIES_MAX} more]")
        if listed.truncated:
            lines.append("[there are more than can be listed at once: list a directory]")
        return "\n".join(lines) or "[no files]"


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
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"{expression!r} is no regular expression: {error}") from error
        # In the sandbox: files need not travel, and a hostile expression costs the sandbox its own time.
        given = [expression, path or ".", pattern or "", str(MATCHES_MAX), str(LINE_CHARS_MAX), str(FILE_BYTES_MAX)]
        done = self._source().processes.run(["python3", "-I", "-c", _SEARCH, *given], timeout_s=TIMEOUT_S)
        if not done.succeeded:
            raise ValueError(f"the search failed: {done.stderr.strip()[-500:] or done.outcome}")
        return done.stdout.rstrip("\n") or "[no matches]"


_SEARCH = """
import fnmatch, os, re, sys
expression, root, pattern, most, chars, size = sys.argv[1:]
found = shown = 0
if not os.path.isdir(root):
    sys.exit(f"there is no directory {root!r}")
for folder, folders, names in os.walk(root):
    folders[:] = sorted(each for each in folders if each not in (".git", "__pycache__", "node_modules"))
    for name in sorted(names):
        path = os.path.normpath(os.path.join(folder, name))
        if pattern and not (fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(name, pattern)):
            continue
        try:
            if not os.path.isfile(path) or os.path.getsize(path) > int(size):
                continue
            data = open(path, "rb").read()
        except OSError:
            continue
        if b"\\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").split("\\n"), start=1):
            if re.search(expression, line):
                print(f"{path}:{number}: {line[:int(chars)]}")
                found += 1
                shown += min(len(line), int(chars))
                if found >= int(most) or shown > 60000:
                    print(f"[the first {found} matches]")
                    sys.exit()
"""


class FileTools(list[smolagents.Tool]):
    """The tools for files, which share one session: read, write, edit by exact replacement, list, search.

    The arguments are those of `SessionSource`. `CodeAgent(tools=[ShellTool(executor=e), *FileTools(executor=e)],
    executor=e)` works in the session of its code.
    """

    def __init__(self, source: SessionSource | None = None, **kwargs: Any) -> None:
        self._source = source or SessionSource(**kwargs)
        kinds: tuple[Callable[..., _SessionTool], ...] = (
            ReadFileTool,
            WriteFileTool,
            EditFileTool,
            ListFilesTool,
            SearchFilesTool,
        )
        super().__init__(kind(self._source) for kind in kinds)

    def cleanup(self) -> None:
        """Ends the session when it is the tools' own. Idempotent."""
        self._source.cleanup()


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]} [… {len(line) - LINE_CHARS_MAX} more]"


def _matches(path: str, pattern: str | None) -> bool:
    name = path.rpartition("/")[2]
    return not pattern or fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(name, pattern)
