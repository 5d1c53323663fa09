"""The entries of recordings, which both the client and the daemon record: their kinds and their bounds.

The client writes the file (`executor_client.recording`); the daemon keeps entries and blobs, and sends them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb

ENTRY_LENGTH = struct.Struct("<I")
"""The length of an entry, in bytes, which precedes it in what the daemon sends."""
INLINE_BYTES_MAX = 1024
"""Bytes of a payload that is written into its line; a larger one is a blob."""

RECORDING_BYTES_MAX = 2 << 30
"""Bytes of a recording; below 4 GiB, so that a zip needs no extensions."""
LINES_BYTES_MAX = 1 << 30
LINE_BYTES_MAX = 32 << 20
BLOBS_MAX = 60_000
"""Fewer than the 65,535 members of a zip without extensions."""
FILE_BYTES_RECORDED_MAX = 16 << 20
"""Bytes of a file that a recording holds; it has only the hash of a larger one."""

KINDS: Mapping[str, type[Message] | None] = {
    "session": None,  # the head: `SessionInfo` as JSON, with "prelude" and "versions"
    "imports": service_pb.AuthorizeImportsRequest,
    "tools": service_pb.RegisterToolsRequest,
    "variables": service_pb.SetVariablesRequest,
    "file": service_pb.PutFileHeader,  # with "content": a payload, or {"sha256": ...} for a large file
    "execute": service_pb.ExecuteRequest,
    "event": pb.Event,
    "answer": service_pb.SubmitToolResultRequest,  # of a host tool
    "broken": None,  # the client left the execution before its end: {"type": ..., "message": ...}
    "files": service_pb.ManageFileRequest,  # makes a directory, moves or removes
    "savepoint": service_pb.TakeSavepointRequest,
    "rollback": service_pb.RollbackRequest,
    "command": service_pb.StartProcessRequest,  # without the values of its environment variables
    "input": service_pb.WriteProcessRequest,
    "resize": service_pb.ResizeProcessRequest,
    "signal": service_pb.SignalProcessRequest,
    "output": service_pb.RecordedProcessEvent,  # any event of a command
    # A call of a model: {"model": its id, "messages": [payload of each as JSON], "settings": payload of the other
    # arguments as JSON, "answer": payload of the answer as JSON, or "error": {"type": ..., "message": ...}}.
    "model": None,
}
"""The kinds of entries, each with the message whose fields it has."""


def fields_of(message: Message) -> dict[str, Any]:
    """Returns a message as the fields of an entry."""
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


PLAIN_ENV = ("TERM", "PAGER")
"""Environment variables of commands whose values are recorded. The values of others are often secrets."""


def drop_env_values(request: service_pb.StartProcessRequest) -> bool:
    """Removes the values of a command's environment variables, except PLAIN_ENV. Returns True if it removed any."""
    dropped = [name for name in request.env if name not in PLAIN_ENV]
    for name in dropped:
        request.env[name] = ""
    return bool(dropped)


PORTS = "connections to ports of the sandbox"
"""What the recording of a session lacks if ports of the session were used."""
ENV_OF_COMMANDS = "values of environment variables of commands"
"""What a recording lacks after `drop_env_values`."""


def tool_payloads(request: service_pb.RegisterToolsRequest) -> Iterator[pb.Payload]:
    """Yields the payloads of the tools that are shipped into the sandbox."""
    for spec in request.tools:
        if spec.shipped.WhichOneof("code") == "value":
            yield spec.shipped.value.packed
        elif spec.shipped.source.HasField("bindings"):
            yield spec.shipped.source.bindings.packed


def payload_of(event: pb.Event) -> pb.Payload | None:
    """Returns the payload of an event; None for one without."""
    kind = event.WhichOneof("kind")
    if kind in ("image", "display"):
        payload: pb.Payload = getattr(event, kind).data
        return payload
    if kind == "tool_call":
        return event.tool_call.arguments.packed
    if kind == "result" and event.result.HasField("output"):
        return event.result.output.packed
    return None
