"""Finds the differences of two policies: by what they mean, not by how they are written.

Profiles are compared with all that they inherit, key by key; tenants by the profile that holds for them. A change is
`looser` (something that was refused can be granted), `tighter`, or "" when it is both, or when that can't be decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from executor_server.core import LANGUAGE_RULES, is_covered, is_denied
from executor_server.core.config import dotted
from executor_server.policy.file import PolicyFile, Tenant
from executor_server.policy.forms import is_tool_within
from executor_server.policy.grants import FORK_SERVERS, VIEWS, fork_server
from executor_server.policy.hosts import is_covered_host, is_denied_host, pattern_of
from executor_server.policy.identity import effective_roles
from executor_server.policy.packages_table import ANY_PACKAGE, age_s
from executor_server.policy.profile import Profile
from executor_server.policy.requirement import Requirement, read_requirement

Direction = Literal["looser", "tighter", ""]


@dataclass(frozen=True)
class Change:
    key: str
    old: str
    new: str
    direction: Direction = ""


def differences(old: PolicyFile, new: PolicyFile) -> list[Change]:
    """Returns every change, in the order of the file."""
    changes = [Change("version", old.version, new.version)] if old.version != new.version else []
    if old.default != new.default:
        changes.append(_default_change(old, new))
    for name in {**old.profiles, **new.profiles}:
        path = dotted(("profiles", name))
        if name in old.profiles and name in new.profiles:
            changes += _profile_changes(path, old.profiles[name], new.profiles[name])
        else:
            changes.append(_presence(path, name in new.profiles))
    for name in {**old.tenants, **new.tenants}:
        path = dotted(("tenants", name))
        if name in old.tenants and name in new.tenants:
            changes += _tenant_changes(path, (old, old.tenants[name]), (new, new.tenants[name]))
        else:
            changes.append(_presence(path, name in new.tenants))
    return changes


def _presence(path: str, is_new: bool) -> Change:
    return Change(path, "nothing", "added") if is_new else Change(path, "there", "removed")


def _default_change(old: PolicyFile, new: PolicyFile) -> Change:
    direction: Direction = "looser" if old.default is None else "tighter" if new.default is None else ""
    return Change("default", _shown(old.default, "nobody"), _shown(new.default, "nobody"), direction)


def _tenant_changes(path: str, old: tuple[PolicyFile, Tenant], new: tuple[PolicyFile, Tenant]) -> Iterator[Change]:
    """Changes of its own keys; and, when another profile holds for it, every difference of the two."""
    old_name, new_name = (tenant.profile or file.default or "" for file, tenant in (old, new))
    if old_name != new_name:
        yield Change(f"{path}.profile", old_name, new_name)
        was, is_now = old[0].profiles[old_name], new[0].profiles[new_name]
        yield from _profile_changes(f"{path} → {dotted(('profiles', new_name))}", was, is_now)
    for key in ("admin", "roles", "certificates", "uids"):
        before, after = getattr(old[1], key), getattr(new[1], key)
        if key == "roles":
            before, after = effective_roles(before), effective_roles(after)
        if before != after:
            yield Change(f"{path}.{key}", _shown(before), _shown(after), _direction(_more, before, after))


def _profile_changes(path: str, old: Profile, new: Profile) -> Iterator[Change]:
    new_values = dict(_values(new))
    for key, was in _values(old):
        is_now = new_values[key]
        compare = _comparison(key)
        if was == is_now or (compare in _OF_PATTERNS and compare(was, is_now) and compare(is_now, was)):
            continue
        unset = next(text for beginning, text in _UNSET.items() if key.startswith(beginning))
        yield Change(f"{path}.{key}", _shown(was, unset), _shown(is_now, unset), _direction(compare, was, is_now))


_UNSET = {
    "quotas.": "no quota",
    "files.": "no limit",
    "sandbox.images": "all",
    "sandbox.backends": "the daemon's own",
    "limits.cpus": "all",
    "limits.execution_": "the session's",
    "": "not set",
}


def _values(profile: Profile) -> Iterator[tuple[str, Any]]:
    """Every key of a profile with its value in effect; `language` as permissions."""
    yield "on_reload", profile.on_reload
    tables = profile.model_dump(exclude={"extends", "on_reload", "language"})
    tables["sandbox"]["fork_server"] = fork_server(profile)
    for section, table in tables.items():
        yield from _leaves(section, table)
    for rule in LANGUAGE_RULES:
        yield f"language.{rule}", rule not in profile.language.refused


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if path == "packages.imports":  # the keys are the author's, and not the same in every profile
        yield path, tuple(f"{module} = {name}" for module, name in sorted(value.items()))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}", each)
    else:
        yield path, value


# ---------------------------------------------------------------------------------------------------------------------
# Which is looser

Comparison = Callable[[Any, Any], bool]
"""True when the second value grants all that the first does."""


def _direction(compare: Comparison | None, old: Any, new: Any) -> Direction:
    if compare is None:
        return ""
    wider, narrower = compare(old, new), compare(new, old)
    return "" if wider == narrower else "looser" if wider else "tighter"


def _more(old: Any, new: Any) -> bool:
    """Compares numbers, permissions and collections, in which None stands for no bound."""
    if isinstance(old, Collection) or isinstance(new, Collection):
        return new is None or (old is not None and set(old) <= set(new))
    return (math.inf if old is None else old) <= (math.inf if new is None else new)


def _serves_more(old: Any, new: Any) -> bool:
    """Compares lists of backends. None is the daemon's own backend, which a list may or may not contain."""
    return old == new or (old is not None and new is not None and set(old) <= set(new))


