"""The policy file: what its author can say, and how it is read.

Named profiles, tenants that map to them, and the profile of everybody else. A profile may extend another: what it does
not say itself, it has from there. The docstring under each key is its documentation (docs/policy.md is made of them).
`load_policy` raises one ConfigError with every problem; what it returns is whole and consistent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from executor_server.model import LANGUAGE_RULES
from executor_server.settings import (
    DAY_S,
    GIB,
    MIB,
    Bytes,
    ConfigError,
    Count,
    ImageName,
    ImportPattern,
    Name,
    Seconds,
    Section,
    read_toml,
    validated,
)

BUILT_IN_PROFILE = "default"
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


def _check_no_network(value: object) -> object:
    if value != "none":
        raise ValueError('must be "none": an allowlist of hosts could not be enforced yet, and so is refused')
    return value


def _check_no_installation(value: object) -> object:
    if value is not False:
        raise ValueError("must be false: packages come with the image; a sandbox has no network to fetch them by")
    return value


def _check_tool_pattern(text: str) -> str:
    if text != "*" and not text.removesuffix("*").isidentifier():
        raise ValueError('must be the name of a tool ("search"), the beginning of one ("web_*"), or "*"')
    return text


Processes = Annotated[int, Field(strict=True, gt=0, le=1_000_000)]
ToolPattern = Annotated[str, AfterValidator(_check_tool_pattern)]
Placement = Literal["host", "sandbox"]


class LimitValues(Section):
    """A value for each limit."""

    wall_time_s: Seconds
    """Wall clock for one execution, in seconds. It stands still while a host tool is being called."""
    cpu_time_s: Seconds
    """CPU time of one execution, over all processes of the sandbox."""
    operations: Count
    """Operations (loop iterations and calls of the agent's own code) for one execution."""
    memory_bytes: Bytes
    """Memory of the sandbox."""
    processes: Processes
    """Processes and threads of the sandbox at one time."""
    output_bytes: Bytes
    """Output kept of one execution, head and tail; at 16 times that the execution is stopped."""
    disk_bytes: Bytes
    """Size of the workspace, and of /tmp."""
    idle_time_s: Seconds
    """A session that nobody used for so long is ended."""
    session_time_s: Seconds
    """A session is ended when it is that old."""
    session_operations: Count
    """Operations of all executions of a session together."""


class DefaultLimits(LimitValues):
    """What a session gets that asks for nothing."""

    wall_time_s: Seconds = 60.0
    cpu_time_s: Seconds = 120.0
    operations: Count = 100_000_000
    memory_bytes: Bytes = 2 * GIB
    processes: Processes = 128
    output_bytes: Bytes = MIB
    disk_bytes: Bytes = GIB
    idle_time_s: Seconds = 1800.0
    session_time_s: Seconds = 28_800.0
    session_operations: Count = 10**12


class MaxLimits(LimitValues):
    """What a session can ask for at most."""

    wall_time_s: Seconds = 3600.0
    cpu_time_s: Seconds = 7200.0
    operations: Count = 10**12
    memory_bytes: Bytes = 16 * GIB
    processes: Processes = 4096
    output_bytes: Bytes = 16 * MIB
    disk_bytes: Bytes = 16 * GIB
    idle_time_s: Seconds = DAY_S
    session_time_s: Seconds = 7 * DAY_S
    session_operations: Count = 10**15


class ExecutionLimitValues(Section):
    """Limits of one execution. What is not set is the session's."""

    wall_time_s: Seconds | None = None
    """Wall clock, in seconds."""
    cpu_time_s: Seconds | None = None
    """CPU time over all processes."""
    operations: Count | None = None
    """Operations."""
    output_bytes: Bytes | None = None
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
    cpus: Annotated[float, Field(strict=True, ge=0.01, le=1024, allow_inf_nan=False)] | None = None
    """Processors that a sandbox may use at a time. Not set: all, shared evenly."""

    @model_validator(mode="after")
    def _check_order(self) -> LimitsTable:
        problems = [
            f"default.{name} is {getattr(self.default, name)}, above max.{name}, which is {getattr(self.max, name)}"
            for name in LimitValues.model_fields
            if getattr(self.default, name) > getattr(self.max, name)
        ]
        for name in ExecutionLimitValues.model_fields:
            default, ceiling = getattr(self.execution_default, name), getattr(self.execution_max, name)
            most = getattr(self.max, name)
            if default is not None and ceiling is not None and default > ceiling:
                problems.append(
                    f"execution_default.{name} is {default}, above execution_max.{name}, which is {ceiling}"
                )
            for table, value in (("execution_default", default), ("execution_max", ceiling)):
                if value is not None and value > most:
                    problems.append(f"{table}.{name} is {value}, above max.{name}, which is {most}")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class ImportsTable(Section):
    """What agent code may import. A guard-rail; the wall is the sandbox."""

    default: tuple[ImportPattern, ...] = SMOLAGENTS_BASE_IMPORTS
    """Authorized without being asked for."""
    allowed: tuple[ImportPattern, ...] = ("*",)
    """What a client may add."""
    denied: tuple[ImportPattern, ...] = ()
    """Never authorized, whatever else is: it goes before `default` and `allowed`, and before what a client adds."""


class LanguageTable(Section):
    """What agent code may do besides importing. Each key is a permission; what is not set is as the preset has it."""

    preset: Literal["standard", "strict"] = "standard"
    """`standard` permits everything and leaves it to isolation; `strict` permits nothing of this table, and so refuses
    what smolagents' local executor refuses."""
    dunder_access: bool | None = None
    """Attributes and names of the form `__x__`, but for `__init__`, `__str__`, `__repr__` and `__name__`."""
    dynamic_code: bool | None = None
    """`eval`, `exec` and `compile`."""
    namespaces: bool | None = None
    """`globals`, `locals` and `vars`."""
    module_attributes: bool | None = None
    """Modules that are not authorized, reached as attributes of others (`random._os`)."""
    dangerous_functions: bool | None = None
    """Functions that start processes (`os.system`, `os.popen`, `subprocess.run` …), however they are reached."""
    open: bool | None = None
    """The builtin `open`, for reading too."""
    file_writing: bool | None = None
    """Opening files for writing."""
    unlisted_builtins: bool | None = None
    """Builtins that smolagents' local executor does not have."""

    @property
    def refused(self) -> tuple[str, ...]:
        """The rules in force: names of model.LANGUAGE_RULES."""
        permits = self.preset == "standard"
        return tuple(
            name for name in LANGUAGE_RULES if not (permits if getattr(self, name) is None else getattr(self, name))
        )


class SandboxTable(Section):
    """What sandboxes may be made of."""

    images: tuple[ImageName, ...] | None = None
    """Images that may be asked for; the first is the default. Not set: all that are configured."""
    backends: tuple[Literal["local", "docker"], ...] = ("local", "docker")
    """Backends that may run the sessions of this profile."""
    pull_images: bool = False
    """Whether an image that the Engine lacks may be fetched from its registry."""
    network: Annotated[Any, AfterValidator(_check_no_network)] = "none"
    """`"none"`: a sandbox reaches nothing outside of it."""
    install_packages: Annotated[Any, AfterValidator(_check_no_installation)] = False
    """Whether code may install packages while it runs."""


class ToolsTable(Section):
    """Which tools a session may have."""

    placements: tuple[Placement, ...] = ("host",)
    """Where tools may run: `host` is the client's process, `sandbox` the sandbox. Empty: no tools at all."""
    allowed: tuple[ToolPattern, ...] = ("*",)
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


class QuotasTable(Section):
    """What each tenant may have or use, over all its sessions. Not set: no quota."""

    sessions: Count | None = None
    """Sessions at one time."""
    executions: Count | None = None
    """Executions that run or wait, at one time."""
    creations_per_minute: Count | None = None
    """Sessions made in any minute."""
    cpu_time_s_per_hour: Seconds | None = None
    """CPU time of executions in any hour."""
    output_bytes_per_hour: Bytes | None = None
    """Output of executions in any hour, what was left out included."""
    calls: Count | None = None
    """Calls to the daemon at one time, streams included."""
    calls_per_second: Count | None = None
    """Calls to the daemon in a second; what is above that waits its turn."""


class AuditTable(Section):
    """What the audit log says of this profile's sessions."""

    code: Literal["none", "hash", "full"] = "hash"
    """Of the code of an execution: nothing, its SHA-256, or all of it."""
    fail_closed: bool = False
    """When the audit log can't be written: true stops executions, false lets them go on."""


class Profile(Section):
    """What the sessions of some tenants may be."""

    extends: Name | None = None
    """A profile that says what this one does not say."""
    on_reload: Literal["keep", "tighten", "end"] = "keep"
    """What happens to running sessions when the policy has changed: they `keep` what they were granted; or are held to
    the new policy from their next execution on (`tighten`), and end where that can't be done; or `end` at once."""
    imports: ImportsTable = ImportsTable()
    """What agent code may import. A guard-rail; the wall is the sandbox."""
    language: LanguageTable = LanguageTable()
    """What agent code may do besides importing."""
    limits: LimitsTable = LimitsTable()
    """Defaults and ceilings of what a session and an execution may use."""
    sandbox: SandboxTable = SandboxTable()
    """What sandboxes may be made of."""
    tools: ToolsTable = ToolsTable()
    """Which tools a session may have."""
    files: FilesTable = FilesTable()
    """Files that clients put into a session, and get out of it."""
    quotas: QuotasTable = QuotasTable()
    """What each tenant of this profile may have or use, over all its sessions."""
    audit: AuditTable = AuditTable()
    """What the audit log says of this profile's sessions."""


class Tenant(Section):
    """Who asks, and which profile holds for it."""

    profile: Name | None = None
    """Its profile. Not set: the default one."""
    admin: bool = False
    """Whether its certificates and users may make admin calls. A token has this by itself (`token new --admin`)."""
    certificates: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Names of client certificates that are this tenant's: a DNS name or a URI among the subject's alternative names,
    or the common name where there are none; or `sha256:` and the fingerprint of one certificate."""
    uids: Annotated[tuple[Annotated[int, Field(strict=True, ge=0, lt=2**32)], ...], Field(max_length=64)] = ()
    """Users of this host that are this tenant when they connect to `server.peer_socket`."""


class PolicyFile(Section):
    """The whole policy."""

    version: Annotated[str, Field(min_length=1, max_length=64)] = "unversioned"
    """What its author calls this version. Told to clients, and written into each record of the audit log."""
    default: Name | None = None
    """The profile of tenants that name none, or are not listed. Not set: tenants that are not listed are refused."""
    profiles: Annotated[dict[Name, Profile], Field(min_length=1, max_length=1024)]
    """Profiles, by name."""
    tenants: Annotated[dict[Name, Tenant], Field(max_length=65_536)] = Field(default_factory=dict)
    """Tenants, by name."""

    @model_validator(mode="after")
    def _check_references(self) -> PolicyFile:
        known = ", ".join(self.profiles)
        problems = []
        if self.default is not None and self.default not in self.profiles:
            problems.append(f"default: there is no profile {self.default!r}; there are {known}")
        owners: dict[object, str] = {}
        for name, tenant in self.tenants.items():
            if tenant.profile is None and self.default is None:
                problems.append(f"tenants.{name}.profile: is missing, and there is no default profile")
            elif tenant.profile is not None and tenant.profile not in self.profiles:
                problems.append(f"tenants.{name}.profile: there is no profile {tenant.profile!r}; there are {known}")
            for key, values in (("certificates", tenant.certificates), ("uids", tenant.uids)):
                for value in values:
                    if owners.setdefault((key, value), name) != name:
                        other = owners[key, value]
                        problems.append(f"tenants.{name}.{key}: {value!r} is tenant {other}'s already")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def fingerprint(self) -> str:
        """Short, and different for policies that say different things, however they are written."""
        said = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:_FINGERPRINT_CHARS]


def built_in_policy() -> PolicyFile:
    """The policy of a daemon that was given none."""
    return PolicyFile(version="built-in", default=BUILT_IN_PROFILE, profiles={BUILT_IN_PROFILE: Profile()})


def load_policy(path: Path | None) -> PolicyFile:
    """The policy in a file; the built-in one for None. Raises ConfigError."""
    if path is None:
        return built_in_policy()
    return validated(PolicyFile, with_inherited(read_toml(path, "policy file")))


def with_inherited(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a policy file with what each profile has from those it extends. Raises ConfigError."""
    profiles = tables.get("profiles")
    if not isinstance(profiles, dict):
        return dict(tables)
    problems: list[str] = []
    resolved = {name: _resolved(name, profiles, problems) for name in profiles}
    if problems:
        raise ConfigError(problems)
    return {**tables, "profiles": resolved}


def lineage(name: str, profiles: Mapping[str, Any]) -> list[str]:
    """A profile and those that it extends, nearest first; one that is met again, in a circle, is the last."""
    names = [name]
    while True:
        table = profiles.get(names[-1])
        parent = table.get("extends") if isinstance(table, dict) else None
        if not isinstance(parent, str) or parent not in profiles:
            return names
        names.append(parent)
        if parent in names[:-1]:
            return names


def _resolved(name: str, profiles: Mapping[str, Any], problems: list[str]) -> Any:
    names = lineage(name, profiles)
    if len(set(names)) != len(names):
        problems.append(f"profiles.{name}.extends: goes round in a circle: {' → '.join(names)}")
        return profiles[name]
    last = profiles[names[-1]]
    parent = last.get("extends") if isinstance(last, dict) else None
    if isinstance(parent, str):
        problems.append(
            f"profiles.{names[-1]}.extends: there is no profile {parent!r}; there are {', '.join(profiles)}"
        )
    merged: Any = {}
    for each in reversed(names):
        merged = _merged(merged, profiles[each])
    return merged


def _merged(base: Any, over: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: _merged(base[key], value) if key in base else value for key, value in over.items()}}
