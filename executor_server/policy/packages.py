"""The packages of a session: what a profile grants of the requested ones, and what remains when the policy changes.

Pure functions. A granted package has the requested bounds and the profile's, so the installed version is within both.
Its dependencies come with it: its authors choose them, not the client. The client chooses extras, so each extra must be
allowed by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from executor_api.distributions import candidates, is_pythons
from executor_server.core import PackagesSpec, Violation, ViolationKind
from executor_server.policy.forms import value_of
from executor_server.policy.lock_file import LockFile
from executor_server.policy.packages_table import ANY_PACKAGE, PackagesTable
from executor_server.policy.requirement import BadRequirement, Requirement, read_granted, read_requirement
from executor_server.policy.violations import above_ceiling, listed, not_allowed, number, rule_of, shortened

CONFIGURED_INDEX = "environments.index_url"
"""The configuration key behind a refusal that no policy can change."""


@dataclass(frozen=True)
class PackagesSummary:
    """The packages that a profile's sessions may request."""

    allowed: tuple[str, ...] = ()  # with bounds; "*" if every package of the index may be requested
    locked: tuple[str, ...] = ()  # "name==version" of the lock
    auto: bool = False
    max_requirements: int = 0
    max_environment_bytes: int = 0
    exclude_newer_s: float | None = None
    ask: tuple[str, ...] = ()  # as `allowed`; these need an approval


def packages_summary(table: PackagesTable, *, own_index: bool) -> PackagesSummary:
    if not table.has_packages:
        return PackagesSummary()
    return value_of(
        PackagesSummary,
        table,
        allowed=tuple(text for text in table.allowed if text != ANY_PACKAGE or own_index),
        ask=tuple(text for text in table.ask if text != ANY_PACKAGE or own_index),
        locked=tuple(map(str, table.lock.distributions)) if table.lock is not None else (),
        exclude_newer_s=None if table.lock is not None else table.exclude_newer_s,
    )


def packages_spec(table: PackagesTable, asked: Sequence[Requirement]) -> PackagesSpec | None:
    """Returns the approved packages, for requirements without violations; None if there are none."""
    if not asked:
        return None
    if table.lock is not None:
        return _whole(table, table.lock)
    texts = sorted({_bounded(table, each).text for each in asked})
    return PackagesSpec(
        tuple(texts), exclude_newer_s=table.exclude_newer_s, max_environment_bytes=table.max_environment_bytes
    )


def _whole(table: PackagesTable, lock: LockFile) -> PackagesSpec:
    """Returns one environment for all sessions: the packages of a lock belong together."""
    return PackagesSpec((), str(lock.file), lock.sha256, None, table.max_environment_bytes)


def _bounded(table: PackagesTable, asked: Requirement) -> Requirement:
    bound = _bound_of(table, asked)
    return asked if bound is None else asked.within((), bound.specifiers)


def _bound_of(table: PackagesTable, asked: Requirement) -> Requirement | None:
    """The entry of `allowed` or `ask` that names the package; None when at most a "*" stands for it."""
    return table.bounds.get(asked.name) or table.ask_bounds.get(asked.name)


def needs_approval(table: PackagesTable, asked: Requirement) -> bool:
    """True for a package, without violations, that is granted after an approval only."""
    if asked.name in table.bounds or table.lock is not None:
        return False
    return asked.name in table.ask_bounds or not table.allows_any


# ---------------------------------------------------------------------------------------------------------------------
# Violations. `name` is the profile's. `own_index`: the daemon has an index of its own, so "*" stands for its content.


def package_violations(
    name: str, table: PackagesTable, asked: Sequence[Requirement], *, own_index: bool
) -> Iterator[Violation]:
    """Yields a violation for each package that the profile does not grant, with what it grants instead."""
    for each in asked:
        violation = _lock_violation(name, table.lock, each) if table.lock is not None else None
        if table.lock is None:
            violation = _violation(name, table, each, own_index=own_index)
        if violation is not None:
            yield violation
    names = {each.name for each in asked}
    if table.has_packages and len(names) > table.max_requirements:
        yield above_ceiling("packages", len(names), table.max_requirements, rule_of(name, "packages.max_requirements"))


