"""A watch of files that is closed while it finds its daemon again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Self, cast

from executor_api.v1 import executor_service_pb2 as pb
from executor_client.errors import UnavailableError
from executor_client.watch import FileWatch


class Stream:
    """The first message, then a lost connection."""

    def __init__(self) -> None:
        self.cancelled = False
        self._messages = [pb.WatchFilesResponse()]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.WatchFilesResponse:
        if not self._messages:
            raise UnavailableError("the daemon is away")
        return self._messages.pop()

    def cancel(self) -> None:
        self.cancelled = True


class Transport:
    """Gives streams, and lets `meanwhile` happen before the second."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.channel = SimpleNamespace(calling=self._calling, events=self._events)
        self.answered = False

    def _calling(self, *, of_stream: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def _events(self, *_: object) -> Stream:
        if self.streams:
            self.meanwhile()
        self.streams.append(Stream())
        return self.streams[-1]

    def repeat(self, attempt: Callable[[], None]) -> None:
        attempt()


def test_a_watch_that_is_closed_while_it_reconnects_leaves_no_stream_open() -> None:
    transport = Transport()
    session = SimpleNamespace(_open=lambda: transport, _transport=transport)
    watch = FileWatch(cast(Any, session), pb.WatchFilesRequest(session_id="s"))
    watch._begin()
    transport.meanwhile = watch.close
    found: Iterator[object] = iter(watch)
    assert list(found) == []
    assert len(transport.streams) == 2 and transport.streams[1].cancelled
