"""The errors of the client, as one tree: all of them are an `ExecutorClientError`.

A program that fails is not an error but an `ExecutionResult` with its outcome (`raise_for_outcome` turns it into
`ExecutionFailed`). gRPC errors never leave this package; `_core/status.py` translates them by a table.
"""

from __future__ import annotations

import errno
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

    `reason` is the daemon's reason from its closed list (docs/protocol.md). The client's own errors have no reason,
    except CLIENT_CLOSED, if the client was closed, perhaps while another thread or task was waiting, and
    SESSION_CLOSED.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


class ConfigurationError(ExecutorClientError):
    """An address, token or TLS setting is missing or unsafe. The message says what to set."""


class InvalidRequest(ExecutorClientError):
    """The request is malformed; the message names the field. Repeating it unchanged does not help."""


class ModulesMissing(InvalidRequest):
    """The sandbox lacks `modules` that tools with the placement "sandbox" need.

    A session can have packages with these modules: `create_session(packages=…)`.
    """

    def __init__(self, message: str, *, reason: str = "", modules: Iterable[str] = ()) -> None:
        super().__init__(message, reason=reason)
        self.modules = tuple(modules)


class ToolNotShippable(InvalidRequest):
    """A tool with the placement "sandbox" can't be shipped unchanged. The placement "host" always works.

    `problems` lists each obstacle with its reason.
    """

    def __init__(self, tool: str, problems: Iterable[str]) -> None:
        self.tool = tool
        self.problems = tuple(problems)
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f'the tool {tool!r} can\'t be shipped into the sandbox; give it the placement "host":{listed}')


@dataclass(frozen=True)
class Violation(ShortRepr):
    """A part of a request that the policy refuses.

    `kind` is from the closed list in docs/protocol.md; `rule` is the key of the daemon's policy.
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
    """The request exceeds the policy. `get_policy()` returns the limits.

    `violations` lists the refused parts. The answer had no room for `omitted` more.
    """

    def __init__(
        self, message: str, *, reason: str = "", violations: tuple[Violation, ...] = (), omitted: int = 0
    ) -> None:
        super().__init__(message, reason=reason)
        self.violations = violations
        self.omitted = omitted


class AuthenticationError(ExecutorClientError):
    """The daemon can't identify the caller: no token or certificate, or one that it does not accept."""


class AuthorizationError(ExecutorClientError):
    """The caller is known but may not do this, for example a call for administrators."""


class NotFoundError(ExecutorClientError):
    """The session, execution, tool call or file does not exist, or belongs to another caller."""


class FileError(ExecutorClientError, OSError):
    """A path can't be used. Common reasons have a subclass, which is also Python's exception for that reason."""


class FileNotFound(FileError, NotFoundError, FileNotFoundError):
    """There is no such file or directory."""

    errno = errno.ENOENT


class FileIsDirectory(FileError, IsADirectoryError):
    """The path leads to a directory, but a file is needed."""

    errno = errno.EISDIR


class FileNotDirectory(FileError, NotADirectoryError):
    """A part of the path is not a directory."""

    errno = errno.ENOTDIR


class FilePermissionDenied(FileError, PermissionError):
    """The sandbox's user may not do this with the file."""

    errno = errno.EACCES


class FileExists(FileError, FileExistsError):
    """Something is there already, or a directory is not empty."""

    errno = errno.EEXIST


class PreconditionError(ExecutorClientError):
    """The object's state does not allow this: a session lost its sandbox, or a call was already answered."""


class SessionGone(NotFoundError, PreconditionError):
    """The session ended, was lost with its sandbox, or never existed. Create another one.

    Every call on such a session raises this, except those that read what the daemon still knows of a lost session: its
    description, executions and processes. `reason` is SESSION_NOT_FOUND, SESSION_LOST, or SESSION_CLOSED if it was
    closed through this object. A daemon that does not answer is an UnavailableError: the session may still exist.
    """


class EnvironmentFailed(PreconditionError):
    """No environment can be built from these packages; the message has the reason, or the resolver's own message.

    Repeating the request unchanged does not help.
    """


class ResourceExhaustedError(ExecutorClientError):
    """A limit is reached. `retry_after_s` is the time to retry in seconds; None if a retry does not help.

    The client has already retried within `busy_timeout_s`.
    """

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class UnavailableError(ExecutorClientError):
    """The daemon can't be reached, or can't serve the call now. `retry_after_s` is the time to retry, if known.

    `progress` is the progress of an environment or image in the daemon, if it reports it.
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
    """A call took longer than its timeout."""


class DaemonError(ExecutorClientError):
    """The daemon failed. `incident_id`, if any, identifies the cause in its log."""

    def __init__(self, message: str, *, reason: str = "", incident_id: str = "") -> None:
        super().__init__(message, reason=reason)
        self.incident_id = incident_id


class ProtocolError(ExecutorClientError):
    """An answer of the daemon violates the protocol, or exceeds a limit of the client."""


class RecordingError(ExecutorClientError):
    """A recording can't be read: it is cut, damaged, edited, too large, of a newer version, or not a recording."""


class ReentrantExecution(ExecutorClientError):
    """A host tool used the session that is waiting for this tool, which would never end."""


class ExecutionFailed(ExecutorClientError):
    """Raised by `ExecutionResult.raise_for_outcome()`, with the `result`."""

    def __init__(self, message: str, result: ExecutionResult) -> None:
        super().__init__(message)
        self.result = result


class ProcessFailed(ExecutorClientError):
    """Raised by `CompletedProcess.check()`, with the `process`."""

    def __init__(self, message: str, process: CompletedProcess) -> None:
        super().__init__(message)
        self.process = process


class OutputLimitExceeded(ExecutorClientError):
    """Raised by `processes.run(overflow="error")`: the command printed more than its limit, and was killed.

    `stdout_bytes` and `stderr_bytes` are the beginnings of its output, up to the limit.
    """

    def __init__(self, message: str, *, stdout_bytes: bytes, stderr_bytes: bytes) -> None:
        super().__init__(message)
        self.stdout_bytes = stdout_bytes
        self.stderr_bytes = stderr_bytes


class EvaluationError(ExecutorClientError):
    """An expression has no value: it failed, or no idle session can evaluate it.

    `result` is the result, if there is one; otherwise `__cause__` may have the reason.
    """

    def __init__(self, message: str, *, reason: str = "", result: ExecutionResult | None = None) -> None:
        super().__init__(message, reason=reason)
        self.result = result

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the evaluation; None if it did not start or the outcome is unknown."""
        return None if self.result is None else self.result.outcome
