"""Writes the bounded texts that a model's tools for a session return. Errors name the existing alternatives.

Nothing here does I/O; `executor_client.aio_computer` does.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from executor_client._core.status import is_session_gone
from executor_client._core.terminal import last_states
from executor_client.errors import (
    CallTimeoutError,
    FileError,
    InvalidRequest,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
    ResourceExhaustedError,
)
from executor_client.file_results import FileInfo, FileList
from executor_client.process_results import ProcessResult

OUTPUT_BYTES = 30_000
"""Bytes of each stream of a command that are shown to a model, head and tail."""
FILE_BYTES_MAX = 4 << 20
"""Limit of a file to read, edit or search."""
LINES_SHOWN_MAX = 2_000
LINE_CHARS_MAX = 1_000
SHOWN_CHARS_MAX = 60_000
MATCHES_MAX = 200
OCCURRENCES_MAX = 20
"""Occurrences of an edit's text that a refusal lists."""
PATTERN_CHARS_MAX = 4_000
"""Characters of a regular expression or a glob. The event loop compiles globs: 4,000 characters take 50 ms."""
ENTRIES_MAX = 500
TIMEOUT_S = 120
"""Default time limit of a command, in seconds."""
WAIT_S = 1.0
"""Seconds to wait for a process's output by default."""
WAIT_S_MAX = 300.0

_REFUSALS = (
    CallTimeoutError,
    FileError,
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
    """Turns the daemon's refusals into ToolRefusal; errors of a lost session or daemon are unchanged."""
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
    """Returns a command's output after a line with its state."""
    parts = [f"[{how}]", last_states(stdout).rstrip("\n")]
    if stderr.strip():
        parts += ["[stderr]", last_states(stderr).rstrip("\n")]
    return "\n".join(part for part in parts if part)


def file_text(path: str, data: bytes) -> str:
    """Returns the text of a file. Raises ToolRefusal for binary files, and for more than FILE_BYTES_MAX."""
    if len(data) > FILE_BYTES_MAX:
        raise ToolRefusal(f"{path!r} has more than {FILE_BYTES_MAX:,} bytes; use the shell for it.")
    if b"\0" in data[:8192]:
        raise ToolRefusal(f"{path!r} is a binary file of {len(data):,} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolRefusal(f"{path!r} is not UTF-8 text (byte {error.start}); use the shell for it.") from error


def encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolRefusal("the text has half a surrogate pair, which can't be written to a file") from error


def numbered(path: str, text: str, first_line: int | None, last_line: int | None) -> str:
    """Returns numbered lines, up to the limit."""
    # Only "\n" ends a line, as in edits and searches.
    lines = text.removesuffix("\n").split("\n")
    first, last = first_line or 1, last_line or len(lines)
    if not 1 <= first <= min(last, len(lines)):
        raise ToolRefusal(f"{path!r} has lines 1 to {len(lines)}, so {first} to {last} can't be shown.")
    last = min(last, len(lines), first + LINES_SHOWN_MAX - 1)
    while first < last and sum(map(len, lines[first - 1 : last])) > SHOWN_CHARS_MAX:
        last = first + (last - first) // 2
    width = len(str(last))
    shown = [f"{number:>{width}}  {_short(line)}" for number, line in enumerate(lines[first - 1 : last], start=first)]
    if last < len(lines):
        shown.append(f"[lines {last + 1} to {len(lines)} are not shown]")
    return "\n".join(shown)


def replaced_once(path: str, text: str, old: str, new: str) -> tuple[str, int]:
    """Replaces `old` by `new`, and returns the text and the line.

    Both get the line ends of the text: a model writes \\n, and does not see \\r. Raises ToolRefusal if one of them
    is too long, or unless `old` occurs once.
    """
    if max(len(old), len(new)) > FILE_BYTES_MAX:
        raise ToolRefusal(
            f"`old` and `new` may have {FILE_BYTES_MAX:,} characters each; use the shell for longer ones."
        )
    if "\r\n" in text and (old not in text or "\n" not in text.replace("\r\n", "")):
        old, new = (each.replace("\r\n", "\n").replace("\n", "\r\n") for each in (old, new))
    if not old:
        raise ToolRefusal("`old` is empty. write_file creates a file.")
    lines = _lines_of(text, old)
    if not lines:
        raise ToolRefusal(_why_missing(path, text, old))
    if len(lines) > 1:
        times = str(len(lines)) if len(lines) <= OCCURRENCES_MAX else f"more than {OCCURRENCES_MAX}"
        where = ", ".join(map(str, lines[:OCCURRENCES_MAX]))
        raise ToolRefusal(f"`old` occurs {times} times in {path!r}, at lines {where}: include more lines around it.")
    return text.replace(old, new, 1), lines[0]


def _lines_of(text: str, old: str) -> list[int]:
    """Returns the lines where `old` occurs, overlapping occurrences too, and at most one more than OCCURRENCES_MAX.

    All tenants of an MCP server wait for it, so it reads the text a limited number of times. `find` itself is linear.
    """
    lines: list[int] = []
    line, counted, at = 1, 0, text.find(old)
    while at >= 0 and len(lines) <= OCCURRENCES_MAX:
        line += text.count("\n", counted, at)
        counted = at
        lines.append(line)
        at = text.find(old, at + 1)
    return lines


def _why_missing(path: str, text: str, old: str) -> str:
    first = old.strip().partition("\n")[0].strip()
    at = text.find(first) if first else -1
    near = text.count("\n", 0, at) + 1
    hint = f" Its first line is at line {near}; the rest differs, perhaps in spaces." if at >= 0 else ""
    return f"`old` is not in {path!r}.{hint} read_file shows the file."


def listing(listed: FileList, pattern: str | None) -> str:
    """Returns the matching files of a listing, one on each line. Raises ToolRefusal for a long pattern."""
    _check_length(pattern)
    files: Sequence[FileInfo] = [each for each in listed if not each.is_directory and _matches(each.path, pattern)]
    lines = [f"{each.path}  {each.size_bytes:,} B" for each in files[:ENTRIES_MAX]]
    if len(files) > ENTRIES_MAX:
        lines.append(f"[{len(files) - ENTRIES_MAX} more]")
    if listed.truncated:
        lines.append("[the list is incomplete: list a directory]")
    return "\n".join(lines) or "[no files]"


def search_command(expression: str, path: str | None, pattern: str | None) -> list[str]:
    """Returns the command of a search. Raises ToolRefusal for a long expression or pattern.

    The sandbox compiles the expression: some short ones take seconds.
    """
    _check_length(expression)
    _check_length(pattern)
    given = [expression, path or ".", pattern or "", str(MATCHES_MAX), str(LINE_CHARS_MAX), str(FILE_BYTES_MAX)]
    return ["python3", "-I", "-c", _SEARCH, *given]


def _check_length(pattern: str | None) -> None:
    if pattern and len(pattern) > PATTERN_CHARS_MAX:
        raise ToolRefusal(
            f"a pattern may have {PATTERN_CHARS_MAX:,} characters, not {len(pattern):,}; use a shorter one"
        )


# Runs in the sandbox: no files are transferred, and a hostile expression only costs the sandbox time.
_SEARCH = """
import fnmatch, os, re, sys
expression, root, pattern, most, chars, size = sys.argv[1:]
found = shown = 0
try:
    matcher = re.compile(expression)
except (re.error, OverflowError, RecursionError) as error:
    sys.exit(f"{expression[:100]!r} is not a regular expression: {error}")
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
            if matcher.search(line):
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
