"""Converts between the wire and values of the daemon, which the sessions of one process take and return.

A refusal becomes the error that the session layer raised, by its reason, so that a test expects the same of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from executor_api.displays import DISPLAY_TYPE
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client import errors as client_errors
from executor_server.core import BranchEnd, Changes
from executor_server.core.errors import (
    ExecutorError,
    InvalidRequest,
    ModulesMissing,
    NotFound,
    OutOfRange,
    PolicyViolation,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    Violation,
    ViolationKind,
)
from executor_server.core.model import (
    BlobChunk,
    BlobRef,
    ErrorDetail,
    Event,
    EventKind,
    FileInfo,
    Image,
    LimitWarning,
    Log,
    Outcome,
    OutputCut,
    OutputMode,
    Payload,
    Queued,
    Result,
    ShippedTool,
    StateManifest,
    StateOmission,
    ToolCall,
    ToolSource,
    ToolSpec,
    Usage,
    VariablesState,
)

_ERRORS: dict[type[client_errors.ExecutorClientError], type[ExecutorError]] = {
    client_errors.InvalidRequest: InvalidRequest,
    client_errors.NotFoundError: NotFound,
    client_errors.PreconditionError: PreconditionFailed,
    client_errors.ResourceExhaustedError: ResourceExhausted,
    client_errors.FileError: InvalidRequest,  # the last: FileNotFound is a NotFoundError, too
}


@contextmanager
def refusals() -> Iterator[None]:
    """Raises the refusals of a daemon as it raised them itself. All other errors pass: they are failures of a test."""
    try:
        yield
    except client_errors.ModulesMissing as error:
        raise ModulesMissing(error.message, error.modules) from error
    except client_errors.PolicyViolationError as error:
        raise PolicyViolation(tuple(map(_violation_from, error.violations))) from error
    except tuple(_ERRORS) as error:
        if error.reason == Reason.EVENT_OUT_OF_RANGE.value:  # to a client it is a request of the wrong form
            raise OutOfRange(Reason.EVENT_OUT_OF_RANGE, error.message) from error
        if error.reason == Reason.SESSION_LOST.value:  # SessionGone is a NotFoundError, too
            raise PreconditionFailed(Reason.SESSION_LOST, error.message) from error
        make = next(ours for theirs, ours in _ERRORS.items() if isinstance(error, theirs))
        raise make(Reason(error.reason), error.message) from error


def _violation_from(violation: client_errors.Violation) -> Violation:
    return Violation(**{**vars(violation), "kind": ViolationKind(violation.kind)})


# ---------------------------------------------------------------------------------------------------------------------
# To the wire


def limits_to(values: dict[str, Any]) -> pb.Limits:
    return pb.Limits(**{name: value for name, value in values.items() if value is not None})


def mode_to(mode: OutputMode) -> Any:
    if mode is OutputMode.WHOLE_EXPRESSION:  # a field of its own says so
        return pb.OUTPUT_MODE_UNSPECIFIED
    return pb.OutputMode.Value(f"OUTPUT_MODE_{mode.name}")


def value_to(payload: Payload) -> pb.Value:
    if isinstance(payload, BlobRef):
        return pb.Value(packed=pb.Payload(blob=pb.BlobRef(blob_id=payload.blob_id, size_bytes=payload.size_bytes)))
    return pb.Value(packed=pb.Payload(inline=payload))


def tool_to(tool: ToolSpec) -> pb.ToolSpec:
    return pb.ToolSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        is_final_answer=tool.is_final_answer,
        shipped=None if tool.shipped is None else _shipped_to(tool.shipped),
    )


def _shipped_to(shipped: ShippedTool) -> pb.ShippedTool:
    code = shipped.code
    if not isinstance(code, ToolSource):
        return pb.ShippedTool(value=value_to(code), modules=shipped.modules)
    bindings = None if code.bindings is None else value_to(code.bindings)
    source = pb.ToolSource(text=code.text, entry=code.entry, bindings=bindings)
    return pb.ShippedTool(source=source, modules=shipped.modules)


# ---------------------------------------------------------------------------------------------------------------------
# From the wire


def event_from(wire: pb.Event) -> Event:
    return Event(wire.number, _kind_from(wire))


def _kind_from(wire: pb.Event) -> EventKind:
    match wire.WhichOneof("kind"):
        case "queued":
            return Queued(wire.queued.ahead)
        case "log":
            return Log(pb.OutputStream.Name(wire.log.stream).removeprefix("OUTPUT_STREAM_").lower(), wire.log.text)
        case "output_cut":
            return OutputCut(wire.output_cut.omitted_bytes)
        case "image":
            return Image(_payload_from(wire.image.data), wire.image.mime_type, wire.image.source)
        case "display":
            return Image(_payload_from(wire.display.data), DISPLAY_TYPE, "")
        case "tool_call":
            call = wire.tool_call
            return ToolCall(call.call_id, call.name, _payload_from(call.arguments.packed))
        case "blob_chunk":
            return blob_chunk_from(wire.blob_chunk)
        case "result":
            return _result_from(wire.result)
        case "limit_warning":
            warning = wire.limit_warning
            return LimitWarning(warning.limit, warning.used, warning.budget)
        case other:
            raise AssertionError(f"an event of the kind {other}")


def _result_from(wire: pb.ExecutionResult) -> Result:
    return Result(
        outcome=Outcome(pb.Outcome.Name(wire.outcome).removeprefix("OUTCOME_").lower()),
        variables_state=VariablesState(
            pb.VariablesState.Name(wire.variables_state).removeprefix("VARIABLES_STATE_").lower()
        ),
        generation=wire.generation,
        usage=Usage(**{name: getattr(wire.usage, name) for name in vars(Usage())}),
        output=_payload_from(wire.output.packed) if wire.HasField("output") else None,
        error=_error_from(wire.error) if wire.HasField("error") else None,
        final_answer_call_id=wire.final_answer_call_id,
        artifacts=tuple(map(file_from, wire.artifacts)),
        artifacts_truncated=wire.artifacts_truncated,
        policy_fingerprint=wire.policy_fingerprint,
        savepoint=wire.savepoint,
        branch=_branch_from(wire.branch) if wire.HasField("branch") else None,
    )


def _branch_from(wire: pb.BranchEnd) -> BranchEnd:
    return BranchEnd(
        number=wire.number,
        refused=wire.refused,
        why_not_kept=wire.why_not_kept,
        variables=_changes_from(wire.variables) if wire.HasField("variables") else None,
        files=_changes_from(wire.files) if wire.HasField("files") else None,
        left_out=tuple(wire.left_out),
    )


def _changes_from(wire: pb.Changes) -> Changes:
    return Changes(
        tuple(wire.added), tuple(wire.changed), tuple(wire.removed), tuple(wire.unknown), truncated=wire.truncated
    )


def _error_from(wire: pb.ErrorDetail) -> ErrorDetail:
    exit_code = wire.exit_code if wire.HasField("exit_code") else None
    return ErrorDetail(wire.type, wire.message, wire.traceback, wire.line, wire.statement, exit_code)


def blob_chunk_from(wire: pb.BlobChunk) -> BlobChunk:
    return BlobChunk(wire.blob_id, wire.data)


def named_from(wire: pb.NamedValue) -> tuple[str, Payload]:
    return wire.name, _payload_from(wire.value.packed)


def _payload_from(wire: pb.Payload) -> Payload:
    if wire.WhichOneof("content") == "blob":
        return BlobRef(wire.blob.blob_id, wire.blob.size_bytes)
    return wire.inline


def file_from(wire: pb.FileInfo) -> FileInfo:
    modified_s = _time_s(wire.modify_time)
    return FileInfo(wire.path, wire.size_bytes, wire.is_directory, modified_s, wire.mode, wire.is_link, wire.target)


def _time_s(wire: Timestamp) -> float:
    return wire.seconds + wire.nanos / 1e9


def manifest_from(wire: service_pb.StateManifest) -> StateManifest:
    return StateManifest(
        tuple(wire.variables),
        tuple(StateOmission(each.name, each.reason) for each in wire.omitted_variables),
        wire.files,
        wire.file_bytes,
        tuple(StateOmission(each.name, each.reason) for each in wire.omitted_files),
        wire.python_version,
    )
