"""The blocking client's primitives: waiting, locking, work that blocks, and the caller's hooks."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from executor_client.errors import InvalidRequest
from executor_client.events import ExecutionEvent

P = ParamSpec("P")
T = TypeVar("T")

OnEvent = Callable[[ExecutionEvent], None]
OnOutput = Callable[[str, bytes], object]

Lock = threading.Lock
sleep = time.sleep


def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a blocking function in this thread."""
    return function(*args, **kwargs)


on_disk = run_blocking


def wait_for(future: Future[T], timeout_s: float) -> T:
    """Waits for another thread's result. Raises TimeoutError."""
    return future.result(timeout_s)


def shielded(work: Callable[[], T], grace_s: float = 0.0) -> T:
    """Does the work: nothing cancels a thread."""
    return work()


def blocking_items(items: Iterator[T]) -> Iterator[T]:
    """Returns the blocking iterator."""
    return items


def notify(hook: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls the caller's hook."""
    hook(*args, **kwargs)


def off_loop(hook: Callable[[T], object]) -> Callable[[T], object]:
    """Returns the hook. Raises InvalidRequest for a coroutine function, which needs an event loop."""
    if inspect.iscoroutinefunction(hook):
        raise InvalidRequest("a coroutine function needs an AsyncExecutorClient; pass a plain function")
    return hook


class Background:
    """Runs a function in a thread during the body of a `with`, and waits for its end unless the body fails."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="executor-background", daemon=True)
        self._thread.start()

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self._thread.join()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            self._error = error
