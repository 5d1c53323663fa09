"""The texts of a model's tools for a session: bounded, with errors that name what exists instead.

Nothing here does I/O; `executor_client.aio_computer` does.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from executor_client._core.status import is_session_gone
from executor_client._core.terminal import last_states
from executor_client.errors import (
    CallTimeoutError,
    InvalidRequest,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
    ResourceExhaustedError,
)
from executor_client.file_results import FileInfo, FileList
from executor_client.process_results import ProcessResult

OUTPUT_BYTES = 30_000
"""Bytes of each stream of a command that a model sees, head and tail."""
FILE_BYTES_MAX = 4 << 20
"""Bytes of a file that is read, edited or searched."""
LINES_SHOWN_MAX = 2_000
LINE_CHARS_MAX = 1_000
SHOWN_CHARS_MAX = 60_000
MATCHES_MAX = 200
ENTRIES_MAX = 500
TIMEOUT_S = 120
"""Default time limit of a command, in seconds."""
WAIT_S = 1.0
"""Seconds to wait for a process's output by default."""
WAIT_S_MAX = 300.0

_REFUSALS = (
    CallTimeoutError,
    InvalidRequest,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
    ResourceExhaustedError,
)


class ToolRefusal(ValueError):
    """A tool call was refused; the message is for the model."""


@contextmanager
def refusals(doing: str) -> Iterator[None]:
    """Turns the daemon's refusals into ToolRefusal; errors of a lost session or daemon pass unchanged."""
    try:
        yield
    except _REFUSALS as error:
        if is_session_gone(error):
            raise
        raise ToolRefusal(f"{doing}: {error.message}") from error


def how_ended(result: ProcessResult, timeout_s: float | None = None) -> str:
    if result.outcome == "exited":
        return f"exit code {result.exit_code}"
    if result.outcome == "signalled":
        return f"ended by signal {result.signal}"
    if result.outcome == "timeout":
        return f"ended after its timeout of {timeout_s:g} seconds" if timeout_s else "ended after its timeout"
    return f"lost: {result.lost_reason}"


def output_text(how: str, stdout: str, stderr: str) -> str:
    """Returns what a command said, after the line that says how it is."""
    parts = [f"[{how}]", last_states(stdout).rstrip("\n")]
    if stderr.strip():
        parts += ["[stderr]", last_states(stderr).rstrip("\n")]
    return "\n".join(part for part in parts if part)


def file_text(path: str, data: bytes) -> str:
    """Returns the text of a file. Raises ToolRefusal when it has none."""
    if b"\0" in data[:8192]:
        raise ToolRefusal(f"{path!r} is no text: a binary file of {len(data):,} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolRefusal(f"{path!r} is no UTF-8 text, at byte {error.start}: use the shell for it.") from error


def encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolRefusal("the text has half a surrogate pair, which no file can hold") from error


def numbered(path: str, text: str, first_line: int | None, last_line: int | None) -> str:
    """Returns lines with their numbers, as many as are shown at once."""
    # Only "\n" ends a line, as for the line numbers of edits and searches.
    lines = text.removesuffix("\n").split("\n")
    first, last = first_line or 1, last_line or len(lines)
    if not 1 <= first <= min(last, len(lines)):
        raise ToolRefusal(f"{path!r} has the lines 1 to {len(lines)}, and {first} to {last} were asked for.")
    last = min(last, len(lines), first + LINES_SHOWN_MAX - 1)
    while first < last and sum(map(len, lines[first - 1 : last])) > SHOWN_CHARS_MAX:
        last = first + (last - first) // 2
    width = len(str(last))
    shown = [f"{number:>{width}}  {_short(line)}" for number, line in enumerate(lines[first - 1 : last], start=first)]
    if last < len(lines):
        shown.append(f"[lines {last + 1} to {len(lines)} are not shown]")
    return "\n".join(shown)


def replaced_once(path: str, text: str, old: str, new: str) -> tuple[str, int]:
    """Returns the text with `new` in place of `old`, and the line where that was. Raises ToolRefusal unless once.

    Both get the ends of lines that the text has: a model writes \\n, and does not see \\r.
    """
    if "\r\n" in text and (old not in text or "\n" not in text.replace("\r\n", "")):
        old, new = (each.replace("\r\n", "\n").replace("\n", "\r\n") for each in (old, new))
    count = len(re.findall(f"(?={re.escape(old)})", text)) if old else 0  # overlapping ones too
    if count != 1:
        raise ToolRefusal(_why_not_once(path, text, old, count))
    return text.replace(old, new), text[: text.index(old)].count("\n") + 1


def _why_not_once(path: str, text: str, old: str, count: int) -> str:
    if not old:
        return "`old` is empty. write_file makes a new file."
    if count:
        lines = [text[: found.start()].count("\n") + 1 for found in re.finditer(f"(?={re.escape(old)})", text)]
        where = ", ".join(map(str, lines[:20]))
        return f"`old` is {count} times in {path!r}, at the lines {where}: include more around it."
    first = old.strip().splitlines()[0].strip() if old.strip() else ""
    near = [number for number, line in enumerate(text.splitlines(), start=1) if first and first in line]
    hint = f" Its first line is at line {near[0]}; the rest differs, perhaps in spaces." if near else ""
    return f"`old` is not in {path!r}.{hint} read_file shows the file."


def listing(listed: FileList, pattern: str | None) -> str:
    """Returns the files of a listing that match, one in each line."""
    files: Sequence[FileInfo] = [each for each in listed if not each.is_directory and _matches(each.path, pattern)]
    lines = [f"{each.path}  {each.size_bytes:,} B" for each in files[:ENTRIES_MAX]]
    if len(files) > ENTRIES_MAX:
        lines.append(f"[{len(files) - ENTRIES_MAX} more]")
    if listed.truncated:
        lines.append("[there are more than can be listed at once: list a directory]")
    return "\n".join(lines) or "[no files]"


def search_command(expression: str, path: str | None, pattern: str | None) -> list[str]:
    """Returns the command of a search. Raises ToolRefusal for what is no regular expression."""
    try:
        re.compile(expression)
    except re.error as error:
        raise ToolRefusal(f"{expression!r} is no regular expression: {error}") from error
    given = [expression, path or ".", pattern or "", str(MATCHES_MAX), str(LINE_CHARS_MAX), str(FILE_BYTES_MAX)]
    return ["python3", "-I", "-c", _SEARCH, *given]


# Runs in the sandbox: files need not travel, and a hostile expression costs the sandbox its own time.
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


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]} [… {len(line) - LINE_CHARS_MAX} more]"


def _matches(path: str, pattern: str | None) -> bool:
    name = path.rpartition("/")[2]
    return not pattern or fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(name, pattern)
