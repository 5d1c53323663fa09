"""The policy grants a request, or refuses it with every violation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smolagents.local_python_executor import check_import_authorized

from executor_server.core.config.config import PoolSection
from executor_server.core.errors import InvalidRequest, PolicyViolation, Reason, Violation, ViolationKind
from executor_server.core.import_patterns import is_covered, is_denied
from executor_server.core.model import Limits, PolicyRef, Principal, SessionSpec, ShippedTool, ToolSpec
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, parse_policy
from executor_server.policy.profile import ImportsTable, Profile
from executor_server.policy.requested import (
    MAX_LABELS,
    MAX_PRELUDE_BYTES,
    MAX_REQUESTED_IMPORTS,
    RequestedLimits,
    RequestedSession,
)
from executor_server.policy.session_rules import check_file_get, check_file_put, check_tools, execution_limits

ALICE = Principal("local", "token")
ABOVE_CEILING, NOT_ALLOWED = ViolationKind.ABOVE_CEILING, ViolationKind.NOT_ALLOWED
DENIED, UNSUPPORTED = ViolationKind.DENIED, ViolationKind.UNSUPPORTED
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


def test_a_repeated_request_is_decided_once_and_another_caller_or_request_for_itself() -> None:
    policy, request = make_policy(), RequestedSession(authorized_imports=("numpy",))
    spec = policy.decide(ALICE, request)
    assert policy.decide(ALICE, replace(request)) is spec
    other = policy.decide(ALICE, RequestedSession(authorized_imports=("math",)))
    assert other == make_policy().decide(ALICE, RequestedSession(authorized_imports=("math",)))
    assert policy.decide(Principal("other", "token"), RequestedSession(authorized_imports=("math",))) is not other
    with pytest.raises(InvalidRequest):
        policy.decide(ALICE, RequestedSession(image="none"))


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


def test_more_imports_are_authorized_as_the_policy_allows() -> None:
    policy = make_policy(("numpy.*", "os"))
    spec = policy.decide(ALICE, RequestedSession(authorized_imports=("os",)))
    more = policy.authorize_imports(ALICE, spec, ("numpy.random",))
    assert more == replace(spec, authorized_imports=tuple(sorted((*spec.authorized_imports, "numpy.random"))))
    assert policy.authorize_imports(ALICE, more, ("numpy.random", "os")) == more
    with pytest.raises(PolicyViolation) as caught:
        policy.authorize_imports(ALICE, spec, ("numpy", "socket", "ctypes"))
    assert [violation.requested for violation in caught.value.violations] == ["socket", "ctypes"]


def test_what_a_session_was_denied_stays_denied_in_it() -> None:
    spec = replace(make_policy().decide(ALICE, RequestedSession()), denied_imports=("os",))
    with pytest.raises(PolicyViolation) as caught:
        make_policy().authorize_imports(ALICE, spec, ("os.path",))
    assert [violation.kind for violation in caught.value.violations] == [DENIED]


def test_a_session_never_has_more_imports_than_its_guest_takes() -> None:
    spec = make_policy().decide(ALICE, RequestedSession())
    with pytest.raises(InvalidRequest, match="1,024 patterns in one session"):
        for batch in range(8):
            spec = make_policy().authorize_imports(ALICE, spec, [f"m{batch}_{n}" for n in range(MAX_REQUESTED_IMPORTS)])
    with pytest.raises(InvalidRequest):
        make_policy().authorize_imports(ALICE, spec, ("not a module",))


def test_imports_are_counted_before_they_are_read() -> None:
    """A client that authorized 690,000 modules held the daemon up for seconds, in which it served nobody."""

    class Unread(list[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("read before it was counted")

    spec = make_policy().decide(ALICE, RequestedSession())
    with pytest.raises(InvalidRequest, match="more than 256 patterns"):
        make_policy().authorize_imports(ALICE, spec, Unread(["m"] * (MAX_REQUESTED_IMPORTS + 1)))


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


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1])
def test_a_limit_that_means_nothing_is_refused_as_a_field(value: float) -> None:
    request = RequestedSession(limits=RequestedLimits(session_time_s=value))
    with pytest.raises(InvalidRequest) as caught:
        make_policy().decide(ALICE, request)
    assert caught.value.field == "limits.session_time_s"


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
    """Compared with smolagents' own meaning of a pattern."""
    if is_covered(asked, [granted]) and check_import_authorized(module, [asked]):
        assert check_import_authorized(module, [granted])


# ---------------------------------------------------------------------------------------------------------------------
# Each violation


def policy_from(text: str, backend: str = "local") -> Policy:
    file = parse_policy(text.encode(), Path("p.toml"))
    return Policy(file, images=["base", "data"], backend=backend, orphan_time_s=600.0)


