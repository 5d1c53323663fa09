"""The asyncio client's way to the daemon; `_transport.py` on the event loop, promise by promise."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from executor_client._endpoint import Endpoint
from executor_client._transport_base import Timeouts, TransportBase
from executor_client.errors import DaemonError, ExecutorClientError, UnavailableError

T = TypeVar("T")


class AioTransport(TransportBase):
    """Owns the channel. Belongs to the event loop that runs when it is made."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        credentials = endpoint.credentials()
        self._channel = (
            grpc.aio.insecure_channel(endpoint.address, endpoint.options)
            if credentials is None
            else grpc.aio.secure_channel(endpoint.address, credentials, endpoint.options)
        )
        super().__init__(endpoint, timeouts, self._channel)

    async def close(self) -> None:
        await self._channel.close(None)

    async def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with one answer."""
        try:
            response = await method(request, timeout=timeout_s or self.timeouts.call_s, metadata=self._metadata())
        except grpc.RpcError as error:
            raise self._judged(error) from error
        self._answered = True
        return response

    async def upload(self, method: Callable[..., Any], requests: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with a stream of requests.

        When the daemon refuses while we still send, grpc.aio may lose its answer and put an INTERNAL of its own there.
        What was said is not known then, as after a broken connection: the call is to be repeated.
        """
        try:
            return await self.once(method, requests, timeout_s)
        except DaemonError as error:
            if error.reason:
                raise
            raise UnavailableError(f"the upload broke off: {error.message}") from error

    async def read(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """One attempt of a call with a stream of answers; ended early, it is cancelled."""
        stream = method(request, timeout=timeout_s or self.timeouts.call_s, metadata=self._metadata())
        try:
            async for message in stream:
                yield message
        except grpc.RpcError as error:
            raise self._judged(error) from error
        finally:
            stream.cancel()

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        """A call with one answer, repeated where that may help."""
        return await self.repeat(lambda: self.once(method, request))

    async def repeat(self, attempt: Callable[[], Awaitable[T]], *, within_s: float = math.inf) -> T:
        """Repeats an attempt while nobody is there, and while the daemon is busy and says when to ask again.

        Neither takes longer than its timeout, nor than `within_s`.
        """
        retries = self._call_retries(within_s)
        while True:
            try:
                return await attempt()
            except ExecutorClientError as error:
                delay_s = self._delay_s(retries, error)
            await asyncio.sleep(delay_s)
