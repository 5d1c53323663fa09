"""Turns a recording, or the events of executions, into frames: what happened, when, as texts and checked images.

The texts come unescaped from the recording. Code that shows them must escape them.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from executor_api import strict_json
from executor_api.displays import unpack
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_api.values import OpaqueValue
from executor_client._core.images import check_image
from executor_client._core.limits import IMAGES_PIXELS_MAX
from executor_client._core.value_text import one_line, value_text
from executor_client._core.values import unpack_or_opaque
from executor_client.errors import RecordingError
from executor_client.recording import Entry, Manifest, Recording
from executor_client.results import Image

VALUE_CHARS_MAX = 20_000
ARGUMENT_CHARS_MAX = 2_000
ANSWER_CHARS_MAX = 4_000
NAMES_SHOWN = 20
PIXELS_MAX = 4 * IMAGES_PIXELS_MAX
"""Pixels of all decoded images of one timeline, which may hold millions of small files with large images."""

_read_json = strict_json.reader()


class FrameKind(enum.Enum):
    """What a frame shows. OUTPUT and ERRORS may begin or end within a line; the others are whole lines."""

    NOTE = "note"
    CODE = "code"
    OUTPUT = "output"
    ERRORS = "errors"
    CALL = "call"
    ANSWER = "answer"
    MODEL = "model"
    IMAGE = "image"
    VALUE = "value"
    FAILURE = "failure"
    END = "end"


@dataclass(frozen=True)
class Frame:
    """One thing that happened, `at_s` seconds after the recording's first entry. `step` is 0 outside of executions."""

    at_s: float
    step: int
    kind: FrameKind
    text: str
    image: Image | None = None


Shown = tuple[FrameKind, str, Image | None]


@dataclass
class Timeline:
    """Turns events into frames, which it yields as kind, text and image.

    `payload` returns the bytes of a payload; its errors pass through.
    """

    payload: Callable[[pb.Payload], bytes]
    pixels_left: int = PIXELS_MAX

    def event(
        self, event: pb.Event, *, redacted: bool = False, took_s: float = 0.0, final: str = ""
    ) -> Iterator[Shown]:
        """Yields what an event shows; without its payload if it is redacted.

        `took_s` and `final` are for a result: its duration in seconds, and the text of the final answer.
        """
        match event.WhichOneof("kind"):
            case "log":
                is_error = event.log.stream == pb.OUTPUT_STREAM_STDERR
                yield FrameKind.ERRORS if is_error else FrameKind.OUTPUT, event.log.text, None
            case "output_cut":
                yield FrameKind.NOTE, f"{event.output_cut.omitted_bytes:,} bytes of output left out", None
            case "image":
                yield self._image(event.image)
            case "display":
                yield FrameKind.NOTE, _display(self.payload(event.display.data)), None
            case "tool_call":
                call = event.tool_call
                given = "…" if redacted else arguments_text(self.payload(call.arguments.packed))
                yield FrameKind.CALL, f"{call.name}({given})", None
            case "limit_warning":
                warning = event.limit_warning
                yield FrameKind.NOTE, f"{warning.used:,} of {warning.budget:,} {warning.limit} are used up", None
            case "queued" if event.queued.ahead:
                yield FrameKind.NOTE, f"waiting for {event.queued.ahead} other executions", None
            case "result":
                yield from self._result(event.result, took_s, final)

    def _image(self, shown: pb.ImageEvent) -> Shown:
        image = check_image(self.payload(shown.data), shown.mime_type, shown.source, pixels_left=self.pixels_left)
        if image.refusal:
            return FrameKind.IMAGE, f"an image was refused: {image.refusal}", image
        self.pixels_left -= image.width * image.height
        return FrameKind.IMAGE, f"an image of {image.width}x{image.height} pixels", image

    def _result(self, result: pb.ExecutionResult, took_s: float, final: str) -> Iterator[Shown]:
        if result.final_answer_call_id:
            yield FrameKind.VALUE, f"final answer: {final or 'unknown'}", None
        elif result.HasField("output"):
            value = unpack_or_opaque(self.payload(result.output.packed))
            if value is not None:
                yield FrameKind.VALUE, value_text(value, VALUE_CHARS_MAX), None
        outcome = enum_text(pb.Outcome, result.outcome, "OUTCOME_")
        if result.outcome != pb.OUTCOME_SUCCEEDED:
            error = result.error
            text = error.traceback or ": ".join(filter(None, (error.type, error.message))) or outcome
            yield FrameKind.FAILURE, text.rstrip("\n"), None
        variables = enum_text(pb.VariablesState, result.variables_state, "VARIABLES_STATE_")
        lost = "" if result.variables_state == pb.VARIABLES_STATE_KEPT else f"; the variables are {variables}"
        yield FrameKind.END, f"{outcome} after {took_s:.2f} s{lost}", None


