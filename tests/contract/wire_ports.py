"""Ports of a session behind a front, with the calls of `executor_server.sessions.Ports`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from executor_api.limits import PIECE_BYTES
from executor_api.v1 import executor_service_pb2 as pb
from executor_client import aio_ports
from executor_client.errors import UnavailableError
from executor_server.core import Reason, Unavailable
from tests.contract import wire_values as values

if TYPE_CHECKING:
    from tests.contract.wire import WireSession


class WirePorts:
    def __init__(self, session: WireSession) -> None:
        self._session = session

    @asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[WireConnection]:
        """Opens a connection. Raises its refusal."""
        with values.refusals():
            opened = await aio_ports._opened(self._session.client_session, port)
        try:
            yield WireConnection(self._session, opened)
        finally:
            opened.call.cancel()


class WireConnection:
    def __init__(self, session: WireSession, opened: Any) -> None:
        self._session = session
        self._opened = opened

    async def read(self) -> bytes:
        """Returns data of the program; nothing after its last. Raises Unavailable when it was cut off."""
        try:
            with values.refusals():
                async with self._opened.channel.calling():
                    async for message in self._opened.messages:
                        return bytes(message.data) if message.WhichOneof("part") == "data" else b""
        except UnavailableError as error:
            raise Unavailable(Reason(error.reason), error.message) from error
        return b""

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            await self._opened.call.write(pb.ForwardPortRequest(data=data[start : start + PIECE_BYTES]))

    async def end_input(self) -> None:
        await self._opened.call.write(pb.ForwardPortRequest(shutdown=pb.Shutdown()))
        await self._opened.call.done_writing()
