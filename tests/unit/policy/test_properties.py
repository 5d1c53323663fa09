"""No request, however built, gets more than its profile grants.

Grants are compared with the profile by the test's own rules, not by those of the policy: imports by brute force over
modules, everything else field by field.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from smolagents.local_python_executor import check_import_authorized

from executor_server.core import LANGUAGE_RULES
from executor_server.core.errors import InvalidRequest, PolicyViolation
from executor_server.core.model import ExecutionLimits, Limits, Principal, SessionSpec, ShippedTool, ToolSpec
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile
from executor_server.policy.limits_table import DefaultLimits, ExecutionLimitValues, MaxLimits
from executor_server.policy.profile import Profile
from executor_server.policy.requested import RequestedLimits, RequestedSession
from executor_server.policy.session_rules import check_file_get, check_file_put, check_tools, execution_limits
from tests.support.rounds import rounds

ALICE = Principal("alice", "token")
IMAGES = ("base", "data", "web")
LIMITS = [each.name for each in fields(Limits)]
EXECUTION_LIMITS = [each.name for each in fields(ExecutionLimits)]
TIMES = {name for name in LIMITS if name.endswith("_s")}
MINIMA = {"memory_bytes": 2**25, "processes": 4, "disk_bytes": 2**16, "max_files": 64, "output_bytes": 2}
MODULES = [".".join(parts) for depth in (1, 2, 3) for parts in itertools.product("abc", repeat=depth)]

# -- what a profile can be

dotted_names = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join)
patterns = st.one_of(dotted_names, dotted_names.map(lambda name: f"{name}.*"), st.just("*"))
some_patterns = st.lists(patterns, max_size=3).map(tuple)
counts = st.none() | st.integers(1, 10)


def values_of(name: str, most: float) -> st.SearchStrategy[Any]:
    least = MINIMA.get(name, 0.001 if name in TIMES else 1)
    return st.floats(least, most) if name in TIMES else st.integers(int(least), int(most))


@st.composite
def limits_tables(draw: st.DrawFn) -> dict[str, Any]:
    built_in = {name: getattr(MaxLimits(), name) for name in LIMITS}
    most = {name: draw(st.just(value) | values_of(name, value)) for name, value in built_in.items()}
    default = {name: draw(values_of(name, most[name])) for name in LIMITS}
    execution_max = {n: draw(st.none() | values_of(n, most[n])) for n in EXECUTION_LIMITS}
    execution_default = {
        n: draw(st.none() | values_of(n, min(default[n], execution_max[n] or math.inf))) for n in EXECUTION_LIMITS
    }
    return {
        "default": default,
        "max": most,
        "execution_default": execution_default,
        "execution_max": execution_max,
        "cpus": draw(st.none() | st.floats(0.01, 1024)),
    }


profiles = st.fixed_dictionaries(
    {
        "imports": st.fixed_dictionaries({"default": some_patterns, "allowed": some_patterns, "denied": some_patterns}),
        "language": st.fixed_dictionaries(
            {
                "preset": st.sampled_from(["standard", "strict"]),
                **{rule: st.none() | st.booleans() for rule in LANGUAGE_RULES},
            }
        ),
        "limits": limits_tables(),
        "sandbox": st.fixed_dictionaries(
            {
                "images": st.none() | st.lists(st.sampled_from([*IMAGES, "gone"]), max_size=3).map(tuple),
                "backends": st.sampled_from([None, ("local", "docker"), ("docker", "local"), ("local",), ("docker",)]),
                "pull_images": st.booleans(),
            }
        ),
        "tools": st.fixed_dictionaries(
            {
                "placements": st.sampled_from([(), ("host",), ("sandbox",), ("host", "sandbox")]),
                "allowed": st.lists(st.sampled_from(["*", "ab*", "abc", "x"]), max_size=2).map(tuple),
            }
        ),
        "files": st.fixed_dictionaries(
            {
                "max_put_bytes": st.integers(1, 100),
                "max_get_bytes": st.integers(1, 100),
                "max_puts": counts,
                "max_gets": counts,
            }
        ),
        "audit": st.fixed_dictionaries(
            {"code": st.sampled_from(["none", "hash", "full"]), "fail_closed": st.booleans()}
        ),
    }
).map(Profile.model_validate)

# -- what a request can be

wild_numbers = st.sampled_from(
    [0, -1, 1, 4, 10**6, 10**18, 2**64, 10**5000, 0.0, -0.0, 0.5, 30.0, 1e300, math.nan, math.inf, -math.inf]
)
wild_texts = st.one_of(
    st.sampled_from(["", "../x", "a b", "\0", "\ud800", "\x1b[2J", "é" * 300, "x" * 100_000]), st.text(max_size=8)
)


def requested_limits(wild: bool) -> st.SearchStrategy[RequestedLimits]:
    def one(name: str) -> st.SearchStrategy[Any]:
        sane = values_of(name, getattr(MaxLimits(), name) * 2)
        return sane | wild_numbers if wild else sane

    names = st.sets(st.sampled_from(LIMITS), max_size=2)  # with more of them nearly everything would be refused
    return names.flatmap(lambda chosen: st.builds(RequestedLimits, **{name: one(name) for name in chosen}))


sane_requests = st.builds(
    RequestedSession,
    image=st.sampled_from(["", *IMAGES]),
    backend=st.sampled_from(["", "local"]),
    authorized_imports=some_patterns,
    limits=requested_limits(wild=False),
)
wild_requests = st.builds(
    RequestedSession,
    image=st.sampled_from(["", *IMAGES, "gone"]) | wild_texts,
    backend=st.sampled_from(["", "local", "docker"]) | wild_texts,
    network=st.lists(wild_texts, max_size=2).map(tuple) | st.just(("h",) * 1000),
    packages=st.lists(wild_texts, max_size=2).map(tuple) | st.just(("p",) * 1000),
    authorized_imports=st.lists(patterns | wild_texts, max_size=3).map(tuple) | st.just(("a",) * 10**6),
    limits=requested_limits(wild=True),
    labels=st.dictionaries(wild_texts, wild_texts, max_size=3) | st.just({str(n): "" for n in range(10_000)}),
    prelude=wild_texts | st.just("x" * 10**6),
)


def policy_of(profile: Profile) -> Policy:
    file = PolicyFile(version="1", default="p", profiles={"p": profile})
    return Policy(file, images=IMAGES, backend="local", orphan_time_s=600.0)


def granted(profile: Profile, request: RequestedSession) -> SessionSpec | None:
    """Returns the grant; any error except the two refusals fails the test."""
    try:
        return policy_of(profile).decide(ALICE, request)
    except (InvalidRequest, PolicyViolation) as refusal:
        assert len(refusal.message) < 300_000
        return None


# -- what may be granted


def denies(patterns: tuple[str, ...], module: str) -> bool:
    stems = [pattern.removesuffix(".*") for pattern in patterns]
    return any(stem == "*" or module == stem or module.startswith(f"{stem}.") for stem in stems)


def importable(authorized: tuple[str, ...], denied: tuple[str, ...]) -> set[str]:
    return {
        module
        for module in MODULES
        if any(check_import_authorized(module, [each]) for each in authorized) and not denies(denied, module)
    }


def assert_within(profile: Profile, spec: SessionSpec) -> None:
    ceilings, sandbox = profile.limits.max, spec.sandbox
    for name in LIMITS:
        assert 0 < getattr(spec.limits, name) <= getattr(ceilings, name)
    for name in EXECUTION_LIMITS:
        most = getattr(spec.execution_max, name)
        assert getattr(spec.execution_default, name) <= most <= getattr(spec.limits, name)
        assert most <= (getattr(profile.limits.execution_max, name) or math.inf)
    assert sandbox.memory_bytes >= MINIMA["memory_bytes"]
    for name in ("memory_bytes", "processes", "disk_bytes"):
        assert getattr(sandbox, name) <= getattr(ceilings, name)
    assert (sandbox.cpus or math.inf) <= (profile.limits.cpus or math.inf)
    assert sandbox.image in IMAGES
    assert profile.sandbox.images is None or sandbox.image in profile.sandbox.images
    assert profile.sandbox.backends is None or "local" in profile.sandbox.backends
    assert sandbox.backends == ("local",)
    imports = profile.imports
    assert set(imports.denied) <= set(spec.denied_imports)
    assert importable(spec.authorized_imports, spec.denied_imports) <= importable(
        (*imports.default, *imports.allowed), imports.denied
    )
    for rule in LANGUAGE_RULES:
        permitted = getattr(profile.language, rule)
        if permitted is False or (permitted is None and profile.language.preset == "strict"):
            assert rule in spec.refused_language
    assert spec.tools.placements == profile.tools.placements
    assert spec.tools.allowed == profile.tools.allowed
    for key, value in profile.files.model_dump().items():
        assert getattr(spec.files, key) == value
    assert (spec.audit.code, spec.audit.fail_closed) == (profile.audit.code, profile.audit.fail_closed)


@given(profile=profiles, request=st.one_of(sane_requests, wild_requests))
@settings(max_examples=rounds(300, 40))
def test_no_request_gets_a_spec_outside_its_profiles_ceilings(profile: Profile, request: RequestedSession) -> None:
    spec = granted(profile, request)
    if spec is None:
        return
    assert_within(profile, spec)
    assert spec.sandbox.may_pull <= profile.sandbox.pull_images
    assert spec.sandbox.policy == spec.policy.fingerprint == policy_of(profile).fingerprint
    assert not request.network and not request.packages
    asked = {name: getattr(request.limits, name) for name in LIMITS}
    for name, value in asked.items():  # and what is granted is what was asked for
        expected = getattr(profile.limits.default, name) if value is None else value
        assert getattr(spec.limits, name) == expected


@given(profile=profiles, request=sane_requests, data=st.data())
def test_what_is_granted_is_granted_too_when_less_is_asked_for(
    profile: Profile, request: RequestedSession, data: st.DataObject
) -> None:
    if granted(profile, request) is None:
        return
    lower = {
        name: data.draw(values_of(name, value))
        for name in LIMITS
        if (value := getattr(request.limits, name)) is not None
    }
    fewer = tuple(pattern for pattern in request.authorized_imports if data.draw(st.booleans()))
    less = replace(request, limits=replace(request.limits, **lower), authorized_imports=fewer)
    spec = granted(profile, less)
    assert spec is not None
    assert all(getattr(spec.limits, name) == value for name, value in lower.items())


@given(profile=profiles, request=sane_requests, asked=requested_limits(wild=True))
def test_no_execution_gets_more_than_its_session_and_its_profile(
    profile: Profile, request: RequestedSession, asked: RequestedLimits
) -> None:
    spec = granted(profile, request)
    if spec is None:
        return
    try:
        limits = execution_limits(spec, asked)
    except (InvalidRequest, PolicyViolation):
        return
    for name in EXECUTION_LIMITS:
        most = getattr(profile.limits.execution_max, name)
        assert 0 < getattr(limits, name) <= min(getattr(spec.limits, name), math.inf if most is None else most)


@given(
    profile=profiles,
    asked=st.lists(st.tuples(st.sampled_from(["ab", "abc", "abcd", "x", "xy"]), st.booleans()), max_size=3),
)
def test_no_tool_is_had_that_the_profile_does_not_name(profile: Profile, asked: list[tuple[str, bool]]) -> None:
    spec = granted(profile, RequestedSession())
    if spec is None:
        return
    shipped = ShippedTool(code=b"")
    tools = [ToolSpec(name, "", (), False, shipped if in_sandbox else None) for name, in_sandbox in asked]
    allowed = {"*": {"ab", "abc", "abcd", "x", "xy"}, "ab*": {"ab", "abc", "abcd"}, "abc": {"abc"}, "x": {"x"}}
    had = set().union(*(allowed[pattern] for pattern in profile.tools.allowed))
    places = {"sandbox" if in_sandbox else "host" for _, in_sandbox in asked}
    may = places <= set(profile.tools.placements) and {name for name, _ in asked} <= had
    try:
        check_tools(spec, tools)
        assert may
    except PolicyViolation:
        assert not may


@given(profile=profiles, size_bytes=st.integers(0, 150), so_far=st.integers(0, 15))
def test_no_file_travels_that_is_too_large_or_one_too_many(profile: Profile, size_bytes: int, so_far: int) -> None:
    spec = granted(profile, RequestedSession())
    if spec is None:
        return
    rules = profile.files
    for check, most_bytes, most in (
        (check_file_put, rules.max_put_bytes, rules.max_puts),
        (check_file_get, rules.max_get_bytes, rules.max_gets),
    ):
        may = size_bytes <= most_bytes and (most is None or so_far < most)
        try:
            check(spec, size_bytes, so_far)
            assert may
        except PolicyViolation:
            assert not may


@given(old=profiles, new=profiles, request=sane_requests)
@settings(max_examples=rounds(200, 30))
def test_a_tightened_session_has_no_more_than_before_nor_than_the_new_profile(
    old: Profile, new: Profile, request: RequestedSession
) -> None:
    before = granted(old, request)
    if before is None:
        return
    after = policy_of(new).tightened(ALICE, before, "local")
    if isinstance(after, str):
        return
    assert_within(new, after)
    assert after.sandbox == before.sandbox
    for name in LIMITS:
        assert getattr(after.limits, name) <= getattr(before.limits, name)
    for name in EXECUTION_LIMITS:
        assert getattr(after.execution_max, name) <= getattr(before.execution_max, name)
        assert getattr(after.execution_default, name) <= getattr(before.execution_default, name)
    assert importable(after.authorized_imports, after.denied_imports) <= importable(
        before.authorized_imports, before.denied_imports
    )
    assert set(after.refused_language) >= set(before.refused_language)
    assert after.policy.fingerprint == policy_of(new).fingerprint


@given(profile=profiles, request=sane_requests)
def test_tightening_to_the_same_profile_changes_nothing(profile: Profile, request: RequestedSession) -> None:
    spec = granted(profile, request)
    if spec is None:
        return
    after = policy_of(profile).tightened(ALICE, spec, "local")
    assert isinstance(after, SessionSpec)
    before_modules = importable(spec.authorized_imports, spec.denied_imports)
    assert importable(after.authorized_imports, after.denied_imports) == before_modules
    assert replace(after, authorized_imports=()) == replace(spec, authorized_imports=())


def test_the_limits_of_the_model_and_of_the_file_are_the_same() -> None:
    assert LIMITS == list(DefaultLimits.model_fields) == [each.name for each in fields(RequestedLimits)]
    assert list(ExecutionLimitValues.model_fields) == EXECUTION_LIMITS
