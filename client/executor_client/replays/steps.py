"""The tool calls of recorded executions, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_client._core.tools import Answer
from executor_client._core.values import pack, unpack_or_opaque
from executor_client.recording import Recording, Step
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
    """Returns a recorded answer as it is sent to the sandbox, which does not receive the value of a final answer."""
    if answer.HasField("error"):
        return Answer(error=answer.error)
    packed = recording.payload(answer.value.packed)
    if is_final:
        return Answer(pack(None), unpack_or_opaque(packed), is_final=True)
    return Answer(packed)
