"""The commands of a recording: what each printed and how it ended, and how they run again.

Commands run next to executions and to each other. So a replay goes through the recorded entries in order, and at each
output it waits until the command has printed as much as it had then: input reaches the same prompt as before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from executor_api.recordings import PLAIN_ENV
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client.errors import (
    CallTimeoutError,
    FileError,
    InvalidRequest,
    NotFoundError,
    PreconditionError,
    ResourceExhaustedError,
)
from executor_client.process import Process
from executor_client.process_results import ProcessOutput
from executor_client.recording import Entry, Recording
from executor_client.replays.comparison import Difference, differing
from executor_client.replays.timeline import command_text, end_text, enum_text
from executor_client.session import Session

WAIT_S = 30.0
"""Seconds that a command may take longer than three times its recorded time."""
_MORE_BYTES = 64 * 1024
"""Bytes of a stream that are kept beyond twice the recorded ones; a stream with more differs."""
_PORTS_WAIT_S = 2.0
"""Seconds to wait for what a connection to a port may have caused."""
_UNKNOWN = "commands whose start is not in the recording"
KINDS = ("command", "input", "resize", "signal", "output")
"""The kinds of entries about commands."""


@dataclass
class Command:
    """What a command printed and how it ended. `end` is empty before the end, `is_cut` true if output is missing."""

    request: service_pb.StartProcessRequest
    begin_s: float
    has_begun: bool = False
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    is_cut: bool = False
    end: str = ""

    @property
    def has_end(self) -> bool:
        """False for a running command, or one that its session ended."""
        return self.end not in ("", "lost")

    def add(self, event: pb.ProcessEvent) -> None:
        """Takes a recorded event."""
        self.has_begun = True
        if event.HasField("output"):
            is_error = event.output.stream == pb.OUTPUT_STREAM_STDERR
            (self.stderr if is_error else self.stdout).extend(event.output.data)
        elif event.HasField("output_cut"):
            self.is_cut = True
        elif event.HasField("result"):
            result = event.result
            outcome = enum_text(pb.ProcessOutcome, result.outcome, "PROCESS_OUTCOME_")
            self.end = end_text(outcome, result.exit_code, result.signal)

    def differences(self, number: int, got: Command) -> Iterator[Difference]:
        """Yields how another run differs: the end and, unless it is cut, stdout.

        If the session ended the recorded run, only the beginning of stdout is compared.
        """
        what = name_of(number, self)
        if not (self.is_cut or got.is_cut):
            printed = got.stdout if self.has_end else got.stdout[: len(self.stdout)]
            yield from _differing(f"{what}: output", _text(self.stdout), _text(printed))
        if self.has_end:
            yield from _differing(f"{what}: end", self.end, got.end or "it still runs")

    def notes(self, number: int, got: Command) -> Iterator[Difference]:
        """Yields differences that are not a divergence: text on stderr."""
        if self.has_end and not (self.is_cut or got.is_cut):
            yield from _differing(f"{name_of(number, self)}: text on stderr", _text(self.stderr), _text(got.stderr))


def name_of(number: int, command: Command) -> str:
    return f"command {number} ({command_text(command.request)})"


def _differing(what: str, expected: str, got: str) -> Iterator[Difference]:
    if (found := differing(0, what, expected, got)) is not None:
        yield found


def _text(output: bytes | bytearray) -> str:
    return output.decode("utf-8", "replace")


def commands_of(recording: Recording) -> list[Command]:
    """Returns the commands of a recording in the order of their starts. Raises RecordingError."""
    found: dict[str, Command] = {}
    commands = []
    for entry in recording.entries():
        if entry.kind == "session":
            found.clear()  # another session may use the same ids
        elif entry.kind == "command":
            request = entry.message()
            if request.process_id not in found:
                found[request.process_id] = Command(request, entry.time_s)
                commands.append(found[request.process_id])
        elif entry.kind == "output" and (command := found.get((message := entry.message()).process_id)) is not None:
            command.add(message.event)
    return commands


@dataclass
class _Running:
    number: int
    expected: Command
    got: Command
    process: Process | None  # None if its start was refused
    is_ignored: bool


class CommandReplay:
    """Runs recorded commands again in a session. `begun` counts them.

    With `ports_used`, connections that the recording lacks may have made a command print or end. So a command that
    still runs is not a divergence, but unverified. The output of commands whose text contains one of `ignore` is
    unverified, too.
    """

    def __init__(self, *, ports_used: bool, ignore: Sequence[str]) -> None:
        self._ports_used = ports_used
        self._ignore = ignore
        self.begun = 0
        self.notes: list[Difference] = []
        self.unverified: list[str] = []
        self._commands: dict[str, _Running] = {}

    def repeat(self, session: Session, entry: Entry) -> Difference | None:
        """Repeats a recorded request, or waits for recorded output. Returns a divergence."""
        message: Any = entry.message()
        if entry.kind == "command":
            if message.process_id not in self._commands:
                self._start(session, entry.time_s, message)
            return None
        running = self._commands.get(message.process_id)
        if running is None:
            if _UNKNOWN not in self.unverified:
                self.unverified.append(_UNKNOWN)
        elif entry.kind == "output":
            running.expected.add(message.event)
            return self._await(running, entry.time_s)
        elif running.process is not None:
            message.session_id = session.session_id
            with suppress(PreconditionError, NotFoundError, CallTimeoutError):  # it has ended, or is slow: as recorded
                session._open().call(message)
        return None

    def finish(self) -> Difference | None:
        """Compares the commands of a session that were refused or had not ended. Returns the first divergence.

        Later commands belong to another session.
        """
        commands, self._commands = self._commands, {}
        for running in commands.values():
            expected = running.expected
            if not expected.has_begun and running.process is not None:
                return Difference(0, name_of(running.number, expected), "refused", "it runs")
            if expected.has_begun and not expected.end:
                self.unverified.append(f"the end of command {running.number}")
            if not expected.has_end and not (self._ports_used or running.is_ignored):
                found = next(expected.differences(running.number, running.got), None)
                if found is not None:
                    return found
        return None

    def _start(self, session: Session, time_s: float, request: service_pb.StartProcessRequest) -> None:
        self.begun += 1
        expected, got = Command(request, time_s), Command(request, time_s)
        text = command_text(request)
        is_ignored = any(each in text for each in self._ignore)
        running = self._commands[request.process_id] = _Running(self.begun, expected, got, None, is_ignored)
        again = service_pb.StartProcessRequest()
        again.CopyFrom(request)
        again.session_id = session.session_id
        for name in [name for name in again.env if name not in PLAIN_ENV]:
            del again.env[name]
        try:
            with session._transport.waits() as waits:
                process = session.processes._asked_for(again, waits)
                process._begin()
        except (InvalidRequest, FileError, ResourceExhaustedError) as error:  # no program, directory or capacity
            got.end = f"refused: {error.message}"
        else:
            running.process = process
            process.close()

    def _await(self, running: _Running, time_s: float) -> Difference | None:
        """Waits until a command has printed and ended as far as recorded. Returns a divergence."""
        expected, got, process = running.expected, running.got, running.process
        if process is None:
            return Difference(0, name_of(running.number, expected), "it was started", got.end)
        wait_s = _PORTS_WAIT_S if self._ports_used else WAIT_S + 3 * max(0.0, time_s - expected.begin_s)
        if _follow(process, running, time.monotonic() + wait_s):
            if not expected.has_end:
                process.close()
                return None
        elif self._ports_used:
            self.unverified.append(f"connections to ports, for which command {running.number} waits")
            return None
        if (result := process.result) is not None:
            got.end = end_text(result.outcome, result.exit_code, result.signal)
        if running.is_ignored:
            self.unverified.append(f"output of command {running.number}, which is ignored")
            return next(_differing(f"{name_of(running.number, expected)}: end", expected.end, got.end), None)
        if expected.is_cut or got.is_cut:
            self.unverified.append(f"output of command {running.number}, of which some was left out")
        self.notes += expected.notes(running.number, got)
        return next(expected.differences(running.number, got), None)


def _follow(process: Process, running: _Running, ends_s: float) -> bool:
    """Reads until a command has printed and ended as far as recorded, or printed far more. False if the time is up."""
    expected, got = running.expected, running.got
    try:
        while process.result is None and (expected.has_end or len(got.stdout) < len(expected.stdout)):
            event = process._next(ends_s)
            if isinstance(event, ProcessOutput):
                is_error = event.stream == "stderr"
                kept, recorded = (got.stderr, expected.stderr) if is_error else (got.stdout, expected.stdout)
                room = 2 * len(recorded) + _MORE_BYTES - len(kept)
                kept.extend(event.data[:room])
                if not (room or is_error or expected.is_cut or got.is_cut or running.is_ignored):
                    return True
            elif event is not None:
                got.is_cut = True
            if time.monotonic() > ends_s:
                return False
    except CallTimeoutError:
        return False
    return True
