"""The executions of a recording in order, with their tool calls and what was sent to the session between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_client._core.tools import Answer
from executor_client._core.values import pack, unpack_or_opaque
from executor_client.recording import Entry, Recording, Step
from executor_client.replays.comparison import alike, call_text
from executor_client.replays.timeline import arguments_text


@dataclass(frozen=True)
class RecordedCall:
    """A tool call of a recorded execution. `arguments` is None if they were redacted, `answer` if it is not known.

    Calls of the same `group` waited at the same time, so their order is not fixed.
    """

    name: str
    packed_arguments: bytes | None
    answer: service_pb.SubmitToolResultRequest | None
    group: int

    @property
    def arguments(self) -> Any:
        return None if self.packed_arguments is None else unpack_or_opaque(self.packed_arguments)

    def is_like(self, other: RecordedCall) -> bool:
        return self.name == other.name and alike(self.arguments, other.arguments)

    def __str__(self) -> str:
        return call_text(self.name, "…" if self.packed_arguments is None else arguments_text(self.packed_arguments))


def in_order(recording: Recording) -> Iterator[Entry | Step]:
    """Yields executions, in the order of their requests, and the entries outside of them. Raises RecordingError."""
    waiting: deque[Entry | list[Entry]] = deque()
    running: dict[int, list[Entry]] = {}
    ended: dict[int, bool] = {}
    for entry in recording.entries():
        if entry.kind == "execute":
            running[entry.step] = [entry]
            waiting.append(running[entry.step])
        elif entry.step in running:
            running[entry.step].append(entry)
            if entry.kind == "broken" or (entry.kind == "event" and "result" in entry.fields):
                del running[entry.step]
                ended[entry.step] = entry.kind == "event"
        elif entry.step == 0:
            waiting.append(entry)
        while waiting and (isinstance(waiting[0], Entry) or waiting[0][0].step in ended):
            yield _made(waiting.popleft(), ended)
    for left in waiting:
        yield _made(left, ended)


def _made(item: Entry | list[Entry], ended: dict[int, bool]) -> Entry | Step:
    if isinstance(item, Entry):
        return item
    number = item[0].step
    return Step(number, item[0].message(), tuple(item), ended.pop(number, False))


def calls_of(recording: Recording, step: Step) -> list[RecordedCall]:
    """Returns the tool calls of an execution in the order in which they came. Raises RecordingError."""
    answers = {answer.call_id: (entry, answer) for entry, answer in step.answers()}
    calls, open_calls, group = [], set(), 0
    for entry in step.entries:
        if entry.kind == "answer":
            open_calls.discard(entry.message().call_id)
        elif entry.kind == "event" and "tool_call" in entry.fields:
            call = entry.message().tool_call
            group += not open_calls
            open_calls.add(call.call_id)
            packed = None if entry.redacted else recording.payload(call.arguments.packed)
            answered, answer = answers.get(call.call_id, (None, None))
            known = answer if answered is not None and not answered.redacted else None
            calls.append(RecordedCall(call.name, packed, known, group))
    return calls


def answer_of(recording: Recording, answer: service_pb.SubmitToolResultRequest, *, is_final: bool) -> Answer:
    """Returns a recorded answer as it is sent to the sandbox; of a final answer, only that there is one."""
    if answer.HasField("error"):
        return Answer(error=answer.error)
    packed = recording.payload(answer.value.packed)
    if is_final:
        return Answer(pack(None), unpack_or_opaque(packed), is_final=True)
    return Answer(packed)
