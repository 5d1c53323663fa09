"""What can go wrong with a rented sandbox, sorted by what can be done about it.

`cloud.py` makes these out of whatever the SDK raises, by table. Their texts go to logs: none holds a key or a token.
"""

from __future__ import annotations

from executor_server.errors import SandboxFailure


class CloudFailure(SandboxFailure):
    """The cloud did not do it. What is not one of the classes below may be tried again where repeating is harmless."""


class Unanswered(CloudFailure):
    """No answer came, in time or at all: nobody knows whether it was done."""


class Failed(CloudFailure):
    """The cloud says that it failed: there was an answer, and it was no."""


class TryLater(CloudFailure):
    """The cloud asks for patience: too many requests, or no room for now. Nothing was done."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        """`retry_after_s`: None when the cloud does not say."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Final(CloudFailure):
    """Trying again won't help."""


class KeyRefused(Final):
    """The API key, or a token that the cloud gave for one sandbox, is not accepted."""


class Gone(Final):
    """There is no such sandbox, template or command (any more)."""


class CannotWake(Final):
    """The sandbox was paused, and what was kept of it can't go on."""


class NotRunning(CloudFailure):
    """Whoever stands before the sandboxes knows no running one by this name: it is gone, or it is paused."""


class CommandFailed(Final):
    """A command in the sandbox ended with an exit code that is not 0. `said`: what it wrote to its standard error."""

    def __init__(self, exit_code: int, said: str) -> None:
        super().__init__(f"a command ended with exit code {exit_code}")
        self.exit_code = exit_code
        self.said = said
