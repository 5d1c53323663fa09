"""The RPC border: errors become statuses here, once, by one table.

Every call of every service passes `error_border`. A refusal (ExecutorError) leaves with its status, its message and a
google.rpc.ErrorInfo; any other exception leaves as INTERNAL with an incident id, and its text stays in the log. Without
this, grpc.aio would send the text of any exception to the client. CancelledError passes: the caller has left. So does
the error that grpc.aio raises when nothing can be sent to the caller any more: that is no failure and no incident.

A status may contain text of an agent's code or of a tool. Characters that could steer the reader's terminal or log are
made visible here, in every text that leaves.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from executor_api.messages import LIST_MAX, Unreadable, write
from executor_api.v1 import types_pb2 as pb
from executor_server.api.handlers import Behaviour, Context, Handler, Wrapper, behaviour_of, with_behaviour
from executor_server.core import (
    ExecutorError,
    Forbidden,
    InvalidRequest,
    ModulesMissing,
    NotFound,
    OutOfRange,
    PolicyViolation,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Violation,
)

DOMAIN = "remote-executor"
DETAILS_KEY = "grpc-status-details-bin"

# A client refuses trailers above 8 KiB by default, and sees that instead of our answer. The message is in them twice,
# once percent-encoded (up to three bytes each), so these limits add up to less.
MAX_MESSAGE_BYTES = 1000
MAX_VIOLATIONS_BYTES = 2500
MAX_FIELD_BYTES = 400
MAX_MODULES_BYTES = 1500
MAX_PROGRESS_BYTES = 60

_CODES: dict[type[ExecutorError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    PolicyViolation: grpc.StatusCode.PERMISSION_DENIED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}

_GRPC_LOGGER = "grpc._cython.cygrpc"

_log = structlog.get_logger(__name__)


def ignore_lost_callers() -> None:
    """Stops grpc.aio from logging a traceback when a caller leaves while its answer is sent. Idempotent."""
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_worth_logging)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], grpc.aio.InternalError)


class PassedOn(Exception):
    """The refusal of another daemon that we called for our caller. Its status is passed on unchanged."""

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


async def refuse(context: Context, error: ExecutorError) -> NoReturn:
    """Ends the call with the status of `error`."""
    await _end_with(context, *_status_of(error))


def _status_of(error: ExecutorError) -> tuple[grpc.StatusCode, str, bytes]:
    code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=_metadata_of(error))
    details: list[Message] = [info]
    if isinstance(error, InvalidRequest) and error.field:
        field = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, MAX_FIELD_BYTES), description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[field]))
    elif isinstance(error, PolicyViolation):
        details.append(_violations_to(error.violations))
    if isinstance(error, (ResourceExhausted, Unavailable)) and error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(retry)
    return code, message, _packed(code, message, details)


def _metadata_of(error: ExecutorError) -> Mapping[str, str]:
    """Returns the facts of an error that programs read, in addition to its reason."""
    if isinstance(error, ModulesMissing):
        return {"modules": _modules_to(error.modules)}
    if isinstance(error, Unavailable) and error.progress is not None:
        progress = error.progress
        step, unit = _cut(progress.step, MAX_PROGRESS_BYTES), _cut(progress.unit, MAX_PROGRESS_BYTES)
        return {"step": step, "done": str(progress.done), "total": str(progress.total), "unit": unit}
    return {}


def error_border(on_refusal: Callable[[str, ExecutorError], None]) -> Wrapper:
    """Translates what a handler raises, and refuses messages that are malformed, or have unknown fields or long lists.

    `on_refusal` receives the method and the error of each call that is refused here, before its caller is answered.
    """

    def wrap(method: str, handler: Handler) -> Handler:
        request_in: Callable[[Any], Any] = _checked_stream if handler.request_streaming else checked
        behaviour = behaviour_of(handler)
        if handler.response_streaming:
            behaviour = _begun(behaviour)

        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await behaviour(request_in(request), context)
            except Exception as error:  # noqa: BLE001 - the border
                if isinstance(error, Unreadable):
                    error = InvalidRequest(Reason.INVALID_FIELD, str(error))
                if isinstance(error, ExecutorError):
                    on_refusal(method, error)
                await _end(method, context, error)

        return with_behaviour(handler, guarded, _without_errors(handler.request_deserializer))

    return wrap


def _begun(behaviour: Behaviour) -> Behaviour:
    """Sends the metadata before the behaviour begins, for a stream of answers.

    grpc.aio sends the metadata with the first message, and notes only afterwards that it did. A behaviour may end while
    that is under way, in a task of its own or in itself when it is cancelled. Then the metadata would be sent again
    with the status; that fails, and the caller would wait for ever.
    """

    async def begun(request: Any, context: Context) -> Any:
        await context.send_initial_metadata(())
        return await behaviour(request, context)

    return begun


async def _end(method: str, context: Context, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, ExecutorError):
        await refuse(context, error)
    if isinstance(error, PassedOn):
        await _end_with(context, error.code, _cut(error.message, MAX_MESSAGE_BYTES), error.details)
    if isinstance(error, grpc.aio.InternalError):
        raise _caller_left(method, error)
    incident_id = secrets.token_hex(8)
    _log.error("rpc_internal_error", method=method, incident_id=incident_id, exc_info=error)
    message = f"the daemon failed; its log tells more under incident {incident_id}"
    info = error_details_pb2.ErrorInfo(
        reason=Reason.INTERNAL.value, domain=DOMAIN, metadata={"incident_id": incident_id}
    )
    code = grpc.StatusCode.INTERNAL
    await _end_with(context, code, message, _packed(code, message, [info]))


def _packed(code: grpc.StatusCode, message: str, details: list[Message]) -> bytes:
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return cast("bytes", status.SerializeToString())


async def _end_with(context: Context, code: grpc.StatusCode, message: str, details: bytes) -> NoReturn:
    try:
        await context.abort(code, message, trailing_metadata=((DETAILS_KEY, details),))
    except grpc.aio.InternalError as error:
        raise _caller_left(code.name, error) from error
    raise AssertionError("abort returned")  # it never does


def _caller_left(doing: str, error: grpc.aio.InternalError) -> asyncio.CancelledError:
    """Returns the error that grpc.aio itself raises when it notices in time that the caller has left.

    A batch of operations fails when its call is over, and for no other reason that our handlers could cause.
    """
    _log.debug("caller_left", doing=doing, error=str(error))
    return asyncio.CancelledError()


def _violations_to(violations: Sequence[Violation]) -> pb.Violations:
    """Lists as many violations as there is room for, and counts the others."""
    listed = pb.Violations()
    for violation in violations:
        texts = {name: _cut(text, MAX_FIELD_BYTES) for name, text in vars(violation).items() if isinstance(text, str)}
        entry = write(pb.Violation, violation, **texts)
        if listed.ByteSize() + entry.ByteSize() > MAX_VIOLATIONS_BYTES:
            break
        listed.violations.append(entry)
    listed.omitted = len(violations) - len(listed.violations)
    return listed


def _modules_to(modules: Sequence[str]) -> str:
    """Joins as many names as there is room for with commas."""
    listed = ""
    for name in modules:
        shown = _UNPRINTABLE.sub(_visible, name)
        longer = f"{listed},{shown}" if listed else shown
        if len(longer.encode()) > MAX_MODULES_BYTES:
            break
        listed = longer
    return listed


# ---------------------------------------------------------------------------------------------------------------------
# Incoming requests

_MALFORMED = object()


def _without_errors(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Returns a deserializer that never raises: grpc would answer UNKNOWN with the exception's text."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    return parse


def checked(request: Any) -> Any:
    """Returns the request. Raises InvalidRequest if it is malformed, or has unknown fields or a list above LIST_MAX.

    A daemon that skipped an unknown field would silently not do what the client asked for. A message has room for a
    million short texts, and no handler may walk so many before it compares their number with its own limit.
    """
    if request is _MALFORMED:
        raise InvalidRequest(Reason.INVALID_FIELD, "the message is malformed (text must be UTF-8)")
    if isinstance(request, bytes):
        return request  # it is passed on to a node of a fleet, which checks it
    size_bytes = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size_bytes:
        raise InvalidRequest(Reason.INVALID_FIELD, "the message has fields that this daemon does not know")
    for name in _lists_of(request.DESCRIPTOR):
        if len(getattr(request, name)) > LIST_MAX:
            raise InvalidRequest(Reason.INVALID_FIELD, f"{name} has more than {LIST_MAX:,} entries", name)
    return request


@functools.cache
def _lists_of(descriptor: Any) -> Sequence[str]:
    """Returns the names of a message's lists and maps. Handlers count the few lists in lists themselves."""
    return tuple(field.name for field in descriptor.fields if field.is_repeated)


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield checked(request)


# Unicode's control characters except tab and newline, and characters that change the direction of text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def _cut(text: str, max_bytes: int) -> str:
    """Cuts `text`, and escapes characters that a status can't carry or that could steer a terminal."""
    # First cut, since a text may have megabytes and escapes make it longer.
    shown = _UNPRINTABLE.sub(_visible, text[:max_bytes])
    data = shown.encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes and len(text) <= max_bytes:
        return data.decode()
    return data[:max_bytes].decode("utf-8", "ignore") + "…"


def _visible(found: re.Match[str]) -> str:
    """Escapes a character as Python's repr does: `\\x1b`."""
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
