"""Bodies of requests that are read whole."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from executor_server.gateway.errors import Refusal


async def body_of(request: Request, bytes_max: int, *, too_large: int = 413) -> bytes:
    """Raises Refusal for a body that is too large, with the status `too_large`, and (400) if the client leaves."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > bytes_max:
                raise Refusal(too_large, f"the request has more than {bytes_max:,} bytes")
    except ClientDisconnect as error:
        raise Refusal(400, "the request broke off") from error
    return bytes(body)
