"""The errors of the daemon: few, one base, each saying what the caller can do.

A failing program is a result, not one of these errors. Our own bugs are not among them either: they become INTERNAL at
the RPC border. `api/errors.py` translates each class to its status by a table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from executor_server.core.packages import Progress


class Reason(enum.Enum):
    """The closed list of reasons that leave the daemon in google.rpc.ErrorInfo. docs/protocol.md explains each."""

    INVALID_FIELD = "INVALID_FIELD"
    UNKNOWN_IMAGE = "UNKNOWN_IMAGE"
    EXECUTION_ID_REUSED = "EXECUTION_ID_REUSED"
    PROCESS_ID_REUSED = "PROCESS_ID_REUSED"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    COMMAND_NOT_EXECUTABLE = "COMMAND_NOT_EXECUTABLE"
    VALUE_REFUSED = "VALUE_REFUSED"
    TOOL_REFUSED = "TOOL_REFUSED"
    MODULES_MISSING = "MODULES_MISSING"
    PATH_REFUSED = "PATH_REFUSED"
    STATE_INVALID = "STATE_INVALID"
    STATE_REFUSED = "STATE_REFUSED"
    SAVEPOINT_REFUSED = "SAVEPOINT_REFUSED"
    SAVEPOINT_NOT_FOUND = "SAVEPOINT_NOT_FOUND"
    SAVEPOINT_LOST = "SAVEPOINT_LOST"
    STATE_FOREIGN = "STATE_FOREIGN"
    POLICY_VIOLATION = "POLICY_VIOLATION"
    APPROVAL_PENDING = "APPROVAL_PENDING"
    APPROVAL_NOT_FOUND = "APPROVAL_NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    ADMIN_ONLY = "ADMIN_ONLY"
    ROLE_MISSING = "ROLE_MISSING"
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    EXECUTION_NOT_FOUND = "EXECUTION_NOT_FOUND"
    PROCESS_NOT_FOUND = "PROCESS_NOT_FOUND"
    TOOL_CALL_NOT_FOUND = "TOOL_CALL_NOT_FOUND"
    BLOB_NOT_FOUND = "BLOB_NOT_FOUND"
    FILE_NOT_FOUND = "FILE_NOT_FOUND"
    FILE_IS_DIRECTORY = "FILE_IS_DIRECTORY"
    FILE_NOT_DIRECTORY = "FILE_NOT_DIRECTORY"
    FILE_PERMISSION_DENIED = "FILE_PERMISSION_DENIED"
    FILE_EXISTS = "FILE_EXISTS"
    CWD_NOT_FOUND = "CWD_NOT_FOUND"
    ENVIRONMENT_NOT_FOUND = "ENVIRONMENT_NOT_FOUND"
    TOOL_CALL_ANSWERED = "TOOL_CALL_ANSWERED"
    EXECUTION_ENDED = "EXECUTION_ENDED"
    PROCESS_ENDED = "PROCESS_ENDED"
    PORT_CLOSED = "PORT_CLOSED"
    NAME_TAKEN = "NAME_TAKEN"
    SESSION_LOST = "SESSION_LOST"
    SESSION_USED = "SESSION_USED"
    EVENT_OUT_OF_RANGE = "EVENT_OUT_OF_RANGE"
    TOO_MANY_SESSIONS = "TOO_MANY_SESSIONS"
    TOO_MANY_PROCESSES = "TOO_MANY_PROCESSES"
    TOO_MANY_CONNECTIONS = "TOO_MANY_CONNECTIONS"
    TOO_MANY_WATCHES = "TOO_MANY_WATCHES"
    QUEUE_FULL = "QUEUE_FULL"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    TOO_LARGE = "TOO_LARGE"
    TOO_SLOW = "TOO_SLOW"
    BACKEND_FULL = "BACKEND_FULL"
    BACKEND_UNAVAILABLE = "BACKEND_UNAVAILABLE"
    IMAGE_NOT_READY = "IMAGE_NOT_READY"
    ENVIRONMENT_FAILED = "ENVIRONMENT_FAILED"
    PORT_RESET = "PORT_RESET"
    DRAINING = "DRAINING"
    AUDIT_UNAVAILABLE = "AUDIT_UNAVAILABLE"
    NODE_FENCED = "NODE_FENCED"
    NODE_REFUSED = "NODE_REFUSED"
    FRONT_SUPERSEDED = "FRONT_SUPERSEDED"
    NO_NODE = "NO_NODE"
    INTERNAL = "INTERNAL"


class ExecutorError(Exception):
    """Base of every refusal. The message goes to the client, so it never holds host paths or other tenants' data."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class InvalidRequest(ExecutorError):
    """A field has a wrong form; the message names it and says what is allowed. `field` is its path, if it has one."""

    def __init__(self, reason: Reason, message: str, field: str = "") -> None:
        super().__init__(reason, message)
        self.field = field


