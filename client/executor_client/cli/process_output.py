"""Prints the output of a process without a terminal.

Files, and pipes in scripts, get the bytes unchanged. Where a terminal may interpret them, control characters are shown
as escapes.
"""

from __future__ import annotations

import codecs
import sys
from typing import Any

from executor_client.cli.console import Console, may_reach_a_terminal
from executor_client.cli.descriptors import write_all


class ProcessOutput:
    """Writes the events of one process."""

    def __init__(self, console: Console, *, raw: bool) -> None:
        """With `raw`, every stream gets the bytes unchanged."""
        self._console = console
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._texts = {
            name: _Text()
            for name, stream in self._streams.items()
            if stream is not None and not raw and may_reach_a_terminal(stream)
        }

    async def show(self, event: Any) -> None:
        """Prints output, or how much was omitted. Raises BrokenPipeError, OSError."""
        data: bytes | None = getattr(event, "data", None)
        if data is None:
            self._console.remark(f"{event.omitted_bytes:,} bytes of output left out")
            return
        stream, text = self._streams[event.stream], self._texts.get(event.stream)
        if text is not None:
            self._console.show_output(stream, text.feed(data))
        elif stream is not None:
            await write_all(stream.fileno(), data)

    def finish(self) -> None:
        """Prints the bytes of incomplete characters."""
        for name, text in self._texts.items():
            self._console.show_output(self._streams[name], text.feed(b"", final=True))


class _Text:
    """Decodes a stream. A carriage return waits for the next character, since both may end a line."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes, *, final: bool = False) -> str:
        text = self._held + self._decoder.decode(data, final)
        self._held = "\r" if text.endswith("\r") and not final else ""
        return text[: len(text) - len(self._held)]


def stdin_is_given() -> bool:
    """True if standard input is a pipe or a file, which the command then reads."""
    return sys.stdin is not None and not sys.stdin.isatty()
