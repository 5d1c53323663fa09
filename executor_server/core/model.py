"""The daemon's vocabulary as values: limits, specs, events, results.

Standard library only, and no behaviour: that belongs to the policy, the sessions and the backends.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from functools import lru_cache
from typing import Literal

from executor_server.core.network import NO_NETWORK, NO_NETWORK_USE, NetworkRules, NetworkUsage
from executor_server.core.packages import PackagesSpec
from executor_server.core.processes import ANY_PORT, DEFAULT_PROCESS_RULES, PortRules, ProcessRules
from executor_server.core.savepoints import BranchEnd

_FINGERPRINT_CHARS = 16
# There are few specs for many sandboxes, and the fingerprint of each is needed several times.
_FINGERPRINTS_KNOWN = 64


class Outcome(enum.Enum):
    """The end of an execution. The values are the words on the guest channel, in logs and in metrics."""

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
    """The fate of a session's variables."""

    KEPT = "kept"
    RESET = "reset"
    ROLLED_BACK = "rolled_back"
    LOST = "lost"


DEFAULT_MAX_FILES = 100_000


class OutputMode(enum.Enum):
    """The statement that gives an execution its value."""

    TRAILING_EXPRESSION = "trailing_expression"
    LAST_STATEMENT = "last_statement"
    WHOLE_EXPRESSION = "whole_expression"  # a trailing expression; its value is never described


@dataclass(frozen=True)
class Limits:
    """The limits of one session and of each of its executions. Every field is set: the policy knows the defaults."""

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
    owner_grace_s: float = 120.0  # the value of sessions that were registered before this limit existed
    max_files: int = DEFAULT_MAX_FILES  # as above


@dataclass(frozen=True)
class ExecutionLimits:
    """The limits of one execution."""

    wall_time_s: float
    cpu_time_s: float
    operations: int
    output_bytes: int


@dataclass(frozen=True)
class Principal:
    """The caller. The tenant owns sessions; the name says which of its credentials was used."""

    tenant: str
    name: str
    is_admin: bool = False  # may make admin calls
    roles: tuple[str, ...] = ()  # its rights in its own tenant; empty: those of a user


@dataclass(frozen=True)
class PolicyRef:
    """The policy that approved something."""

    profile: str
    version: str  # as the author of the policy calls it
    fingerprint: str  # differs between policies of different content


@dataclass(frozen=True)
class SandboxSpec:
    """The approved description of a sandbox. Only the policy makes one; a backend builds exactly this.

    All of it is fixed when the sandbox is made, so sessions of equal specs can share a warm pool.
    """

    image: str
    memory_bytes: int
    processes: int
    disk_bytes: int
    orphan_time_s: float
    cpus: float | None = None  # processors that it may use at a time; None: all, shared evenly
    may_pull: bool = False  # an image that the host lacks may be fetched
    policy: str = ""  # fingerprint of the approving policy: the pool never serves what an earlier one approved
    backends: tuple[str, ...] = ()  # names, the preferred one first; empty: the daemon's own
    max_files: int = DEFAULT_MAX_FILES  # files, directories and links in each of its file systems
    egress: bool = False  # it has a listener for the egress proxy; its session's rules say what that lets through
    packages: PackagesSpec | None = None  # it sees an environment of these; None: the image's packages alone
    fork_server: str = "off"  # the local backend may fork it: "off", "shared", or "tenant:" and the tenant's name

    @property
    def fingerprint(self) -> str:
        """A short digest of everything that a sandbox is made of; the same in every daemon of this version."""
        # The other backends that might have made it leave no trace in the sandbox.
        return _fingerprint(replace(self, backends=()))


SANDBOX_LIMIT_NAMES = tuple(each.name for each in fields(Limits) if each.name in SandboxSpec.__dataclass_fields__)
"""The limits that are fixed when a sandbox is made."""


@lru_cache(maxsize=_FINGERPRINTS_KNOWN)
def _fingerprint(made_of: SandboxSpec) -> str:
    return hashlib.sha256(repr(astuple(made_of)).encode()).hexdigest()[:_FINGERPRINT_CHARS]


@dataclass(frozen=True)
class ToolRules:
    """The tools that a session may have: where they run, and patterns of their names as in the policy file."""

    placements: tuple[Literal["host", "sandbox"], ...] = ("host", "sandbox")
    allowed: tuple[str, ...] = ("*",)
    ask: tuple[str, ...] = ()  # each call waits for an approval, unless an `allowed` pattern other than "*" matches


@dataclass(frozen=True)
class FileRules:
    """Limits of uploads and downloads; None stands for no limit."""

    max_put_bytes: int = 2**30
    max_get_bytes: int = 2**30
    max_puts: int | None = None
    max_gets: int | None = None


@dataclass(frozen=True)
class StateRules:
    """Permissions to export the state of a session, and to restore one in it."""

    export: bool = True
    restore: bool = True
    max_bytes: int = 256 * 2**20
    allow_foreign: bool = False  # accept states that another daemon or tenant exported
    savepoints: int = 8  # of a session at one time
    savepoint_file_bytes: int = 32 * 2**20  # workspace files in one savepoint
    branches: int = 8  # that a session keeps at one time; 0: it can't run code in branches


