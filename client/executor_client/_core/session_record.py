"""Adds a session to a recording: each method takes something that the session sends or receives. No I/O of its own.

It must never fail the session: a `Recorder` logs its problems. A session that is not recorded has no object of this
class.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from executor_api.limits import EXECUTION_BLOBS_BYTES_MAX, EXECUTION_BLOBS_OPEN_MAX
from executor_api.recordings import (
    ENV_OF_COMMANDS,
    FILE_BYTES_RECORDED_MAX,
    INLINE_BYTES_MAX,
    drop_env_values,
    fields_of,
    payload_of,
)
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_api.values import EncodeError, encode
from executor_client._core import requests, shipped_tools
from executor_client._core.assembler import Assembler, ToolRequest
from executor_client._core.blobs import IncomingBlobs
from executor_client._core.execution import Execution
from executor_client._core.local import Content
from executor_client._core.terminal import sendable
from executor_client._core.tools import Answer, Tool
from executor_client.errors import InvalidRequest
from executor_client.events import ExecutionEvent
from executor_client.recording import Recorder
from executor_client.results import ExecutionResult, SessionInfo

if TYPE_CHECKING:
    from executor_client._shipping import Shipped

M = TypeVar("M", bound=Message)


class SessionRecord:
    """Writes one session to a recorder. `owns_recorder`: the recording ends with the session."""

    def __init__(
        self, recorder: Recorder, info: SessionInfo, *, owns_recorder: bool, was_used: bool, prelude: str
    ) -> None:
        self.recorder = recorder
        self._owns_recorder = owns_recorder
        self._running: dict[str, _RecordedAssembler] = {}
        self._commands: dict[str, float] = {}  # the last recorded event of each command; math.inf after its end
        versions = {"remote_executor": version("remote-executor")}
        recorder.add("session", {**_plain(dataclasses.asdict(info)), "prelude": prelude, "versions": versions})
        if was_used:
            recorder.note("what the session did before the recording", unknown=True)
        if info.network:
            recorder.note("what hosts of the network answered", unknown=True)

    @property
    def is_active(self) -> bool:
        return self.recorder.is_recording

    def begin(self, execution: Execution, request: service_pb.ExecuteRequest) -> None:
        """Adds the request of an execution that begins, and records its events from now on."""
        step = self.recorder.begin_step(_without_session(request))
        assembler = _RecordedAssembler(execution.assembler, self.recorder, step)
        execution.assembler = self._running[execution.execution_id] = assembler

    def end(self, execution_id: str) -> None:
        """Forgets an execution. Answers of its host tools that come later are not recorded."""
        self._running.pop(execution_id, None)

    def broken(self, execution_id: str, error: BaseException) -> None:
        """Adds that the caller left an execution before its end."""
        if (assembler := self._running.get(execution_id)) is not None:
            text = sendable(str(error)[:1000])
            self.recorder.add("broken", {"type": type(error).__name__, "message": text}, step=assembler.step)

    def answer(self, execution_id: str, call_id: str, answer: Answer) -> None:
        """Adds the answer of a host tool. The host's object of a final answer is packed if it has an exact form."""
        assembler = self._running.get(execution_id)
        if assembler is None:
            return
        request = service_pb.SubmitToolResultRequest(call_id=call_id, error=answer.error)
        redacted = call_id in assembler.redacted_calls
        if redacted:
            if answer.error is None:
                request.value.packed.inline = b""
            else:
                request.error.CopyFrom(service_pb.ToolError(type=answer.error.type))
        elif answer.packed is not None:
            packed: bytes | None = answer.packed
            if answer.is_final:
                try:
                    packed = encode(answer.value)
                except EncodeError:
                    packed = None
                    self.recorder.note("final answers without an exact form", unknown=True)
            request.value.packed.CopyFrom(self.recorder.payload(packed or b""))
        self.recorder.add("answer", request, step=assembler.step, redacted=redacted)

    def variables(self, packed: Mapping[str, bytes]) -> None:
        request = service_pb.SetVariablesRequest()
        for name, each in packed.items():
            request.variables.add(name=name).value.packed.CopyFrom(self.recorder.payload(each))
        self.recorder.add("variables", request)

    def tools(self, made: Mapping[str, Tool], shipped: Mapping[str, Shipped]) -> None:
        """Adds the session's tools: the names of host tools, and the source of tools in the sandbox."""
        request = requests.register_tools("", made)
        for place, packed in shipped_tools.payloads(request, shipped):
            place.CopyFrom(self.recorder.payload(packed))
        self.recorder.add("tools", request)

    def file(self, header: service_pb.PutFileHeader, content: Content) -> None:
        """Adds a file that was put: its content, or only its hash if it is large."""
        try:
            self._file(header, content)
        except (OSError, InvalidRequest):
            self.recorder.note("files that changed or went after they were put", unknown=True)

    def _file(self, header: service_pb.PutFileHeader, content: Content) -> None:
        fields = fields_of(_without_session(header))
        if content.size_bytes <= FILE_BYTES_RECORDED_MAX:
            fields["content"] = fields_of(self.recorder.payload(b"".join(content.pieces())))
        else:
            digest = hashlib.sha256()
            for piece in content.pieces():
                digest.update(piece)
            fields["content"] = {"sha256": digest.hexdigest()}
            self.recorder.note(f"files of more than {FILE_BYTES_RECORDED_MAX >> 20} MiB")
        self.recorder.add("file", fields)

    def changed(self, request: service_pb.ManageFileRequest) -> None:
        """Adds a change to the files of the workspace."""
        if request.WhichOneof("action") in ("mkdir", "move", "remove"):
            self.request("files", request)

    def command(self, request: service_pb.StartProcessRequest) -> None:
        """Adds a command that is about to be started."""
        request = _without_session(request)
        if drop_env_values(request):
            self.recorder.note(ENV_OF_COMMANDS, unknown=True)
        self.recorder.add("command", request)
        self._commands.setdefault(request.process_id, 0)

    def command_event(self, process_id: str, event: pb.ProcessEvent) -> None:
        """Adds an event of a command, once."""
        if process_id not in self._commands:
            self.unseen("commands that began before the recording, or by another client")
            self._commands[process_id] = math.inf
        if event.number > self._commands[process_id]:
            self.recorder.add("output", service_pb.RecordedProcessEvent(process_id=process_id, event=event))
            self._commands[process_id] = math.inf if event.HasField("result") else event.number

    def unseen(self, what: str) -> None:
        """Counts something that the session does and that the recording lacks."""
        self.recorder.note(what, unknown=True)

    def request(self, kind: str, request: Message) -> None:
        """Adds a request as it was sent."""
        self.recorder.add(kind, _without_session(request))

    def close(self) -> None:
        """Closes the recording if it belongs to the session."""
        if self._owns_recorder:
            self.recorder.close()


