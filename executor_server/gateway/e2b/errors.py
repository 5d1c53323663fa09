"""Refusals in E2B's form, and the table of statuses for errors of our client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from executor_client.errors import (
    AuthenticationError,
    AuthorizationError,
    CallTimeoutError,
    EnvironmentFailed,
    ExecutorClientError,
    FileError,
    FileExists,
    FileNotFound,
    FilePermissionDenied,
    InvalidRequest,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
    ResourceExhaustedError,
    SessionGone,
    UnavailableError,
)
from executor_server.gateway.clients import public_message

GONE, NOT_FOUND = 502, "The sandbox was not found"
"""SDKs read this text, with this status, as the end of a sandbox."""


class E2BError(Exception):
    """A refusal: an HTTP status and a message for the caller. `retry_after_s` is a time to retry, if one helps."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(math.ceil(self.retry_after_s))}
        return JSONResponse({"code": self.status, "message": self.message}, self.status, headers)


def sandbox_gone() -> E2BError:
    """Refuses traffic of a sandbox that does not run, or never did."""
    return E2BError(GONE, NOT_FOUND)


def not_offered(what: str, why: str = "") -> E2BError:
    """Refuses a part of E2B's protocol that does not exist here: `what` is a noun, `why` a clause."""
    return E2BError(501, f"{what} is not offered by remote-executor" + (f": {why}" if why else ""))


def from_client(error: ExecutorClientError) -> E2BError:
    """Returns the refusal for an error of our client."""
    if isinstance(error, SessionGone):
        return sandbox_gone()
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    return E2BError(status, public_message(error), retry_after_s=getattr(error, "retry_after_s", None))


async def _respond(_: Request, error: Exception) -> Response:
    assert isinstance(error, E2BError | ExecutorClientError)
    return (error if isinstance(error, E2BError) else from_client(error)).response()


REFUSALS: Mapping[Any, Any] = {E2BError: _respond, ExecutorClientError: _respond}
"""Exception handlers of an application."""

# The first class that fits counts.
_STATUSES = (
    (FileNotFound, 404),
    (FileExists, 409),
    (FilePermissionDenied, 403),
    (FileError, 400),
    (InvalidRequest, 400),
    (AuthenticationError, 401),
    (AuthorizationError, 403),
    (PolicyViolationError, 403),
    (NotFoundError, 404),
    (EnvironmentFailed, 400),
    (PreconditionError, 409),
    (ResourceExhaustedError, 429),
    (UnavailableError, 503),
    (CallTimeoutError, 504),
)