def _forks_more(old: Any, new: Any) -> bool:
    return FORK_SERVERS.index(old) <= FORK_SERVERS.index(new)


def _less(old: Any, new: Any) -> bool:
    return _more(new, old)


def _covers_imports(old: Any, new: Any) -> bool:
    return all(is_covered(pattern, new) for pattern in old)


def _denies_fewer(old: Any, new: Any) -> bool:
    return all(is_denied(pattern, old) for pattern in new)


def _covers_tools(old: Any, new: Any) -> bool:
    return all(any(is_tool_within(pattern, wider) for wider in new) for pattern in old)


def _covers_hosts(old: Any, new: Any) -> bool:
    return all(is_covered_host(pattern_of(text), new) for text in old)


def _denies_fewer_hosts(old: Any, new: Any) -> bool:
    return all(is_denied_host(pattern_of(text), old) for text in new)


def _covers_packages(old: Any, new: Any) -> bool:
    had, has = _bounds(old), _bounds(new)
    if ANY_PACKAGE in old:  # a name in the new list would narrow what the star covered in the old one
        return ANY_PACKAGE in new and has.keys() <= had.keys() and all(had[each].is_within(has[each]) for each in has)
    return all(each.is_within(has[name]) if name in has else ANY_PACKAGE in new for name, each in had.items())


def _bounds(allowed: Collection[str]) -> dict[str, Requirement]:
    found = (read_requirement(text) for text in allowed if text != ANY_PACKAGE)
    return {each.name: each for each in found}


def _counts_newer(old: Any, new: Any) -> bool:
    """Compares the ages below which files of an index don't count."""
    return (0 if new is None else age_s(new)) <= (0 if old is None else age_s(old))


_OF_PATTERNS = (_covers_imports, _denies_fewer, _covers_tools, _covers_hosts, _denies_fewer_hosts, _covers_packages)
_COMPARISONS: Mapping[str, Comparison | None] = {
    "on_reload": None,
    "imports.default": _covers_imports,
    "imports.allowed": _covers_imports,
    "imports.ask": None,  # with "*" in `allowed` it narrows, without it widens
    "imports.denied": _denies_fewer,
    "tools.allowed": _covers_tools,
    "tools.ask": None,
    "sandbox.backends": _serves_more,
    "sandbox.fork_server": _forks_more,
    "network.default": _covers_hosts,
    "network.allowed": _covers_hosts,
    "network.ask": _covers_hosts,
    "network.denied": _denies_fewer_hosts,
    "network.secrets": None,
    "network.audit": None,
    "packages.allowed": _covers_packages,
    "packages.ask": None,
    "approvals.wait_s": None,
    "packages.lock": None,
    "packages.exclude_newer": _counts_newer,
    "packages.wheels_only": None,
    "packages.imports": None,
    "audit.code": None,
    "audit.fail_closed": _less,
    "audit.view": lambda old, new: VIEWS.index(old) <= VIEWS.index(new),
}


def _comparison(key: str) -> Comparison | None:
    return _COMPARISONS.get(key, _more)


def _shown(value: Any, unset: str = "not set") -> str:
    if value is None:
        return unset
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(_secret(each) if isinstance(each, Mapping) else str(each) for each in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _secret(table: Mapping[str, Any]) -> str:
    asked = " ".join(part for part in (", ".join(table["methods"]), ", ".join(table["paths"])) if part)
    return f"{table['header']}: {table['value']} for {table['host']}" + (f" ({asked})" if asked else "")
