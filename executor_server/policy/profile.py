"""A profile of the policy file: every key with its default, and the docstring that is its entry in docs/policy.md."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from executor_api.limits import SAVEPOINTS_MAX
from executor_server.core import LANGUAGE_RULES, AuditRules, FileRules, RecordRules, StateRules, ToolRules, is_covered
from executor_server.core.config import (
    BackendName,
    Bytes,
    Count,
    ImageName,
    Name,
    Seconds,
    Section,
    each_once,
    refuse,
)
from executor_server.policy.forms import (
    MAX_PATTERNS,
    Flag,
    ImportPatterns,
    Placement,
    ToolPatterns,
    granted_already,
    is_tool_within,
)
from executor_server.policy.limits_table import LimitsTable
from executor_server.policy.network_table import NetworkTable
from executor_server.policy.packages_table import PackagesTable
from executor_server.policy.processes_table import PortsTable, ProcessesTable

# The modules that smolagents authorizes by itself (BASE_BUILTIN_MODULES), so that its prompts hold here too.
SMOLAGENTS_BASE_IMPORTS = (
    "collections",
    "datetime",
    "itertools",
    "math",
    "queue",
    "random",
    "re",
    "stat",
    "statistics",
    "time",
    "unicodedata",
)

_FINGERPRINT_CHARS = 16


class ImportsTable(Section):
    """Modules that agent code may import. A guard-rail; the wall is the sandbox."""

    default: ImportPatterns = SMOLAGENTS_BASE_IMPORTS
    """Authorized without being asked for."""
    allowed: ImportPatterns = ("*",)
    """Modules that a client may add."""
    ask: ImportPatterns = ()
    """Modules that a client may add after an approval (docs/approvals.md), even if `allowed` has `"*"`. Modules that
    `default` or `allowed` name otherwise need no approval."""
    denied: ImportPatterns = ()
    """Never authorized. This overrides all other keys and the modules that a client adds."""
    workspace: Flag = True
    """True when modules in the workspace, which are agent code themselves, may be imported without being authorized by
    name."""

    @model_validator(mode="after")
    def _check_ask(self) -> ImportsTable:
        named = [("default", self.default), ("allowed", tuple(each for each in self.allowed if each != "*"))]
        refuse(self, list(granted_already(self.ask, named, lambda ask, pattern: is_covered(ask, (pattern,)))))
        return self


class LanguageTable(Section):
    """Permissions of agent code besides importing: a guard-rail, too. A key that is not set follows the preset."""

    preset: Literal["standard", "guarded", "strict"] = "guarded"
    """`standard` permits everything and relies on isolation; `guarded` permits everything but `foreign_modules`, so
    that unauthorized modules can't be reached without an import either; `strict` permits nothing of this table, and so
    refuses what smolagents' local executor refuses."""
    dunder_access: Flag | None = None
    """Attributes and names of the form `__x__`, but for `__init__`, `__str__`, `__repr__` and `__name__`."""
    dynamic_code: Flag | None = None
    """`eval`, `exec` and `compile`."""
    namespaces: Flag | None = None
    """`globals`, `locals` and `vars`."""
    foreign_modules: Flag | None = None
    """Modules of packages that are not authorized, however they are reached: as attributes of others
    (`random._os`), in `sys.modules`, by `getattr`, `vars` and `__globals__`, through frames and classes. If `*` is
    authorized and nothing is denied, there are none."""
    module_attributes: Flag | None = None
    """Modules that could not be imported, reached as attributes of others (`random._os`; if only `numpy` is authorized,
    `numpy.random`, too)."""
    dangerous_functions: Flag | None = None
    """Functions that start processes (`os.system`, `os.popen`, `subprocess.run` …), however they are reached."""
    open: Flag | None = None
    """The builtin `open`, for reading too."""
    file_writing: Flag | None = None
    """Opening files for writing."""
    unlisted_builtins: Flag | None = None
    """Builtins that smolagents' local executor does not have."""

    @property
    def refused(self) -> tuple[str, ...]:
        """The rules in force: names of core.LANGUAGE_RULES."""
        refused = _REFUSED_BY_PRESET[self.preset]
        return tuple(
            name
            for name in LANGUAGE_RULES
            if (name in refused if getattr(self, name) is None else not getattr(self, name))
        )


