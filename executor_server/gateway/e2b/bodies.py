"""Bodies of requests that are read whole."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from executor_server.gateway.e2b.errors import E2BError


async def body_of(request: Request, bytes_max: int) -> bytes:
    """Raises E2BError (413) for a body that is too large, and (400) if the client leaves."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > bytes_max:
                raise E2BError(413, f"the request has more than {bytes_max:,} bytes")
    except ClientDisconnect as error:
        raise E2BError(400, "the request broke off") from error
    return bytes(body)
