"""Keeps the exceptions that end an execution out of the hands of agent code.

The instrumented code calls `guard()` first in every handler. A control exception that a bare `except:` caught goes on
its way; so does one that an exception group holds. Handlers of libraries are not guarded: what they swallow meets the
spent meter at the next tick.
"""

from __future__ import annotations

import builtins
import sys
from itertools import repeat

from .control import ControlException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_GROUP_MEMBERS = 10_000
"""How many members of an exception group are searched for a control exception."""

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # CPython 3.11 and later


class Guard:
    """Raises the control exception that is being handled on; any other exception is the program's to handle."""

    def __call__(self) -> None:
        handled = sys.exc_info()[1]
        control = find_control(handled)
        if control is handled and control is not None:
            raise control
        if control is not None:
            raise control from None  # the group around it says nothing of its own

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle ships functions with their constants (joblib does). Another process has nothing to guard.
        return (getattr, (repeat(True), "__next__"))


guard = Guard()


def find_control(exception: BaseException | None) -> ControlException | None:
    """The control exception that this is, or that an exception group holds."""
    if isinstance(exception, ControlException):
        return exception
    if not isinstance(exception, _GROUPS):
        return None
    pending: list[Any] = [exception]
    searched = 0
    while pending and searched < MAX_GROUP_MEMBERS:
        searched += 1
        member = pending.pop()
        if isinstance(member, ControlException):
            return member
        if isinstance(member, _GROUPS):
            pending.extend(member.exceptions)
    return None
