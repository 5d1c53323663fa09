"""The daemon's vocabulary as values: limits, specs, events, results.

Standard library only. Nothing here does anything; the owners of behaviour are policy.py, sessions.py and the backends.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

_FINGERPRINT_CHARS = 16


class Outcome(enum.Enum):
    """How an execution ended. The values are the words used on the guest channel, in logs and in metrics."""

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
    """What became of a session's variables."""

    KEPT = "kept"
    RESET = "reset"
    LOST = "lost"


DEFAULT_MAX_FILES = 100_000


class OutputMode(enum.Enum):
    """Which statement gives an execution its value."""

    TRAILING_EXPRESSION = "trailing_expression"
    LAST_STATEMENT = "last_statement"


@dataclass(frozen=True)
class Limits:
    """What one session, and each of its executions, may use. Every field is set: defaults are the policy's business."""

    wall_time_s: float
    cpu_time_s: float
    operations: int
    memory_bytes: int
    processes: int
    output_bytes: int
    disk_bytes: int
    idle_time_s: float
    session_time_s: float
    session_operations: int
    owner_grace_s: float = 120.0  # what a registry has that was written before there was such a limit
    max_files: int = DEFAULT_MAX_FILES  # a session of an earlier version was asked for none


@dataclass(frozen=True)
class ExecutionLimits:
    """The limits of one execution."""

    wall_time_s: float
    cpu_time_s: float
    operations: int
    output_bytes: int


@dataclass(frozen=True)
class Principal:
    """Who asks. The tenant owns sessions; the name says which of its credentials was used."""

    tenant: str
    name: str
    is_admin: bool = False  # whether it may make admin calls


LANGUAGE_RULES = (
    "dunder_access",
    "dynamic_code",
    "namespaces",
    "foreign_modules",
    "module_attributes",
    "dangerous_functions",
    "open",
    "file_writing",
    "unlisted_builtins",
)
"""What a policy can refuse agent code besides imports; docs/policy.md explains each."""


@dataclass(frozen=True)
class PolicyRef:
    """Which policy approved something."""

    profile: str
    version: str  # as the author of the policy calls it
    fingerprint: str  # different for policies that say different things


@dataclass(frozen=True)
class SandboxSpec:
    """The approved description of a sandbox. Only policy.py makes one; a backend builds exactly this.

    All of it is fixed when the sandbox is made, so sessions of equal specs can share a warm pool.
    """

    image: str
    memory_bytes: int
    processes: int
    disk_bytes: int
    orphan_time_s: float
    cpus: float | None = None  # processors it may use at a time; None: all, shared evenly
    may_pull: bool = False  # whether an image that the host lacks may be fetched
    policy: str = ""  # fingerprint of the policy that approved it: a pool never serves what an earlier one approved
    backends: tuple[str, ...] = ()  # that may make it, the preferred one first; empty: the daemon's own
    max_files: int = DEFAULT_MAX_FILES  # files, directories and links in each of its file systems

    @property
    def fingerprint(self) -> str:
        """Short, and different for sandboxes that are made differently; the same in every daemon of this version.

        Which other backends might have made it is nothing that a sandbox is made of.
        """
        made_of = replace(self, backends=())
        return hashlib.sha256(repr(astuple(made_of)).encode()).hexdigest()[:_FINGERPRINT_CHARS]


@dataclass(frozen=True)
class ToolRules:
    """Which tools a session may have: where they run, and name patterns as in the policy file."""

    placements: tuple[str, ...] = ("host", "sandbox")
    allowed: tuple[str, ...] = ("*",)


@dataclass(frozen=True)
class FileRules:
    """Files that may be put and got; None is as many as one likes."""

    max_put_bytes: int = 2**30
    max_get_bytes: int = 2**30
    max_puts: int | None = None
    max_gets: int | None = None


@dataclass(frozen=True)
class StateRules:
    """Whether the state of a session may be written down, and what may be restored in it."""

    export: bool = True
    restore: bool = True
    max_bytes: int = 256 * 2**20
    allow_foreign: bool = False  # also what another daemon or tenant has written


@dataclass(frozen=True)
class AuditRules:
    """What the audit log says of a session."""

    code: str = "hash"  # none, hash, full
    fail_closed: bool = False


