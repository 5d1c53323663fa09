"""Bounds the time that the interpreter spends on a program's own objects after it: its value, its figures."""

from __future__ import annotations

from ..checks.control import ControlException
from ..wire.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


class TimeUp(ControlException):
    """It took too long."""

    __module__ = "builtins"


def within(time_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the main thread, and raises TimeUp in it when `time_s` are over."""

    def stop(_signum: int, _frame: object) -> None:
        raise TimeUp(f"it took longer than {time_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, time_s)
    try:
        return function(*args)
    finally:
        clear_timers()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)  # None: a C library's


def clear_timers() -> None:
    """Stops the timers of the process: one that a program left running would end the next one, or the interpreter."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