class _RecordedAssembler(Assembler):
    """An `Assembler` that records what it takes. Large payloads arrive before the event that names them."""

    def __init__(self, unrecorded: Assembler, recorder: Recorder, step: int) -> None:
        super().__init__(unrecorded.execution_id, unrecorded.output_limits)
        self._recorder, self.step = recorder, step
        self.redacted_calls: set[str] = set()
        self._blobs = self._taken = _LastTaken(bytes_max=EXECUTION_BLOBS_BYTES_MAX, open_max=EXECUTION_BLOBS_OPEN_MAX)

    def _take(self, kind: str | None, event: pb.Event) -> ExecutionEvent | ToolRequest | None:
        taken = super()._take(kind, event)
        if kind not in ("blob_chunk", "result"):
            self._record(event)
        return taken

    def _result(self, wire: pb.ExecutionResult) -> ExecutionResult:  # also of an execution that was lost
        result = super()._result(wire)
        self._record(pb.Event(result=wire))
        if wire.artifacts:
            self._recorder.note("contents of files that the code made or changed")
        return result

    def _record(self, event: pb.Event) -> None:
        payload = payload_of(event)
        redacted = event.HasField("tool_call") and self._recorder.redacts(event.tool_call.name)
        if redacted:
            self.redacted_calls.add(event.tool_call.call_id)
            self._recorder.note("calls of redacted tools", unknown=True)
        if payload is not None and (redacted or len(self._taken.last) > INLINE_BYTES_MAX):
            recorded = pb.Event()
            recorded.CopyFrom(event)  # the assembler goes on with the event
            event = recorded
            stored = pb.Payload(inline=b"") if redacted else self._recorder.payload(self._taken.last)
            payload_of(event).CopyFrom(stored)  # type: ignore[union-attr]  # a copy of the event has a payload, too
        self._taken.last = b""
        self._recorder.add("event", event, step=self.step, redacted=redacted)


class _LastTaken(IncomingBlobs):
    """Keeps the payload that was taken last."""

    last: bytes | memoryview = b""

    def take(self, payload: pb.Payload) -> bytes | memoryview:
        self.last = super().take(payload)
        return self.last


def _without_session(request: M) -> M:
    """Returns a copy of a request without the session's id, which is in the head."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.ClearField("session_id")
    return copy


def _plain(value: Any) -> Any:
    """Returns a value of a dataclass as JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value.value if isinstance(value, Enum) else value
