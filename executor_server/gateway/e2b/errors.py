"""Refusals that are E2B's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from executor_client.errors import ExecutorClientError, SessionGone
from executor_server.gateway.errors import Refusal, of_client

GONE, NOT_FOUND = 502, "The sandbox was not found"
"""SDKs read this text, with this status, as the end of a sandbox."""


def sandbox_gone() -> Refusal:
    """Refuses traffic of a sandbox that does not run, or never did."""
    return Refusal(GONE, NOT_FOUND)


def not_offered(what: str, why: str = "") -> Refusal:
    """Refuses a part of E2B's protocol that does not exist here: `what` is a noun, `why` a clause."""
    return Refusal(501, f"{what} is not offered by remote-executor" + (f": {why}" if why else ""))


def refusal_of(error: Refusal | ExecutorClientError) -> Refusal:
    """Returns the refusal for an error."""
    if isinstance(error, SessionGone):
        return sandbox_gone()
    return error if isinstance(error, Refusal) else of_client(error)


async def _respond(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal | ExecutorClientError)
    return refusal_of(error).response()


REFUSALS: Mapping[Any, Any] = {Refusal: _respond, ExecutorClientError: _respond}
"""Exception handlers of an application."""
