"""Shared parts of envd's services: the sandbox of a call, its user, its messages, and its errors in Connect's form."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator, Collection
from typing import Any

from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from executor_client.errors import ExecutorClientError, SessionGone
from executor_server.gateway.codecs import BinaryCodec, JsonCodec
from executor_server.gateway.e2b.records import Sandbox, Sandboxes
from executor_server.gateway.errors import Refusal, of_bug, of_client, response
from executor_server.gateway.routing import current_target

USER = "user"
"""E2B's default user. Our sandboxes have one user, who goes by this name."""

CODECS: list[Codec[Any, Any]] = [BinaryCodec(), JsonCodec(skips_unknown=True)]
"""Messages as binary and as JSON."""
KEEPALIVE_S_MAX = 90
"""envd's default, and the longest silence of a stream."""

_NAME_CHARS = 200


def admitting(service: ASGIApp, sandboxes: Sandboxes) -> ASGIApp:
    """Refuses strangers before connectrpc reads the body, which may take for ever to arrive."""

    async def admit(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await sandboxes.find(current_target().sandbox_id, Headers(scope=scope).get("x-access-token"))
        except Refusal as error:
            await response(error)(scope, receive, send)
        else:
            await service(scope, receive, send)

    return admit


@contextlib.asynccontextmanager
async def sandbox_of(sandboxes: Sandboxes, ctx: RequestContext[Any, Any]) -> AsyncIterator[Sandbox]:
    """Provides the sandbox of a call. Errors of the body become ConnectErrors."""
    sandbox: Sandbox | None = None
    try:
        headers = ctx.request_headers
        check_user(_name_in(headers.get("authorization", "")), sandboxes.users)
        sandbox = await sandboxes.find(current_target().sandbox_id, headers.get("x-access-token"))
        yield sandbox
    except ConnectError:
        raise
    except SessionGone as error:
        if sandbox is not None:
            sandboxes.forget(sandbox.record)  # the SDK's next request asks whether the sandbox runs
        message = f"the sandbox was killed or reached its end of life during the call: {error.message}"
        raise ConnectError(Code.UNAVAILABLE, message) from error
    except ExecutorClientError as error:
        raise of_client(error) from error
    except Exception as error:
        raise of_bug(ctx.method.name, error) from error


def check_user(name: str | None, users: Collection[str]) -> None:
    """Raises Refusal (401) for a name that is neither the only user's nor one of its further names."""
    if name and name != USER and name not in users:
        raise Refusal(
            401,
            f'the user "{name[:_NAME_CHARS]}" is not offered: everything in this sandbox runs as its only user '
            f'"{USER}"; name that one, or none',
        )


def _name_in(authorization: str) -> str | None:
    """Returns the user of Basic authentication; None without one."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[0]
    except ValueError:
        raise Refusal(401, "the header Authorization names no user: Basic authentication can't be read") from None


def keepalive_s(ctx: RequestContext[Any, Any]) -> int:
    """Returns the seconds of silence after which a stream sends a keepalive."""
    given = ctx.request_headers.get("keepalive-ping-interval", "")
    if not (given.isascii() and given.isdigit()):
        return KEEPALIVE_S_MAX
    return min(max(int(given[:4]), 1), KEEPALIVE_S_MAX)
