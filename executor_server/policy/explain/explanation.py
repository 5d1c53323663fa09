"""Explains why a policy refuses something, and which line of its file a person would have to change.

Each violation names the key behind it. This module finds the line where that key is written: in the profile itself, or
in one that it extends. For a default that is not written, it names the table where the key would go.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from executor_server.core import (
    ExecutorError,
    InvalidRequest,
    PolicyViolation,
    Principal,
    Reason,
    SessionSpec,
    Violation,
    ViolationKind,
    is_covered,
)
from executor_server.core.config import KeyPath, dotted, undotted
from executor_server.policy.backend_choice import CONFIGURED_BACKEND
from executor_server.policy.decide import Policy
from executor_server.policy.explain.lines import FreePlace, Line, Lines
from executor_server.policy.explain.question import Question, answer
from executor_server.policy.grants import PolicySummary
from executor_server.policy.hosts import is_covered_host, is_denied_host, pattern_of
from executor_server.policy.inheritance import lineage
from executor_server.policy.network import CONFIGURED_SECRETS
from executor_server.policy.packages import CONFIGURED_INDEX


@dataclass(frozen=True)
class PolicyText:
    """A policy, the text of its file, and that of the configuration; a text is empty when there is no file.

    `config_text` is None if it is not known.
    """

    policy: Policy
    text: str = ""
    config_text: str | None = ""


@dataclass(frozen=True)
class Place:
    """The change that a person would have to make, and its line. Without a line it is not in the file."""

    advice: str
    line: Line | None = None
    is_in_config: bool = False  # the line is one of the configuration
    free_place: FreePlace | None = None  # for a key that is not written


@dataclass(frozen=True)
class Refusal:
    """One reason for a refusal. `violation` is None for a request that no policy could grant."""

    message: str
    place: Place
    violation: Violation | None = None


@dataclass(frozen=True)
class Explanation:
    """The answer. `lineage` is the tenant's profile and those that it extends; empty when it has none.

    `approvals`: what would wait for an approval, if the request is granted.
    """

    lineage: tuple[str, ...]
    granted: SessionSpec | None
    refusals: tuple[Refusal, ...]
    approvals: tuple[Refusal, ...] = ()


def explain(source: PolicyText, tenant: str, question: Question) -> Explanation:
    """Answers a tenant's question by the policy, with the line behind each refusal."""
    written = _Written(source)
    descent = written.lineage(source.policy.profile_name(tenant))
    answered = answer(source.policy, tenant, question)
    refusals = tuple(
        _with_alternative(source.policy, tenant, refusal)
        for error in answered.refusals
        for refusal in _refusals(written, question, error)
    )
    if refusals:
        return Explanation(descent, None, refusals)
    approvals = (
        Refusal(f"{each.kind} {each.what}: waits for an approval", written.place(undotted(each.rule)))
        for each in answered.to_ask
    )
    return Explanation(descent, answered.spec, (), tuple(approvals))


def places(source: PolicyText, rules: Iterable[str]) -> dict[str, Place]:
    """Returns the places of keys of profiles, as violations name them; without those that have no line."""
    written = _Written(source)
    found = {}
    for rule in rules:
        try:
            path = undotted(rule)
        except ValueError:  # no key is written so
            continue
        if written.has_profile(path) and (place := written.place(path)).line is not None:
            found[rule] = place
    return found


def _refusals(written: _Written, question: Question, error: ExecutorError) -> Iterator[Refusal]:
    if not isinstance(error, PolicyViolation):
        yield Refusal(error.message, _place_of_invalid(written, error))
        return
    for violation in error.violations:
        message = f"{violation.field}: asked for {violation.requested}, allowed is {violation.allowed}"
        yield Refusal(message, _place(written, question, violation), violation)


# Fields for what code does, and the fields of the session's request that could ask for it.
_ASKED_BY = {"imports": "authorized_imports", "connections": "network"}


def _with_alternative(policy: Policy, tenant: str, refusal: Refusal) -> Refusal:
    """Adds to the advice for a refused import or connection that the session may ask for it, if it may."""
    violation = refusal.violation
    asked_by = None if violation is None else _ASKED_BY.get(violation.field)
    if violation is None or asked_by is None or violation.kind is not ViolationKind.NOT_ALLOWED:
        return refusal
    summary = policy.describe(Principal(tenant, "question"))
    may_ask = _may_ask_for_import if violation.field == "imports" else _may_ask_for_host
    if not may_ask(summary, violation.requested):
        return refusal
    advice = f"{refusal.place.advice}; or the session asks for it, which it may ({asked_by} of the request)"
    return replace(refusal, place=replace(refusal.place, advice=advice))


