"""Turns what a session reports into the entries of its recording. Runs in the recordings' thread, and blocks.

A failure ends the recording, never the session: `ended` gives the reason, which is also in the recording if the disk
accepts it.
"""

from __future__ import annotations

import fnmatch
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from google.protobuf.message import DecodeError, Message

from executor_api.limits import EXECUTION_BLOBS_OPEN_MAX
from executor_api.recordings import (
    ENV_OF_COMMANDS,
    FILE_BYTES_RECORDED_MAX,
    INLINE_BYTES_MAX,
    RECORDING_BYTES_MAX,
    drop_env_values,
    fields_of,
    payload_of,
    tool_payloads,
)
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api import to_wire
from executor_server.api.recordings.files import (
    ENDED,
    ENTRY,
    REFERENCED,
    UNKNOWN,
    About,
    BlobsFull,
    Incoming,
    RecordingFiles,
    Snapshot,
)
from executor_server.core import BlobChunk, Event, Payload, ProcessEvent, RecordRules, Result, ToolCall
from executor_server.sessions.journal import ExecutionRequest, ToolFailure

_UPLOADS_MAX = 1024
"""Uploaded blobs that no request has named yet; the oldest is forgotten."""
_DIRECTORY_BYTES = 64 << 20
"""Room in a file of RECORDING_BYTES_MAX for what the client adds."""

_log = structlog.get_logger(__name__)


@dataclass
class _Step:
    """A running execution: its number, its last recorded event, and its unfinished payloads."""

    number: int
    last_event: int = 0
    incoming: dict[str, Incoming] = field(default_factory=dict)
    redacted_calls: set[str] = field(default_factory=set)
    final_calls: set[str] = field(default_factory=set)