class ModulesMissing(InvalidRequest):
    """Shipped tools need `modules`, which the image does not have."""

    def __init__(self, message: str, modules: tuple[str, ...]) -> None:
        super().__init__(Reason.MODULES_MISSING, message)
        self.modules = modules


class NotFound(ExecutorError):
    """The thing does not exist, or is not the caller's."""


class PreconditionFailed(ExecutorError):
    """The thing exists but its state does not allow this."""


class OutOfRange(ExecutorError):
    """A position past the end."""


class Unauthenticated(ExecutorError):
    """No token or certificate, or a wrong one."""


class Forbidden(ExecutorError):
    """The caller is known and may not do this."""


class ResourceExhausted(ExecutorError):
    """A limit of the daemon is reached; `retry_after_s` says when to try again; None when a retry won't help."""

    def __init__(self, reason: Reason, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason, message)
        self.retry_after_s = retry_after_s


class TooManySessions(ResourceExhausted):
    """The session limit is reached; a new one can be made when one has ended."""


class Unavailable(ExecutorError):
    """The daemon cannot do it now, through no fault of the caller; `retry_after_s` says when it may, where known.

    `progress`: how far the daemon is with making the thing that the caller waits for.
    """

    def __init__(
        self, reason: Reason, message: str, retry_after_s: float | None = None, *, progress: Progress | None = None
    ) -> None:
        super().__init__(reason, message)
        self.retry_after_s = retry_after_s
        self.progress = progress


class ViolationKind(enum.Enum):
    """The kind of a refusal by the policy."""

    ABOVE_CEILING = "ABOVE_CEILING"
    NOT_ALLOWED = "NOT_ALLOWED"  # not on the policy's list
    DENIED = "DENIED"  # named by the policy as never granted
    UNSUPPORTED = "UNSUPPORTED"  # this daemon cannot enforce it, so no policy grants it


@dataclass(frozen=True)
class Violation:
    """One requested thing that the policy does not grant."""

    field: str  # path in the request
    kind: ViolationKind
    requested: str
    allowed: str
    rule: str  # path of the deciding key in the policy file: "profiles.data.limits.max.memory_bytes"


class PolicyViolation(ExecutorError):
    """The request exceeds what the policy grants. Every violation is listed, so that one answer is enough."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        listed = "; ".join(f"{v.field}: asked for {v.requested}, allowed is {v.allowed}" for v in violations)
        super().__init__(Reason.POLICY_VIOLATION, f"the policy refuses this: {listed}")
        self.violations = violations


class SandboxFailure(Exception):
    """A backend could not make a sandbox, or a sandbox broke. Internal: its text may name host paths."""


class BackendFull(SandboxFailure):
    """The backend has reached its limit of sandboxes; ask again after `retry_after_s` seconds. Its text is internal."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendSilent(SandboxFailure):
    """The backend did not answer, so the outcome of the request is unknown. Its text is internal."""


class ImageNotReady(SandboxFailure):
    """The image is missing, is being fetched, or is unusable. Its text goes to the client: it names no host path.

    `retry_after_s` says when it may be ready; None when an operator has to act first. `progress`: how far it is made.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, *, progress: Progress | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.progress = progress


class EnvironmentFailed(ImageNotReady):
    """The environment can't be made from these packages: a retry with the same ones is useless.

    Its text goes to the client, and may be uv's own explanation, cut; it names no host and no path.
    """


class SpecUnsupported(SandboxFailure):
    """The backend works, but can't make sandboxes of this spec; another may. Its text goes to the client."""
