"""The asyncio client's transport: one channel, errors of ours only, retries."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from executor_client._aio.channel import AsyncChannel, AsyncEventStream
from executor_client._aio.runtime import run_blocking, sleep
from executor_client._aio.timer import AsyncTimer
from executor_client._core import probe
from executor_client._core.channel import EventsRequest
from executor_client._core.endpoint import Endpoint
from executor_client._core.tracing import Metadata
from executor_client._core.transport_base import Timeouts, TransportBase, is_unreached
from executor_client._core.waiting import Awaited
from executor_client.errors import ExecutorClientError
from executor_client.waits import OnWait

T = TypeVar("T")


class AsyncTransport(TransportBase):
    """Owns the channel and makes the calls. Belongs to the event loop that runs when it is made."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, on_wait: OnWait | None = None) -> None:
        self._channel = AsyncChannel(endpoint)
        super().__init__(self._channel, timeouts, None if on_wait is None else AsyncTimer(on_wait))

    def check_caller(self) -> None:
        """Raises ConfigurationError where this transport cannot be used."""
        self._channel.check_caller()

    async def close(self) -> None:
        """Closes the channel. Calls that wait end with UnavailableError, and no other call begins."""
        self.check_caller()
        self._channel.shut()
        self._end_reports()
        await self._channel.close()

    def open(self, request: EventsRequest, trace: Metadata, timeout_s: float | None = None) -> AsyncEventStream:
        """Starts a stream of the events of an execution or a process, which all belong to the trace of the first."""
        return self._channel.events(request, trace, timeout_s)

    def duplex(self, method: Callable[..., Any]) -> Any:
        """Starts a call with streams in both directions, without a time limit. Its errors are gRPC's: `calling`."""
        return method(metadata=self._channel.metadata())

    def calling(self) -> AbstractContextManager[None]:
        """Translates gRPC's errors around a use of such a call."""
        return self._channel.calling()

    async def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with one answer."""
        with self._channel.calling():
            metadata = self._channel.metadata()
            response = await method(request, timeout=timeout_s or self.timeouts.call_s, metadata=metadata)
        self.answered = True
        return response

    async def upload(self, method: Callable[..., Any], requests: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with a stream of requests."""
        with self._channel.uploading():
            return await self.once(method, requests, timeout_s)

    async def read(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Makes one attempt of a call with a stream of answers. A reader that stops early cancels the call."""
        with self._channel.calling():
            metadata = self._channel.metadata()
            stream = method(request, timeout=timeout_s or self.timeouts.call_s, metadata=metadata)
            try:
                async for message in stream:
                    yield message
            finally:
                stream.cancel()

    async def call(self, method: Callable[..., Any], request: Any, awaited: Awaited | None = None) -> Any:
        """Makes a call with one answer, repeated where that may help. `awaited` names the wait in reports."""
        return await self.repeat(lambda: self.once(method, request), awaited=awaited or self.answer)

    async def repeat(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        within_s: float = math.inf,
        awaited: Awaited | None = None,
    ) -> T:
        """Repeats an attempt while no daemon can be reached, and while the daemon names a time to retry.

        Each of these waits ends with its timeout, and at the latest after `within_s`. `awaited` names the wait for the
        answer in reports.
        """
        if not self.answered:
            self._listened = await run_blocking(probe.listens, self.endpoint)
        retries = self._call_retries(within_s)
        with self.waits() as waits:
            while True:
                self._begin_attempt(waits, awaited)
                try:
                    return await attempt()
                except ExecutorClientError as error:
                    if self._may_have_been_killed(error) and not await run_blocking(probe.listens, self.endpoint):
                        # It is waited for like one that has answered: its sessions continue with the next daemon.
                        self.answered = True
                        retries = self._call_retries(within_s)
                    if self._diagnoses_now(error) and (cause := await self.diagnosis()) is not None:
                        raise self._unanswered(error, cause) from None
                    delay_s = self._delay_s(retries, error, waits)
                    if delay_s is None:
                        cause = await self.diagnosis() if is_unreached(error) else None
                        raise self._unanswered(error, cause) from None
                await sleep(delay_s)

    async def diagnosis(self) -> str | None:
        """Returns why no daemon answers, if that can be found out. Each of its steps has a time limit."""
        return await run_blocking(probe.diagnosis, self.endpoint)
