"""The policy file: what its author can say, and how it is read.

Named profiles, tenants that map to them, and the profile of everybody else. A profile may extend another: what it does
not say itself, it has from there (policy_inheritance.py). The docstring under each key is its documentation, and
docs/policy.md is made of it. `load_policy` raises one ConfigError with every problem; what it returns is consistent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import InitErrorDetails

from executor_server.model import DEFAULT_MAX_FILES, LANGUAGE_RULES
from executor_server.policy_forms import (
    MAX_PATTERNS,
    NO_INSTALLATION,
    NO_NETWORK,
    Certificate,
    Cpus,
    Disk,
    Files,
    Flag,
    ImportPatterns,
    Memory,
    Output,
    Placement,
    Processes,
    Time,
    ToolPatterns,
    Uid,
    Version,
)
from executor_server.policy_inheritance import is_written, lineage, with_inherited
from executor_server.settings import (
    DAY_S,
    GIB,
    MIB,
    BackendName,
    Bytes,
    Count,
    ImageName,
    KeyPath,
    Name,
    Problem,
    Seconds,
    Section,
    config_error,
    contradiction,
    each_once,
    examined,
    parse_toml,
    read_trusted,
    refuse,
    some_of,
)

BUILT_IN_PROFILE = "default"

MAX_PROFILES = 1024
MAX_TENANTS = 65_536
MAX_IDENTITIES = 64

_FINGERPRINT_CHARS = 16

# What smolagents authorizes by itself (BASE_BUILTIN_MODULES), so that its prompts hold here too.
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


class LimitValues(Section):
    """A value for each limit."""

    wall_time_s: Time
    """Wall clock for one execution, in seconds. It stands still while all of it waits for a host tool."""
    cpu_time_s: Time
    """CPU time of one execution, over all processes of the sandbox."""
    operations: Count
    """Operations (loop iterations and calls of the agent's own code) for one execution."""
    memory_bytes: Memory
    """Memory of the sandbox."""
    processes: Processes
    """Processes and threads of the sandbox at one time."""
    output_bytes: Output
    """Output kept of one execution, head and tail; at 16 times that the execution is stopped."""
    disk_bytes: Disk
    """Size of the workspace, and of /tmp."""
    idle_time_s: Time
    """A session that nobody used for so long is ended."""
    session_time_s: Time
    """A session is ended when it is that old."""
    session_operations: Count
    """Operations of all executions of a session together."""
    owner_grace_s: Time
    """A session is ended when its client, which has died or can't be reached, was not heard of for so long."""
    max_files: Files
    """Files, directories and links in the workspace, and as many in /tmp."""


class DefaultLimits(LimitValues):
    """What a session gets that asks for nothing."""

    wall_time_s: Time = 60.0
    cpu_time_s: Time = 120.0
    operations: Count = 100_000_000
    memory_bytes: Memory = 2 * GIB
    processes: Processes = 128
    output_bytes: Output = MIB
    disk_bytes: Disk = GIB
    idle_time_s: Time = 1800.0
    session_time_s: Time = 28_800.0
    session_operations: Count = 10**12
    owner_grace_s: Time = 120.0
    max_files: Files = DEFAULT_MAX_FILES


class MaxLimits(LimitValues):
    """What a session can ask for at most."""

    wall_time_s: Time = 3600.0
    cpu_time_s: Time = 7200.0
    operations: Count = 10**12
    memory_bytes: Memory = 16 * GIB
    processes: Processes = 4096
    output_bytes: Output = 16 * MIB
    disk_bytes: Disk = 16 * GIB
    idle_time_s: Time = DAY_S
    session_time_s: Time = 7 * DAY_S
    session_operations: Count = 10**15
    owner_grace_s: Time = DAY_S
    max_files: Files = 1_000_000


class ExecutionLimitValues(Section):
    """Limits of one execution. What is not set is the session's."""

    wall_time_s: Time | None = None
    """Wall clock, in seconds."""
    cpu_time_s: Time | None = None
    """CPU time over all processes."""
    operations: Count | None = None
    """Operations."""
    output_bytes: Output | None = None
    """Output kept."""


class LimitsTable(Section):
    """Defaults and ceilings."""

    default: DefaultLimits = DefaultLimits()
    """What a session gets that asks for nothing."""
    max: MaxLimits = MaxLimits()
    """What a session can ask for at most."""
    execution_default: ExecutionLimitValues = ExecutionLimitValues()
    """What an execution gets that asks for nothing, in a session that asked for nothing."""
    execution_max: ExecutionLimitValues = ExecutionLimitValues()
    """What one execution can get at most, whatever its session has."""
    cpus: Cpus | None = None
    """Processors that a sandbox may use at a time. Not set: all, shared evenly."""

    @model_validator(mode="after")
    def _check_order(self) -> LimitsTable:
        session = [(name, "default", "max") for name in LimitValues.model_fields]
        execution = [
            (name, lower, higher)
            for name in ExecutionLimitValues.model_fields
            for lower, higher in (
                ("execution_default", "default"),
                ("execution_default", "execution_max"),
                ("execution_max", "max"),
            )
        ]
        wrong = []
        for name, lower, higher in session + execution:
            value, ceiling = getattr(getattr(self, lower), name), getattr(getattr(self, higher), name)
            if value is not None and ceiling is not None and value > ceiling:
                must = "must be" if name in getattr(self, lower).model_fields_set else "is not set, and must be"
                text = f"{must} at most {ceiling}, which is limits.{higher}.{name}"
                wrong.append(contradiction((lower, name), text, value, also=[(higher, name)]))
        refuse(self, wrong)
        return self


class ImportsTable(Section):
    """What agent code may import. A guard-rail; the wall is the sandbox."""

    default: ImportPatterns = SMOLAGENTS_BASE_IMPORTS
    """Authorized without being asked for."""
    allowed: ImportPatterns = ("*",)
    """What a client may add."""
    denied: ImportPatterns = ()
    """Never authorized, whatever else is: it goes before `default` and `allowed`, and before what a client adds."""


class LanguageTable(Section):
    """What agent code may do besides importing. Each key is a permission; what is not set is as the preset has it."""

    preset: Literal["standard", "guarded", "strict"] = "guarded"
    """`standard` permits everything and leaves it to isolation; `guarded` permits everything but `foreign_modules`, so
    that what is not authorized isn't reached without an import either; `strict` permits nothing of this table, and so
    refuses what smolagents' local executor refuses."""
    dunder_access: Flag | None = None
    """Attributes and names of the form `__x__`, but for `__init__`, `__str__`, `__repr__` and `__name__`."""
    dynamic_code: Flag | None = None
    """`eval`, `exec` and `compile`."""
    namespaces: Flag | None = None
    """`globals`, `locals` and `vars`."""
    foreign_modules: Flag | None = None
    """Modules of packages that are not authorized, in whatever way they are reached: as attributes of others
    (`random._os`), in `sys.modules`, by `getattr`, `vars` and `__globals__`, through frames and classes. Where `*` is
    authorized and nothing denied, there are none."""
    module_attributes: Flag | None = None
    """Modules that could not be imported, reached as attributes of others (`random._os`, and of `numpy` alone
    `numpy.random` too)."""
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
        """The rules in force: names of model.LANGUAGE_RULES."""
        refused = _REFUSED_BY_PRESET[self.preset]
        return tuple(
            name
            for name in LANGUAGE_RULES
            if (name in refused if getattr(self, name) is None else not getattr(self, name))
        )


_REFUSED_BY_PRESET = {"standard": (), "guarded": ("foreign_modules",), "strict": LANGUAGE_RULES}


class SandboxTable(Section):
    """What sandboxes may be made of."""

    images: Annotated[tuple[ImageName, ...], Field(max_length=MAX_PATTERNS)] | None = None
    """Images that may be asked for; the first is the default. Not set: all that are configured."""
    backends: Annotated[tuple[BackendName, ...], AfterValidator(each_once)] | None = None
    """Backends that may run the sessions of this profile: a new one goes to the first that is neither full nor down.
    Not set: the daemon's own, `server.backend`."""
    pull_images: Flag = False
    """Whether an image that the Engine lacks may be fetched from its registry."""
    network: Annotated[Any, AfterValidator(NO_NETWORK)] = "none"
    """`"none"`: a sandbox reaches nothing outside of it."""
    install_packages: Annotated[Any, AfterValidator(NO_INSTALLATION)] = False
    """Whether code may install packages while it runs."""


class ToolsTable(Section):
    """Which tools a session may have."""

    placements: tuple[Placement, ...] = ("host", "sandbox")
    """Where tools may run: `host` is the client's process, `sandbox` the sandbox itself, into which the client ships
    them. Empty: no tools at all."""
    allowed: ToolPatterns = ("*",)
    """Names that tools may have."""


class FilesTable(Section):
    """Files that clients put into a session, and get out of it."""

    max_put_bytes: Bytes = GIB
    """One file, or one archive, that is put."""
    max_get_bytes: Bytes = GIB
    """One file, or one archive, that is got."""
    max_puts: Count | None = None
    """Files and archives put in one session. Not set: as many as one likes."""
    max_gets: Count | None = None
    """Files and archives got from one session. Not set: as many as one likes."""


class StateTable(Section):
    """The state of sessions: written down by a client, and restored in another session."""

    export: Flag = True
    """Whether a session's state may be written down. The files of the workspace are in it, whatever `files` says."""
    restore: Flag = True
    """Whether a session may begin with such a state."""
    max_bytes: Bytes = 256 * MIB
    """One state, variables and files."""
    allow_foreign: Flag = False
    """Whether it may be one that another daemon or another tenant has written. What is in it can run code when it is
    restored, in the sandbox."""


class QuotasTable(Section):
    """Quotas of each tenant, over all its sessions. Not set: no quota, or what is said at the quota itself."""

    sessions: Count | None = None
    """Sessions at one time. Not set: where there are several tenants, as many as it leaves free for the others."""
    executions: Count | None = None
    """Executions that run or wait, at one time."""
    creations_per_minute: Count | None = None
    """Sessions made in any minute."""
    cpu_time_s_per_hour: Seconds | None = None
    """CPU time of executions, and of what sandboxes run between them, in any hour."""
    output_bytes_per_hour: Bytes | None = None
    """Output of executions in any hour, what was left out included."""
    calls: Count | None = None
    """Calls to the daemon at one time, streams included. Not set: where there are several tenants, as many as it leaves
    free for the others."""
    calls_per_second: Count | None = None
    """Calls to the daemon in a second; what is above that waits its turn."""


class AuditTable(Section):
    """What the audit log says of this profile's sessions."""

    code: Literal["none", "hash", "full"] = "hash"
    """Of the code of an execution: nothing, its SHA-256, or all of it."""
    fail_closed: Flag = False
    """When the audit log can't be written: true stops executions, false lets them go on."""


class Profile(Section):
    """What the sessions of some tenants may be."""

    extends: Name | None = None
    """A profile that says what this one does not say."""
    on_reload: Literal["keep", "tighten", "end"] = "keep"
    """What happens to running sessions when this profile has changed: they `keep` what they were granted; or are held
    to the new policy from their next execution on (`tighten`), and end where that can't be done; or `end` at once."""
    imports: ImportsTable = ImportsTable()
    """What agent code may import. A guard-rail; the wall is the sandbox."""
    language: LanguageTable = LanguageTable()
    """What agent code may do besides importing: a guard-rail too. Each key permits something; what is not set is as
    `preset` has it."""
    limits: LimitsTable = LimitsTable()
    """Defaults and ceilings of what a session and an execution may use."""
    sandbox: SandboxTable = SandboxTable()
    """What sandboxes may be made of."""
    tools: ToolsTable = ToolsTable()
    """Which tools a session may have."""
    files: FilesTable = FilesTable()
    """Files that clients put into a session, and get out of it."""
    state: StateTable = StateTable()
    """The state of sessions: written down by a client, and restored in another session."""
    quotas: QuotasTable = QuotasTable()
    """What each tenant of this profile may have or use, over all its sessions."""
    audit: AuditTable = AuditTable()
    """What the audit log says of this profile's sessions."""

    @property
    def fingerprint(self) -> str:
        """Short, and different for profiles that say different things."""
        # What a profile extends says nothing: what it has from there is in it.
        return _fingerprint_of(self.model_dump(mode="json", exclude={"extends"}))


class Tenant(Section):
    """Who asks, and which profile holds for it."""

    profile: Name | None = None
    """Its profile. Not set: the default one."""
    admin: Flag = False
    """Whether its certificates and users may make admin calls. A token has this by itself (`token new --admin`)."""
    certificates: Annotated[tuple[Certificate, ...], Field(max_length=MAX_IDENTITIES)] = ()
    """Names of client certificates that are this tenant's: a DNS name or a URI among the subject's alternative names,
    or the common name where there are none; or `sha256:` and the fingerprint of one certificate."""
    uids: Annotated[tuple[Uid, ...], Field(max_length=MAX_IDENTITIES)] = ()
    """Users of this host that are this tenant when they connect to `server.peer_socket`."""


class PolicyFile(Section):
    """The whole policy."""

    version: Version = "unversioned"
    """What its author calls this version. Told to clients, and written into each record of the audit log."""
    default: Name | None = None
    """The profile of tenants that name none, or are not listed. Not set: tenants that are not listed are refused."""
    profiles: Annotated[dict[Name, Profile], Field(min_length=1, max_length=MAX_PROFILES)]
    """Profiles, by name."""
    tenants: Annotated[dict[Name, Tenant], Field(max_length=MAX_TENANTS)] = Field(default_factory=dict)
    """Tenants, by name."""

    @model_validator(mode="after")
    def _check_references(self) -> PolicyFile:
        wrong = []
        if self.default is not None and self.default not in self.profiles:
            wrong.append(self._no_profile(("default",), self.default))
        for name, tenant in self.tenants.items():
            path = ("tenants", name, "profile")
            if tenant.profile is None and self.default is None:
                text = "is missing, and there is no default profile"
                wrong.append(contradiction(path, text, {}, also=[("default",)]))
            elif tenant.profile is not None and tenant.profile not in self.profiles:
                wrong.append(self._no_profile(path, tenant.profile))
        refuse(self, [*wrong, *self._claimed_twice()])
        return self

    def _no_profile(self, path: KeyPath, name: str) -> InitErrorDetails:
        text = f"there is no such profile; there are {some_of(self.profiles)}"
        return contradiction(path, text, name, also=[("profiles", name)])

    def _claimed_twice(self) -> Iterator[InitErrorDetails]:
        """Who shows a certificate, or is a user, must be one tenant and not two."""
        owners: dict[object, str] = {}
        for name, tenant in self.tenants.items():
            for key, values in (("certificates", tenant.certificates), ("uids", tenant.uids)):
                for value in values:
                    owner = owners.setdefault((key, value), name)
                    if owner != name:
                        text = f"is tenant {owner}'s already"
                        yield contradiction(("tenants", name, key), text, value, also=[("tenants", owner, key)])

    @property
    def fingerprint(self) -> str:
        """Short, and different for policies that say different things, however they are written."""
        return _fingerprint_of(self.model_dump(mode="json", exclude={"profiles": {"__all__": {"extends"}}}))


def _fingerprint_of(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:_FINGERPRINT_CHARS]


def built_in_policy() -> PolicyFile:
    """The policy of a daemon that was given none."""
    return PolicyFile(version="built-in", default=BUILT_IN_PROFILE, profiles={BUILT_IN_PROFILE: Profile()})


def load_policy(path: Path | None) -> PolicyFile:
    """The policy in a file; the built-in one for None. Raises ConfigError."""
    if path is None:
        return built_in_policy()
    return parse_policy(read_trusted(path, "policy file"), path)


def parse_policy(data: bytes, path: Path) -> PolicyFile:
    """The policy in the bytes of a file. Raises ConfigError."""
    tables = parse_toml(data, f"policy file {path}")
    problems: list[Problem] = []
    written = tables.get("profiles")
    profiles = written if isinstance(written, dict) else {}
    if profiles:
        resolved, problems = with_inherited(profiles)
        tables = {**tables, "profiles": resolved}
    policy, found = examined(PolicyFile, tables)
    problems += [problem for problem in found if _stands_here(problem, profiles)]
    if policy is None or problems:
        raise config_error(problems)
    return policy


def _stands_here(problem: Problem, profiles: Mapping[str, Any]) -> bool:
    """Whether to mend a problem where it was found. One that was inherited is found in the profile it is from too."""
    section, name = (*problem.path, "", "")[:2]
    if section != "profiles" or name not in profiles:
        return True
    keys = [path[2:] for path in (problem.path, *problem.also)]
    writers = [each for each in lineage(str(name), profiles) if any(is_written(profiles[each], key) for key in keys)]
    return not writers or writers[0] == name
