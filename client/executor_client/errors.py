"""The errors of the client, as one tree: all of them are an `ExecutorClientError`.

A program that fails is not an error but an `ExecutionResult` with its outcome (`raise_for_outcome` turns it into
`ExecutionFailed`). gRPC's own errors never leave this package; `_core/status.py` translates them, by table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor_client._core.short_repr import ShortRepr

if TYPE_CHECKING:
    from executor_client.process_results import CompletedProcess
    from executor_client.results import ExecutionResult, Outcome
    from executor_client.waits import Progress


class ExecutorClientError(Exception):
    """The base of all errors.

    `reason` is the daemon's reason from its closed list (docs/protocol.md). It is empty for an error of the client's
    own, except CLIENT_CLOSED, when the client was closed, perhaps while another thread or task was waiting, and
    SESSION_CLOSED.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


class ConfigurationError(ExecutorClientError):
    """An address, token or TLS setting is missing or unsafe. The message says what to set."""


class InvalidRequest(ExecutorClientError):
    """The request has a wrong form; the message names the field. Repeating it unchanged does not help."""


class ModulesMissing(InvalidRequest):
    """Tools with the placement "sandbox" need `modules`, which the sandbox does not have.

    A session with the packages that bring them may have them: `create_session(packages=…)`.
    """

    def __init__(self, message: str, *, reason: str = "", modules: Iterable[str] = ()) -> None:
        super().__init__(message, reason=reason)
        self.modules = tuple(modules)


class ToolNotShippable(InvalidRequest):
    """A tool with the placement "sandbox" cannot be shipped unchanged. The placement "host" is always possible.

    `problems` names each obstacle, and its reason.
    """

    def __init__(self, tool: str, problems: Iterable[str]) -> None:
        self.tool = tool
        self.problems = tuple(problems)
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f'the tool {tool!r} can\'t be shipped into the sandbox; give it the placement "host":{listed}')


@dataclass(frozen=True)
class Violation(ShortRepr):
    """A part of a request that the policy does not grant.

    `kind` is from the closed list in docs/protocol.md; `rule` is the key of the daemon's policy that refuses it.
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
    """The request asks for more than the policy grants. `get_policy()` returns what is allowed.

    `violations` lists everything that is refused, except the last `omitted` ones, for which the answer had no room.
    """

    def __init__(
        self, message: str, *, reason: str = "", violations: tuple[Violation, ...] = (), omitted: int = 0
    ) -> None:
        super().__init__(message, reason=reason)
        self.violations = violations
        self.omitted = omitted


class AuthenticationError(ExecutorClientError):
    """The daemon cannot identify the caller: no token or certificate, or one that it does not accept."""


class AuthorizationError(ExecutorClientError):
    """The daemon has identified the caller, who may not do this: a call for administrators, for example."""


class NotFoundError(ExecutorClientError):
    """No such session, execution, tool call or file, or it belongs to another caller."""


class PreconditionError(ExecutorClientError):
    """The state of the object does not allow this: a session that lost its sandbox, a call answered already."""


class EnvironmentFailed(PreconditionError):
    """No environment can be made of these packages; the message says why, in the resolver's own words where it failed.

    Repeating the request unchanged does not help.
    """


class ResourceExhaustedError(ExecutorClientError):
    """A limit is reached. `retry_after_s` is the time to retry; None if that does not help.

    The client has already retried, within `busy_timeout_s`.
    """

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class UnavailableError(ExecutorClientError):
    """The daemon cannot be reached, or cannot do it now. `retry_after_s` is the time to retry, if it is known.

    `progress` is that of the environment or image which the daemon is making, if it said.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s
        self.progress = progress


class ConnectionLost(UnavailableError):
    """The daemon stopped answering during an execution, and did not come back in time.

    The outcome of the execution is unknown; `execution_id` names it.
    """

    def __init__(self, message: str, *, execution_id: str, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.execution_id = execution_id


class CallTimeoutError(ExecutorClientError):
    """A call took longer than `call_timeout_s`."""


class DaemonError(ExecutorClientError):
    """The daemon failed. `incident_id`, if there is one, identifies the cause in its log."""

    def __init__(self, message: str, *, reason: str = "", incident_id: str = "") -> None:
        super().__init__(message, reason=reason)
        self.incident_id = incident_id


class ProtocolError(ExecutorClientError):
    """An answer of the daemon breaks the protocol, or passes a limit of the client."""


class ReentrantExecution(ExecutorClientError):
    """A host tool used the session that waits for this very tool, which would never end."""


class ExecutionFailed(ExecutorClientError):
    """Raised by `ExecutionResult.raise_for_outcome()`. The whole result is in `result`."""

    def __init__(self, message: str, result: ExecutionResult) -> None:
        super().__init__(message)
        self.result = result


class ProcessFailed(ExecutorClientError):
    """Raised by `CompletedProcess.check()`. The whole of it is in `process`."""

    def __init__(self, message: str, process: CompletedProcess) -> None:
        super().__init__(message)
        self.process = process


class EvaluationError(ExecutorClientError):
    """An expression has no value: it failed, or no idle session can evaluate it.

    `result` is the whole result if there is one; else `__cause__` may say more.
    """

    def __init__(self, message: str, *, reason: str = "", result: ExecutionResult | None = None) -> None:
        super().__init__(message, reason=reason)
        self.result = result

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the evaluation; None if it did not begin, or its outcome is unknown."""
        return None if self.result is None else self.result.outcome