VIOLATIONS: list[tuple[str, RequestedSession, tuple[str, ViolationKind, str, str, str]]] = [
    (
        "limits = {default.wall_time_s = 1, max.wall_time_s = 2.5}",
        RequestedSession(limits=RequestedLimits(wall_time_s=3.0)),
        ("limits.wall_time_s", ABOVE_CEILING, "3", "at most 2.5", "profiles.a.limits.max.wall_time_s"),
    ),
    (
        "imports = {allowed = ['numpy.*', 'x']}",
        RequestedSession(authorized_imports=("numpyx",)),
        ("authorized_imports", NOT_ALLOWED, "numpyx", "numpy.*, x", "profiles.a.imports.allowed"),
    ),
    (
        "imports = {allowed = []}",
        RequestedSession(authorized_imports=("x",)),
        ("authorized_imports", NOT_ALLOWED, "x", "nothing more than the defaults", "profiles.a.imports.allowed"),
    ),
    (
        "imports = {denied = ['os']}",
        RequestedSession(authorized_imports=("os.path.*",)),
        ("authorized_imports", DENIED, "os.path.*", "nothing of os", "profiles.a.imports.denied"),
    ),
    (
        "sandbox = {images = ['data']}",
        RequestedSession(image="base"),
        ("image", NOT_ALLOWED, "base", "data", "profiles.a.sandbox.images"),
    ),
    (
        "sandbox = {images = ['elsewhere']}",
        RequestedSession(),
        ("image", NOT_ALLOWED, "the default image", "nothing", "profiles.a.sandbox.images"),
    ),
    (
        "sandbox = {backends = ['docker']}",
        RequestedSession(),
        ("backend", NOT_ALLOWED, "local", "docker", "profiles.a.sandbox.backends"),
    ),
    (
        "sandbox = {backends = ['local']}",
        RequestedSession(backend="e2b"),
        ("backend", UNSUPPORTED, "e2b", "local", "server.backend"),
    ),
    (
        "",
        RequestedSession(backend="docker"),
        ("backend", UNSUPPORTED, "docker", "local", "server.backend"),
    ),
    (
        "",
        RequestedSession(network=("example.com",)),
        ("network", NOT_ALLOWED, "example.com", "none", "profiles.a.network.allowed"),
    ),
    (
        "",
        RequestedSession(packages=("requests",)),
        ("packages", NOT_ALLOWED, "requests", "none", "profiles.a.packages.allowed"),
    ),
]


@pytest.mark.parametrize(("profile", "request_", "violation"), VIOLATIONS)
def test_a_violation_says_what_was_asked_what_is_allowed_and_by_which_key(
    profile: str, request_: RequestedSession, violation: tuple[str, ViolationKind, str, str, str]
) -> None:
    policy = policy_from(f"default = 'a'\n[profiles.a]\n{profile}")
    with pytest.raises(PolicyViolation) as caught:
        policy.decide(ALICE, request_)
    assert caught.value.violations == (Violation(*violation),)


def test_a_tenant_without_a_profile_is_refused() -> None:
    policy = policy_from("[profiles.a]\n[tenants]\nbob.profile = 'a'")
    with pytest.raises(PolicyViolation) as caught:
        policy.decide(ALICE, RequestedSession())
    assert caught.value.violations == (Violation("tenant", NOT_ALLOWED, "local", "a tenant that is listed", "default"),)


def test_a_rule_names_its_profile_as_toml_would() -> None:
    policy = policy_from("default = 'a.b'\n[profiles.'a.b']\nsandbox.backends = []")
    with pytest.raises(PolicyViolation) as caught:
        policy.decide(ALICE, RequestedSession())
    assert caught.value.violations[0].rule == 'profiles."a.b".sandbox.backends'


def test_what_a_violation_shows_has_a_bound() -> None:
    allowed = [f"module{number}" for number in range(1000)]
    policy = policy_from(f"default = 'a'\n[profiles.a]\nimports.allowed = {allowed}")
    with pytest.raises(PolicyViolation) as caught:
        policy.decide(ALICE, RequestedSession(authorized_imports=("x" * 200,) * 256))
    assert all(len(each.allowed) <= 256 for each in caught.value.violations)


@pytest.mark.parametrize("text", ["x" * 257, "a\nb", "\x1b[2J", "\ud800"], ids=["long", "lines", "escape", "half"])
@pytest.mark.parametrize("field", ["image", "backend", "network", "packages"])
def test_a_text_that_a_refusal_could_not_show_is_refused_itself(field: str, text: str) -> None:
    value: Any = (text,) if field in ("network", "packages") else text
    with pytest.raises(InvalidRequest) as caught:
        make_policy().decide(ALICE, replace(RequestedSession(), **{field: value}))
    assert caught.value.field.partition("[")[0] == field


