"""Reads requests: the wire's messages become values of the daemon.

The form of every field is checked here, and the layers below rely on it. Each function raises InvalidRequest with the
name of the field, or ResourceExhausted when something is too large. Protobuf types stop here and in to_wire.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from executor_api.limits import (
    ARGUMENT_BYTES_MAX,
    ARGUMENTS_BYTES_MAX,
    ARGUMENTS_MAX,
    IDENTIFIER_CHARS_MAX,
    PATH_BYTES_MAX,
    PIECE_BYTES,
    TOOL_ERROR_ARGUMENTS_BYTES_MAX,
    TOOL_MODULES_MAX,
    TOOL_PARAMETERS_MAX,
    TOOLS_MAX,
    TOOLS_SHIPPED_BYTES_MAX,
    VARIABLES_NAMED_MAX,
    WRITE_BYTES_MAX,
)
from executor_api.messages import prepare, read
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api import checks
from executor_server.core import (
    TERMINAL_CHARS_MAX,
    BlobRef,
    OutputMode,
    Payload,
    ProcessRequest,
    ShippedTool,
    SignalTarget,
    TerminalSize,
    ToolSource,
    ToolSpec,
)
from executor_server.policy import RequestedLimits, RequestedSession
from executor_server.policy.approvals import Decision
from executor_server.sessions.journal import ToolFailure

MAX_TOOL_DESCRIPTION_BYTES = 16 * 1024

_SIGNALS_MAX = 64
_TIME_S_MAX = 365 * 86_400.0

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
_SIGNAL_TARGETS: dict[int, SignalTarget] = {
    pb.SIGNAL_TARGET_UNSPECIFIED: SignalTarget.GROUP,
    **{pb.SignalTarget.Value(f"SIGNAL_TARGET_{target.name}"): target for target in SignalTarget},
}
_DECISIONS: dict[int, Decision] = {
    admin_pb.ApprovalDecision.Value(f"APPROVAL_DECISION_{decision.name}"): decision for decision in Decision
}


prepare(RequestedSession, service_pb.CreateSessionRequest, "name", "env_names")
prepare(RequestedLimits, pb.Limits)


def requested_session_from(request: service_pb.CreateSessionRequest) -> RequestedSession:
    return read(
        RequestedSession,
        request,
        name=checks.session_name(request.name) if request.name else "",
        env_names=tuple(sorted(checks.environment(request.env, "env"))),
    )


def requested_environment_from(request: service_pb.PrepareEnvironmentRequest) -> RequestedSession:
    """Returns a session with this environment; the policy decides about it as about any session."""
    return RequestedSession(image=request.image, backend=request.backend, packages=tuple(request.packages))


def needed_modules_from(request: service_pb.CreateSessionRequest) -> tuple[str, ...]:
    checks.count(len(request.modules), TOOL_MODULES_MAX, "modules")
    return tuple(checks.module_name(name, "modules") for name in request.modules)


def requested_limits_from(message: pb.Limits) -> RequestedLimits:
    return read(RequestedLimits, message)


def output_mode_from(request: service_pb.ExecuteRequest) -> OutputMode:
    if request.whole_output:
        return OutputMode.WHOLE_EXPRESSION
    try:
        return _OUTPUT_MODES[request.output_mode]
    except KeyError:
        raise checks.invalid("output_mode", f"has the unknown value {request.output_mode}") from None


def is_tar(number: int) -> bool:
    """True for a directory, which is sent as a tar archive."""
    try:
        return _FILE_FORMATS[number]
    except KeyError:
        raise checks.invalid("format", f"has the unknown value {number}") from None


def tools_from(messages: Sequence[pb.ToolSpec]) -> list[ToolSpec]:
    checks.count(len(messages), TOOLS_MAX, "tools")
    checks.size(sum(map(_shipped_bytes, messages)), TOOLS_SHIPPED_BYTES_MAX, "the shipped code of the tools")
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
            error_type = request.error.type[:IDENTIFIER_CHARS_MAX]
            if len(request.error.message.encode()) > PIECE_BYTES:
                raise checks.invalid("error.message", f"is larger than {PIECE_BYTES:,} bytes")
            if len(request.error.arguments) > TOOL_ERROR_ARGUMENTS_BYTES_MAX:
                raise checks.invalid("error.arguments", f"are more than {TOOL_ERROR_ARGUMENTS_BYTES_MAX:,} bytes")
            return ToolFailure(error_type, request.error.message, request.error.arguments)
        case _:
            raise checks.invalid("answer", "is missing; send a value or an error")


def payload_from(value: pb.Value, field: str) -> Payload:
    content = value.packed.WhichOneof("content")
    if content == "inline":
        if len(value.packed.inline) > PIECE_BYTES:
            raise checks.invalid(field, f"is larger than {PIECE_BYTES:,} bytes; send it by UploadBlob")
        return value.packed.inline
    if content == "blob":
        blob = value.packed.blob
        return BlobRef(checks.identifier(blob.blob_id, f"{field}.blob_id"), blob.size_bytes)
    raise checks.invalid(field, "is missing")


def _tool_from(message: pb.ToolSpec, field: str) -> ToolSpec:
    if len(message.description.encode()) > MAX_TOOL_DESCRIPTION_BYTES:
        raise checks.invalid(f"{field}.description", f"is larger than {MAX_TOOL_DESCRIPTION_BYTES:,} bytes")
    checks.count(len(message.parameters), TOOL_PARAMETERS_MAX, f"{field}.parameters")
    parameters = [checks.python_name(name, f"{field}.parameters") for name in message.parameters]
    checks.distinct(parameters, f"{field}.parameters")
    is_shipped = message.HasField("shipped")
    if is_shipped and parameters:
        raise checks.invalid(f"{field}.parameters", "can't be set for a shipped tool, which brings its own")
    if is_shipped and message.is_final_answer:
        raise checks.invalid(f"{field}.is_final_answer", "can't be set for a shipped tool, only for a host tool")
    return ToolSpec(
        name=checks.python_name(message.name, f"{field}.name"),
        description=message.description,
        parameters=tuple(parameters),
        is_final_answer=message.is_final_answer,
        shipped=_shipped_from(message.shipped, f"{field}.shipped") if is_shipped else None,
    )


def _shipped_from(message: pb.ShippedTool, field: str) -> ShippedTool:
    checks.count(len(message.modules), TOOL_MODULES_MAX, f"{field}.modules")
    modules = tuple(checks.module_name(name, f"{field}.modules") for name in message.modules)
    match message.WhichOneof("code"):
        case "source":
            return ShippedTool(_source_from(message.source, f"{field}.source"), modules)
        case "value":
            return ShippedTool(payload_from(message.value, f"{field}.value"), modules)
        case _:
            raise checks.invalid(field, "has no code; send a source or a value")


def _source_from(message: pb.ToolSource, field: str) -> ToolSource:
    has_bindings = message.HasField("bindings")
    return ToolSource(
        text=checks.source(message.text, f"{field}.text"),
        entry=checks.python_name(message.entry, f"{field}.entry"),
        bindings=payload_from(message.bindings, f"{field}.bindings") if has_bindings else None,
    )


def _shipped_bytes(message: pb.ToolSpec) -> int:
    """Returns the bytes that a tool brings into the sandbox, without copying them."""
    values = (message.shipped.value, message.shipped.source.bindings)
    return message.shipped.ByteSize() + sum(value.packed.blob.size_bytes for value in values)


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def process_request_from(request: service_pb.StartProcessRequest) -> ProcessRequest:
    return ProcessRequest(
        process_id=checks.identifier(request.process_id, "process_id"),
        argv=_argv(tuple(request.argv)),
        cwd=_cwd(request.cwd),
        env=checks.environment(request.env, "env"),
        pty=terminal_size_from(request.pty, "pty") if request.HasField("pty") else None,
        stdin=request.stdin,
        timeout_s=_timeout_s(request.timeout_s) if request.HasField("timeout_s") else None,
        prefers_bash=request.prefers_bash,
        merge_stderr=request.merge_stderr,
    )


def _argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    if not argv or not argv[0]:
        raise checks.invalid("argv", "must begin with a program")
    checks.count(len(argv), ARGUMENTS_MAX, "argv")
    if any("\0" in each for each in argv):
        raise checks.invalid("argv", "holds a NUL character")
    sizes_bytes = [len(each.encode()) for each in argv]
    if max(sizes_bytes) > ARGUMENT_BYTES_MAX:
        raise checks.invalid("argv", f"has an argument of more than {ARGUMENT_BYTES_MAX:,} bytes, the kernel's limit")
    if sum(sizes_bytes) + len(argv) > ARGUMENTS_BYTES_MAX:
        raise checks.invalid("argv", f"is larger than {ARGUMENTS_BYTES_MAX:,} bytes")
    return argv


def _cwd(path: str) -> str:
    if "\0" in path or len(path.encode()) > PATH_BYTES_MAX:
        raise checks.invalid("cwd", f"must have no NUL and at most {PATH_BYTES_MAX} bytes")
    return path


def _timeout_s(timeout_s: float) -> float:
    if not 0.001 <= timeout_s <= _TIME_S_MAX:  # rejects NaN too
        raise checks.invalid("timeout_s", "must be from 0.001 seconds to a year")
    return timeout_s


def terminal_size_from(size: pb.TerminalSize, field: str) -> TerminalSize:
    if not (1 <= size.columns <= TERMINAL_CHARS_MAX and 1 <= size.rows <= TERMINAL_CHARS_MAX):
        raise checks.invalid(field, f"must have 1 to {TERMINAL_CHARS_MAX:,} columns and rows")
    return TerminalSize(size.columns, size.rows)


def written_data_from(request: service_pb.WriteProcessRequest) -> bytes:
    if len(request.data) > WRITE_BYTES_MAX:
        raise checks.invalid("data", f"must be at most {WRITE_BYTES_MAX:,} bytes in each message")
    if request.offset > 2**62:
        raise checks.invalid("offset", "is larger than the input of any process")
    return request.data


def decision_from(decision: int) -> Decision:
    if decision not in _DECISIONS:
        raise checks.invalid("decision", "must be once, session or denied")
    return _DECISIONS[decision]


def signal_from(request: service_pb.SignalProcessRequest) -> tuple[int, SignalTarget]:
    if not 1 <= request.signal <= _SIGNALS_MAX:
        raise checks.invalid("signal", f"must be a number from 1 to {_SIGNALS_MAX}")
    if request.target not in _SIGNAL_TARGETS:
        raise checks.invalid("target", "has a value that this daemon does not know")
    return request.signal, _SIGNAL_TARGETS[request.target]
