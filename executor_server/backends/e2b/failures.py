"""Errors of the cloud, classified by the possible reaction.

`cloud.py` makes them from the SDK's exceptions, by table. Their texts go to logs: none holds a key or a token.
"""

from __future__ import annotations

from executor_server.core import SandboxFailure


class CloudFailure(SandboxFailure):
    """The cloud did not do it. Unless it is `Final`, the request may be repeated if repeating is harmless."""


class Unanswered(CloudFailure):
    """No answer came, in time or at all: the request may have been carried out."""


class Failed(CloudFailure):
    """The cloud answered that it failed."""


class TryLater(CloudFailure):
    """The cloud has too many requests, or no room at the moment. It did nothing."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        """`retry_after_s`: None when the cloud does not say."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Final(CloudFailure):
    """Repeating the request won't help."""


class KeyRefused(Final):
    """The API key, or a token that the cloud gave for one sandbox, is not accepted."""


class Missing(Final):
    """The sandbox, template or command does not exist (any more)."""


class CannotWake(Final):
    """The sandbox was paused, and its kept state can't be continued."""


class NotRunning(CloudFailure):
    """The cloud's proxy knows no running sandbox by this name: it has ended, or it is paused."""


class CommandFailed(Final):
    """A command in the sandbox ended with an exit code that is not 0."""

    def __init__(self, exit_code: int, stderr: str) -> None:
        super().__init__(f"a command ended with exit code {exit_code}")
        self.exit_code = exit_code
        self.stderr = stderr
