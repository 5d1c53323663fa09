"""Reads uploads: a stream of one header, then data of the size that the header declares.

The session layer reserves the declared size, so a stream with more or less data is refused. A stalled stream is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from executor_api.limits import PIECE_BYTES
from executor_server.api import checks
from executor_server.core import InvalidRequest, Reason

PIECE_TIMEOUT_S = 60.0
"""Seconds to wait for the next piece: at 5 kB/s even the largest arrives in time."""


class Upload:
    """One client stream of messages that have a oneof `part` of `header` and `data`."""

    def __init__(self, requests: AsyncIterator[Any], first: str = "header") -> None:
        """`first` is the field of the first message."""
        self._requests = requests
        self._first = first

    async def header(self) -> Any:
        message = await self._next()
        if message is None or message.WhichOneof("part") != self._first:
            raise checks.invalid(self._first, "must be the first message")
        return getattr(message, self._first)

    async def pieces(self, size_bytes: int) -> AsyncIterator[bytes]:
        """Yields exactly `size_bytes` of data. Raises InvalidRequest when the stream has anything else."""
        received_bytes = 0
        async for piece in self.all_pieces():
            received_bytes += len(piece)
            if received_bytes > size_bytes:
                raise checks.invalid("data", f"is longer than the {size_bytes:,} bytes that the header declares")
            yield piece
        if received_bytes < size_bytes:
            raise checks.invalid("data", f"ends after {received_bytes:,} of the {size_bytes:,} bytes declared")

    async def all_pieces(self) -> AsyncIterator[bytes]:
        """Yields the data, of any size. Raises InvalidRequest for messages without data."""
        while (message := await self._next()) is not None:
            if message.WhichOneof("part") != "data":
                raise checks.invalid(self._first, "is allowed in the first message only; the others carry data")
            piece: bytes = message.data
            if not 0 < len(piece) <= PIECE_BYTES:
                raise checks.invalid("data", f"must be 1 to {PIECE_BYTES:,} bytes in each message")
            yield piece

    async def _next(self) -> Any:
        """Returns the next message, None at the end."""
        try:
            async with asyncio.timeout(PIECE_TIMEOUT_S):
                return await anext(self._requests, None)
        except TimeoutError as error:
            raise InvalidRequest(Reason.INVALID_FIELD, f"no data arrived for {PIECE_TIMEOUT_S:g} s") from error