class RecordingWriter:
    """Writes the recording of one session. Each method but `size_bytes` and `ended` is for the thread alone."""

    def __init__(self, files: RecordingFiles, about: About, rules: RecordRules) -> None:
        self._files = files
        self.about = about
        self._rules = rules
        self.ended = about.ended
        self.failure = ""  # the kind of reason: "disk", "size", "slow", "policy" or "internal"
        self._steps = 0
        self._running: dict[str, _Step] = {}
        self._uploading: dict[int, Incoming] = {}
        self._uploads: OrderedDict[str, Incoming] = OrderedDict()
        self._final_tools: set[str] = set()

    @property
    def size_bytes(self) -> int:
        return self._files.size_bytes or self.about.size_bytes  # it may have ended under an earlier daemon

    # -- its life ------------------------------------------------------------------------------------------------

    def create(self, time_s: float, head: Mapping[str, Any]) -> None:
        self._files.create(self.about)
        self._add(time_s, "session", head)

    def reopen(self, time_s: float, head: Mapping[str, Any]) -> None:
        """Goes on with the recording of an earlier daemon; begins it if that daemon was killed before it did."""
        is_begun = False
        for kind, body in self._files.reopen(replace(self.about, size_bytes=0)):
            if kind == ENTRY:
                is_begun = True
                self._recall(service_pb.RecordedEntry.FromString(body))
            elif kind == ENDED:
                self.ended = body.decode("utf-8", "replace")
        if not is_begun:
            self._add(time_s, "session", head)
        when = "while" if is_begun else "before"
        self.note(f"what happened {when} the daemon was restarted", unknown=True)

    def _recall(self, entry: service_pb.RecordedEntry) -> None:
        if entry.kind == "execute":
            self._steps = entry.step
            request = service_pb.ExecuteRequest.FromString(entry.message)
            self._running[request.execution_id] = _Step(entry.step)
        elif entry.kind == "tools":
            self._note_tools(service_pb.RegisterToolsRequest.FromString(entry.message))
        elif entry.kind == "event":
            event = pb.Event.FromString(entry.message)
            execution_id, step = next(each for each in self._running.items() if each[1].number == entry.step)
            step.last_event = event.number
            if event.HasField("result"):
                del self._running[execution_id]
            elif event.HasField("tool_call"):
                self._note_call(step, event.tool_call, redacted=entry.redacted)

    def write(self, items: list[tuple[Any, ...]]) -> None:
        """Calls methods of this object: each item is a method, the time, and arguments by position and by name."""
        for method, time_s, arguments, options in items:
            if self.ended and method is not RecordingWriter.close:
                continue
            try:
                method(self, time_s, *arguments, **options)
                # Payloads that are never named count too: a hostile guest can send any number of them.
                if self._files.size_bytes + self._files.incoming_bytes > min(
                    self._rules.max_bytes, RECORDING_BYTES_MAX - _DIRECTORY_BYTES
                ):
                    self.end_early(0.0, f"it reached its limit of {self._rules.max_bytes:,} bytes", "size")
            except BlobsFull:
                self.end_early(0.0, "it reached its limit of payloads", "size")
            except (OSError, DecodeError, StopIteration) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
                self.end_early(0.0, f"its files could not be written: {reason}", "disk")
            except Exception:  # noqa: BLE001 - a bug of ours with one recording must not cost all the others
                _log.exception("recording_broke", session_id=self.about.session_id)
                self.end_early(0.0, "an internal error of the daemon", "internal")

    def end_early(self, time_s: float, why: str, failure: str) -> None:
        """Ends the recording before the session; the session goes on."""
        if self.ended:
            return
        self.ended, self.failure = why, failure
        _log.warning("recording_ended", session_id=self.about.session_id, tenant=self.about.tenant, reason=why)
        self.about = replace(self.about, ended=why)
        self._files.drop_incoming()
        try:
            self._files.append(ENDED, why.encode())
            self._files.write_about(self.about)
        except OSError:
            return  # logged above; `close` tries again

    def hold_to(self, time_s: float, rules: RecordRules) -> None:
        """Applies another policy from now on."""
        self._rules = rules
        redacted = {*self.about.redact_tools, *rules.redact_tools}
        self.about = replace(self.about, redact_tools=tuple(sorted(redacted)))
        if rules.mode == "none":
            self.end_early(time_s, "the policy does not record the session any more", "policy")

    def close(self, time_s: float) -> None:
        """The session has ended."""
        self.about = replace(self.about, end_time_s=time_s, ended=self.ended, size_bytes=self.size_bytes)
        try:
            self._files.write_about(self.about)
        except OSError as error:
            _log.warning("recording_not_closed", session_id=self.about.session_id, reason=error.strerror)
        self._files.close()

    def release(self) -> None:
        """Closes the files of a session that the next daemon goes on with."""
        self._files.close()

    def snapshot(self) -> Snapshot:
        return self._files.snapshot()

    # -- executions ----------------------------------------------------------------------------------------------

    def begin(self, time_s: float, request: ExecutionRequest) -> None:
        self._steps += 1
        self._running[request.execution_id] = _Step(self._steps)
        self._add(time_s, "execute", to_wire.execute_request_to(request), step=self._steps)

    def event(self, time_s: float, execution_id: str, event: Event) -> None:
        step = self._running.get(execution_id)
        if step is None or event.number <= step.last_event:
            return  # of an execution that an earlier daemon has recorded
        step.last_event = event.number
        if isinstance(event.kind, BlobChunk):
            self._take_piece(step, event.kind)
            return
        message = to_wire.event_to(event)
        redacted = isinstance(event.kind, ToolCall) and self._redacts(event.kind.name)
        if isinstance(event.kind, ToolCall):
            self._note_call(step, message.tool_call, redacted=redacted)
        if redacted:
            self.note("calls of redacted tools", unknown=True)
        if (payload := payload_of(message)) is not None:
            redacted = self._store(payload, step.incoming, redacted=redacted)
        self._add(time_s, "event", message, step=step.number, redacted=redacted)
        if isinstance(event.kind, Result):
            del self._running[execution_id]
            for each in step.incoming.values():
                each.drop()
            if event.kind.artifacts:
                self.note("contents of files that the code made or changed")

    def answer(self, time_s: float, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        step = self._running.get(execution_id)
        if step is None:
            return
        message = to_wire.tool_answer_to(call_id, answer)
        redacted = call_id in step.redacted_calls
        if redacted and isinstance(answer, ToolFailure):
            message.error.CopyFrom(service_pb.ToolError(type=answer.type))
        elif message.HasField("value"):
            redacted = self._store(message.value.packed, self._uploads, redacted=redacted)
            if call_id in step.final_calls:
                self.note("final answers, which stay with the client")
        self._add(time_s, "answer", message, step=step.number, redacted=redacted)

    def process_event(self, time_s: float, process_id: str, event: ProcessEvent) -> None:
        message = service_pb.RecordedProcessEvent(process_id=process_id, event=to_wire.process_event_to(event))
        self._add(time_s, "output", message)

    def _take_piece(self, step: _Step, chunk: BlobChunk) -> None:
        incoming = step.incoming.get(chunk.blob_id)
        if incoming is None:
            if len(step.incoming) >= EXECUTION_BLOBS_OPEN_MAX:
                return  # an honest guest has fewer; the payload counts as not seen in full
            incoming = step.incoming[chunk.blob_id] = self._files.incoming()
        incoming.add(chunk.data)

    def _note_call(self, step: _Step, call: pb.ToolCallEvent, *, redacted: bool) -> None:
        if redacted:
            step.redacted_calls.add(call.call_id)
        if call.name in self._final_tools:
            step.final_calls.add(call.call_id)

    # -- what clients put into the session -----------------------------------------------------------------------

    def request(self, time_s: float, kind: str, request: Message) -> None:
        """Adds a request that the session has granted."""
        if isinstance(request, service_pb.SetVariablesRequest):
            for variable in request.variables:
                self._store(variable.value.packed, self._uploads, redacted=not self._is_full)
            if not self._is_full:
                self.note("variables that the client set", unknown=True)
                return
        elif isinstance(request, service_pb.RegisterToolsRequest):
            for payload in tool_payloads(request):
                self._store(payload, self._uploads, redacted=False)
            self._note_tools(request)
        elif isinstance(request, service_pb.StartProcessRequest) and drop_env_values(request):
            self.note(ENV_OF_COMMANDS, unknown=True)
        self._add(time_s, kind, request)

    def _note_tools(self, request: service_pb.RegisterToolsRequest) -> None:
        self._final_tools = {each.name for each in request.tools if each.is_final_answer}

    def piece(self, time_s: float, number: int, data: bytes, *, keeps: bool) -> None:
        """Adds a piece of an upload; without `keeps`, to its hash only."""
        incoming = self._uploading.get(number)
        if incoming is None:
            incoming = self._uploading[number] = self._files.incoming(keeps=keeps)
        incoming.add(data)

    def drop(self, time_s: float, number: int) -> None:
        """An upload has failed."""
        if (incoming := self._uploading.pop(number, None)) is not None:
            incoming.drop()

    def uploaded(self, time_s: float, number: int, blob_id: str) -> None:
        """An upload became a blob, which a request may name."""
        if (incoming := self._uploading.pop(number, None)) is not None:
            self._uploads[blob_id] = incoming
            while len(self._uploads) > _UPLOADS_MAX:
                self._uploads.popitem(last=False)[1].drop()

    def put(self, time_s: float, number: int, header: service_pb.PutFileHeader) -> None:
        """An upload became a file."""
        incoming = self._uploading.pop(number, None) or self._files.incoming()
        fields = fields_of(header)
        if not self._is_full:
            incoming.drop()
            self.note("contents of files that the client put", unknown=True)
            return
        if incoming.keeps:
            payload = pb.Payload(blob=pb.BlobRef(blob_id="", size_bytes=incoming.size_bytes))
            self._store(payload, {"": incoming}, redacted=False)
            fields["content"] = fields_of(payload)
        else:
            fields["content"] = {"sha256": incoming.name}
            self.note(f"files of more than {FILE_BYTES_RECORDED_MAX >> 20} MiB")
        self._add(time_s, "file", fields)

    # -- entries -------------------------------------------------------------------------------------------------

    def unseen(self, time_s: float, what: str) -> None:
        self.note(what, unknown=True)

    def note(self, what: str, *, unknown: bool = False) -> None:
        """Counts something that is only referenced, or unknown."""
        self._files.append(UNKNOWN if unknown else REFERENCED, what.encode())

    @property
    def _is_full(self) -> bool:
        return self._rules.mode == "full"

    def _redacts(self, tool: str) -> bool:
        return any(fnmatch.fnmatchcase(tool, pattern) for pattern in self._rules.redact_tools)

    def _store(self, payload: pb.Payload, arrived: dict[str, Incoming], *, redacted: bool) -> bool:
        """Stores a payload in the recording: inline if it is small, else as a blob. Returns True if it is left out."""
        if payload.WhichOneof("content") == "blob":
            incoming = arrived.pop(payload.blob.blob_id, None)
            if incoming is None or incoming.size_bytes != payload.blob.size_bytes or not incoming.keeps:
                if not redacted:
                    self.note("payloads that were not seen in full", unknown=True)
                redacted = True
            if incoming is not None and redacted:
                incoming.drop()
            elif incoming is not None and incoming.size_bytes <= INLINE_BYTES_MAX:
                payload.inline = incoming.read()
                incoming.drop()
            elif incoming is not None:
                payload.blob.blob_id = self._files.keep(incoming)
        elif len(payload.inline) > INLINE_BYTES_MAX and not redacted:
            incoming = self._files.incoming()
            incoming.add(payload.inline)
            payload.blob.CopyFrom(pb.BlobRef(blob_id=self._files.keep(incoming), size_bytes=incoming.size_bytes))
        if redacted:
            payload.inline = b""
        return redacted

    def _add(
        self, time_s: float, kind: str, fields: Message | Mapping[str, Any], *, step: int = 0, redacted: bool = False
    ) -> None:
        entry = service_pb.RecordedEntry(time_s=time_s, kind=kind, step=step, redacted=redacted)
        if isinstance(fields, Message):
            entry.message = fields.SerializeToString()
        else:
            entry.json = json.dumps(fields).encode()
        self._files.append(ENTRY, entry.SerializeToString())
