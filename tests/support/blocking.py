"""The asyncio client used as its blocking counterpart, so that one test can hold both clients to the same."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from executor_client import (
    AsyncExecutorClient,
    AsyncSessionFiles,
    AsyncSessionPorts,
    AsyncSessionProcesses,
    ExecutorClient,
)
from tests.support.daemon import Daemon

WAIT_S = 60.0


class Blocking:
    """An asyncio client, or what it made, used as its blocking counterpart: each coroutine is waited for."""

    def __init__(self, run: Callable[[Any], Any], wrapped: Any) -> None:
        self._run, self._wrapped = run, wrapped

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._wrapped, name)
        if isinstance(attribute, AsyncSessionFiles | AsyncSessionProcesses | AsyncSessionPorts):
            return Blocking(self._run, attribute)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            result = self._run(result) if inspect.isawaitable(result) else result
            return Blocking(self._run, result) if hasattr(result, "execute") else result

        return call

    def __enter__(self) -> Blocking:
        self._run(self._wrapped.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._run(self._wrapped.__aexit__(*error))


@contextmanager
def event_loop() -> Iterator[Callable[[Any], Any]]:
    """Runs coroutines, from any thread, on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, loop)
        return future.result(WAIT_S)

    try:
        yield run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def client_of(kind: str, daemon: Daemon) -> Iterator[ExecutorClient | Blocking]:
    """A client of the daemon: the `sync` one, or the `async` one made blocking."""
    if kind == "sync":
        with daemon.client() as client:
            yield client
        return

    async def make() -> AsyncExecutorClient:
        return AsyncExecutorClient(**daemon.access)

    with event_loop() as run, Blocking(run, run(make())) as blocking:
        yield blocking