@dataclass
class _State:
    events: Timeline
    begin_s: dict[int, float] = field(default_factory=dict)
    calls: dict[tuple[int, str], str] = field(default_factory=dict)  # names of tools, by step and call
    answers: dict[tuple[int, str], Entry] = field(default_factory=dict)


def moment_text(time_s: float) -> str:
    """Returns a time, in seconds since 1970, for people."""
    try:
        return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # a recording may say anything
        return "at an unknown time"


def lacking(manifest: Manifest) -> list[str]:
    """Lists what a recording lacks; empty if it is complete."""
    return [*([manifest.ended or "its end"] * (not manifest.complete)), *_counted(manifest.unknown)]


def completeness(manifest: Manifest) -> str:
    """Says whether a recording is complete, and what it lacks."""
    missing, referenced = lacking(manifest), _counted(manifest.referenced)
    text = f"Unverified: the recording lacks {'; '.join(missing)}." if missing else "Complete."
    return f"{text} Only referenced: {'; '.join(referenced)}." if referenced else text


def _counted(things: Mapping[str, int]) -> list[str]:
    return [f"{what} ({count:,})" for what, count in things.items()]


def frames(recording: Recording) -> Iterator[Frame]:
    """Yields the frames of a recording in order. Raises RecordingError."""
    state, first_s, last_s = _State(Timeline(recording.payload)), None, 0.0
    for entry in recording.entries():
        first_s = entry.time_s if first_s is None else first_s
        last_s = max(last_s, entry.time_s - first_s)  # a clock may be set back
        if entry.kind == "execute":
            state.begin_s[entry.step] = last_s
        for kind, text, image in _shown(recording, entry, state, last_s):
            yield Frame(last_s, entry.step, kind, text, image)


def _shown(recording: Recording, entry: Entry, state: _State, at_s: float) -> Iterator[Shown]:
    """Yields the kind, the text and the image of what an entry shows."""
    if entry.kind == "event":
        yield from _event(recording, entry, state, at_s)
    elif entry.kind == "output":
        yield from _command_event(entry.message().event)
    elif entry.kind == "execute":
        yield FrameKind.CODE, entry.message().code, None
    elif entry.kind == "answer":
        yield FrameKind.ANSWER, _answer(recording, entry, state), None
    elif entry.kind == "model":
        yield FrameKind.MODEL, _model(recording, entry), None
    else:
        yield FrameKind.NOTE, _note(entry), None


def _event(recording: Recording, entry: Entry, state: _State, at_s: float) -> Iterator[Shown]:
    event: pb.Event = entry.message()
    if event.HasField("tool_call"):
        state.calls[entry.step, event.tool_call.call_id] = event.tool_call.name
    final = state.answers.get((entry.step, event.result.final_answer_call_id))
    yield from state.events.event(
        event,
        redacted=entry.redacted,
        took_s=at_s - state.begin_s.get(entry.step, at_s),
        final="" if final is None else _answer_text(recording, final),
    )


def _command_event(event: pb.ProcessEvent) -> Iterator[Shown]:
    match event.WhichOneof("kind"):
        case "output":
            is_error = event.output.stream == pb.OUTPUT_STREAM_STDERR
            text = event.output.data.decode("utf-8", "replace")
            yield FrameKind.ERRORS if is_error else FrameKind.OUTPUT, text, None
        case "output_cut":
            yield FrameKind.NOTE, f"{event.output_cut.omitted_bytes:,} bytes of output left out", None
        case "result":
            outcome = enum_text(pb.ProcessOutcome, event.result.outcome, "PROCESS_OUTCOME_")
            yield FrameKind.END, f"command: {end_text(outcome, event.result.exit_code, event.result.signal)}", None


def command_text(request: service_pb.StartProcessRequest) -> str:
    """Returns a command as one line; without the shell if the text is for a shell."""
    argv = list(request.argv)
    return one_line(argv[2] if request.prefers_bash and len(argv) == 3 else " ".join(argv), ARGUMENT_CHARS_MAX)


def end_text(outcome: str, exit_code: int | None, signal: int) -> str:
    """Returns how a command ended, for people."""
    return {"exited": f"exit code {exit_code}", "signalled": f"signal {signal}"}.get(outcome, outcome)


