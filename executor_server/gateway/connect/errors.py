"""Errors as Connect sends them, from gRPC's statuses, with the daemon's reasons."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import grpc
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
from executor_client.errors import (
    AuthenticationError,
    AuthorizationError,
    CallTimeoutError,
    ExecutorClientError,
    InvalidRequest,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from executor_server.gateway.clients import NO_ANSWER, public_message

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "remote-executor"

_CODES = {each.name: each for each in Code} | {"CANCELLED": Code.CANCELED}
# For statuses that gRPC made itself: their texts have the daemon's address.
_WITHOUT_DAEMON = {
    Code.UNAVAILABLE: NO_ANSWER,
    Code.INTERNAL: NO_ANSWER,
    Code.UNKNOWN: NO_ANSWER,
    Code.CANCELED: "the call was cancelled",
    Code.DEADLINE_EXCEEDED: "the call took longer than its connect-timeout-ms",
}

_CLIENT_CODES: dict[type[BaseException], Code] = {
    InvalidRequest: Code.INVALID_ARGUMENT,
    PolicyViolationError: Code.PERMISSION_DENIED,
    AuthorizationError: Code.PERMISSION_DENIED,
    AuthenticationError: Code.UNAUTHENTICATED,
    NotFoundError: Code.NOT_FOUND,
    PreconditionError: Code.FAILED_PRECONDITION,
    ResourceExhaustedError: Code.RESOURCE_EXHAUSTED,
    UnavailableError: Code.UNAVAILABLE,
    CallTimeoutError: Code.DEADLINE_EXCEEDED,
    ExecutorClientError: Code.INTERNAL,
}

_log = structlog.get_logger(__name__)


def of_status(error: grpc.RpcError) -> ConnectError:
    """Returns the Connect error for a gRPC status, with its details."""
    status: Any = error  # grpc.RpcError lacks the methods that all its subclasses have
    code = _CODES.get(status.code().name, Code.UNKNOWN)
    details = list(_details(status.trailing_metadata() or ()))
    message = status.details() or ""
    return ConnectError(code, message if details else _WITHOUT_DAEMON.get(code, message), details)


def of_client(error: ExecutorClientError) -> ConnectError:
    """Returns the Connect error for an error of our client."""
    code = next(_CLIENT_CODES[each] for each in type(error).__mro__ if each in _CLIENT_CODES)
    return ConnectError(code, public_message(error), [_info(error.reason)] if error.reason else [])


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


def to_json(error: ConnectError) -> dict[str, Any]:
    """Returns the body of an error."""
    return ConnectWireError.from_exception(error).to_dict()


def response(error: ConnectError) -> Response:
    return JSONResponse(to_json(error), status_of(error.code.value))


def status_of(code: str) -> int:
    """Returns the HTTP status of a code."""
    return ConnectWireError(Code(code), "", ()).to_http_status().code


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
