"""A process that is asked for figures: a request is a line of JSON on its stdin, the answer one on its stdout.

It measures with code that this process must not load: another commit's client, another project's packages. It ends when
its stdin does, so none outlives the process that asks, however that ends. Every wait for it is bounded.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_MAX_ANSWER_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_STOP_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 20.0
_TAIL_BYTES = 4000
_TAIL_LINES = 3


class WorkerFailure(Exception):
    """It ended, or was silent for too long; the message says which, with its last lines."""


class LineProcess:
    """One such process, in a process group of its own: an interrupt at the terminal reaches it as an end of input."""

    def __init__(self, command: Sequence[str], *, directory: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._received = bytearray()
        self._works = False

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Returns its answer. Raises WorkerFailure; after that only `close` makes sense."""
        assert self._process.stdin is not None
        self._works = True
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailure(f"it has ended: {self._last_words()}") from error
        try:
            answer = json.loads(self._line(time.monotonic() + timeout_s))
        except ValueError as error:
            raise WorkerFailure("its answer is not JSON") from error
        if not isinstance(answer, dict):
            raise WorkerFailure("its answer is no object")
        self._works = False
        return answer

    def close(self) -> None:
        """Ends it and all that it started, in order when it can."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        if self._works:  # it would see the end of its input after the work only
            self._process.terminate()
        for number, timeout_s in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, _KILL_TIMEOUT_S)):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
                break
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _MAX_ANSWER_BYTES:
                raise WorkerFailure(f"its answer has more than {_MAX_ANSWER_BYTES} bytes")
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise WorkerFailure(f"no answer in time: {self._last_words()}")
            piece = os.read(descriptor, _READ_BYTES)
            if not piece:
                raise WorkerFailure(f"it ended: {self._last_words()}")
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").split("\n")
        return " / ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:]) or "no word of why"