def enum_text(kind: Any, number: int, prefix: str) -> str:
    """Returns the name of an enum's number as a word; the number itself if it is unknown."""
    name = kind.Name(number) if number in kind.values() else str(number)
    return str(name).removeprefix(prefix).lower().replace("_", " ")


def _display(packed: bytes) -> str:
    try:
        data = unpack(packed)
    except ValueError as error:
        return f"a display was refused: {error}"
    return data.get("text/plain") or f"displayed an object as {', '.join(sorted(data)[:NAMES_SHOWN])}"


def arguments_text(packed: bytes) -> str:
    """Returns packed arguments as they stand in a call: `'Paris', unit='C'`."""
    match unpack_or_opaque(packed):
        case (tuple() as args, dict() as kwargs):
            texts = [value_text(each, ARGUMENT_CHARS_MAX) for each in args[:NAMES_SHOWN]]
            texts += [f"{name}={value_text(each, ARGUMENT_CHARS_MAX)}" for name, each in kwargs.items()]
            more = ["…"] if len(args) + len(kwargs) > NAMES_SHOWN else []
            return ", ".join([*texts[:NAMES_SHOWN], *more])
        case other:
            return value_text(other, ARGUMENT_CHARS_MAX)


def _answer(recording: Recording, entry: Entry, state: _State) -> str:
    call_id = entry.message().call_id
    state.answers[entry.step, call_id] = entry
    return f"{state.calls.get((entry.step, call_id), 'a tool')} → {_answer_text(recording, entry)}"


def _answer_text(recording: Recording, entry: Entry) -> str:
    return answer_text(recording, None if entry.redacted else entry.message())


def answer_text(recording: Recording, answer: service_pb.SubmitToolResultRequest | None) -> str:
    """Returns the answer of a tool for people; None is one that is not in the recording."""
    if answer is None:
        return "left out of the recording"
    if answer.HasField("error"):
        return f"{answer.error.type}: {answer.error.message}"[:ANSWER_CHARS_MAX]
    value = unpack_or_opaque(recording.payload(answer.value.packed))
    return value.repr if isinstance(value, OpaqueValue) else value_text(value, ANSWER_CHARS_MAX)


def _model(recording: Recording, entry: Entry) -> str:
    fields = entry.fields
    messages = fields.get("messages")
    count = len(messages) if isinstance(messages, list) else 0
    if isinstance(error := fields.get("error"), Mapping):
        told = f"{error.get('type')}: {error.get('message')}"
    else:
        told = _model_answer(recording, fields.get("answer"))
    return f"{fields.get('model')}, {count} messages:\n{told}"


def _model_answer(recording: Recording, payload: object) -> str:
    if not isinstance(payload, Mapping):
        return "no answer"
    try:
        found = _read_json(recording.payload(payload))
        if isinstance(found, Mapping) and isinstance(found.get("content"), str):
            return str(found["content"])
        return json.dumps(found, indent=1, ensure_ascii=False)
    except (strict_json.NotJson, RecursionError) as error:  # readable JSON may be nested too deeply to be shown
        raise RecordingError(f"the recording can't be read: a model's answer is not JSON: {error}") from error


def _note(entry: Entry) -> str:
    fields = entry.fields
    match entry.kind:
        case "session":
            image, python = fields.get("image"), fields.get("python_version")
            return f"session {fields.get('session_id')}: image {image!r}, Python {python}"
        case "broken":
            return f"the client left the execution: {fields.get('type')}: {fields.get('message')}"
    message = entry.message()
    match entry.kind:
        case "imports":
            return f"imports authorized: {_names(message.authorized_imports)}"
        case "tools":
            return f"tools: {_names([each.name for each in message.tools])}"
        case "variables":
            return f"variables set: {_names([each.name for each in message.variables])}"
        case "file":
            return f"file put: {message.path!r} ({message.size_bytes:,} bytes)"
        case "rollback":
            return f"went back to savepoint {message.savepoint or 'the newest'}"
        case "command":
            return f"$ {command_text(message)}"
        case "input":
            more = " and the end of the input" if message.eof else ""
            return f"input of {len(message.data):,} bytes{more}"
        case "signal":
            return f"signal {message.signal}"
        case "files":
            return f"files changed: {message.WhichOneof('action')} {message.path!r}"
        case kind:
            return f"{kind} taken"


def _names(names: Any) -> str:
    shown = list(names)
    more = f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else ""
    return ", ".join(shown[:NAMES_SHOWN]) + more if shown else "none"
