"""The asyncio client's primitives: waiting, locking, work that blocks, and the caller's hooks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from executor_client.events import ExecutionEvent

P = ParamSpec("P")
T = TypeVar("T")

OnEvent = Callable[[ExecutionEvent], Awaitable[None] | None]
OnOutput = Callable[[str, bytes], object]
"""Receives the name of a stream and a piece of output; may be a coroutine function."""

Lock = asyncio.Lock
sleep = asyncio.sleep
run_blocking = asyncio.to_thread
"""Calls a blocking function in a thread. A cancelled caller does not wait for it."""


async def wait_for(future: Future[T], timeout_s: float) -> T:
    """Waits for another thread's result. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(future)


async def blocking_items(items: Iterator[T]) -> AsyncIterator[T]:
    """Yields the items of a blocking iterator, each fetched in a thread."""
    missing = object()
    while (item := await asyncio.to_thread(next, items, missing)) is not missing:
        yield item  # type: ignore[misc]  # a sentinel of another type has no way to say so


async def notify(hook: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls the caller's hook, and awaits it if it is a coroutine function."""
    returned = hook(*args, **kwargs)
    if inspect.isawaitable(returned):
        await returned


def is_cancelling() -> bool:
    """True while this task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Background:
    """Runs a coroutine during the body of an `async with`, and waits for its end; an error of the body cancels it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # the body's error goes on; marked as seen
        else:
            await self._task
