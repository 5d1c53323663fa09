"""The values that the client returns: results, sessions, policies, files. All are frozen, and none does I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from executor_api.messages import on_wire
from executor_client._core.arguments import checks_calls
from executor_client._core.short_repr import ShortRepr, images_of, page_of, png_of
from executor_client.errors import ExecutionFailed
from executor_client.file_results import FileInfo
from executor_client.process_results import NO_PORTS, NO_RULES, PortRules, ProcessRules
from executor_client.savepoint import Branch

if TYPE_CHECKING:
    import PIL.Image


class Outcome(enum.Enum):
    """The end of an execution."""

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
    """The state of the session's variables: kept, reset (a new interpreter), rolled back (to the savepoint before the
    execution, which had ended its interpreter), lost (no sandbox any more)."""

    KEPT = "kept"
    RESET = "reset"
    LOST = "lost"
    ROLLED_BACK = "rolled_back"


class SessionState(enum.Enum):
    """The state of a session."""

    IDLE = "idle"
    BUSY = "busy"
    LOST = "lost"
    PAUSED = "paused"  # its sandbox is frozen; the next request resumes it


@checks_calls
@dataclass(frozen=True, kw_only=True)
class Limits(ShortRepr):
    """Limits of a session or an execution. None: not asked for, so the policy's default holds."""

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
class ErrorDetail(ShortRepr):
    """The error of a program that failed.

    `line` is 0 if there is none; `statement` is the top-level statement that failed; `exit_code` is the program's own
    if the outcome is EXITED.
    """

    type: str
    message: str
    traceback: str = field(default="", repr=False)
    line: int = 0
    statement: str = ""
    exit_code: int | None = None


@dataclass(frozen=True)
class NetworkUsage(ShortRepr):
    """Connections out of a sandbox that were made, and that were refused; bytes that the sandbox sent and received."""

    connections: int = 0
    denied: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class Usage(ShortRepr):
    """The resources that an execution used."""

    operations: int = 0
    wall_time_s: float = 0.0
    cpu_time_s: float = 0.0
    peak_memory_bytes: int = 0
    output_bytes: int = 0
    network: NetworkUsage = NetworkUsage()


@dataclass(frozen=True)
class Image(ShortRepr):
    """An image that the program displayed, behind `log_offset` characters of `ExecutionResult.logs`.

    It is decoded when `pil` or `problem` is first read. That can take a second; with an event loop, use a thread.
    `refusal` says why its headers forbid to decode it; empty when they don't.
    """

    data: bytes = field(repr=False)
    mime_type: str
    source: str
    width: int = 0
    height: int = 0
    refusal: str = ""
    log_offset: int = 0

    @property
    def pil(self) -> PIL.Image.Image | None:
        """The pixels, without metadata; None if the data is broken or not safe to decode: then `problem` says why."""
        return None if isinstance(self._decoded, str) else self._decoded

    @property
    def problem(self) -> str:
        """The reason why `pil` is None, else empty."""
        return self._decoded if isinstance(self._decoded, str) else ""

    @cached_property
    def _decoded(self) -> PIL.Image.Image | str:
        from executor_client._core.images import decode

        return decode(self)

    def _repr_png_(self) -> bytes | None:
        return None if self.pil is None else png_of(self.pil)


