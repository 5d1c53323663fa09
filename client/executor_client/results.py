"""Values that the client returns: results, sessions, policies. All are frozen, and none does I/O."""

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
from executor_client.process_results import PortRules, ProcessRules
from executor_client.savepoint import Branch

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
    """The session's variables after an execution: kept; reset (new interpreter); rolled back to the savepoint before
    the execution, because it ended its interpreter; or lost with the sandbox."""

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
    """Limits of a session or an execution. None: the policy's default applies."""

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

    `line` is 0 if it is unknown; `statement` is the top-level statement that failed; `exit_code` is the program's own
    code if the outcome is EXITED.
    """

    type: str
    message: str
    traceback: str = field(default="", repr=False)
    line: int = 0
    statement: str = ""
    exit_code: int | None = None


@dataclass(frozen=True)
class NetworkUsage(ShortRepr):
    """Connections made from a sandbox, connections refused, and bytes sent and received."""

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
    """An image that the program displayed, after `log_offset` characters of `ExecutionResult.logs`.

    It is decoded when `pil` or `problem` is first read. That can take a second; with an event loop, use a thread.
    `refusal` has the reason if its headers are not safe to decode.
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
        """The pixels, without metadata; None if the data is broken or unsafe, for the reason in `problem`."""
        return None if isinstance(self._decoded, str) else self._decoded

    @property
    def problem(self) -> str:
        """Why `pil` is None; empty otherwise."""
        return self._decoded if isinstance(self._decoded, str) else ""

    @cached_property
    def _decoded(self) -> PIL.Image.Image | str:
        from executor_client._core.images import decode

        return decode(self)

    def _repr_png_(self) -> bytes | None:
        return None if self.pil is None else png_of(self.pil)


@dataclass(frozen=True)
class Display(ShortRepr):
    """The representations of an object that the program displayed, by MIME type, such as "text/html".

    Its plain text is in the logs, at `log_offset` characters. The texts are untrusted: show HTML only where its scripts
    can do no harm. `problem` has the reason if there are none.
    """

    data: Mapping[str, str] = field(repr=False)
    log_offset: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutionResult(ShortRepr):
    """The outcome of one execution, and all its outputs.

    `output` is the value of the trailing expression, or the host's own object if a final-answer tool was called
    (`is_final_answer`). A value without an exact form arrives as an `OpaqueValue`. `state` and `generation` show
    whether the session's variables were kept. `artifacts` are the files of the workspace that the program created or
    changed; there may be more if `artifacts_truncated`. `policy_fingerprint` identifies the policy that applied.
    `savepoint` is the number of the savepoint taken before the execution, or 0; if one was requested and refused,
    `savepoint_refused` has the reason. `branch` has the changes of a tried program (`Session.try_`); None for an
    executed program."""

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
        """The displayed images that could be decoded, in order; `image_entries` has all."""
        return [image.pil for image in self.image_entries if image.pil is not None]

    @property
    def succeeded(self) -> bool:
        return self.outcome is Outcome.SUCCEEDED

    def raise_for_outcome(self) -> Self:
        """Returns this result if the program succeeded; otherwise raises `ExecutionFailed`."""
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

    `denied_imports` are never authorized, even if `authorized_imports` contains them. With `workspace_imports`, modules
    of the workspace need no authorization. `refused_language` lists language features that code may not use
    (docs/policy.md). `network` lists the hosts that code may reach, except those of `denied_network`; `network_usage`
    is the use so far.

    `packages` are the requirements of its environment, in addition to the image's packages: the requested ones, and
    those that the policy added for `authorized_imports`. `environment_id` identifies the environment.
    `images_with_missing` are images known to have all `missing_modules`.

    `node` is the session's node in a fleet.
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
    missing_modules: tuple[str, ...] = ()  # authorized, but known to be missing in the sandbox
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
class RecordingInfo(ShortRepr):
    """A recording that the daemon made of a session.

    `mode` is "events" or "full" (docs/recording.md). `end_time` and `expire_time`, after which it is removed, are None
    while the session goes on. If the recording ended before the session, `ended` is the reason; otherwise it is empty.
    """

    session_id: str
    tenant: str
    mode: str
    create_time: datetime
    end_time: datetime | None
    expire_time: datetime | None
    size_bytes: int
    ended: str