_REFUSED_BY_PRESET = {"standard": (), "guarded": ("foreign_modules",), "strict": LANGUAGE_RULES}


class SandboxTable(Section):
    """Backends and images of sandboxes, and their reach beyond the sandbox."""

    images: Annotated[tuple[ImageName, ...], Field(max_length=MAX_PATTERNS)] | None = None
    """Images that may be asked for; the first is the default. Not set: all that are configured."""
    backends: Annotated[tuple[BackendName, ...], AfterValidator(each_once)] | None = None
    """Backends that may run the sessions of this profile: a new one goes to the first that is neither full nor down.
    Not set: the daemon's own, `server.backend`."""
    pull_images: Flag = False
    """True when an image that the Engine lacks may be fetched from its registry."""
    fork_server: Literal["shared", "tenant", "off"] | None = None
    """The processes that the local backend forks sandboxes from (docs/backends.md): one for all sessions of an image
    (`shared`), one for each `tenant`, or none (`off`): bubblewrap then makes each sandbox, with an address layout and
    a hash seed of its own. The libraries that such a process imports ahead are trusted code of all its sandboxes.
    Not set: `shared`, but `off` where `language.preset` is `strict`."""


class ToolsTable(Section):
    """Tools that a session may have."""

    placements: tuple[Placement, ...] = ToolRules.placements
    """Where tools may run: `host` is the client's process, `sandbox` is a process in the sandbox, into which the client
    ships them. Empty: no tools at all."""
    allowed: ToolPatterns = ToolRules.allowed
    """Names that tools may have."""
    ask: ToolPatterns = ()
    """Names of tools whose calls each wait for an approval (docs/approvals.md), even if `allowed` has `"*"`. Tools that
    `allowed` names otherwise need no approval. Tools that run in the sandbox are not called through the daemon, so a
    tool with such a name must run on the host."""

    @model_validator(mode="after")
    def _check_ask(self) -> ToolsTable:
        named = [("allowed", tuple(each for each in self.allowed if each != "*"))]
        refuse(self, list(granted_already(self.ask, named, is_tool_within)))
        return self


class FilesTable(Section):
    """Files that clients put into a session, and get out of it."""

    max_put_bytes: Bytes = FileRules.max_put_bytes
    """Bytes of one file, or of one archive, that is put."""
    max_get_bytes: Bytes = FileRules.max_get_bytes
    """Bytes of one file, or of one archive, that is got."""
    max_puts: Count | None = None
    """Files and archives put in one session. Not set: any number."""
    max_gets: Count | None = None
    """Files and archives got from one session. Not set: any number."""


class StateTable(Section):
    """The state of sessions: exported by a client, and restored in another session."""

    export: Flag = StateRules.export
    """True when a session's state may be exported. It includes the files of the workspace, whatever `files` allows."""
    restore: Flag = StateRules.restore
    """True when a session may begin with such a state."""
    max_bytes: Bytes = StateRules.max_bytes
    """Bytes of one state, variables and files."""
    allow_foreign: Flag = StateRules.allow_foreign
    """True when the state may be one that another daemon or another tenant has exported. Its content can run code in
    the sandbox when it is restored."""
    savepoints: Annotated[int, Field(strict=True, ge=0, le=SAVEPOINTS_MAX)] = StateRules.savepoints
    """Savepoints of a session at one time; its sandbox keeps them. Beyond that number, and when the sandbox's memory is
    short, the oldest are dropped. 0: none may be taken."""
    savepoint_file_bytes: Bytes = StateRules.savepoint_file_bytes
    """Bytes of the workspace that a savepoint holds, in the sandbox's memory. A larger workspace is left out of it, and
    no code can be tried in it."""
    branches: Annotated[int, Field(strict=True, ge=0, le=SAVEPOINTS_MAX)] = StateRules.branches
    """Branches of a session that are kept at one time, after code was tried in them. Beyond that number, and when
    memory is short, the oldest are dropped. 0: no code may be tried."""


