# Made of _aio/transport.py by tools/unasync.py: change that, and run `make unasync`.
"""The blocking client's transport: one channel, errors of ours only, retries."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from google.protobuf.message import Message

from executor_client._core import probe
from executor_client._core.endpoint import Endpoint
from executor_client._core.transport_base import Timeouts, TransportBase, is_unreached
from executor_client._core.waiting import Awaited
from executor_client._sync.channel import Channel
from executor_client._sync.runtime import run_blocking, sleep
from executor_client._sync.timer import Timer
from executor_client.errors import ExecutorClientError
from executor_client.waits import OnWait

T = TypeVar("T")


class Transport(TransportBase):
    """Owns the channel and makes the calls. Thread-safe."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, on_wait: OnWait | None = None) -> None:
        self.channel = Channel(endpoint)
        super().__init__(self.channel, timeouts, None if on_wait is None else Timer(on_wait))

    def close(self) -> None:
        """Closes the channel. Waiting calls end with UnavailableError, and no other call begins."""
        self.channel.check_caller()
        self.channel.shut()
        self._end_reports()
        self.channel.close()

    def once(self, request: Message, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with one answer."""
        return self._attempt(self.channel.method(request), request, timeout_s)

    def upload(self, method: Callable[..., Any], requests: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with a stream of requests, by a method of the channel's stub."""
        with self.channel.uploading():
            return self._attempt(method, requests, timeout_s)

    def _attempt(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        with self.channel.calling():
            metadata = self.channel.metadata()
            response = method(request, timeout=timeout_s or self.timeouts.call_s, metadata=metadata)
        self.answered = True
        return response

    def read(self, request: Message, timeout_s: float | None = None) -> Generator[Any, None]:
        """Makes one attempt of a call with a stream of answers. A reader that stops early cancels the call.

        A watch has the timeout `math.inf`: none. The channel's keepalive detects a dead connection.
        """
        timeout = None if timeout_s == math.inf else timeout_s or self.timeouts.call_s
        with self.channel.calling(of_stream=True):
            metadata = self.channel.metadata()
            stream = self.channel.method(request)(request, timeout=timeout, metadata=metadata)
            try:
                yield from stream
            finally:
                stream.cancel()

    def call(self, request: Message, awaited: Awaited | None = None) -> Any:
        """Makes a call with one answer, repeated where that may help. `awaited` names the wait in reports."""
        return self.repeat(lambda: self.once(request), awaited=awaited or self.answer)

    def repeat(
        self,
        attempt: Callable[[], T],
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
            self._listened = run_blocking(probe.listens, self.endpoint)
        retries = self._call_retries(within_s)
        with self.waits() as waits:
            while True:
                self._begin_attempt(waits, awaited)
                try:
                    return attempt()
                except ExecutorClientError as error:
                    if self._may_have_been_killed(error) and not run_blocking(probe.listens, self.endpoint):
                        # Wait as for a daemon that has answered: its sessions continue with the next daemon.
                        self.answered = True
                        retries = self._call_retries(within_s)
                    if self._diagnoses_now(error) and (cause := self.diagnosis()) is not None:
                        raise self._unanswered(error, cause) from None
                    delay_s = self._delay_s(retries, error, waits)
                    if delay_s is None:
                        cause = self.diagnosis() if is_unreached(error) else None
                        raise self._unanswered(error, cause) from None
                sleep(delay_s)

    def diagnosis(self) -> str | None:
        """Returns why no daemon answers, if known. Each step has a time limit."""
        return run_blocking(probe.diagnosis, self.endpoint)
