"""Refusals and failures, as Connect and E2B's protocol send them.

Each is a ConnectError: a code and a message. The errors of our client and the statuses of the daemon are translated
here and nowhere else.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import structlog
from connectrpc._protocol import ConnectWireError
from connectrpc.code import Code
from connectrpc.errors import ConnectError, ErrorDetail
from google.protobuf import any_pb2
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from protobuf import Message, message_from_json_value
from protobuf.wkt import Any as WireAny
from protobuf.wkt import Struct
from starlette.responses import JSONResponse, Response

from executor_api.v1 import types_pb2  # noqa: F401 - `_Detail` finds Violations by its name
from executor_client import errors as client_errors
from executor_client.errors import ExecutorClientError

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "remote-executor"
NO_ANSWER = "the executor's daemon does not answer, or stopped answering during the call; try again later"

_CODES = {each.name: each for each in Code} | {"CANCELLED": Code.CANCELED}
# For statuses that gRPC made itself: their texts have the daemon's address.
_WITHOUT_DAEMON = {
    Code.UNAVAILABLE: NO_ANSWER,
    Code.INTERNAL: NO_ANSWER,
    Code.UNKNOWN: NO_ANSWER,
    Code.CANCELED: "the call was cancelled",
    Code.DEADLINE_EXCEEDED: "the call took longer than its connect-timeout-ms",
}
# The first class of an error, in the order of its MRO, that is listed here decides.
_CLIENT_CODES: Mapping[type, Code] = {
    client_errors.FileNotFound: Code.NOT_FOUND,
    client_errors.FileExists: Code.ALREADY_EXISTS,
    client_errors.FilePermissionDenied: Code.PERMISSION_DENIED,
    client_errors.FileError: Code.INVALID_ARGUMENT,
    client_errors.InvalidRequest: Code.INVALID_ARGUMENT,
    client_errors.PolicyViolationError: Code.PERMISSION_DENIED,
    client_errors.AuthorizationError: Code.PERMISSION_DENIED,
    client_errors.AuthenticationError: Code.UNAUTHENTICATED,
    client_errors.NotFoundError: Code.NOT_FOUND,
    client_errors.PreconditionError: Code.FAILED_PRECONDITION,
    client_errors.ResourceExhaustedError: Code.RESOURCE_EXHAUSTED,
    client_errors.UnavailableError: Code.UNAVAILABLE,
    client_errors.CallTimeoutError: Code.DEADLINE_EXCEEDED,
    ExecutorClientError: Code.INTERNAL,
}

_log = structlog.get_logger(__name__)


def status_of(code: Code) -> int:
    """Returns the HTTP status of a code."""
    return ConnectWireError(code, "", ()).to_http_status().code


_OF_STATUS = {status_of(code): code for code in reversed(Code)} | {500: Code.INTERNAL, 502: Code.UNAVAILABLE}


class Refusal(ConnectError):
    """A refusal with its HTTP status. `retry_after_s` is a time to retry, if one helps."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: Code | None = None,
        details: tuple[ErrorDetail, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        """`code` is that of the status, unless it is given."""
        super().__init__(code or _OF_STATUS.get(status, Code.RESOURCE_EXHAUSTED), message, details)
        self.status = status
        self.retry_after_s = retry_after_s

    def response(self) -> Response:
        """Returns it in E2B's own form, for its services that do not use Connect."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(math.ceil(self.retry_after_s))}
        return JSONResponse({"code": self.status, "message": self.message}, self.status, headers)


def to_json(error: ConnectError) -> dict[str, Any]:
    """Returns the body of an error in Connect's form."""
    return ConnectWireError.from_exception(error).to_dict()


def response(error: ConnectError) -> Response:
    """Returns an error in Connect's form."""
    status = error.status if isinstance(error, Refusal) else status_of(error.code)
    return JSONResponse(to_json(error), status, {"allow": "POST"} if status == 405 else None)


def of_client(error: ExecutorClientError) -> Refusal:
    """Returns the refusal for an error of our client, without the daemon's address."""
    code = next(_CLIENT_CODES[each] for each in type(error).__mro__ if each in _CLIENT_CODES)
    message = error.message
    if isinstance(error, client_errors.AuthenticationError):
        message = "the daemon does not accept this token; pass one made by `executor-server token new`"
    elif not error.reason and isinstance(
        error, client_errors.UnavailableError | client_errors.ConfigurationError | client_errors.ProtocolError
    ):
        message = NO_ANSWER
    details = (_info(error.reason),) if error.reason else ()
    retry_after_s = getattr(error, "retry_after_s", None)
    return Refusal(status_of(code), message, code=code, details=details, retry_after_s=retry_after_s)


def of_status(status: Any) -> ConnectError:
    """Returns the error for a gRPC status, with its details. `status` is a grpc.RpcError."""
    code = _CODES.get(status.code().name, Code.UNKNOWN)
    details = list(_details(status.trailing_metadata() or ()))
    message = status.details() or ""
    return ConnectError(code, message if details else _WITHOUT_DAEMON.get(code, message), details)


def of_bug(method: str, error: Exception) -> ConnectError:
    """Logs an error of ours. Returns one for the client that only names the incident in the log."""
    incident_id = secrets.token_hex(8)
    _log.error("gateway_internal_error", method=method, incident_id=incident_id, exc_info=error)
    return ConnectError(Code.INTERNAL, f"the gateway failed; its log tells more under incident {incident_id}")


def of_cancellation() -> ConnectError:
    """Ends the cancellation of this task, and returns an error for its client, which may still be there."""
    task = asyncio.current_task()
    while task is not None and task.uncancel():
        pass
    return ConnectError(Code.UNAVAILABLE, "the gateway stopped, or closed its connection to the daemon; try again")


def _details(metadata: Any) -> Iterator[ErrorDetail]:
    for key, value in metadata:
        if key == DETAILS_KEY:
            try:
                packed = status_pb2.Status.FromString(value).details
            except DecodeError:
                return
            yield from map(_Detail, packed)


def _info(reason: str) -> ErrorDetail:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    return _Detail(packed)


class _Detail(ErrorDetail):
    """A detail that an error also shows as JSON ("debug"), for clients without its definition."""

    def __init__(self, packed: any_pb2.Any) -> None:
        super().__init__(WireAny(type_url=packed.type_url, value=packed.value))
        self._packed = packed

    def value(self, *_: object) -> Message | None:  # type: ignore[override]
        try:
            shown = MessageToDict(self._packed)
        except (JsonError, DecodeError, TypeError):  # its definition is unknown here
            return None
        del shown["@type"]
        return message_from_json_value(Struct, shown)
