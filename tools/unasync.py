"""Writes the blocking client from the asyncio one, so that a feature is written once.

    python tools/unasync.py [--check]

`--check` writes nothing, and fails when a checked-in file is not what would be written.

The rules are few, and work on tokens: `async` and `await` are dropped, a name loses its "Async", and a few names are
replaced. Differences that no rule covers are in one of two places: in the modules that `_aio` and `_sync` both have,
written by hand, with the same names; or, for prose, in `PROSE` below, where each text must occur exactly once.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "client/executor_client"
RUFF = Path(sys.executable).with_name("ruff")

TARGETS = {
    "aio.py": "client.py",
    "aio_session.py": "session.py",
    "aio_computer.py": "computer.py",
    "aio_driving.py": "driving.py",
    "aio_files.py": "files.py",
    "aio_watch.py": "watch.py",
    "aio_undo.py": "undo.py",
    "aio_process.py": "process.py",
    "aio_processes.py": "processes.py",
    "_aio/transport.py": "_sync/transport.py",
}

PROSE: dict[str, tuple[tuple[str, str], ...]] = {
    "aio.py": (
        ("The asyncio client: connects", "The blocking client: connects"),
        (
            "opened on first use. It belongs to the event loop of its first call, and so do its\n    sessions.",
            "opened on first use. Thread-safe.",
        ),
        (
            "on the client's\n    event loop; it must not be a coroutine function. It must not block.",
            "in a thread\n    of the client. The end of the call waits for it, so it must not block.",
        ),
    ),
    "aio_session.py": (
        ("A session of the asyncio client", "A session of the blocking client"),
        (
            "a cancelled task, an exception out of `on_event`), it cancels the execution first.",
            "an interrupt, an exception out of `on_event`), it cancels the execution first.\n"
            "It reads in the caller's own thread, and starts no other unless the program calls host tools.",
        ),
        (
            "order of arrival. Host tools may be coroutine\n    functions; others run in threads. A task that is "
            "cancelled in `execute` cancels the execution first.",
            "order of arrival. Thread-safe.",
        ),
        ("as it arrives; it may be a coroutine function.", "as it arrives, in this thread."),
        (
            'waits. Those with the placement "sandbox" run in the session\'s\n        interpreter,',
            'waits, on threads. Those with the placement "sandbox" run in the\n        session\'s interpreter,',
        ),
    ),
    "aio_computer.py": (("computer, of the asyncio client", "computer, of the blocking client"),),
    "aio_driving.py": (("of the asyncio client to its result", "of the blocking client to its result"),),
    "aio_files.py": (
        ("of the asyncio client", "of the blocking client"),
        ("workspace. The disk's work is done in threads.", "workspace. Thread-safe."),
    ),
    "aio_undo.py": (("of the asyncio client", "of the blocking client"),),
    "aio_watch.py": (("files, of the asyncio client", "files, of the blocking client"),),
    "aio_process.py": (("of the asyncio client: its output", "of the blocking client: its output"),),
    "aio_processes.py": (
        ("of the asyncio client: commands", "of the blocking client: commands"),
        ("(an interrupt, a cancelled task, an exception", "(an interrupt, an exception"),
        ("by a break, an exception, a cancelled task.", "by a break, an exception."),
        ("`contextlib.aclosing` closes it", "`contextlib.closing` closes it"),
    ),
    "_aio/transport.py": (
        ("The asyncio client's", "The blocking client's"),
        ("Belongs to the event loop of its first use.", "Thread-safe."),
    ),
}

DROPPED = ("async", "await")
RENAMED = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "_aio": "_sync",
    "AsyncGenerator": "Generator",
    "aclosing": "closing",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "push_async_exit": "push",
    "aio": "client",
    "aio_computer": "computer",
    "aio_driving": "driving",
    "aio_files": "files",
    "aio_ports": "ports",
    "aio_process": "process",
    "aio_processes": "processes",
    "aio_session": "session",
    "aio_undo": "undo",
    "aio_watch": "watch",
}
_ASYNC_NAME = re.compile(r"\bAsync(?=[A-Z])")
_AWAITABLE = re.compile(r"\bAwaitable\[(\w+)\]")

HEADER = "# Made of {source} by tools/unasync.py: change that, and run `make unasync`.\n"


def blocking(source: str) -> str:
    """Returns the blocking form of a module of the asyncio client, formatted."""
    text = (CLIENT / source).read_text()
    for ours, theirs in PROSE[source]:
        if text.count(ours) != 1:
            sys.exit(f"{source} has not once, but {text.count(ours)} times: {ours!r}")
        text = text.replace(ours, theirs)
    text = _AWAITABLE.sub(r"\1", _without_async(text))
    text = HEADER.format(source=source) + text
    name = str(CLIENT / TARGETS[source])
    # Imports have changed or are unused, loops only yield, and lines are shorter.
    fix = ("--quiet", "--select", "I,F401,SIM117,UP028", "--fix", "--unsafe-fixes")
    text = _ruff("check", *fix, "--stdin-filename", name, "-", given=text)
    return _ruff("format", "--stdin-filename", name, "-", given=text)


def _without_async(text: str) -> str:
    lines = text.splitlines(keepends=True)
    for token in reversed(list(_tokens(text))):
        (row, start), (end_row, end) = token.start, token.end
        if token.type == tokenize.NAME and token.string in DROPPED:
            line = lines[row - 1]
            lines[row - 1] = line[:start] + line[end:].removeprefix(" ")
        elif token.type == tokenize.NAME:
            lines[row - 1] = lines[row - 1][:start] + _renamed(token.string) + lines[row - 1][end:]
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            # Only from the token on: the columns of the tokens before it are still needed.
            line = lines[row - 1]
            lines[row - 1] = line[:start] + _ASYNC_NAME.sub("", line[start:])
            for number in range(row, end_row):
                lines[number] = _ASYNC_NAME.sub("", lines[number])
    return "".join(lines)


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _renamed(name: str) -> str:
    return RENAMED.get(name) or _ASYNC_NAME.sub("", name)


def _ruff(*arguments: str, given: str) -> str:
    return subprocess.run([RUFF, *arguments], input=given, capture_output=True, text=True, check=True).stdout


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    for source, target in TARGETS.items():
        path, fresh = CLIENT / target, blocking(source)
        if not check:
            path.write_text(fresh)
        elif path.read_text() != fresh:
            sys.exit(f"{target} is not what {source} gives; run: make unasync")


if __name__ == "__main__":
    main()
