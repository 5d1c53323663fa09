"""The policy grants what was asked for, or refuses it and says all that is too much."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smolagents.local_python_executor import check_import_authorized

from executor_server.config import PoolSection
from executor_server.errors import InvalidRequest, PolicyViolation, Reason
from executor_server.import_patterns import is_covered
from executor_server.model import Limits, Principal
from executor_server.policy import Policy
from executor_server.policy_file import ImportsTable, PolicyFile, Profile
from executor_server.requested import (
    MAX_LABELS,
    MAX_PRELUDE_BYTES,
    MAX_REQUESTED_IMPORTS,
    RequestedLimits,
    RequestedSession,
)
from executor_server.session_rules import execution_limits

ALICE = Principal("local", "token")
LIMIT_NAMES = [f.name for f in fields(Limits)]


def make_policy(allowed: tuple[str, ...] = ("*",)) -> Policy:
    profile = Profile(imports=ImportsTable(allowed=allowed))
    file = PolicyFile(version="1", default="default", profiles={"default": profile})
    return Policy(file, images=["base", "data"], backend="local", orphan_time_s=600.0)


def test_asking_for_nothing_gets_the_defaults() -> None:
    spec = make_policy().decide(ALICE, RequestedSession())
    assert spec.limits == make_policy().describe(ALICE).default_limits
    assert spec.sandbox.image == "base"
    assert spec.authorized_imports == make_policy().describe(ALICE).default_imports
    assert spec.sandbox == make_policy().warm_sandboxes(PoolSection())[0].spec


def test_what_is_asked_for_within_the_policy_is_granted() -> None:
    request = RequestedSession(
        image="data",
        authorized_imports=("numpy.*", "math"),
        limits=RequestedLimits(wall_time_s=1.5, memory_bytes=64 << 20),
        labels={"team": "ä"},
        prelude="x = 1",
    )
    spec = make_policy().decide(ALICE, request)
    assert (spec.sandbox.image, spec.sandbox.memory_bytes, spec.limits.wall_time_s) == ("data", 64 << 20, 1.5)
    assert spec.authorized_imports.count("math") == 1
    assert "numpy.*" in spec.authorized_imports
    assert (spec.prelude, spec.labels) == ("x = 1", {"team": "ä"})


def test_every_violation_is_listed() -> None:
    request = RequestedSession(
        authorized_imports=("os", "numpy", "math", "*"),
        limits=RequestedLimits(wall_time_s=1e9, operations=2**63),
    )
    with pytest.raises(PolicyViolation) as caught:
        make_policy(("numpy.*",)).decide(ALICE, request)
    assert [(v.field, v.requested) for v in caught.value.violations] == [
        ("limits.wall_time_s", "1,000,000,000"),
        ("limits.operations", "9,223,372,036,854,775,808"),
        ("authorized_imports", "os"),
        ("authorized_imports", "*"),
    ]


@pytest.mark.parametrize("name", LIMIT_NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, -1])
def test_a_limit_that_means_nothing_is_refused_as_a_field(name: str, value: float) -> None:
    request = RequestedSession(limits=replace(RequestedLimits(), **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        make_policy().decide(ALICE, request)
    assert caught.value.field == f"limits.{name}"


@pytest.mark.parametrize("name", LIMIT_NAMES)
def test_no_limit_can_be_raised_above_its_ceiling(name: str) -> None:
    ceiling = getattr(make_policy().describe(ALICE).max_limits, name)
    at = RequestedSession(limits=replace(RequestedLimits(), **{name: ceiling}))
    assert getattr(make_policy().decide(ALICE, at).limits, name) == ceiling
    above = RequestedSession(limits=replace(RequestedLimits(), **{name: ceiling * 2}))
    with pytest.raises(PolicyViolation):
        make_policy().decide(ALICE, above)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (RequestedSession(limits=RequestedLimits(memory_bytes=1000)), "limits.memory_bytes"),
        (RequestedSession(limits=RequestedLimits(processes=1)), "limits.processes"),
        (RequestedSession(authorized_imports=("numpy", "os; import sys")), "authorized_imports[1]"),
        (RequestedSession(authorized_imports=("",)), "authorized_imports[0]"),
        (RequestedSession(authorized_imports=("numpy.*.x",)), "authorized_imports[0]"),
        (RequestedSession(authorized_imports=("a" * 201,)), "authorized_imports[0]"),
        (RequestedSession(authorized_imports=("a",) * (MAX_REQUESTED_IMPORTS + 1)), "authorized_imports"),
        (RequestedSession(labels={str(n): "" for n in range(MAX_LABELS + 1)}), "labels"),
        (RequestedSession(labels={"": "x"}), "labels"),
        (RequestedSession(labels={"x": "y" * 257}), "labels"),
        (RequestedSession(prelude="x" * (MAX_PRELUDE_BYTES + 1)), "prelude"),
        (RequestedSession(prelude="a\0b"), "prelude"),
    ],
)
def test_nonsense_is_refused_with_its_field(request_: RequestedSession, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_policy().decide(ALICE, request_)
    assert caught.value.field == field
    assert caught.value.reason is Reason.INVALID_FIELD


def test_an_unknown_image_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidRequest, match="base, data") as caught:
        make_policy().decide(ALICE, RequestedSession(image="../base"))
    assert caught.value.reason is Reason.UNKNOWN_IMAGE


def test_an_execution_gets_the_sessions_limits_or_less() -> None:
    spec = make_policy().decide(ALICE, RequestedSession())
    chosen = execution_limits(spec, RequestedLimits(wall_time_s=2.0))
    assert (chosen.wall_time_s, chosen.operations) == (2.0, spec.limits.operations)


@pytest.mark.parametrize(
    "limits",
    [
        RequestedLimits(memory_bytes=64 << 20),
        RequestedLimits(cpu_time_s=math.nan),
    ],
)
def test_an_execution_cannot_ask_for_what_means_nothing(limits: RequestedLimits) -> None:
    spec = make_policy().decide(ALICE, RequestedSession())
    with pytest.raises(InvalidRequest):
        execution_limits(spec, limits)


@pytest.mark.parametrize("limits", [RequestedLimits(wall_time_s=61.0), RequestedLimits(operations=2**64 - 1)])
def test_an_execution_cannot_have_more_than_its_session(limits: RequestedLimits) -> None:
    spec = make_policy().decide(ALICE, RequestedSession())
    with pytest.raises(PolicyViolation):
        execution_limits(spec, limits)


@pytest.mark.parametrize(
    ("asked", "granted", "covered"),
    [
        ("numpy", "numpy", True),
        ("numpy", "numpy.*", True),
        ("numpy.random", "numpy.*", True),
        ("numpy.random.*", "numpy.*", True),
        ("numpy.*", "numpy", False),
        ("numpy.random", "numpy", False),
        ("os", "os.path", True),
        ("os.*", "os.path", False),
        ("os.*", "os.path.*", False),
        ("reprlib", "re", False),
        ("re", "reprlib", False),
        ("*", "*", True),
        ("*", "numpy.*", False),
        ("numpy.*", "*", True),
    ],
)
def test_a_pattern_is_covered_by_whole_components(asked: str, granted: str, covered: bool) -> None:
    assert is_covered(asked, [granted]) is covered


parts = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join)
patterns = st.one_of(parts, parts.map(lambda p: p + ".*"), st.just("*"))


@given(asked=patterns, granted=patterns, module=parts)
def test_what_is_covered_never_authorizes_more_than_the_grant(asked: str, granted: str, module: str) -> None:
    """Against smolagents' own meaning of a pattern."""
    if is_covered(asked, [granted]) and check_import_authorized(module, [asked]):
        assert check_import_authorized(module, [granted])
