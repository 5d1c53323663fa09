"""The asyncio client's transport: one channel, errors of ours only, retries."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from executor_client._aio.channel import AsyncChannel
from executor_client._aio.runtime import run_blocking, sleep
from executor_client._aio.timer import AsyncTimer
from executor_client._core import probe
from executor_client._core.endpoint import Endpoint
from executor_client._core.transport_base import Timeouts, TransportBase, is_unreached
from executor_client._core.waiting import Awaited
from executor_client.errors import ExecutorClientError
from executor_client.waits import OnWait

T = TypeVar("T")


class AsyncTransport(TransportBase):
    """Owns the channel and makes the calls. Belongs to the event loop of its first use."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, on_wait: OnWait | None = None) -> None:
        self.channel = AsyncChannel(endpoint)
        super().__init__(self.channel, timeouts, None if on_wait is None else AsyncTimer(on_wait))

    async def close(self) -> None:
        """Closes the channel. Waiting calls end with UnavailableError, and no other call begins."""
        self.channel.check_caller()
        self.channel.shut()
        self._end_reports()
        await self.channel.close()

    async def once(self, request: Message, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with one answer."""
        return await self._attempt(self.channel.method(request), request, timeout_s)

    async def upload(self, method: Callable[..., Any], requests: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with a stream of requests, by a method of the channel's stub."""
        with self.channel.uploading():
            return await self._attempt(method, requests, timeout_s)

    async def _attempt(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        async with self.channel.calling():
            metadata = self.channel.metadata()
            response = await method(request, timeout=timeout_s or self.timeouts.call_s, metadata=metadata)
        self.answered = True
        return response

    async def read(self, request: Message, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        """Makes one attempt of a call with a stream of answers. A reader that stops early cancels the call.

        A watch has the timeout `math.inf`: none. The channel's keepalive detects a dead connection.
        """
        timeout = None if timeout_s == math.inf else timeout_s or self.timeouts.call_s
        async with self.channel.calling(of_stream=True):
            metadata = self.channel.metadata()
            stream = self.channel.method(request)(request, timeout=timeout, metadata=metadata)
            try:
                async for message in stream:
                    yield message
            finally:
                stream.cancel()

    async def call(self, request: Message, awaited: Awaited | None = None) -> Any:
        """Makes a call with one answer, repeated where that may help. `awaited` names the wait in reports."""
        return await self.repeat(lambda: self.once(request), awaited=awaited or self.answer)

    async def repeat(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        within_s: float = math.inf,
        awaited: Awaited | None = None,
    ) -> T:
        """Repeats an attempt while the daemon can't be reached, and while it names a time to retry.

        Each of these waits ends after its timeout, at most `within_s` seconds. `awaited` names the wait for the answer
        in reports.
        """
        self.channel.check_caller()
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
                        # Wait as for a daemon that has answered: its sessions continue with the next daemon.
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
        """Returns why no daemon answers, if known. Each step has a time limit."""
        return await run_blocking(probe.diagnosis, self.endpoint)