@dataclass(frozen=True)
class AuditRules:
    """The detail of a session's audit records."""

    code: Literal["none", "hash", "full"] = "hash"
    fail_closed: bool = False
    view: Literal["none", "metadata", "content"] = "metadata"  # what operators see of executions


@dataclass(frozen=True)
class RecordRules:
    """The recording of a session by the daemon."""

    mode: Literal["none", "events", "full"] = "none"
    max_bytes: int = 256 * 2**20
    total_bytes: int = 10 * 2**30  # of all recordings of a tenant
    retention_s: float = 7 * 86400.0  # after the session's end
    redact_tools: tuple[str, ...] = ()  # patterns of names
    fetch: bool = True  # the tenant may fetch them


@dataclass(frozen=True)
class SessionSpec:
    """The approved description of a session: its sandbox and what its interpreter may do."""

    sandbox: SandboxSpec
    limits: Limits
    execution_default: ExecutionLimits  # for a request that names no limits
    execution_max: ExecutionLimits
    authorized_imports: tuple[str, ...]
    prelude: str
    policy: PolicyRef
    denied_imports: tuple[str, ...] = ()
    workspace_imports: bool = True  # modules of the workspace need no authorization
    refused_language: tuple[str, ...] = ()  # names of LANGUAGE_RULES
    tools: ToolRules = ToolRules()
    files: FileRules = FileRules()
    audit: AuditRules = AuditRules()
    record: RecordRules = RecordRules()
    state: StateRules = StateRules()
    network: NetworkRules = NO_NETWORK
    processes: ProcessRules = DEFAULT_PROCESS_RULES
    ports: PortRules = ANY_PORT
    name: str = ""  # unique among its owner's sessions; empty: it has none
    env_names: tuple[str, ...] = ()  # names of environment variables, sorted; the guest alone keeps their values
    approval_wait_s: float = 120.0  # until an undecided request is denied
    profile_fingerprint: str = ""  # the profile alone; equal in policies that differ elsewhere
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionFacts:
    """The facts of one session that observers and admission get with every notification."""

    session_id: str
    owner: Principal
    policy: PolicyRef
    audit: AuditRules
    backend: str
    image: str
    warm: bool
    request_id: str = ""  # the request that made it
    audits_connections: bool = True  # each network connection gets an audit record, not only refusals
    packages: tuple[str, ...] = ()  # requirements of its environment


@dataclass(frozen=True)
class FileInfo:
    """A file, a directory or a link of a sandbox; `path` is the requested one or below it. `mode`: permissions."""

    path: str
    size_bytes: int
    is_directory: bool
    modify_time_s: float
    mode: int = 0
    is_link: bool = False
    target: str = ""
    user_id: int = 0
    group_id: int = 0


@dataclass(frozen=True)
class StateOmission:
    """A variable or a file that is not in a state, or could not be restored from one, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class StateManifest:
    """The contents of an exported state, or the restored part of one."""

    variables: tuple[str, ...]
    omitted_variables: tuple[StateOmission, ...]
    files: int
    file_bytes: int
    omitted_files: tuple[StateOmission, ...]
    python_version: str


# ---------------------------------------------------------------------------------------------------------------------
# Payloads and events, as the sessions hand them to the wire


@dataclass(frozen=True)
class BlobRef:
    """Bytes that travel in pieces of their own."""

    blob_id: str
    size_bytes: int
    sha256: str | None = None  # hex; None when the daemon has not seen the bytes or no digest was requested


Payload = bytes | BlobRef
"""Packed bytes: inline when small, else a reference to a blob."""


@dataclass(frozen=True)
class ToolSource:
    """The source of a module that makes a tool: once it has run, its name `entry` is the tool."""

    text: str
    entry: str
    bindings: Payload | None = None  # a dict of names that the module has before it runs


@dataclass(frozen=True)
class ShippedTool:
    """A tool that runs in the sandbox: its code, and the modules that it needs."""

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
    """A budget is nearly spent."""

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
    network: NetworkUsage = NO_NETWORK_USE  # while it ran
    output: Payload | None = None
    error: ErrorDetail | None = None
    final_answer_call_id: str = ""
    artifacts: tuple[FileInfo, ...] = ()
    artifacts_truncated: bool = False  # more files were made or changed than are listed
    policy_fingerprint: str = ""  # the policy in force when the execution began
    savepoint: int = 0  # the savepoint taken before it; 0: none
    savepoint_refused: str = ""  # why none was taken, if one was requested
    branch: BranchEnd | None = None  # when it ran in a branch
    imports: tuple[str, ...] = ()  # modules that the checked part of its source imports, sorted


EventKind = Queued | Log | OutputCut | Image | ToolCall | BlobChunk | LimitWarning | Result


@dataclass(frozen=True)
class Event:
    """A numbered event of an execution; the first has number 1."""

    number: int
    kind: EventKind
