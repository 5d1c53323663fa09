"""The sync client's way to the daemon: one channel, the same metadata on every call, errors of ours only, retries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from grpc.experimental import ChannelOptions

from executor_client import _probe
from executor_client._endpoint import Endpoint
from executor_client._quiet_grpc import grpc
from executor_client._transport_base import Timeouts, TransportBase, is_unreached
from executor_client._watch import Awaited, ThreadBell
from executor_client.errors import ExecutorClientError
from executor_client.waits import OnWait

T = TypeVar("T")


class Transport(TransportBase):
    """Owns the channel. Thread-safe."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, on_wait: OnWait | None = None) -> None:
        credentials = endpoint.credentials()
        # Streams are read by the thread that asked for them: a hop between threads less per event.
        options = [*endpoint.options, (ChannelOptions.SingleThreadedUnaryStream, 1)]
        self._channel = (
            grpc.insecure_channel(endpoint.address, options)
            if credentials is None
            else grpc.secure_channel(endpoint.address, credentials, options)
        )
        super().__init__(endpoint, timeouts, self._channel, None if on_wait is None else ThreadBell(on_wait))

    def close(self) -> None:
        self._shut()
        self._channel.close()

    def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with one answer."""
        with self._calling():
            response = method(request, timeout=timeout_s or self.timeouts.call_s, metadata=self._metadata())
        self.answered = True
        return response

    def read(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Iterator[Any]:
        """One attempt of a call with a stream of answers; ended early, it is cancelled."""
        with self._calling():
            stream = method(request, timeout=timeout_s or self.timeouts.call_s, metadata=self._metadata())
            try:
                yield from stream
            finally:
                stream.cancel()

    def call(self, method: Callable[..., Any], request: Any, awaited: Awaited | None = None) -> Any:
        """A call with one answer, repeated where that may help. `awaited` says what takes its time."""
        return self.repeat(lambda: self.once(method, request), awaited=awaited or self._answer)

    def repeat(self, attempt: Callable[[], T], *, within_s: float = math.inf, awaited: Awaited | None = None) -> T:
        """Repeats an attempt while nobody is there, and while the daemon says when to ask again.

        Nothing of that takes longer than its timeout, nor than `within_s`. `awaited` is what an attempt waits for.
        """
        self._look_first()
        retries = self._call_retries(within_s)
        with self.watch() as watch:
            while True:
                self._asks(watch, awaited)
                try:
                    return attempt()
                except ExecutorClientError as error:
                    if self._looks_at_once(error) and (cause := _probe.diagnosis(self.endpoint)) is not None:
                        raise self._nobody(error, cause) from error
                    delay_s = self._delay_s(retries, error, watch)
                    if delay_s is None:
                        cause = _probe.diagnosis(self.endpoint) if is_unreached(error) else None
                        raise self._nobody(error, cause) from error
                time.sleep(delay_s)
