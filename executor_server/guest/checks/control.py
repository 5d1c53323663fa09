"""The exceptions that end agent code, and the guard that keeps agent code from handling them.

The instrumented code calls `guard()` first in every handler, which raises a control exception again, even from inside
an exception group. Handlers of libraries are not guarded: a program that goes on after one meets the spent meter at its
next tick.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Members of an exception group that are searched for a control exception.
MAX_GROUP_MEMBERS = 10_000

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # CPython 3.11 and later


class ControlException(BaseException):
    """Ends the execution. It is not an Exception, so `except Exception` lets it pass."""

    __module__ = "builtins"  # so that a traceback shows its plain name


class ExecutionInterrupted(ControlException, KeyboardInterrupt):
    """The supervisor stops the program: its time is up, it printed too much, or the client cancelled it."""

    __module__ = "builtins"


class Refusal(ControlException):
    """The policy forbids what the program did; `outcome` is how the execution ends."""

    __module__ = "builtins"
    outcome = ""


class FinalAnswerGiven(ControlException):
    """The client has the final answer, so the program ends."""


class Guard:
    """Raises a control exception again when it is being handled; the program handles any other exception."""

    def __call__(self) -> None:
        handled = sys.exc_info()[1]
        control = find_control(handled)
        if control is handled and control is not None:
            raise control
        if control is not None:
            raise control from None  # the group around it has no information of its own

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle ships functions with their constants (joblib does). Another process has nothing to guard.
        return (getattr, ("", "strip"))


guard = Guard()


def find_control(exception: BaseException | None) -> ControlException | None:
    """Returns the control exception itself, or one inside the exception group."""
    pending: list[Any] = [exception]
    searched = 0
    while pending and searched < MAX_GROUP_MEMBERS:
        searched += 1
        member = pending.pop()
        kind = type(member)  # not isinstance, which asks the exception itself
        if issubclass(kind, ControlException):
            return member  # type: ignore[no-any-return]
        if issubclass(kind, _GROUPS):
            pending.extend(_GROUPS.exceptions.__get__(member))  # a subclass may have its own `exceptions`
    return None
