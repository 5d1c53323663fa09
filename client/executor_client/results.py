"""The values that the client hands out: results, sessions, policies, files. All frozen; none of them does any I/O."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from executor_client._suggest import names_fields
from executor_client.errors import ExecutionFailed

if TYPE_CHECKING:
    import PIL.Image


class Outcome(enum.Enum):
    """How an execution ended."""

    SUCCEEDED = "succeeded"
    EXCEPTION = "exception"
    IMPORT_DENIED = "import_denied"
    POLICY_DENIED = "policy_denied"
    OPERATION_LIMIT = "operation_limit"
    TIMEOUT = "timeout"
    CPU_LIMIT = "cpu_limit"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    EXITED = "exited"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    LOST = "lost"


class VariablesState(enum.Enum):
    """What became of the session's variables: kept, reset (a new interpreter), lost (no sandbox any more)."""

    KEPT = "kept"
    RESET = "reset"
    LOST = "lost"


class SessionState(enum.Enum):
    """What a session is doing."""

    IDLE = "idle"
    BUSY = "busy"
    LOST = "lost"
    PAUSED = "paused"
    """Its sandbox stands still, as it is; the next request wakes it."""


@names_fields
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a session or an execution may use. None: not asked for, the policy's default holds."""

    wall_time_s: float | None = None
    cpu_time_s: float | None = None
    operations: int | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    output_bytes: int | None = None
    disk_bytes: int | None = None
    idle_time_s: float | None = None
    session_time_s: float | None = None
    session_operations: int | None = None
    owner_grace_s: float | None = None
    max_files: int | None = None


@dataclass(frozen=True)
class ErrorDetail:
    """Why a program failed.

    `line` is 0 when there is none; `statement` is the top-level statement that failed; `exit_code` is the program's own
    when the outcome is EXITED.
    """

    type: str
    message: str
    traceback: str = ""
    line: int = 0
    statement: str = ""
    exit_code: int | None = None


@dataclass(frozen=True)
class Usage:
    """What an execution used."""

    operations: int = 0
    wall_time_s: float = 0.0
    cpu_time_s: float = 0.0
    peak_memory_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Image:
    """An image that the program displayed.

    `pil` is the decoded image. It is None when the data is no image that is safe to decode; `problem` says why then.
    `log_offset` tells its place between the prints: so many characters of `ExecutionResult.logs` came before it.
    """

    data: bytes = field(repr=False)
    mime_type: str
    source: str
    width: int = 0
    height: int = 0
    pil: PIL.Image.Image | None = field(default=None, repr=False, compare=False)
    problem: str = ""
    log_offset: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutionResult:
    """How one execution ended, and everything it gave.

    `output` is the value of the trailing expression, or the host's own object when a final-answer tool was called
    (`is_final_answer`). A value without an exact form arrives as an `OpaqueValue`. `state` and `generation` tell what
    became of the session's variables. `artifacts` are the files of the workspace that the program made or changed; with
    `artifacts_truncated` there may be more. `policy_fingerprint` is that of the policy that it ran under.
    """

    execution_id: str
    outcome: Outcome
    state: VariablesState
    generation: int
    output: Any = None
    is_final_answer: bool = False
    logs: str = ""
    stdout: str = ""
    stderr: str = ""
    omitted_output_bytes: int = 0
    image_entries: tuple[Image, ...] = ()
    error: ErrorDetail | None = None
    usage: Usage = Usage()
    artifacts: tuple[FileInfo, ...] = ()
    artifacts_truncated: bool = False
    policy_fingerprint: str = ""

    @property
    def images(self) -> list[PIL.Image.Image]:
        """The displayed images that could be decoded, in order; `image_entries` has the others too."""
        return [image.pil for image in self.image_entries if image.pil is not None]

    @property
    def succeeded(self) -> bool:
        return self.outcome is Outcome.SUCCEEDED

    def raise_for_outcome(self) -> Self:
        """Returns the result when the program succeeded, else raises `ExecutionFailed`."""
        if self.succeeded:
            return self
        what = f": {self.error.type}: {self.error.message}" if self.error else ""
        raise ExecutionFailed(f"the execution ended as {self.outcome.name}{what}", self)


