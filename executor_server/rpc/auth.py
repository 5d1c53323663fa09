"""Who is calling: a bearer token on every method.

Only the health service's Check is open, so that probes need no secret; all it tells is whether the daemon serves. Its
Watch, reflection and methods that do not exist need the token like the rest, so a stranger learns nothing from them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from executor_server.errors import Reason, Unauthenticated
from executor_server.model import Principal
from executor_server.rpc.errors import Context, Handler, refuse

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})

LOCAL_PRINCIPAL = Principal(tenant="local", name="token", is_admin=True)
"""The one principal of a daemon with one token."""

current_principal: ContextVar[Principal] = ContextVar("current_principal")
"""Set for the duration of a call. grpc.aio runs the interceptors and the handler of a call in one task."""


class TokenAuth(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls through that carry `authorization: Bearer TOKEN`."""

    def __init__(self, token: str, principal: Principal = LOCAL_PRINCIPAL) -> None:
        # Compared as digests, so that not even the token's length shows in the time it takes.
        self._digest = hashlib.sha256(token.encode()).digest()
        self._principal = principal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if handler_call_details.method in OPEN_METHODS:
            return await continuation(handler_call_details)
        if not self._is_known(handler_call_details):
            return _DENY
        current_principal.set(self._principal)
        return await continuation(handler_call_details)

    def _is_known(self, call: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in call.invocation_metadata or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            return False
        scheme, _, token = given[0].partition(" ")
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"


async def _deny(_requests: Any, context: Context) -> None:
    await refuse(
        context,
        Unauthenticated(Reason.UNAUTHENTICATED, "no valid token: send `authorization: Bearer TOKEN` in the metadata"),
    )


# A stream handler whatever the method is: it answers before it reads anything that a stranger sends.
_DENY: Handler = grpc.stream_stream_rpc_method_handler(_deny)
