"""The call ForwardPort: one connection to a port of a sandbox, in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from executor_api.limits import PIECE_BYTES
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.rpc import checks
from executor_server.rpc.handlers import Context
from executor_server.sessions import PortConnection, Session

_MAX_PORT = 65_535


async def forward_port(
    requests: AsyncIterator[service_pb.ForwardPortRequest], context: Context, find: Callable[[str], Session]
) -> None:
    """Serves the call; `find` finds the caller's session. Returns when both directions have ended."""
    first = await anext(requests, None)
    if first is None or first.WhichOneof("part") != "open":
        raise checks.invalid("open", "must be the first message")
    if not 1 <= first.open.port <= _MAX_PORT:
        raise checks.invalid("open.port", f"must be from 1 to {_MAX_PORT}")
    async with find(first.open.session_id).ports.open(first.open.port) as connection:
        await context.write(service_pb.ForwardPortResponse(opened=service_pb.PortOpened()))
        sending = asyncio.create_task(_send(requests, connection))
        try:
            while data := await connection.read():
                await context.write(service_pb.ForwardPortResponse(data=data))
            await context.write(service_pb.ForwardPortResponse(shutdown=service_pb.Shutdown()))
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _send(requests: AsyncIterator[service_pb.ForwardPortRequest], connection: PortConnection) -> None:
    """Passes the client's data on, up to its end."""
    async for request in requests:
        part = request.WhichOneof("part")
        if part == "shutdown":
            break
        if part != "data" or not 0 < len(request.data) <= PIECE_BYTES:
            raise checks.invalid("data", f"must be 1 to {PIECE_BYTES:,} bytes in each message")
        await connection.write(request.data)
    connection.end_input()
