"""The policy file: named profiles, the tenants that they hold for, and the profile of all other tenants.

A profile may extend another: the keys that it does not set come from there (inheritance.py). The docstring of each key
is its entry in docs/policy.md. `load_policy` raises one ConfigError with every problem; the policy that it returns is
consistent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import InitErrorDetails

from executor_server.core.config import (
    KeyPath,
    Name,
    Problem,
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
from executor_server.policy.forms import Certificate, Flag, Uid, Version
from executor_server.policy.identity import Role
from executor_server.policy.inheritance import is_written, lineage, with_inherited
from executor_server.policy.lock_file import copies_in
from executor_server.policy.profile import Profile, fingerprint_of

BUILT_IN_PROFILE = "default"

MAX_PROFILES = 1024
MAX_TENANTS = 65_536
MAX_IDENTITIES = 64


class Tenant(Section):
    """A tenant: its profile, and how its calls are recognized."""

    profile: Name | None = None
    """Its profile. Not set: the default one."""
    admin: Flag = False
    """True when its certificates and users may make admin calls. A token has this by itself (`token new --admin`)."""
    roles: Annotated[tuple[Role, ...], AfterValidator(each_once)] = ()
    """What its certificates and users may do: `user` has sessions, `approver` decides requests that need an approval
    (docs/approvals.md), `viewer` watches sessions (docs/access.md). Empty: `["user"]`. A token has its own roles
    (`token new --role`)."""
    certificates: Annotated[tuple[Certificate, ...], Field(max_length=MAX_IDENTITIES)] = ()
    """Names of client certificates that are this tenant's: a DNS name or a URI among the subject's alternative names,
    or the common name where there are none; or `sha256:` and the fingerprint of one certificate."""
    uids: Annotated[tuple[Uid, ...], Field(max_length=MAX_IDENTITIES)] = ()
    """Users of this host that are this tenant when they connect to `server.peer_socket`."""


class PolicyFile(Section):
    """The whole policy."""

    version: Version = "unversioned"
    """The author's name for this version. Clients see it, and each record of the audit log holds it."""
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
            if tenant.admin and tenant.roles:
                text = "must be empty: an admin has every role"
                roles = ("tenants", name, "roles")
                wrong.append(contradiction(roles, text, tenant.roles, also=[("tenants", name, "admin")]))
        refuse(self, [*wrong, *self._claimed_twice()])
        return self

    def _no_profile(self, path: KeyPath, name: str) -> InitErrorDetails:
        text = f"no such profile; available: {some_of(self.profiles)}"
        return contradiction(path, text, name, also=[("profiles", name)])

    def _claimed_twice(self) -> Iterator[InitErrorDetails]:
        """A certificate or a user that two tenants claim would make the caller ambiguous."""
        owners: dict[object, str] = {}
        for name, tenant in self.tenants.items():
            for key, values in (("certificates", tenant.certificates), ("uids", tenant.uids)):
                for value in values:
                    owner = owners.setdefault((key, value), name)
                    if owner != name:
                        text = f"belongs to tenant {owner} already"
                        yield contradiction(("tenants", name, key), text, value, also=[("tenants", owner, key)])

    @property
    def is_built_in(self) -> bool:
        """True when it says what the policy of a daemon without a policy file does."""
        return self.fingerprint == built_in_policy().fingerprint

    @property
    def fingerprint(self) -> str:
        """Short, and different for policies that grant different things, however they are written."""
        return fingerprint_of(self.model_dump(mode="json", exclude={"profiles": {"__all__": {"extends"}}}))


def built_in_policy() -> PolicyFile:
    """Returns the policy of a daemon without a policy file."""
    return PolicyFile(version="built-in", default=BUILT_IN_PROFILE, profiles={BUILT_IN_PROFILE: Profile()})


def load_policy(path: Path | None, copies: Path | None = None) -> PolicyFile:
    """Returns the policy in a file, with `copies` of its lock files; the built-in one for None. Raises ConfigError."""
    if path is None:
        return built_in_policy()
    return parse_policy(read_trusted(path, "policy file"), path, copies)


def parse_policy(data: bytes, path: Path, copies: Path | None = None) -> PolicyFile:
    """Returns the policy in the bytes of a file, with `copies` of its lock files. Raises ConfigError."""
    tables = parse_toml(data, f"policy file {path}")
    problems: list[Problem] = []
    written = tables.get("profiles")
    profiles = written if isinstance(written, dict) else {}
    if profiles:
        resolved, problems = with_inherited(profiles)
        tables = {**tables, "profiles": resolved}
    with copies_in(copies):
        policy, found = examined(PolicyFile, tables)
    problems += [problem for problem in found if _is_reported_here(problem, profiles)]
    if policy is None or problems:
        raise config_error(problems)
    return policy


def _is_reported_here(problem: Problem, profiles: Mapping[str, Any]) -> bool:
    """True when a problem is to be fixed where it was found. An inherited one is found in its ancestor, too."""
    section, name = (*problem.path, "", "")[:2]
    if section != "profiles" or name not in profiles:
        return True
    keys = [path[2:] for path in (problem.path, *problem.also)]
    writers = [each for each in lineage(str(name), profiles) if any(is_written(profiles[each], key) for key in keys)]
    return not writers or writers[0] == name
