"""Between the wire's messages and the daemon's values; protobuf types go no further than here.

Inwards (`..._from`), every field's form is checked, and the layers below can trust the form of what they get.
Outwards (`..._to`), values become messages; text that came out of a sandbox may hold characters that UTF-8 can't carry,
and leaves with those escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from executor_api.limits import VARIABLES_NAMED_MAX
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.executions import ToolFailure
from executor_server.model import (
    BlobChunk,
    BlobRef,
    ErrorDetail,
    Event,
    ExecutionLimits,
    FileInfo,
    Image,
    Limits,
    LimitWarning,
    Log,
    Outcome,
    OutputCut,
    OutputMode,
    Payload,
    PolicyRef,
    Queued,
    Result,
    ShippedTool,
    StateManifest,
    StateOmission,
    ToolCall,
    ToolSource,
    ToolSpec,
    VariablesState,
)
from executor_server.policy import PolicySummary
from executor_server.policy_file import QuotasTable
from executor_server.requested import RequestedLimits, RequestedSession
from executor_server.rpc import checks
from executor_server.sessions import Session, VariablesReply
from executor_server.tool_packing import MAX_SHIPPED_BYTES

MAX_TOOLS = 256
MAX_TOOL_PARAMETERS = 256
MAX_TOOL_DESCRIPTION_BYTES = 16 * 1024
MAX_TOOL_MODULES = 256
MAX_TOOL_ERROR_TYPE_CHARS = 256

_OUTPUT_MODES: dict[int, OutputMode] = {
    pb.OUTPUT_MODE_UNSPECIFIED: OutputMode.TRAILING_EXPRESSION,
    pb.OUTPUT_MODE_TRAILING_EXPRESSION: OutputMode.TRAILING_EXPRESSION,
    pb.OUTPUT_MODE_LAST_STATEMENT: OutputMode.LAST_STATEMENT,
}
_FILE_FORMATS: dict[int, bool] = {
    pb.FILE_FORMAT_UNSPECIFIED: False,
    pb.FILE_FORMAT_PLAIN: False,
    pb.FILE_FORMAT_TAR: True,
}
# By name, so that a member that is added on one side only fails at import and not at some client.
_OUTCOMES: dict[Outcome, Any] = {outcome: pb.Outcome.Value(f"OUTCOME_{outcome.name}") for outcome in Outcome}
_VARIABLES_STATES: dict[VariablesState, Any] = {
    state: pb.VariablesState.Value(f"VARIABLES_STATE_{state.name}") for state in VariablesState
}
_SESSION_STATES = {
    "idle": pb.SESSION_STATE_IDLE,
    "busy": pb.SESSION_STATE_BUSY,
    "lost": pb.SESSION_STATE_LOST,
    "paused": pb.SESSION_STATE_PAUSED,
}
_OUTPUT_STREAMS = {"stdout": pb.OUTPUT_STREAM_STDOUT, "stderr": pb.OUTPUT_STREAM_STDERR}


# ---------------------------------------------------------------------------------------------------------------------
# Inwards


def requested_session_from(request: service_pb.CreateSessionRequest) -> RequestedSession:
    return RequestedSession(
        image=request.image,
        backend=request.backend,
        network=tuple(request.network),
        packages=tuple(request.packages),
        authorized_imports=tuple(request.authorized_imports),
        limits=requested_limits_from(request.limits),
        labels=dict(request.labels),
        prelude=request.prelude,
    )


def requested_limits_from(message: pb.Limits) -> RequestedLimits:
    return RequestedLimits(**{field.name: value for field, value in message.ListFields()})


def output_mode_from(number: int) -> OutputMode:
    try:
        return _OUTPUT_MODES[number]
    except KeyError:
        raise checks.invalid("output_mode", f"is {number}, which no mode has") from None


def is_tar(number: int) -> bool:
    """Whether a file travels as an archive of a directory."""
    try:
        return _FILE_FORMATS[number]
    except KeyError:
        raise checks.invalid("format", f"is {number}, which no format has") from None


def tools_from(messages: Sequence[pb.ToolSpec]) -> list[ToolSpec]:
    checks.count(len(messages), MAX_TOOLS, "tools")
    checks.size(sum(map(_shipped_bytes, messages)), MAX_SHIPPED_BYTES, "what is shipped of tools")
    tools = [_tool_from(message, f"tools[{index}]") for index, message in enumerate(messages)]
    checks.distinct([tool.name for tool in tools], "tools")
    return tools


def variables_from(messages: Sequence[pb.NamedValue]) -> list[tuple[str, Payload]]:
    checks.count(len(messages), VARIABLES_NAMED_MAX, "variables")
    variables = [
        (
            checks.python_name(message.name, f"variables[{index}].name"),
            payload_from(message.value, f"variables[{index}].value"),
        )
        for index, message in enumerate(messages)
    ]
    checks.distinct([name for name, _ in variables], "variables")
    return variables


def variable_names_from(names: Sequence[str]) -> list[str]:
    checks.count(len(names), VARIABLES_NAMED_MAX, "names")
    return [checks.python_name(name, f"names[{index}]") for index, name in enumerate(names)]


def answer_from(request: service_pb.SubmitToolResultRequest) -> Payload | ToolFailure:
    match request.WhichOneof("answer"):
        case "value":
            return payload_from(request.value, "value")
        case "error":
            error_type = request.error.type[:MAX_TOOL_ERROR_TYPE_CHARS]
            if len(request.error.message.encode()) > checks.MAX_PIECE_BYTES:
                raise checks.invalid("error.message", f"is larger than {checks.MAX_PIECE_BYTES:,} bytes")
            return ToolFailure(type=error_type, message=request.error.message)
        case _:
            raise checks.invalid("answer", "is missing; it is a value or an error")


def payload_from(value: pb.Value, field: str) -> Payload:
    content = value.packed.WhichOneof("content")
    if content == "inline":
        if len(value.packed.inline) > checks.MAX_PIECE_BYTES:
            raise checks.invalid(field, f"is larger than {checks.MAX_PIECE_BYTES:,} bytes; send it by UploadBlob")
        return value.packed.inline
    if content == "blob":
        blob = value.packed.blob
        return BlobRef(checks.identifier(blob.blob_id, f"{field}.blob_id"), blob.size_bytes)
    raise checks.invalid(field, "is missing")


def _tool_from(message: pb.ToolSpec, field: str) -> ToolSpec:
    if len(message.description.encode()) > MAX_TOOL_DESCRIPTION_BYTES:
        raise checks.invalid(f"{field}.description", f"is larger than {MAX_TOOL_DESCRIPTION_BYTES:,} bytes")
    checks.count(len(message.parameters), MAX_TOOL_PARAMETERS, f"{field}.parameters")
    parameters = [checks.python_name(name, f"{field}.parameters") for name in message.parameters]
    checks.distinct(parameters, f"{field}.parameters")
    is_shipped = message.HasField("shipped")
    if is_shipped and parameters:
        raise checks.invalid(f"{field}.parameters", "can't be set for a tool that is shipped, which has its own")
    if is_shipped and message.is_final_answer:
        raise checks.invalid(f"{field}.is_final_answer", "can't be set for a tool that is shipped; a host tool can")
    return ToolSpec(
        name=checks.python_name(message.name, f"{field}.name"),
        description=message.description,
        parameters=tuple(parameters),
        is_final_answer=message.is_final_answer,
        shipped=_shipped_from(message.shipped, f"{field}.shipped") if is_shipped else None,
    )


def _shipped_from(message: pb.ShippedTool, field: str) -> ShippedTool:
    checks.count(len(message.modules), MAX_TOOL_MODULES, f"{field}.modules")
    modules = tuple(checks.module_name(name, f"{field}.modules") for name in message.modules)
    match message.WhichOneof("code"):
        case "source":
            return ShippedTool(_source_from(message.source, f"{field}.source"), modules)
        case "value":
            return ShippedTool(payload_from(message.value, f"{field}.value"), modules)
        case _:
            raise checks.invalid(field, "has no code; it is a source or a value")


def _source_from(message: pb.ToolSource, field: str) -> ToolSource:
    has_bindings = message.HasField("bindings")
    return ToolSource(
        text=checks.source(message.text, f"{field}.text"),
        entry=checks.python_name(message.entry, f"{field}.entry"),
        bindings=payload_from(message.bindings, f"{field}.bindings") if has_bindings else None,
    )


def _shipped_bytes(message: pb.ToolSpec) -> int:
    """What a tool brings into the sandbox, told without a copy of it."""
    values = (message.shipped.value, message.shipped.source.bindings)
    return message.shipped.ByteSize() + sum(value.packed.blob.size_bytes for value in values)


# ---------------------------------------------------------------------------------------------------------------------
# Outwards


def session_to(session: Session) -> pb.Session:
    spec = session.spec
    return pb.Session(
        session_id=session.session_id,
        state=_SESSION_STATES[session.state],
        generation=session.generation,
        backend=session.backend_name,
        image=spec.sandbox.image,
        limits=limits_to(spec.limits),
        authorized_imports=spec.authorized_imports,
        python_version=_text(session.python_version),
        create_time=_timestamp(session.create_time_s),
        expire_time=_timestamp(session.expire_time_s),
        warm=session.warm,
        labels=spec.labels,
        lost_reason=_text(session.lost_reason),
        policy=policy_ref_to(spec.policy),
        denied_imports=spec.denied_imports,
        refused_language=spec.refused_language,
        missing_modules=session.missing_modules,
        leased=session.leased,
    )


def policy_ref_to(policy: PolicyRef) -> pb.PolicyRef:
    return pb.PolicyRef(profile=policy.profile, version=policy.version, fingerprint=policy.fingerprint)


def limits_to(limits: Limits) -> pb.Limits:
    return pb.Limits(
        wall_time_s=limits.wall_time_s,
        cpu_time_s=limits.cpu_time_s,
        operations=limits.operations,
        memory_bytes=limits.memory_bytes,
        processes=limits.processes,
        output_bytes=limits.output_bytes,
        disk_bytes=limits.disk_bytes,
        idle_time_s=limits.idle_time_s,
        session_time_s=limits.session_time_s,
        session_operations=limits.session_operations,
        owner_grace_s=limits.owner_grace_s,
        max_files=limits.max_files,
    )


def execution_limits_to(limits: ExecutionLimits) -> pb.Limits:
    return pb.Limits(
        wall_time_s=limits.wall_time_s,
        cpu_time_s=limits.cpu_time_s,
        operations=limits.operations,
        output_bytes=limits.output_bytes,
    )


def event_to(event: Event) -> pb.Event:
    kind = event.kind
    match kind:
        case Log():
            log = pb.LogEvent(stream=_OUTPUT_STREAMS[kind.stream], text=_text(kind.text))
            return pb.Event(number=event.number, log=log)
        case Result():
            return pb.Event(number=event.number, result=_result_to(kind))
        case ToolCall():
            call = pb.ToolCallEvent(call_id=kind.call_id, name=_text(kind.name), arguments=_value_to(kind.arguments))
            return pb.Event(number=event.number, tool_call=call)
        case BlobChunk():
            return pb.Event(number=event.number, blob_chunk=blob_chunk_to(kind))
        case Image():
            image = pb.ImageEvent(
                data=_payload_to(kind.data), mime_type=_text(kind.mime_type), source=_text(kind.source)
            )
            return pb.Event(number=event.number, image=image)
        case OutputCut():
            return pb.Event(number=event.number, output_cut=pb.OutputCutEvent(omitted_bytes=kind.omitted_bytes))
        case Queued():
            return pb.Event(number=event.number, queued=pb.QueuedEvent(ahead=kind.ahead))
        case LimitWarning():
            warning = pb.LimitWarningEvent(limit=kind.limit, used=kind.used, budget=kind.budget)
            return pb.Event(number=event.number, limit_warning=warning)


def blob_chunk_to(chunk: BlobChunk) -> pb.BlobChunk:
    return pb.BlobChunk(blob_id=chunk.blob_id, data=chunk.data)


def variables_to(reply: VariablesReply) -> service_pb.Variables:
    return service_pb.Variables(
        variables=[pb.NamedValue(name=_text(name), value=_value_to(packed)) for name, packed in reply.variables],
        missing=[_text(name) for name in reply.missing],
    )


def file_to(file: FileInfo) -> pb.FileInfo:
    return pb.FileInfo(
        path=_text(file.path),
        size_bytes=file.size_bytes,
        is_directory=file.is_directory,
        modify_time=_timestamp(file.modify_time_s),
    )


def state_manifest_to(manifest: StateManifest) -> service_pb.StateManifest:
    return service_pb.StateManifest(
        variables=map(_text, manifest.variables),
        omitted_variables=map(_omission_to, manifest.omitted_variables),
        files=manifest.files,
        file_bytes=manifest.file_bytes,
        omitted_files=map(_omission_to, manifest.omitted_files),
        python_version=_text(manifest.python_version),
    )


def _omission_to(omission: StateOmission) -> service_pb.StateOmission:
    return service_pb.StateOmission(name=_text(omission.name), reason=_text(omission.reason))


def files_to(files: Iterable[FileInfo], *, truncated: bool) -> service_pb.ListFilesResponse:
    return service_pb.ListFilesResponse(files=[file_to(file) for file in files], truncated=truncated)


def policy_to(summary: PolicySummary) -> pb.Policy:
    files = summary.files
    return pb.Policy(
        policy=policy_ref_to(summary.policy),
        default_limits=limits_to(summary.default_limits),
        max_limits=limits_to(summary.max_limits),
        execution_default_limits=execution_limits_to(summary.execution_default),
        execution_max_limits=execution_limits_to(summary.execution_max),
        default_imports=summary.default_imports,
        allowed_imports=summary.allowed_imports,
        denied_imports=summary.denied_imports,
        refused_language=summary.refused_language,
        images=summary.images,
        backend=next(iter(summary.backends), ""),
        backends=summary.backends,
        tool_placements=summary.tools.placements,
        allowed_tools=summary.tools.allowed,
        files=pb.FileLimits(
            max_put_bytes=files.max_put_bytes,
            max_get_bytes=files.max_get_bytes,
            max_puts=files.max_puts,
            max_gets=files.max_gets,
        ),
        network=summary.network,
        quotas=quotas_to(summary.quotas),
        state=pb.StateRules(**vars(summary.state)),
    )


def quotas_to(quotas: QuotasTable) -> pb.Quotas:
    return pb.Quotas(**quotas.model_dump())


def _result_to(result: Result) -> pb.ExecutionResult:
    usage = result.usage
    return pb.ExecutionResult(
        outcome=_OUTCOMES[result.outcome],
        output=None if result.output is None else _value_to(result.output),
        error=None if result.error is None else _error_to(result.error),
        usage=pb.Usage(
            operations=usage.operations,
            wall_time_s=usage.wall_time_s,
            cpu_time_s=usage.cpu_time_s,
            peak_memory_bytes=usage.peak_memory_bytes,
            output_bytes=usage.output_bytes,
        ),
        variables_state=_VARIABLES_STATES[result.variables_state],
        generation=result.generation,
        final_answer_call_id=result.final_answer_call_id,
        artifacts=[file_to(file) for file in result.artifacts],
        artifacts_truncated=result.artifacts_truncated,
        policy_fingerprint=result.policy_fingerprint,
    )


def _error_to(error: ErrorDetail) -> pb.ErrorDetail:
    return pb.ErrorDetail(
        type=_text(error.type),
        message=_text(error.message),
        traceback=_text(error.traceback),
        line=error.line,
        statement=_text(error.statement),
        exit_code=error.exit_code,
    )


def _value_to(packed: Payload) -> pb.Value:
    return pb.Value(packed=_payload_to(packed))


def _payload_to(payload: Payload) -> pb.Payload:
    if isinstance(payload, BlobRef):
        return pb.Payload(blob=pb.BlobRef(blob_id=payload.blob_id, size_bytes=payload.size_bytes))
    return pb.Payload(inline=payload)


def _timestamp(time_s: float) -> Timestamp:
    seconds, rest = divmod(time_s, 1)
    return Timestamp(seconds=int(seconds), nanos=int(rest * 1_000_000_000))


def _text(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()