@dataclass(frozen=True)
class PolicyRef:
    """Which policy approved something; the fingerprint differs for policies that say different things."""

    profile: str
    version: str
    fingerprint: str


@dataclass(frozen=True)
class SessionInfo:
    """A session as the daemon described it at one moment. `limits` has every field set.

    `denied_imports` are never authorized, whatever `authorized_imports` says; `refused_language` names what code may
    not do besides (docs/policy.md explains each rule).
    """

    session_id: str
    state: SessionState
    generation: int
    backend: str
    image: str
    limits: Limits
    authorized_imports: tuple[str, ...]
    python_version: str
    create_time: datetime
    expire_time: datetime
    warm: bool
    labels: Mapping[str, str]
    policy: PolicyRef
    lost_reason: str = ""  # why it is lost; empty unless it is
    denied_imports: tuple[str, ...] = ()
    refused_language: tuple[str, ...] = ()
    missing_modules: tuple[str, ...] = ()  # authorized, but not in the image, as far as the daemon has looked
    detached: bool = False
    """It belongs to no client: only its idle time and its age end it."""


@dataclass(frozen=True)
class FileInfo:
    """An entry of the workspace; `path` is relative to it."""

    path: str
    size_bytes: int
    is_directory: bool
    modify_time: datetime


@dataclass(frozen=True)
class FileList:
    """Entries of the workspace; `truncated` when there are more than the daemon lists."""

    files: tuple[FileInfo, ...]
    truncated: bool = False

    def __iter__(self) -> Iterator[FileInfo]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True, kw_only=True)
class StateManifest:
    """What is in the state of a session, or was restored from one. What is left out is told by name, with the reason.

    `files` and `file_bytes` count regular files of the workspace; `python_version` is that of the sandbox.
    """

    variables: tuple[str, ...]
    omitted_variables: Mapping[str, str]
    files: int
    file_bytes: int
    omitted_files: Mapping[str, str]
    python_version: str


@dataclass(frozen=True, kw_only=True)
class StateRules:
    """What may be done with the state of a session: whether it may be exported, restored, also a foreign one."""

    export: bool
    restore: bool
    max_bytes: int
    allow_foreign: bool


@dataclass(frozen=True, kw_only=True)
class FileLimits:
    """What files may be put into a session and got out of it. None: as many as one likes."""

    max_put_bytes: int
    max_get_bytes: int
    max_puts: int | None = None
    max_gets: int | None = None


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """What a tenant may have or use, over all its sessions. None: no quota."""

    sessions: int | None = None
    executions: int | None = None
    creations_per_minute: int | None = None
    cpu_time_s_per_hour: float | None = None
    output_bytes_per_hour: int | None = None
    calls: int | None = None
    calls_per_second: int | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the caller may ask for.

    Imports: `default_imports` are authorized without being asked for, `allowed_imports` may be added, `denied_imports`
    may never be had. `execution_default_limits` and `execution_max_limits` are of one execution, and set only what an
    execution can ask for; the others are of a session.
    """

    policy: PolicyRef
    default_limits: Limits
    max_limits: Limits
    execution_default_limits: Limits
    execution_max_limits: Limits
    default_imports: tuple[str, ...]
    allowed_imports: tuple[str, ...]
    denied_imports: tuple[str, ...]
    refused_language: tuple[str, ...]
    images: tuple[str, ...]
    backend: str
    """The first of `backends`."""
    backends: tuple[str, ...] = ()
    """That run the caller's sessions: a new one goes to the first that has its image and is neither full nor down."""
    tool_placements: tuple[str, ...]
    allowed_tools: tuple[str, ...]
    files: FileLimits
    network: str
    quotas: Quotas
    state: StateRules