@dataclass(frozen=True)
class Display(ShortRepr):
    """The texts by which an object that the program displayed shows itself, by MIME type, such as "text/html".

    Its plain text is in the logs, behind `log_offset` characters of which this comes. The texts are the program's: show
    HTML only where its scripts can do no harm. `problem` says why there are none.
    """

    data: Mapping[str, str] = field(repr=False)
    log_offset: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutionResult(ShortRepr):
    """The outcome of one execution, and all its outputs.

    `output` is the value of the trailing expression, or the host's own object when a final-answer tool was called
    (`is_final_answer`). A value without an exact form arrives as an `OpaqueValue`. `state` and `generation` say whether
    the session's variables were kept. `artifacts` are the files of the workspace that the program made or changed; with
    `artifacts_truncated` there may be more. `policy_fingerprint` identifies the policy that it ran under. `savepoint`
    is the number of the savepoint that was taken before it; 0 when there is none, and then `savepoint_refused` has the
    reason if one was asked for. `branch` says what a program that was tried has changed (`Session.try_`); None for one
    that was executed.
    """

    execution_id: str = field(repr=False)
    outcome: Outcome
    state: VariablesState = field(metadata=on_wire("variables_state"))
    generation: int = field(repr=False)
    output: Any = None
    is_final_answer: bool = False
    logs: str = ""
    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)
    omitted_output_bytes: int = 0
    image_entries: tuple[Image, ...] = ()
    displays: tuple[Display, ...] = ()
    error: ErrorDetail | None = None
    usage: Usage = field(default=Usage(), repr=False)
    artifacts: tuple[FileInfo, ...] = ()
    artifacts_truncated: bool = False
    policy_fingerprint: str = field(default="", repr=False)
    savepoint: int = 0
    savepoint_refused: str = ""
    branch: Branch | None = None

    @property
    def images(self) -> list[PIL.Image.Image]:
        """The displayed images that could be decoded, in order; `image_entries` has the others too."""
        return [image.pil for image in self.image_entries if image.pil is not None]

    @property
    def succeeded(self) -> bool:
        return self.outcome is Outcome.SUCCEEDED

    def raise_for_outcome(self) -> Self:
        """Returns this result if the program succeeded, else raises `ExecutionFailed`."""
        if self.succeeded:
            return self
        what = f": {self.error.type}: {self.error.message}" if self.error else ""
        raise ExecutionFailed(f"the execution ended as {self.outcome.name}{what}", self)

    def _repr_png_(self) -> bytes | None:
        images = images_of(self)
        return png_of(images[-1]) if images else None

    def _repr_html_(self) -> str:
        return page_of(self)


@dataclass(frozen=True)
class PolicyRef(ShortRepr):
    """Identifies a policy; policies with different contents have different fingerprints."""

    profile: str
    version: str
    fingerprint: str