@dataclass(frozen=True)
class EnvironmentInfo(ShortRepr):
    """A package environment that is ready for sessions with the same packages and image."""

    environment_id: str
    pins: tuple[str, ...]
    """Its packages, including dependencies, as "numpy==2.5.5"."""
    size_bytes: int
    modules: tuple[str, ...] = ()  # the top-level modules in it


@dataclass(frozen=True, kw_only=True)
class StateManifest(ShortRepr):
    """The contents of an exported state, or its restored part. Omitted variables and files have reasons, by name.

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
    """Rules for the state of a session: whether it may be exported or restored, even from another daemon; the number of
    savepoints, the bytes of the workspace in one, and the number of kept branches."""

    export: bool
    restore: bool
    max_bytes: int
    allow_foreign: bool
    savepoints: int = 0
    savepoint_file_bytes: int = 0
    branches: int = 0


@dataclass(frozen=True, kw_only=True)
class FileLimits(ShortRepr):
    """Limits of files that are put into a session or read from it. None: no limit."""

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
    """A header that the daemon adds to requests to a host. Its value never enters a sandbox.

    `methods` and `paths` select the requests; empty selects all.
    """

    host: str
    header: str
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NetworkRules(ShortRepr):
    """The hosts that sessions may reach, and the limits of one session.

    A session can always reach the `default` hosts, may request those that `allowed` covers, and reaches `ask` hosts
    after an approval; it never reaches `denied` hosts. A pattern is a name, or `*.` and a name for its subdomains, with
    a port; without a port it means the ports 443 and 80. Without any host there is no network, and the limits are 0.
    """

    default: tuple[str, ...] = field(default=(), metadata=on_wire("default_hosts"))
    allowed: tuple[str, ...] = field(default=(), metadata=on_wire("allowed_hosts"))
    denied: tuple[str, ...] = field(default=(), metadata=on_wire("denied_hosts"))
    ask: tuple[str, ...] = field(default=(), metadata=on_wire("ask_hosts"))
    secrets: tuple[NetworkSecret, ...] = ()
    max_connections: int = 0
    max_new_connections_per_minute: int = 0
    max_sent_bytes: int = 0
    max_received_bytes: int = 0
    max_connection_s: float = 0.0

    def __bool__(self) -> bool:
        """True if a session can have a network."""
        return bool(self.default or self.allowed or self.ask)


@dataclass(frozen=True, kw_only=True)
class PackagesPolicy(ShortRepr):
    """The packages that sessions may request in addition to those of their image.

    `allowed` are names with allowed versions and extras; "*" means every other package of the daemon's index. `locked`
    are the packages of a lock, as "name==version": a session that requests one gets all of them. With `auto`, the
    daemon adds packages for authorized modules that are missing. Packages in `ask` need an approval.
    """

    allowed: tuple[str, ...] = ()
    locked: tuple[str, ...] = ()
    auto: bool = False
    max_requirements: int = 0
    max_environment_bytes: int = 0
    exclude_newer_s: float | None = None
    ask: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """True if a session can request packages."""
        return bool(self.allowed or self.locked or self.ask)


@dataclass(frozen=True, kw_only=True)
class Policy(ShortRepr):
    """The policy for the caller.

    `default_imports` are authorized without a request, `allowed_imports` may be requested, `denied_imports` are never
    granted. `execution_default_limits` and `execution_max_limits` are limits of one execution, and only have the limits
    that an execution can request; the others are limits of a session.
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
    """Modules of the workspace may be imported without authorization."""
    refused_language: tuple[str, ...]
    images: tuple[str, ...]
    backend: str
    """The first of `backends`."""
    backends: tuple[str, ...] = ()
    """The backends for the caller's sessions. A new session goes to the first available one that has its image."""
    tool_placements: tuple[str, ...]
    allowed_tools: tuple[str, ...]
    files: FileLimits
    network: NetworkRules = field(default=NetworkRules(), metadata=on_wire("network_rules"))
    packages: PackagesPolicy = PackagesPolicy()
    quotas: Quotas
    state: StateRules
    processes: ProcessRules = field(default_factory=ProcessRules)
    ports: PortRules = field(default_factory=PortRules)
    ask_imports: tuple[str, ...] = ()
    """Imports that need an approval to be authorized."""
    ask_tools: tuple[str, ...] = ()
    """Tools whose calls each need an approval."""
    record: str = "none"
    """What the daemon records of new sessions: "none", "events" or "full" (docs/recording.md)."""
