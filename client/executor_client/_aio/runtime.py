"""The asyncio client's primitives: waiting, locking, work that blocks, and the caller's hooks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from executor_client._core.limits import CANCEL_GRACE_S
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
        yield item  # type: ignore[misc]  # mypy can't know that the sentinel does not get here


async def notify(hook: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls the caller's hook, and awaits it if it is a coroutine function."""
    returned = hook(*args, **kwargs)
    if inspect.isawaitable(returned):
        await returned


def off_loop(hook: Callable[[T], object]) -> Callable[[T], object]:
    """Returns the hook for use in another thread. If it is a coroutine function, it runs on this loop, and the call
    returns a future."""
    loop = asyncio.get_running_loop()

    def call(argument: T) -> object:
        returned = hook(argument)
        return asyncio.run_coroutine_threadsafe(_result(returned), loop) if inspect.isawaitable(returned) else returned

    return call


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


def is_cancelling() -> bool:
    """True while this task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def shielded(work: Callable[[], Coroutine[Any, Any, T]], grace_s: float = CANCEL_GRACE_S) -> T:
    """Runs work that a cancellation must not cut off, such as a clean-up, in its own task, and waits for its end.

    If the caller is or will be cancelled, the work has `grace_s` seconds to end and is then cancelled. A cancellation
    that arrives meanwhile is raised after the end of the work: anyio cancels a task at each of its awaits.
    """
    task = asyncio.create_task(work())
    end = _End(task, grace_s)
    await end
    if end.cancellation is not None:
        if not task.cancelled():
            task.exception()  # marked as seen
        raise end.cancellation
    return task.result()


async def on_disk(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a blocking function in a thread. A cancelled caller waits for it, so that no file is closed under it."""
    return await shielded(lambda: run_blocking(function, *args, **kwargs))


class _End(asyncio.Future[None]):
    """The end of a task, to be awaited. A cancellation of the waiting task is recorded and does not wake it."""

    def __init__(self, task: asyncio.Task[Any], grace_s: float) -> None:
        super().__init__()
        self.cancellation: asyncio.CancelledError | None = None
        self._task, self._grace_s = task, grace_s
        self._timer: asyncio.TimerHandle | None = None
        task.add_done_callback(self._wake)
        if is_cancelling():
            self._limit()

    def cancel(self, msg: Any | None = None) -> bool:
        self.cancellation = self.cancellation or asyncio.CancelledError(*([] if msg is None else [msg]))
        self._limit()
        return True

    def _limit(self) -> None:
        if self._timer is None:
            self._timer = self._task.get_loop().call_later(self._grace_s, self._task.cancel)

    def _wake(self, task: asyncio.Task[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.set_result(None)


class Background:
    """Runs a coroutine during the body of an `async with`, and waits for its end; an error of the body cancels it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self._task.cancel()
            await shielded(lambda: asyncio.wait([self._task]))
            if not self._task.cancelled():
                self._task.exception()  # the body's error goes on; marked as seen
        else:
            await self._task
