"""Translates a gRPC status into an error of ours, by table; nothing else does.

A status that the daemon made carries google.rpc.ErrorInfo with our domain. One without it was made by gRPC (a reset
connection, a message too large), and does not say what the daemon did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from executor_api.v1 import types_pb2 as pb
from executor_client._core.limits import IMAGE_RETRY_MAX_S
from executor_client._core.quiet_grpc import grpc
from executor_client.errors import (
    AuthenticationError,
    AuthorizationError,
    CallTimeoutError,
    DaemonError,
    EnvironmentFailed,
    ExecutorClientError,
    FileError,
    FileExists,
    FileIsDirectory,
    FileNotDirectory,
    FileNotFound,
    FilePermissionDenied,
    InvalidRequest,
    ModulesMissing,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
    ResourceExhaustedError,
    SessionGone,
    UnavailableError,
    Violation,
)
from executor_client.waits import Progress, WaitKind

DOMAIN = "remote-executor"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
DETAILS_MAX = 16
VIOLATIONS_MAX = 256
MESSAGE_CHARS_MAX = 20_000
MODULES_MAX = 32
PROGRESS_CHARS_MAX = 64
"""Characters of a step or a unit."""
_COUNT_DIGITS_MAX = 12
_AWAY_REASONS = ("", "DRAINING", "NODE_FENCED")
"""Reasons of an UnavailableError: no daemon answers, it is about to restart, a node waits for its front."""
_CROWDED_REASONS = ("AUDIT_UNAVAILABLE", "NO_NODE")


@dataclass(frozen=True)
class Details:
    """The details of a status: all but its code."""

    message: str
    reason: str = ""
    incident_id: str = ""
    retry_after_s: float | None = None
    violations: tuple[Violation, ...] = ()
    omitted: int = 0
    progress: Progress | None = None
    modules: tuple[str, ...] = ()


def translate(error: grpc.RpcError) -> ExecutorClientError:
    """Turns a gRPC error into ours. Never raises, whatever the daemon sent."""
    # Blocking and asyncio errors have code(), details() and trailing_metadata(); their common base class does not.
    code: grpc.StatusCode = error.code()
    details = _details(error.details() or "", error.trailing_metadata() or ())
    if (of_file := _FILE_ERRORS.get(details.reason)) is not None:
        return of_file(details.message, reason=details.reason)
    return _ERRORS.get(code, _daemon_error)(details)


def is_transport_failure(error: ExecutorClientError) -> bool:
    """True when repeating a call may help, because no daemon was there or it is about to restart."""
    return isinstance(error, UnavailableError) and error.reason in _AWAY_REASONS


def is_session_gone(error: ExecutorClientError) -> bool:
    """True when the session is gone, or the daemon has no record any more of an execution that was followed."""
    return isinstance(error, SessionGone) or error.reason == "EXECUTION_NOT_FOUND"


def waits_for(error: ExecutorClientError) -> WaitKind | None:
    """Returns what a repetition of the call has to wait for; None if a repetition does not help.

    The daemon names a time to retry for everything but its own absence. An image that it fails to fetch has a long one.
    """
    if is_transport_failure(error):
        return WaitKind.DAEMON
    if not isinstance(error, ResourceExhaustedError | UnavailableError) or error.retry_after_s is None:
        return None
    if isinstance(error, ResourceExhaustedError) or error.reason in _CROWDED_REASONS:
        return WaitKind.ROOM
    if error.reason == "IMAGE_NOT_READY":
        return WaitKind.IMAGE if error.retry_after_s <= IMAGE_RETRY_MAX_S else None
    return WaitKind.APPROVAL if error.reason == "APPROVAL_PENDING" else None


def breaks_stream(error: grpc.RpcError) -> bool:
    """True when gRPC ended a stream, so that the execution may continue without it.

    A reset stream may also have the code CANCELLED, INTERNAL or UNKNOWN, but then without the daemon's ErrorInfo.
    """
    if error.code() not in _STREAM_BREAKS:
        return False
    return _details("", error.trailing_metadata() or ()).reason in _AWAY_REASONS


_STREAM_BREAKS = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
)


def _details(message: str, metadata: object) -> Details:
    status = _status(metadata)
    if status is None:
        return Details(message[:MESSAGE_CHARS_MAX])
    reason = incident_id = ""
    making: Progress | None = None
    modules: tuple[str, ...] = ()
    retry_after_s: float | None = None
    violations: tuple[Violation, ...] = ()
    omitted = 0
    for detail in status.details[:DETAILS_MAX]:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        listed = pb.Violations()
        if _unpack(detail, info) and info.domain == DOMAIN:
            reason, incident_id = info.reason, info.metadata.get("incident_id", "")
            making = _progress(info.metadata)
            modules = tuple(info.metadata.get("modules", "").split(",", MODULES_MAX)[:MODULES_MAX])
        elif _unpack(detail, retry):
            retry_after_s = max(0.0, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
        elif _unpack(detail, listed):
            violations = tuple(_violation(each) for each in listed.violations[:VIOLATIONS_MAX])
            omitted = listed.omitted + len(listed.violations) - len(violations)
    return Details(
        message[:MESSAGE_CHARS_MAX], reason, incident_id, retry_after_s, violations, omitted, making, modules
    )


def _progress(metadata: Mapping[str, str]) -> Progress | None:
    step = metadata.get("step", "")[:PROGRESS_CHARS_MAX]
    if not step:
        return None
    total = _count(metadata.get("total", ""))
    unit = metadata.get("unit", "")[:PROGRESS_CHARS_MAX]
    return Progress(step, min(_count(metadata.get("done", "")), total), total, unit)


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _COUNT_DIGITS_MAX else 0


def _violation(wire: pb.Violation) -> Violation:
    known = wire.kind in pb.ViolationKind.values()
    kind = pb.ViolationKind.Name(wire.kind).removeprefix("VIOLATION_KIND_") if known else "UNSPECIFIED"
    return Violation(wire.field, kind, wire.requested, wire.allowed, wire.rule)


def _status(metadata: object) -> status_pb2.Status | None:
    for key, value in metadata:  # type: ignore[attr-defined]  # a sequence of pairs in both gRPC APIs
        if key == STATUS_DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpack(detail: object, into: Message) -> bool:
    try:
        return bool(detail.Unpack(into))  # type: ignore[attr-defined]  # google.protobuf.Any
    except DecodeError:
        return False


def _daemon_error(details: Details) -> ExecutorClientError:
    where = f" (incident {details.incident_id})" if details.incident_id else ""
    return DaemonError(
        f"the daemon failed{where}: {details.message}", reason=details.reason, incident_id=details.incident_id
    )


def _permission_denied(details: Details) -> ExecutorClientError:
    if details.reason != "POLICY_VIOLATION" and not details.violations:
        return AuthorizationError(details.message, reason=details.reason)
    message = details.message
    if details.violations:
        # Written again, one violation on a line: the daemon's own message is cut to the size of a status.
        lines = ["the policy refuses this:", *map(str, details.violations)]
        message = "\n  ".join([*lines, f"and {details.omitted} more"] if details.omitted else lines)
    return PolicyViolationError(message, reason=details.reason, violations=details.violations, omitted=details.omitted)


def _invalid_argument(details: Details) -> ExecutorClientError:
    if details.reason == "MODULES_MISSING":
        return ModulesMissing(details.message, reason=details.reason, modules=filter(None, details.modules))
    return InvalidRequest(details.message, reason=details.reason)


def _by_reason(**classes: type[ExecutorClientError]) -> Callable[[Details], ExecutorClientError]:
    """Returns a function that makes the errors of a code: the reason selects the class, else `otherwise`."""
    return lambda details: classes.get(details.reason, classes["otherwise"])(details.message, reason=details.reason)


def _simple(make: type[ExecutorClientError]) -> Callable[[Details], ExecutorClientError]:
    return lambda details: make(details.message, reason=details.reason)


_FILE_ERRORS: dict[str, type[FileError]] = {
    "FILE_NOT_FOUND": FileNotFound,
    "CWD_NOT_FOUND": FileNotFound,
    "FILE_IS_DIRECTORY": FileIsDirectory,
    "FILE_NOT_DIRECTORY": FileNotDirectory,
    "FILE_PERMISSION_DENIED": FilePermissionDenied,
    "FILE_EXISTS": FileExists,
    "PATH_REFUSED": FileError,
}

_ERRORS: dict[grpc.StatusCode, Callable[[Details], ExecutorClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: _invalid_argument,
    grpc.StatusCode.OUT_OF_RANGE: _simple(InvalidRequest),
    grpc.StatusCode.PERMISSION_DENIED: _permission_denied,
    grpc.StatusCode.UNAUTHENTICATED: _simple(AuthenticationError),
    grpc.StatusCode.NOT_FOUND: _by_reason(SESSION_NOT_FOUND=SessionGone, otherwise=NotFoundError),
    grpc.StatusCode.FAILED_PRECONDITION: _by_reason(
        SESSION_LOST=SessionGone, ENVIRONMENT_FAILED=EnvironmentFailed, otherwise=PreconditionError
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: lambda details: ResourceExhaustedError(
        details.message, reason=details.reason, retry_after_s=details.retry_after_s
    ),
    grpc.StatusCode.UNAVAILABLE: lambda details: UnavailableError(
        details.message, reason=details.reason, retry_after_s=details.retry_after_s, progress=details.progress
    ),
    grpc.StatusCode.CANCELLED: _simple(UnavailableError),
    grpc.StatusCode.DEADLINE_EXCEEDED: _simple(CallTimeoutError),
    grpc.StatusCode.UNIMPLEMENTED: lambda details: DaemonError(
        "what answers at this address is no executor daemon, or one of another version", reason=details.reason
    ),
}