def _violation(name: str, table: PackagesTable, asked: Requirement, *, own_index: bool) -> Violation | None:
    bound = _bound_of(table, asked)
    rule = rule_of(name, "packages.ask" if asked.name in table.ask_bounds else "packages.allowed")
    if bound is None and (table.allows_any or table.asks_any):
        return None if own_index else _index_violation(table, asked)
    if bound is None:
        return not_allowed("packages", asked.text, (*table.allowed, *table.ask), rule, "none")
    within = asked.within((), bound.specifiers).versions
    # Bounds that exclude each other already go to the resolver, which explains them.
    is_outside = within.is_unsatisfiable() and not asked.versions.is_unsatisfiable()
    if is_outside or not set(asked.extras) <= set(bound.extras):
        return not_allowed("packages", asked.text, [bound.text], rule)
    return None


def _index_violation(table: PackagesTable, asked: Requirement) -> Violation:
    named = listed((text for text in (*table.allowed, *table.ask) if text != ANY_PACKAGE), "none")
    allowed = f"{named}; others where the daemon has an index of its own"
    return Violation("packages", ViolationKind.UNSUPPORTED, shortened(asked.text), allowed, CONFIGURED_INDEX)


def _lock_violation(name: str, lock: LockFile, asked: Requirement) -> Violation | None:
    rule, versions = rule_of(name, "packages.lock"), lock.versions_of(asked.name)
    if not versions:
        names = dict.fromkeys(each.name for each in lock.distributions)
        return not_allowed("packages", asked.text, names, rule, "none")
    if asked.extras or not any(asked.versions.contains(each, prereleases=True) for each in versions):
        return not_allowed("packages", asked.text, (f"{asked.name}=={each}" for each in versions), rule)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Modules that are authorized and missing


def with_found(
    table: PackagesTable, spec: PackagesSpec | None, modules: Iterable[str], *, own_index: bool
) -> PackagesSpec | None:
    """Adds the packages of missing modules that may be requested, up to `max_requirements`; None if there are none."""
    if table.lock is not None:
        locked = {each.name for each in table.lock.distributions}
        found = any(name in locked for module in modules for name in _candidates(table, module))
        return _whole(table, table.lock) if found and spec is None else None
    asked = tuple(map(read_granted, spec.requirements)) if spec is not None else ()
    names = {each.name for each in asked}
    added: dict[str, Requirement] = {}
    for module in modules:
        options = _candidates(table, module)
        if names.isdisjoint(options) and added.keys().isdisjoint(options):
            added |= _first_granted(table, options, own_index=own_index)
    room = max(table.max_requirements - len(names), 0)
    more = tuple(added.values())[:room]
    return packages_spec(table, (*asked, *more)) if more else None


def _candidates(table: PackagesTable, module: str) -> tuple[str, ...]:
    """Names of packages that a module may be in: none for modules of Python, and for texts that are no such name."""
    if is_pythons(module):
        return ()
    return tuple(name for name in map(_name_of, candidates(module, table.imports)) if name)


def _name_of(text: str) -> str:
    """The text as the name of a package; empty when it can't be one."""
    try:
        return read_requirement(text).name
    except BadRequirement:
        return ""


def _first_granted(table: PackagesTable, names: Sequence[str], *, own_index: bool) -> dict[str, Requirement]:
    for name in names:
        asked = Requirement(name)
        if _violation("", table, asked, own_index=own_index) is None and not needs_approval(table, asked):
            return {name: asked}
    return {}


# ---------------------------------------------------------------------------------------------------------------------
# Tightening


def why_packages_must_go(table: PackagesTable, spec: PackagesSpec, *, own_index: bool) -> str | None:
    """The reason why packages that a sandbox has are not allowed any more; None when they are."""
    if spec.max_environment_bytes > table.max_environment_bytes:
        most = number(table.max_environment_bytes)
        return f"its packages may take {number(spec.max_environment_bytes)} bytes, and the policy now allows {most}"
    lock_sha256 = table.lock.sha256 if table.lock is not None else ""
    if spec.lock_sha256 != lock_sha256:
        return "its packages are not from the policy's present lock"
    if lock_sha256:
        return None
    if (table.exclude_newer_s or 0) > (spec.exclude_newer_s or 0):
        return "its packages may be newer than the policy now allows"
    if len(spec.requirements) > table.max_requirements:
        return f"it has {len(spec.requirements)} packages, and the policy now allows {table.max_requirements}"
    for text in spec.requirements:
        has = read_granted(text)
        bound = _bound_of(table, has)
        is_any = bound is None and (table.allows_any or table.asks_any) and own_index
        if not is_any and (bound is None or not has.is_within(bound)):
            return f"the policy does not allow the package {shortened(text)} any more"
    return None
