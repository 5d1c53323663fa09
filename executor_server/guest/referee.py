"""Holds the code of one interpreter to the rules, and remembers what it was refused.

A refusal ends the execution, however the program, or a library on its behalf, goes on after it: it passes the
program's own handlers as every control exception does, whoever else swallows it meets it again at the next tick, and
what was refused in a thread decides how the execution ends all the same.
"""

from __future__ import annotations

from .rules import Rules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, NoReturn, Optional, Protocol

    from .control import Refusal

    class _Stoppable(Protocol):
        """What is needed of a Meter."""

        def stop(self, exception: Callable[[], BaseException]) -> None: ...


class Referee:
    """`rules` are those of now; `refusal` is the first of the current execution."""

    def __init__(self, meter: _Stoppable) -> None:
        self._meter = meter
        self._watches = False
        self.rules = Rules()
        self.refusal: Optional[Refusal] = None

    def begin(self) -> None:
        """An execution begins."""
        self.refusal = None
        self._watches = True

    def end(self) -> None:
        """It has ended: what a thread does from here on is nobody's."""
        self._watches = False

    def refuse(self, refusal: Refusal) -> NoReturn:
        """Raises it, now and from now on."""
        if self._watches and self.refusal is None:
            self.refusal = refusal
            self._meter.stop(lambda: refusal)
        raise refusal
