"""Ends executions that break a rule, and keeps the first refusal of each.

A refusal ends the execution even when it is swallowed: the guard raises it again in the program's own handlers, after a
library's handler the next tick raises it again, and one in a thread decides how the whole execution ends.
"""

from __future__ import annotations

from .own_modules import NoModules
from .rules import Rules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, NoReturn, Optional, Protocol

    from .control import Refusal

    class _Stoppable(Protocol):
        """The part of a Meter that is used here."""

        on_stop: Callable[[], None] | None

        def stop(self, exception: Callable[[], BaseException]) -> None: ...


class RuleEnforcer:
    """`rules` are those in force, `own` the program's own modules; `refusal` is the first of the execution."""

    def __init__(self, meter: _Stoppable) -> None:
        self._meter = meter
        self._watches = False
        self.rules = Rules()
        self.own = NoModules()
        self.refusal: Optional[Refusal] = None

    def begin(self) -> None:
        """Begins an execution."""
        self.refusal = None
        self._watches = True

    def end(self) -> None:
        """Ends the execution: a refusal in a thread that outlives it counts for no other one."""
        self._watches = False

    def refuse(self, refusal: Refusal) -> NoReturn:
        """Raises the refusal, now and at each further tick of the execution."""
        if self._watches and self.refusal is None:
            self.refusal = refusal
            self._meter.stop(lambda: refusal)
            if self._meter.on_stop is not None:
                self._meter.on_stop()
        raise refusal