@dataclass(frozen=True)
class SessionInfo(ShortRepr):
    """A session as the daemon described it at one moment. `limits` has every field set.

    `denied_imports` are never authorized, whatever `authorized_imports` says; with `workspace_imports` modules in the
    workspace need no authorization; `refused_language` names further things
    that code may not do (docs/policy.md explains each rule). `network` are the hosts that code may reach, without those
    of `denied_network`; `network_usage` is what it has used of them so far.

    `packages` are the requirements of its environment, beside the packages of the image: those that were asked for, and
    those that the policy added because `authorized_imports` needs them. `environment_id` names that environment.
    `images_with_missing` are images that have all of the `missing_modules`, as far as the daemon has seen.

    `node` is the node of a fleet that has the session.
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
    lost_reason: str = ""  # empty unless it is lost
    denied_imports: tuple[str, ...] = ()
    workspace_imports: bool = True
    refused_language: tuple[str, ...] = ()
    missing_modules: tuple[str, ...] = ()  # authorized, but not in the sandbox, as far as the daemon has looked
    detached: bool = False  # it belongs to no client: only its idle time, its age and `close` end it
    network: tuple[str, ...] = ()
    denied_network: tuple[str, ...] = ()
    network_usage: NetworkUsage = NetworkUsage()
    packages: tuple[str, ...] = ()
    environment_id: str = ""  # empty without packages
    images_with_missing: tuple[str, ...] = ()
    node: str = ""  # empty: the daemon belongs to no fleet
    name: str = ""  # unique among the caller's sessions; empty: it has none
    env_names: tuple[str, ...] = ()  # names of its environment variables; their values stay in its sandbox


@dataclass(frozen=True)
class EnvironmentInfo(ShortRepr):
    """An environment of packages that is ready: sessions that ask for the same packages and image have it."""

    environment_id: str
    pins: tuple[str, ...]
    """The packages in it, dependencies included, as "numpy==2.5.5"."""
    size_bytes: int
    modules: tuple[str, ...] = ()  # the top-level modules in it


@dataclass(frozen=True, kw_only=True)
class StateManifest(ShortRepr):
    """The contents of an exported state, or the restored part of one; omitted things by name, with the reason.

    `files` and `file_bytes` count regular files of the workspace; `python_version` is the sandbox's.
    """

    variables: tuple[str, ...]
    omitted_variables: Mapping[str, str]
    files: int
    file_bytes: int
    omitted_files: Mapping[str, str]
    python_version: str


@dataclass(frozen=True, kw_only=True)
class StateRules(ShortRepr):
    """Rules for the state of a session: whether it may be exported or restored, also one of another daemon; how many
    savepoints it may have, how many bytes of the workspace one holds, and how many branches are kept."""

    export: bool
    restore: bool
    max_bytes: int
    allow_foreign: bool
    savepoints: int = 0
    savepoint_file_bytes: int = 0
    branches: int = 0


@dataclass(frozen=True, kw_only=True)
class FileLimits(ShortRepr):
    """Limits of the files that are put into a session and got out of it. None: no limit."""

    max_put_bytes: int
    max_get_bytes: int
    max_puts: int | None = None
    max_gets: int | None = None


@dataclass(frozen=True, kw_only=True)
class Quotas(ShortRepr):
    """Limits of a tenant over all its sessions. None: no quota."""

    sessions: int | None = None
    executions: int | None = None
    creations_per_minute: int | None = None
    cpu_time_s_per_hour: float | None = None
    output_bytes_per_hour: int | None = None
    calls: int | None = None
    calls_per_second: int | None = None
    egress_bytes_per_hour: int | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkSecret(ShortRepr):
    """A header that the daemon sets in requests to a host, with a value that no sandbox sees.

    `methods` and `paths` are those of the requests that get it. Empty: all.
    """

    host: str
    header: str
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NetworkRules(ShortRepr):
    """The hosts that sessions may reach, and the limits of one session.

    A session has the `default` hosts without a request and may ask for those that `allowed` covers; it never reaches
    `denied` ones. A pattern is a name, or `*.` and a name for all below it, with a port; without one it stands for the
    ports 443 and 80. Without any host there is no network, and the limits are 0.
    """

    default: tuple[str, ...] = field(default=(), metadata=on_wire("default_hosts"))
    allowed: tuple[str, ...] = field(default=(), metadata=on_wire("allowed_hosts"))
    denied: tuple[str, ...] = field(default=(), metadata=on_wire("denied_hosts"))
    secrets: tuple[NetworkSecret, ...] = ()
    max_connections: int = 0
    max_new_connections_per_minute: int = 0
    max_sent_bytes: int = 0
    max_received_bytes: int = 0
    max_connection_s: float = 0.0

    def __bool__(self) -> bool:
        """True when a session can have a network at all."""
        return bool(self.default or self.allowed)


@dataclass(frozen=True, kw_only=True)
class PackagesPolicy(ShortRepr):
    """The packages that sessions may ask for besides those of their image.

    `allowed` are names with bounds of the versions and the extras that may be asked for; "*" stands for every other
    package of the daemon's index. `locked` are the packages of a lock, as "name==version": a session that asks for one
    has them all. With `auto` the packages of modules that are authorized and missing are added without being asked for.
    """

    allowed: tuple[str, ...] = ()
    locked: tuple[str, ...] = ()
    auto: bool = False
    max_requirements: int = 0
    max_environment_bytes: int = 0
    exclude_newer_s: float | None = None

    def __bool__(self) -> bool:
        """True when a session can ask for packages at all."""
        return bool(self.allowed or self.locked)


@dataclass(frozen=True, kw_only=True)
class Policy(ShortRepr):
    """The policy for the caller: what a session may ask for.

    `default_imports` are authorized without a request, `allowed_imports` may be requested, `denied_imports` are
    never granted. `execution_default_limits` and `execution_max_limits` are limits of one execution, and set only those
    that an execution can ask for; the others are limits of a session.
    """

    policy: PolicyRef
    default_limits: Limits
    max_limits: Limits
    execution_default_limits: Limits
    execution_max_limits: Limits
    default_imports: tuple[str, ...]
    allowed_imports: tuple[str, ...]
    denied_imports: tuple[str, ...]
    workspace_imports: bool = True
    """Modules in the workspace may be imported without being authorized by name."""
    refused_language: tuple[str, ...]
    images: tuple[str, ...]
    backend: str
    """The first of `backends`."""
    backends: tuple[str, ...] = ()
    """The backends of the caller's sessions: a new one goes to the first with its image that is not full or down."""
    tool_placements: tuple[str, ...]
    allowed_tools: tuple[str, ...]
    files: FileLimits
    network: NetworkRules = field(default=NetworkRules(), metadata=on_wire("network_rules"))
    packages: PackagesPolicy = PackagesPolicy()
    quotas: Quotas
    state: StateRules
    processes: ProcessRules = NO_RULES
    ports: PortRules = NO_PORTS
