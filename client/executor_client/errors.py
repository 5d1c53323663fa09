"""What can go wrong, as one tree: everything that the client raises on its own behalf is an `ExecutorClientError`.

A program that fails is not here: that is an `ExecutionResult` with its outcome (and `ExecutionFailed` for those who ask
for an exception). gRPC's own errors never leave this package; `_status.py` turns them into these, by table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor_client.results import ExecutionResult, Outcome


class ExecutorClientError(Exception):
    """Base of all.

    `reason` is the daemon's word from its closed list (docs/protocol.md), or empty when we say it; but for
    CLIENT_CLOSED, which says that the client was closed by its owner, perhaps while somebody waited for it.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


class ConfigurationError(ExecutorClientError):
    """The client cannot start: an address, token or TLS setting is missing or unsafe. The message says what to set."""


class InvalidRequest(ExecutorClientError):
    """What was asked has a wrong form; the message names the field. Asking again unchanged won't help."""


class ToolNotShippable(InvalidRequest):
    """A tool was to run in the sandbox and can't be put there as what it is. Placement "host" always can.

    `problems` names each thing that stands in the way, and why.
    """

    def __init__(self, tool: str, problems: Iterable[str]) -> None:
        self.tool = tool
        self.problems = tuple(problems)
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f'the tool {tool!r} can\'t be shipped into the sandbox; give it the placement "host":{listed}')


@dataclass(frozen=True)
class Violation:
    """One thing that was asked for and that the policy does not grant.

    `kind` is a word of the closed list of docs/protocol.md; `rule` is the key of the daemon's policy that says so.
    """

    field: str
    kind: str
    requested: str
    allowed: str
    rule: str

    def __str__(self) -> str:
        rule = f" ({self.rule})" if self.rule else ""
        return f"{self.field}: asked for {self.requested}, allowed is {self.allowed}{rule}"


class PolicyViolationError(ExecutorClientError):
    """More was asked for than the policy grants. `get_policy()` tells what is allowed.

    `violations` lists everything that is refused, but for the last `omitted` ones, which the answer had no room for.
    """

    def __init__(
        self, message: str, *, reason: str = "", violations: tuple[Violation, ...] = (), omitted: int = 0
    ) -> None:
        super().__init__(message, reason=reason)
        self.violations = violations
        self.omitted = omitted


class AuthenticationError(ExecutorClientError):
    """The daemon does not know who we are: no token or certificate, or one that it does not accept."""


class AuthorizationError(ExecutorClientError):
    """The daemon knows who we are, and this is not for us: a call for administrators, say."""


class NotFoundError(ExecutorClientError):
    """No such session, execution, tool call or file, or it is not ours."""


class PreconditionError(ExecutorClientError):
    """It exists, but its state does not allow this: a session that lost its sandbox, a call answered already."""


class ResourceExhaustedError(ExecutorClientError):
    """A limit is reached. `retry_after_s` says when to try again; None when trying again won't help.

    The client has tried again by itself, within `busy_timeout_s`.
    """

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class UnavailableError(ExecutorClientError):
    """The daemon cannot be reached, or cannot do it now. `retry_after_s` says when it may, where that is known."""

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class ConnectionLost(UnavailableError):
    """The daemon went away in the middle of an execution and did not come back in time.

    What became of the execution is not known; `execution_id` names it.
    """

    def __init__(self, message: str, *, execution_id: str, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.execution_id = execution_id


class CallTimeoutError(ExecutorClientError):
    """A call took longer than `call_timeout_s`."""


class DaemonError(ExecutorClientError):
    """The daemon failed. `incident_id`, when there is one, finds the cause in its log."""

    def __init__(self, message: str, *, reason: str = "", incident_id: str = "") -> None:
        super().__init__(message, reason=reason)
        self.incident_id = incident_id


class ProtocolError(ExecutorClientError):
    """What came from the daemon breaks the protocol or passes one of our limits on what we accept."""


class ReentrantExecution(ExecutorClientError):
    """A host tool used the session that waits for this very tool: that would wait for ever."""


class ExecutionFailed(ExecutorClientError):
    """Raised by `ExecutionResult.raise_for_outcome()`. The whole result is in `result`."""

    def __init__(self, message: str, result: ExecutionResult) -> None:
        super().__init__(message)
        self.result = result


class EvaluationError(ExecutorClientError):
    """An expression has no value: it failed, or there is no idle session that could evaluate it.

    `result` is the whole result where there is one; else `__cause__` may tell more.
    """

    def __init__(self, message: str, *, reason: str = "", result: ExecutionResult | None = None) -> None:
        super().__init__(message, reason=reason)
        self.result = result

    @property
    def outcome(self) -> Outcome | None:
        """How the evaluation ended; None when it did not begin, or its end is not known."""
        return None if self.result is None else self.result.outcome