class QuotasTable(Section):
    """Quotas of each tenant of this profile, over all its sessions. Not set: no quota, unless noted otherwise."""

    sessions: Count | None = None
    """Sessions at one time. Not set: if there are several tenants, as many as the tenant leaves free for the others."""
    executions: Count | None = None
    """Executions that run or wait, at one time."""
    creations_per_minute: Count | None = None
    """Sessions created in any minute."""
    cpu_time_s_per_hour: Seconds | None = None
    """Seconds of CPU time in any hour: of executions, preludes, and processes that run between executions."""
    output_bytes_per_hour: Bytes | None = None
    """Bytes of output of executions in any hour, including output that was cut."""
    calls: Count | None = None
    """Calls to the daemon at one time, streams included. Not set: if there are several tenants, as many as the tenant
    leaves free for the others."""
    calls_per_second: Count | None = None
    """Calls to the daemon in a second; further calls wait. Not set: 500 if there are several tenants."""
    egress_bytes_per_hour: Bytes | None = None
    """Bytes sent and received through the egress proxy in any hour."""


class AuditTable(Section):
    """Records of this profile's sessions in the audit log, and what admins and viewers see of its executions."""

    code: Literal["none", "hash", "full"] = AuditRules.code
    """The recorded part of an execution's code, and of a process's command and input: none, its SHA-256, or all."""
    fail_closed: Flag = AuditRules.fail_closed
    """True stops executions while the audit log can't be written, false lets them go on."""
    view: Literal["none", "metadata", "content"] = AuditRules.view
    """What admins and viewers see of executions, as they happen and afterwards: nothing; their events without texts,
    values and data; or all, and then each viewing is recorded (`content_viewed`). The code of executions is kept for
    viewers if this is `content` when the session is created."""


class RecordTable(Section):
    """Recordings of sessions, which the daemon keeps in its state directory (docs/recording.md). They hold code and
    data of the tenants."""

    mode: Literal["none", "events", "full"] = RecordRules.mode
    """`events` records what happens in executions: code, output, images, tool calls with their answers, results.
    `full` also records the variables and files that clients put into a session, so that it can run again."""
    max_bytes: Bytes = RecordRules.max_bytes
    """Bytes of one recording. It ends there, and the session goes on."""
    total_bytes: Bytes = RecordRules.total_bytes
    """Bytes of all recordings of a tenant. Above that, the oldest recordings of ended sessions are removed."""
    retention_s: Seconds = RecordRules.retention_s
    """Seconds after its session's end until a recording is removed."""
    redact_tools: ToolPatterns = ()
    """Names of host tools whose arguments and answers are left out. If code prints them, its output is recorded."""
    fetch: Flag = RecordRules.fetch
    """True when a tenant may fetch the recordings of its sessions. Administrators always may."""


class ApprovalsTable(Section):
    """How long requests that need an approval (`ask`) wait."""

    wait_s: Annotated[float, Field(strict=True, ge=1, le=3600, allow_inf_nan=False)] = 120.0
    """Seconds until a request that nobody has decided is denied."""


class Profile(Section):
    """Rights and limits of the sessions of some tenants."""

    extends: Name | None = None
    """The profile that has the keys that this one does not set."""
    on_reload: Literal["keep", "tighten", "end"] = "keep"
    """The effect on running sessions when this profile has changed: they `keep` what they were granted; or are held
    to the new policy from their next execution on (`tighten`), and end where that can't be done; or `end` at once."""
    imports: ImportsTable = ImportsTable()
    language: LanguageTable = LanguageTable()
    limits: LimitsTable = LimitsTable()
    sandbox: SandboxTable = SandboxTable()
    network: NetworkTable = NetworkTable()
    packages: PackagesTable = PackagesTable()
    tools: ToolsTable = ToolsTable()
    files: FilesTable = FilesTable()
    processes: ProcessesTable = ProcessesTable()
    ports: PortsTable = PortsTable()
    state: StateTable = StateTable()
    approvals: ApprovalsTable = ApprovalsTable()
    quotas: QuotasTable = QuotasTable()
    audit: AuditTable = AuditTable()
    record: RecordTable = RecordTable()

    @property
    def fingerprint(self) -> str:
        """Short, and different for profiles that grant different things."""
        # `extends` itself grants nothing: the keys that it brings are in the other tables by now.
        return fingerprint_of(self.model_dump(mode="json", exclude={"extends"}))


def fingerprint_of(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_FINGERPRINT_CHARS]