@dataclass(frozen=True)
class SessionSpec:
    """The approved description of a session: its sandbox and what its interpreter may do."""

    sandbox: SandboxSpec
    limits: Limits
    # Of an execution that asks for nothing, and of one that asks for as much as it can get.
    execution_default: ExecutionLimits
    execution_max: ExecutionLimits
    authorized_imports: tuple[str, ...]
    prelude: str
    policy: PolicyRef
    denied_imports: tuple[str, ...] = ()
    refused_language: tuple[str, ...] = ()  # of LANGUAGE_RULES
    tools: ToolRules = ToolRules()
    files: FileRules = FileRules()
    audit: AuditRules = AuditRules()
    state: StateRules = StateRules()
    profile_fingerprint: str = ""  # of its profile alone: another policy may leave that as it is
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionFacts:
    """What whoever watches sessions is told of one."""

    session_id: str
    owner: Principal
    policy: PolicyRef
    audit: AuditRules
    backend: str
    image: str
    warm: bool
    request_id: str = ""  # of the request that made it


@dataclass(frozen=True)
class FileInfo:
    """An entry of the workspace; `path` is relative to it."""

    path: str
    size_bytes: int
    is_directory: bool
    modify_time_s: float


@dataclass(frozen=True)
class StateOmission:
    """A variable or a file that is not in a state, or could not be restored from one, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class StateManifest:
    """What is in a session's state, or was restored from one."""

    variables: tuple[str, ...]
    omitted_variables: tuple[StateOmission, ...]
    files: int
    file_bytes: int
    omitted_files: tuple[StateOmission, ...]
    python_version: str


# ---------------------------------------------------------------------------------------------------------------------
# Payloads and events, as the session layer hands them to the wire


@dataclass(frozen=True)
class BlobRef:
    """Bytes that travel in pieces of their own."""

    blob_id: str
    size_bytes: int
    sha256: str | None = None  # of the bytes, where the daemon has seen them and was asked to say


Payload = bytes | BlobRef
"""Packed bytes: themselves when small, else a reference to a blob."""


@dataclass(frozen=True)
class ToolSource:
    """A tool as a module that makes it: in which `entry` is the tool when it has run."""

    text: str
    entry: str
    bindings: Payload | None = None  # a dict of names that the module has before it runs


@dataclass(frozen=True)
class ShippedTool:
    """A tool that runs in the sandbox: what it is made of there, and modules that it needs."""

    code: ToolSource | Payload
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the sandbox sees it: answered by the client or, when it was shipped, run in the sandbox itself."""

    name: str
    description: str
    parameters: tuple[str, ...]
    is_final_answer: bool
    shipped: ShippedTool | None = None

    @property
    def placement(self) -> str:
        """Where it runs, in the words of a policy."""
        return "host" if self.shipped is None else "sandbox"


@dataclass(frozen=True)
class Queued:
    ahead: int


@dataclass(frozen=True)
class Log:
    stream: str  # "stdout" or "stderr"
    text: str


@dataclass(frozen=True)
class OutputCut:
    omitted_bytes: int


@dataclass(frozen=True)
class Image:
    data: Payload
    mime_type: str
    source: str


@dataclass(frozen=True)
class ToolCall:
    call_id: str
    name: str
    arguments: Payload


@dataclass(frozen=True)
class BlobChunk:
    blob_id: str
    data: bytes


@dataclass(frozen=True)
class LimitWarning:
    """So much of a budget is spent that its end is near."""

    limit: str  # a name of Limits: operations, session_operations
    used: int
    budget: int


@dataclass(frozen=True)
class ErrorDetail:
    type: str
    message: str
    traceback: str = ""
    line: int = 0
    statement: str = ""
    exit_code: int | None = None


@dataclass(frozen=True)
class Usage:
    operations: int = 0
    wall_time_s: float = 0.0
    cpu_time_s: float = 0.0
    peak_memory_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Result:
    """The terminal event of an execution."""

    outcome: Outcome
    variables_state: VariablesState
    generation: int
    usage: Usage = Usage()
    output: Payload | None = None
    error: ErrorDetail | None = None
    final_answer_call_id: str = ""
    artifacts: tuple[FileInfo, ...] = ()
    artifacts_truncated: bool = False  # it made or changed more files than are listed
    policy_fingerprint: str = ""  # of the policy that it was begun under
    imports: tuple[str, ...] = ()  # modules that its source imports, as far as it was looked at, sorted


EventKind = Queued | Log | OutputCut | Image | ToolCall | BlobChunk | LimitWarning | Result


@dataclass(frozen=True)
class Event:
    """A numbered event of an execution; the first has number 1."""

    number: int
    kind: EventKind
