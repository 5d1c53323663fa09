"""The call ForwardPort: one connection to a port of a sandbox, in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from executor_api.limits import PIECE_BYTES
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api import checks
from executor_server.api.handlers import Context
from executor_server.sessions import PortConnection, Session

_MAX_PORT = 65_535


async def forward_port(
    requests: AsyncIterator[service_pb.ForwardPortRequest], context: Context, find: Callable[[str], Session]
) -> None:
    """Serves the call until both directions have ended; `find` returns the caller's session."""
    first = await anext(requests, None)
    if first is None or first.WhichOneof("part") != "open":
        raise checks.invalid("open", "must be the first message")
    if not 1 <= first.open.port <= _MAX_PORT:
        raise checks.invalid("open.port", f"must be from 1 to {_MAX_PORT}")
    async with find(first.open.session_id).ports.open(first.open.port) as connection:
        await context.write(service_pb.ForwardPortResponse(opened=service_pb.PortOpened()))
        passing = [
            asyncio.create_task(_send(requests, connection)),
            asyncio.create_task(_receive(context, connection)),
        ]
        try:
            done, _ = await asyncio.wait(passing, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)


async def _receive(context: Context, connection: PortConnection) -> None:
    """Sends the program's data to the client, up to its end."""
    while data := await connection.read():
        await context.write(service_pb.ForwardPortResponse(data=data))
    await context.write(service_pb.ForwardPortResponse(shutdown=service_pb.Shutdown()))


async def _send(requests: AsyncIterator[service_pb.ForwardPortRequest], connection: PortConnection) -> None:
    """Sends the client's data to the program, up to `shutdown`.

    The stream of a dead client ends too, but the program must not take its data for complete. That call is cancelled,
    which resets the connection.
    """
    async for request in requests:
        part = request.WhichOneof("part")
        if part == "shutdown":
            connection.end_input()
            return
        if part != "data" or not 0 < len(request.data) <= PIECE_BYTES:
            raise checks.invalid("data", f"must be 1 to {PIECE_BYTES:,} bytes in each message")
        await connection.write(request.data)
