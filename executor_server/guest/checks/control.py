"""The exceptions by which the guest ends agent code. The guard in each handler of a program raises them again."""

from __future__ import annotations


class ControlException(BaseException):
    """Ends the execution; not an Exception, so that `except Exception` lets it pass."""

    __module__ = "builtins"  # so that a traceback shows its plain name


class ExecutionInterrupted(ControlException, KeyboardInterrupt):
    """The supervisor asked the program to stop: its time is up, it printed too much, or the client cancelled it."""

    __module__ = "builtins"


class Refusal(ControlException):
    """The policy does not let the program do this; `outcome` is how the execution ends."""

    __module__ = "builtins"
    outcome = ""


class FinalAnswerGiven(ControlException):
    """The client has the final answer; nothing is left to do."""