def test_what_is_denied_is_not_said_to_be_authorized() -> None:
    policy = policy_from("default = 'a'\n[profiles.a]\nimports = {default = ['os', 'os.path', 're'], denied = ['os']}")
    spec = policy.decide(ALICE, RequestedSession())
    assert (spec.authorized_imports, spec.denied_imports) == (("re",), ("os",))
    assert policy.describe(ALICE).default_imports == ("re",)


@pytest.mark.parametrize(
    ("asked", "denied", "is_denied_"),
    [
        ("os", "os", True),
        ("os.path", "os", True),
        ("os.*", "os", True),
        ("os", "os.path", False),
        ("os.path", "os.path", True),
        ("os.path.*", "os.*", True),
        ("os.*", "os.path", False),
        ("*", "os", False),
        ("*", "*", True),
        ("os", "*", True),
        ("osx", "os", False),
    ],
)
def test_a_pattern_denies_downwards(asked: str, denied: str, is_denied_: bool) -> None:
    assert is_denied(asked, [denied]) is is_denied_


# ---------------------------------------------------------------------------------------------------------------------
# In a session


@pytest.mark.parametrize(
    ("profile", "violation"),
    [
        (
            "limits.default.wall_time_s = 60",
            ("at most 60, as its session", "profiles.a.limits.default.wall_time_s"),
        ),
        (
            "limits.execution_max.wall_time_s = 30",
            ("at most 30", "profiles.a.limits.execution_max.wall_time_s"),
        ),
    ],
)
def test_an_execution_is_told_whether_its_session_or_the_profile_says_no(
    profile: str, violation: tuple[str, str]
) -> None:
    spec = policy_from(f"default = 'a'\n[profiles.a]\n{profile}").decide(ALICE, RequestedSession())
    with pytest.raises(PolicyViolation) as caught:
        execution_limits(spec, RequestedLimits(wall_time_s=61))
    assert caught.value.violations == (Violation("limits.wall_time_s", ABOVE_CEILING, "61", *violation),)


def test_an_execution_gets_what_the_profile_says_of_one_unless_its_session_asked_for_itself() -> None:
    policy = policy_from("default = 'a'\n[profiles.a]\nlimits.execution_default.wall_time_s = 5")
    assert execution_limits(policy.decide(ALICE, RequestedSession()), RequestedLimits()).wall_time_s == 5
    asked = RequestedSession(limits=RequestedLimits(wall_time_s=40.0))
    assert execution_limits(policy.decide(ALICE, asked), RequestedLimits()).wall_time_s == 40


IN_SANDBOX = ShippedTool(code=b"")


def tool(name: str, shipped: ShippedTool | None = None) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters=(), is_final_answer=False, shipped=shipped)


def test_tools_are_refused_by_name_and_by_place() -> None:
    text = "default = 'a'\n[profiles.a]\ntools = {placements = ['sandbox'], allowed = ['web_*', 'search']}"
    spec = policy_from(text).decide(ALICE, RequestedSession())
    with pytest.raises(PolicyViolation) as caught:
        check_tools(spec, [tool("search"), tool("searching", IN_SANDBOX), tool("web_", IN_SANDBOX)])
    assert caught.value.violations == (
        Violation("tools[0]", NOT_ALLOWED, "host", "sandbox", "profiles.a.tools.placements"),
        Violation("tools[1].name", NOT_ALLOWED, "searching", "web_*, search", "profiles.a.tools.allowed"),
    )
    check_tools(spec, [])
    check_tools(spec, [tool("search", IN_SANDBOX)])


@pytest.mark.parametrize(
    ("placements", "refused"),
    [("['host', 'sandbox']", []), ("['host']", ["sandbox"]), ("['sandbox']", ["host"]), ("[]", ["host", "sandbox"])],
)
def test_each_tool_is_refused_by_where_it_runs(placements: str, refused: list[str]) -> None:
    policy = policy_from(f"default = 'a'\n[profiles.a]\ntools.placements = {placements}")
    spec = policy.decide(ALICE, RequestedSession())
    found = []
    for each in (tool("a"), tool("a", IN_SANDBOX)):
        try:
            check_tools(spec, [each])
        except PolicyViolation as violation:
            found += [each.requested for each in violation.violations]
    assert found == refused


def test_tools_may_run_in_both_places_where_nothing_is_said() -> None:
    spec = policy_from("default = 'a'\n[profiles.a]\nlanguage.preset = 'strict'").decide(ALICE, RequestedSession())
    assert spec.tools.placements == ("host", "sandbox")


