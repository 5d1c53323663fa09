"""Runs a recording again in a new session, and stops at the first divergence.

The session gets the settings of the recorded one, within the policy. What was sent to the session is sent again. Host
tools do not run: their calls are answered from the recording, by step, order, name and arguments. Commands run again
(`commands.py`). The recording's code and values only go to the sandbox.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from executor_api.recordings import PORTS, tool_payloads
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client._core.requests import InlineBudget
from executor_client._core.tools import Answer, Tool
from executor_client._core.values import pack
from executor_client.client import ExecutorClient
from executor_client.errors import RecordingError
from executor_client.recording import Entry, Recording, Step
from executor_client.replays.commands import KINDS as COMMAND_KINDS
from executor_client.replays.commands import CommandReplay
from executor_client.replays.comparison import Difference, Diverged, alike, call_text, difference, notes
from executor_client.replays.steps import RecordedCall, answer_of, calls_of
from executor_client.replays.timeline import arguments_text, lacking
from executor_client.results import ExecutionResult, Outcome
from executor_client.session import Session

OnStep = Callable[[int, str], None]
"""Called with the number of each step and how it went."""


@dataclass(frozen=True)
class Replayed:
    """How a recording ran again: the first divergence, or None, what could not be verified, and what else differs."""

    steps: int
    commands: int
    divergence: Difference | None
    unverified: tuple[str, ...]
    notes: tuple[Difference, ...]


class _Unanswered(BaseException):
    """A call whose answer is not in the recording."""

    def __init__(self, why: str) -> None:
        self.why = why


def execute_again(
    client: ExecutorClient,
    recording: Recording,
    *,
    image: str | None = None,
    from_step: int = 1,
    ignore: Sequence[str] = (),
    on_step: OnStep = lambda number, how: None,
) -> Replayed:
    """Runs all steps of a recording in new sessions of `client`, and ends these sessions.

    Steps before `from_step` only rebuild the state: their results are not compared. Nor is the output of commands whose
    text contains one of `ignore`. Raises RecordingError, and the errors of the client if the daemon refuses a setting
    of the recorded session.
    """
    with ExitStack() as until_replayed:
        return _Replay(client, recording, image, from_step, ignore, on_step, until_replayed).run()


@dataclass
class _Replay:
    client: ExecutorClient
    recording: Recording
    image: str | None
    from_step: int
    ignore: Sequence[str]
    on_step: OnStep
    until_replayed: ExitStack
    session: Session | None = None
    tools: dict[str, bool] = field(default_factory=dict)  # whether a host tool gives the final answer, by name
    steps: int = 0
    unverified: list[str] = field(default_factory=list)
    notes: list[Difference] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commands = CommandReplay(ports_used=PORTS in self.recording.manifest.unknown, ignore=self.ignore)

    def run(self) -> Replayed:
        self.unverified += lacking(self.recording.manifest)
        if self.recording.manifest.captured.get("session", 0) > 1:
            self.unverified.append("the session of each step: several sessions share it")
        for item in self.recording.in_order():
            try:
                found = self._repeat(item) if isinstance(item, Entry) else self._step(item)
            except _Unanswered as unanswered:
                self.unverified.append(f"{unanswered.why}, so the replay ended in step {item.number}")
                return self._replayed(None)
            if found is not None:
                return self._replayed(found)
        return self._replayed(self.commands.finish())

    def _replayed(self, found: Difference | None) -> Replayed:
        unverified, notes = self.unverified + self.commands.unverified, self.notes + self.commands.notes
        return Replayed(self.steps, self.commands.begun, found, tuple(unverified), tuple(notes))

    def _open_session(self) -> Session:
        if self.session is None:
            raise RecordingError(f"{self.recording.path} can't run again: it does not begin with a session")
        return self.session

    # -----------------------------------------------------------------------------------------------------------------
    # Between steps

    def _repeat(self, entry: Entry) -> Difference | None:
        """Repeats a recorded request in the session. Returns a divergence of a command."""
        if entry.kind == "session":
            if (found := self.commands.finish()) is None:
                self._create(entry.fields)
            return found
        if entry.kind in ("model", "broken", "event", "answer"):
            return None
        session, message = self._open_session(), entry.message()
        if entry.kind in COMMAND_KINDS:
            return self.commands.repeat(session, entry)
        match entry.kind:
            case "imports":
                session.authorize_imports(message.authorized_imports)
            case "tools":
                self.tools = {each.name: each.is_final_answer for each in message.tools if not each.HasField("shipped")}
                self._send(message, tool_payloads(message))
            case "variables":
                self._send(message, [each.value.packed for each in message.variables])
            case "files":
                self._send(message, [])
            case "file":
                self._put(entry, message)
            case "savepoint":
                session.savepoint()
            case "rollback":
                session.rollback(message.savepoint or None)
        return None

    def _create(self, head: Mapping[str, Any]) -> None:
        if self.session is not None:
            self.session.close()
        if names := _texts(head, "env_names"):
            self.unverified.append(f"the values of the environment variables {', '.join(names)}")
        limits, backend = head.get("limits"), head.get("backend")
        self.session = self.client.create_session(
            self.image or str(head.get("image", "")) or None,
            _texts(head, "authorized_imports"),
            limits if isinstance(limits, Mapping) else None,
            {"client": "executor replay"},
            str(head.get("prelude", "")),
            backend=backend if backend in self.client.get_policy().backends else None,
            network=_texts(head, "network"),
            packages=_texts(head, "packages"),
        )
        self.until_replayed.enter_context(self.session)

    def _send(self, request: Any, places: Iterable[pb.Payload]) -> None:
        """Sends a recorded request, and uploads its payloads anew."""
        session = self._open_session()
        payloads = [(place, self.recording.payload(place)) for place in places]
        request.session_id = session.session_id

        def attempt() -> None:
            budget = InlineBudget()
            for place, packed in payloads:
                place.CopyFrom(session._payload(packed, budget))
            session._transport.once(request)

        session._transport.repeat(attempt)

    def _put(self, entry: Entry, header: service_pb.PutFileHeader) -> None:
        content = entry.fields.get("content")
        if not isinstance(content, Mapping) or "sha256" in content:
            self.unverified.append(f"the content of the file {header.path!r}, which was not put")
            return
        files, data = self._open_session().files, self.recording.payload(content)
        if header.format == pb.FILE_FORMAT_TAR:
            files.unpack(data, header.path)
        else:
            mode = header.mode if header.HasField("mode") else None
            files.write(header.path, data, append=header.append, mode=mode)

    # -----------------------------------------------------------------------------------------------------------------
    # A step

    def _step(self, step: Step) -> Difference | None:
        """Runs a step again. Returns its first divergence."""
        expected = self.recording.result(step) if step.is_ended else None
        if expected is None or expected.outcome in (Outcome.CANCELLED, Outcome.LOST):
            how = "has no recorded end" if expected is None else f"was {expected.outcome.value}"
            self.unverified.append(f"step {step.number}, which {how} and was not run again")
            self.on_step(step.number, "not run")
            return None
        self.steps += 1
        try:
            got, missing = self._run(step)
        except Diverged as diverged:
            return diverged.difference
        if step.number < self.from_step:
            self.on_step(step.number, "run, not compared")
            return None
        if missing is not None:
            return missing
        found = difference(step.number, expected, got)
        if found is None:
            self.on_step(step.number, "as recorded")
            self.notes += notes(step.number, expected, got)
        return found

    def _run(self, step: Step) -> tuple[ExecutionResult, Difference | None]:
        """Returns the new result, and the first recorded tool call that did not come again."""
        session, calls = self._open_session(), _Calls(self.recording, step, self.tools)
        request = service_pb.ExecuteRequest()
        request.CopyFrom(step.request)
        request.session_id, request.execution_id = session.session_id, secrets.token_hex(16)
        result = session._execute(request, calls.tools(), None)
        return result, calls.missing(result)


class _Calls:
    """Answers the tool calls of one step from the recording. Thread-safe."""

    def __init__(self, recording: Recording, step: Step, tools: Mapping[str, bool]) -> None:
        self._recording = recording
        self._step = step
        self._tools = tools
        self._left = calls_of(recording, step)
        self._answered = 0
        self._lock = threading.Lock()

    def tools(self) -> dict[str, Tool]:
        names = dict.fromkeys([*self._tools, *(each.name for each in self._left)])
        return {
            name: Tool(functools.partial(self._answer, name), is_final_answer=self._tools.get(name, False))
            for name in names
        }

    def missing(self, result: ExecutionResult) -> Difference | None:
        with self._lock:
            if not self._left:
                return None
            ended = f"no call; the step ended as {result.outcome.value}"
            return Difference(self._step.number, self._what(), str(self._left[0]), ended)

    def _answer(self, name: str, /, *args: Any, **kwargs: Any) -> Answer:
        given = (args, kwargs)
        with self._lock:
            call = next((each for each in self._next() if each.name == name and _takes(each, given)), None)
            if call is None:
                expected = str(self._left[0]) if self._left else "no further tool call"
                got = call_text(name, arguments_text(pack(given)))
                raise Diverged(Difference(self._step.number, self._what(), expected, got))
            self._left.remove(call)
            self._answered += 1
        if call.answer is None:
            raise _Unanswered(f"the answer of the tool {name} is not in the recording")
        return answer_of(self._recording, call.answer, is_final=self._tools.get(name, False))

    def _next(self) -> list[RecordedCall]:
        """Returns the recorded calls that may come now: the next one, and those that waited together with it."""
        return [each for each in self._left if each.group == self._left[0].group]

    def _what(self) -> str:
        return f"tool call {self._answered + 1}"


def _takes(call: RecordedCall, given: tuple[Any, Any]) -> bool:
    if call.packed_arguments is None:
        return True
    recorded = call.arguments
    return type(recorded) is tuple and alike([*recorded], [*given])


def _texts(head: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = head.get(name, ())
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise RecordingError(f"the recording can't be used: the session's {name} are not texts")
    return tuple(found)
