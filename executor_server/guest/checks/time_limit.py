"""Bounds the time of a program's own code outside executions: the code of its values, its figures, its pickles."""

from __future__ import annotations

from ..wire.lean import signal
from .control import ControlException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

# Seconds between two exceptions in a call that goes on after the first.
_AGAIN_S = 0.1


class TimeUp(ControlException):
    """A call took too long."""

    __module__ = "builtins"


def within(time_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the main thread, and raises TimeUp in it when `time_s` are over, again and again.

    Clears the program's own timers.
    """
    is_running = True

    def stop(_signum: int, _frame: object) -> None:
        if is_running:
            raise TimeUp(f"it took longer than {time_s:g} s")

    clear_timers()
    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Not before the block: a short time may be over at once, and the timer would go on.
        signal.setitimer(signal.ITIMER_REAL, time_s, _AGAIN_S)
        return function(*args)
    finally:
        is_running = False
        clear_timers()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)  # None: a C library's


def clear_timers() -> None:
    """Stops the timers of the process: one that a program left running would end the next one, or the interpreter."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