def test_a_file_is_refused_by_size_and_by_number() -> None:
    text = "default = 'a'\n[profiles.a]\nfiles = {max_put_bytes = 10, max_puts = 2, max_get_bytes = 20}"
    spec = policy_from(text).decide(ALICE, RequestedSession())
    check_file_put(spec, 10, 1)
    check_file_get(spec, 20, 10**6)
    with pytest.raises(PolicyViolation) as caught:
        check_file_put(spec, 11, 2)
    assert caught.value.violations == (
        Violation("size_bytes", ABOVE_CEILING, "11", "at most 10", "profiles.a.files.max_put_bytes"),
        Violation("path", ABOVE_CEILING, "3", "at most 2", "profiles.a.files.max_puts"),
    )


# ---------------------------------------------------------------------------------------------------------------------
# When the policy changes

WIDE = "default = 'a'\n[profiles.a]\nimports = {default = ['re'], allowed = ['*']}\n"


def tightened(new: str, request: RequestedSession | None = None, principal: Principal = ALICE) -> SessionSpec | str:
    spec = policy_from(WIDE).decide(ALICE, request or RequestedSession())
    return policy_from(new).tightened(principal, spec, "local")


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("[profiles.a]", "the policy has no profile for its tenant any more"),
        ("sandbox.backends = ['docker']", "the policy does not allow the local backend any more"),
        ("sandbox.images = ['data']", "the policy does not allow the image base any more"),
        (
            "limits = {default.memory_bytes = 100_000_000, max.memory_bytes = 1_000_000_000}",
            "its sandbox has memory_bytes 2,147,483,648, and the policy now allows at most 1,000,000,000",
        ),
        (
            "limits = {default.processes = 4, max.processes = 5}",
            "its sandbox has processes 128, and the policy now allows at most 5",
        ),
        ("limits.cpus = 1.5", "its sandbox may use more processors than the 1.5 that the policy now allows"),
    ],
)
def test_a_sandbox_that_is_not_allowed_any_more_cannot_be_kept(new: str, reason: str) -> None:
    text = new if new.startswith("[") else f"default = 'a'\n[profiles.a]\n{new}"
    assert tightened(text) == reason


def test_a_session_is_held_to_the_stricter_of_both_policies() -> None:
    request = RequestedSession(
        authorized_imports=("numpy.*", "os", "pandas"), limits=RequestedLimits(wall_time_s=900.0), labels={"a": "b"}
    )
    new = """
        version = "2"
        default = "b"
        [profiles.b]
        imports = {default = ["math"], allowed = ["numpy.linalg", "os", "pandas.*"], denied = ["os"]}
        language.open = false
        limits.max.wall_time_s = 300
        limits.execution_max.wall_time_s = 100
        tools.allowed = ["search"]
        files.max_puts = 3
        audit.code = "full"
    """
    spec = tightened(new, request)
    assert isinstance(spec, SessionSpec)
    assert spec.authorized_imports == ("numpy.linalg", "pandas")
    assert spec.denied_imports == ("os",)
    assert spec.refused_language == ("foreign_modules", "open")
    assert (spec.limits.wall_time_s, spec.execution_max.wall_time_s, spec.execution_default.wall_time_s) == (
        300,
        100,
        100,
    )
    assert (spec.tools.allowed, spec.files.max_puts, spec.audit.code) == (("search",), 3, "full")
    assert spec.policy == PolicyRef("b", "2", policy_from(new).fingerprint)
    assert spec.labels == {"a": "b"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("default = 'a'\n[profiles.a]", "keep"),
        ("default = 'a'\n[profiles.a]\non_reload = 'tighten'", "tighten"),
        ("default = 'a'\n[profiles.a]\n[profiles.b]\non_reload = 'end'\n[tenants]\nlocal.profile = 'b'", "end"),
        ("[profiles.a]\non_reload = 'keep'", "end"),
    ],
)
def test_the_new_policy_says_what_becomes_of_a_session(text: str, expected: str) -> None:
    spec = policy_from("default = 'a'\n[profiles.a]\nimports.denied = ['os']").decide(ALICE, RequestedSession())
    assert policy_from(text).on_reload(ALICE, spec) == expected


def test_a_session_whose_profile_says_what_it_said_is_kept_whatever_else_has_changed() -> None:
    profile = "default = 'a'\n[profiles.a]\non_reload = 'end'\n"
    spec = policy_from(profile).decide(ALICE, RequestedSession())
    assert policy_from(profile + "[profiles.b]\n[tenants]\nbob.profile = 'b'").on_reload(ALICE, spec) == "keep"
    assert policy_from(profile + "imports.denied = ['os']").on_reload(ALICE, spec) == "end"