def _may_ask_for_import(summary: PolicySummary, module: str) -> bool:
    return is_covered(module, summary.allowed_imports)


def _may_ask_for_host(summary: PolicySummary, host: str) -> bool:
    network, pattern = summary.network, pattern_of(host)
    return is_covered_host(pattern, network.allowed) and not is_denied_host(pattern, network.rules.denied)


def _place_of_invalid(written: _Written, error: ExecutorError) -> Place:
    if error.reason is Reason.UNKNOWN_IMAGE:
        return Place("the configuration has no such image, so no policy can grant it")
    assert isinstance(error, InvalidRequest), error
    return Place("the request is invalid, so no policy could grant it")


def _place(written: _Written, question: Question, violation: Violation) -> Place:
    if violation.rule in (CONFIGURED_BACKEND, CONFIGURED_INDEX, CONFIGURED_SECRETS):
        return written.place_in_config(undotted(violation.rule))
    place = written.place(undotted(violation.rule))
    if violation.rule.endswith(".network.secrets"):
        return replace(place, advice=f"{place.advice}; or another backend first (sandbox.backends), which sets headers")
    limit = violation.field.removeprefix("limits.")
    if ".limits.default." in violation.rule and getattr(question.limits, limit, None) is not None:
        return Place(f"nothing in the policy: the session itself requests no more (limits.{limit} of the request)")
    return place


_ADVICE = {
    "below": "to change that, write `{} = …` below this line",
    "within": "to change that, write `{} = …` into the table of this line",
    "new": "to change that, write it under `{}`",
}


class _Written:
    """Finds the lines on which the keys of a policy are written."""

    def __init__(self, source: PolicyText) -> None:
        self._lines = Lines(source.text)
        self._config_lines = None if source.config_text is None else Lines(source.config_text)
        profiles = tomllib.loads(source.text).get("profiles")
        self._profiles: Mapping[str, Any] = profiles if profiles is not None else {}
        self._is_built_in = not self._profiles

    def lineage(self, profile: str | None) -> tuple[str, ...]:
        if profile is None or self._is_built_in:
            return () if profile is None else (profile,)
        return tuple(lineage(profile, self._profiles))

    def has_profile(self, rule: KeyPath) -> bool:
        """True for a path of a key in a profile that is written."""
        return len(rule) > 2 and rule[0] == "profiles" and rule[1] in self._profiles

    def place(self, rule: KeyPath) -> Place:
        if self._is_built_in:
            return Place(f"the built-in policy says so; a policy file could say {dotted(rule)}")
        if rule[0] != "profiles":
            return self._place_at_top(rule)
        profile, key = str(rule[1]), rule[2:]
        for asked in (key, *_deciding_instead(key)):
            for each in lineage(profile, self._profiles):
                line = self._lines.of_key(("profiles", each, *asked))
                if line is not None:
                    whose = f"profile {each}" if each == profile else f"profile {each}, which {profile} extends"
                    return Place(f"{dotted(asked)} of {whose}", line)
        return self._place_of_default(rule)

    def place_in_config(self, key: KeyPath) -> Place:
        line = self._config_lines.of_key(key) if self._config_lines is not None else None
        unset = "" if line is not None or self._config_lines is None else ", which is not set"
        return Place(f"{dotted(key)} of the daemon's configuration{unset}; no policy can change it", line, True)

    def _place_at_top(self, rule: KeyPath) -> Place:
        line = self._lines.of_key(rule)
        if line is not None:
            return Place(dotted(rule), line)
        return Place(f"{dotted(rule)}, which is not written; it would go above this line", self._lines.first_header())

    def _place_of_default(self, rule: KeyPath) -> Place:
        free = self._lines.free_place_for(rule)
        assert free is not None, rule  # the profile itself is written
        advice = f"{dotted(rule[2:])} is not written, so it has its default; {_ADVICE[free.kind].format(free.write)}"
        return Place(advice, free.line, free_place=free)


def _deciding_instead(key: KeyPath) -> Iterator[KeyPath]:
    """The key that decides where another is not written."""
    if key[0] == "language":
        yield ("language", "preset")
