"""The blocking client's primitives: waiting, locking, work that blocks, and the caller's hooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from executor_client.events import ExecutionEvent

P = ParamSpec("P")
T = TypeVar("T")

OnEvent = Callable[[ExecutionEvent], None]

Lock = threading.Lock
sleep = time.sleep


def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function that blocks, in this thread."""
    return function(*args, **kwargs)


def wait_for(future: Future[T], timeout_s: float) -> T:
    """Waits for another thread's result. Raises TimeoutError."""
    return future.result(timeout_s)


def blocking_items(items: Iterator[T]) -> Iterator[T]:
    """Returns an iterator that blocks as it is."""
    return items


def notify(on_event: OnEvent, event: ExecutionEvent) -> None:
    """Calls the caller's hook."""
    on_event(event)
