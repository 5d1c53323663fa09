"""A wrong policy file is refused with every problem, each once and with its path."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from executor_server.core import LANGUAGE_RULES
from executor_server.core.config.backend_config import DockerSection, LocalSection
from executor_server.core.config.config import Config, PoolSection, ServerSection, WarmSection
from executor_server.core.config.key_types import ConfigError
from executor_server.policy.check import unserved
from executor_server.policy.file import PolicyFile, load_policy, parse_policy
from executor_server.policy.inheritance import with_inherited

WHERE = Path("/p.toml")


def policy(text: str) -> PolicyFile:
    return parse_policy(text.encode(), WHERE)


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        policy(text)
    return list(caught.value.problems)


def test_no_file_is_the_built_in_policy() -> None:
    built_in = load_policy(None)
    assert (built_in.version, built_in.default, list(built_in.profiles)) == ("built-in", "default", ["default"])


def test_every_problem_is_listed_with_its_key() -> None:
    found = problems(
        """
        version = "a\\u0007b"
        default = "nobody"
        colour = "red"
        [profiles.a]
        on_reload = "restart"
        limits.default.wall_time_s = 100
        limits.max.wall_time_s = 10
        limits.default.processes = 1
        imports.allowed = ["numpy", "os; import sys"]
        language.evil = true
        language.open = "yes"
        tools.allowed = ["web_*", "a b"]
        [profiles."a b"]
        [tenants.x]
        profile = "c"
        certificates = ["sha256:12"]
        uids = [-1]
        [tenants.y]
        admin = 1
        """
    )
    assert [problem.partition(": ")[0] for problem in found] == [
        "version",
        "profiles.a.on_reload",
        "profiles.a.imports.allowed.1",
        "profiles.a.language.open",
        "profiles.a.language.evil",
        "profiles.a.limits.default.processes",
        "profiles.a.tools.allowed.1",
        'profiles."a b"',
        "tenants.x.certificates.0",
        "tenants.x.uids.0",
        "tenants.y.admin",
        "colour",
        "profiles.a.limits.default.wall_time_s",
        "default",
        "tenants.x.profile",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "profiles: is missing"),
        ("profiles = {}", "profiles: must have an entry"),
        ("[profiles]\na = 3", "profiles.a: must be a table"),
        (
            "[profiles.a]\nlimits.max.wall_time_s = 10",
            "profiles.a.limits.default.wall_time_s: is not set, and must be at most 10.0, which is "
            "limits.max.wall_time_s (it is 60.0)",
        ),
        (
            "[profiles.a]\nlimits.execution_max.operations = 10_000_000_000_000",
            "profiles.a.limits.execution_max.operations: must be at most 1000000000000, which is "
            "limits.max.operations (it is 10000000000000)",
        ),
        (
            "[profiles.a]\nlimits.execution_default.wall_time_s = 61",
            "profiles.a.limits.execution_default.wall_time_s: must be at most 60.0, which is "
            "limits.default.wall_time_s (it is 61.0)",
        ),
        (
            "[profiles.a]\nlimits.execution_default.wall_time_s = 5\nlimits.execution_max.wall_time_s = 4",
            "profiles.a.limits.execution_default.wall_time_s: must be at most 4.0, which is "
            "limits.execution_max.wall_time_s (it is 5.0)",
        ),
        (
            "[profiles.a]\nlimits.max.memory_bytes = 100",
            "profiles.a.limits.max.memory_bytes: must be greater than or equal to 33554432 (it is 100)",
        ),
        (
            "[profiles.a]\nlimits.max.wall_time_s = nan",
            "profiles.a.limits.max.wall_time_s: must be a finite number (it is nan)",
        ),
        (
            "[profiles.a]\n[tenants.x]",
            "tenants.x.profile: is missing, and there is no default profile",
        ),
        (
            '[profiles.a]\n[tenants.x]\nprofile = "b"',
            "tenants.x.profile: no such profile; available: a (it is 'b')",
        ),
        (
            'default = "a"\n[profiles.a]\n[tenants]\nx.uids = [5, 5]\ny.uids = [5]',
            "tenants.y.uids: belongs to tenant x already (it is 5)",
        ),
        (
            'default = "a"\n[profiles.a]\n[tenants]\nx.certificates = ["a.example"]\ny.certificates = ["a.example"]',
            "tenants.y.certificates: belongs to tenant x already (it is 'a.example')",
        ),
        (
            'default = "a"\n[profiles.a]\n[tenants]\nx = {admin = true, roles = ["viewer"]}',
            "tenants.x.roles: must be empty: an admin has every role (it is an array of 1)",
        ),
        (
            '[profiles.a]\nextends = "b"',
            "profiles.a.extends: no profile 'b'; available: a",
        ),
        (
            '[profiles.a]\nextends = "a"',
            "profiles.a.extends: goes round in a circle: a → a",
        ),
        (
            '[profiles.d]\nextends = "a"\n[profiles]\na.extends = "b"\nb.extends = "c"\nc.extends = "a"',
            "profiles.a.extends: goes round in a circle: a → b → c → a",
        ),
    ],
)
def test_each_problem_is_one_sentence(text: str, said: str) -> None:
    assert problems(text) == [said]


def test_what_a_profile_does_not_say_it_has_from_those_it_extends() -> None:
    profiles = policy(
        """
        [profiles.c]
        extends = "b"
        limits.max.wall_time_s = 500
        imports.allowed = ["b"]
        [profiles.b]
        extends = "a"
        limits = { max = { memory_bytes = 8_000_000_000 } }
        [profiles.a]
        limits.max.wall_time_s = 400
        imports = { allowed = ["a", "aa"], denied = ["x"] }
        """
    ).profiles
    assert (profiles["b"].limits.max.wall_time_s, profiles["c"].limits.max.wall_time_s) == (400, 500)
    assert profiles["c"].limits.max.memory_bytes == 8_000_000_000
    assert (profiles["c"].imports.allowed, profiles["c"].imports.denied) == (("b",), ("x",))


def test_an_inherited_problem_is_told_where_it_stands() -> None:
    assert problems(
        """
        [profiles.a]
        imports.allowed = ["1"]
        limits.default.wall_time_s = 5000
        audit.coed = "hash"
        [profiles.b]
        extends = "a"
        limits.max.memory_bytes = 3_000_000_000
        [profiles.c]
        extends = "b"
        limits.max.wall_time_s = 4000
        """
    ) == [
        'profiles.a.imports.allowed.0: must be a dotted module name ("numpy"), one followed by ".*" ("numpy.*"), or '
        "\"*\" (it is '1')",
        "profiles.a.limits.default.wall_time_s: must be at most 3600.0, which is limits.max.wall_time_s (it is 5000.0)",
        "profiles.a.audit.coed: no such key; available: code, fail_closed, view",
        "profiles.c.limits.default.wall_time_s: must be at most 4000.0, which is limits.max.wall_time_s (it is 5000.0)",
    ]


def test_a_long_line_of_descent_is_followed() -> None:
    chain = "".join(f'[profiles.p{n}]\nextends = "p{n + 1}"\n' for n in range(1000))
    text = f"{chain}[profiles.p1000]\nimports.denied = ['x']"
    assert policy(text).profiles["p0"].imports.denied == ("x",)


def test_the_fingerprint_is_of_what_is_said_and_not_of_how() -> None:
    one = policy('version = "1"\n[profiles.a]\nlimits.max.cpu_time_s = 7200\n[profiles.b]\naudit.code = "none"')
    same = policy('version = "1"\n[profiles]\nb = {extends = "a", audit.code = "none"}\na.limits = {}')
    other = policy('version = "1"\n[profiles.a]\n[profiles.b]\naudit.code = "full"')
    newer = policy('version = "2"\n[profiles.a]\n[profiles.b]\naudit.code = "none"')
    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, other.fingerprint, newer.fingerprint}) == 3


@pytest.mark.parametrize(
    ("written", "refused"),
    [
        ('preset = "standard"', ()),
        ('preset = "strict"', LANGUAGE_RULES),
        ('preset = "strict"\nopen = true', tuple(rule for rule in LANGUAGE_RULES if rule != "open")),
        ("", ("foreign_modules",)),
        ('preset = "guarded"', ("foreign_modules",)),
        ('preset = "guarded"\nforeign_modules = true', ()),
        ('preset = "standard"\nopen = false', ("open",)),
        ("open = false", ("foreign_modules", "open")),
    ],
)
def test_a_language_key_goes_before_the_preset(written: str, refused: tuple[str, ...]) -> None:
    assert policy(f"[profiles.a.language]\n{written}").profiles["a"].language.refused == refused


# -- with a configuration


def config(backend: str = "local", warm: tuple[WarmSection, ...] = ()) -> Config:
    return Config(
        server=ServerSection.model_validate({"backend": backend}),
        local=LocalSection.model_validate({"images": {"base": "/usr"}}),
        docker=DockerSection.model_validate({"images": {"base": "x", "data": "y"}}),
        pool=PoolSection(warm=warm),
    )


def test_what_a_daemon_cannot_serve_is_told_of_the_profile_that_says_so() -> None:
    file = policy(
        """
        [profiles.a]
        sandbox.images = ["data", "dtaa"]
        [profiles.b]
        extends = "a"
        [profiles.c]
        extends = "a"
        sandbox.images = ["base"]
        sandbox.backends = ["docker"]
        """
    )
    assert [str(problem) for problem in unserved(file, config())] == [
        "profiles.a.sandbox.images: the configuration has no image 'dtaa'; available: base, data",
        "profiles.a.sandbox.images: the local backend has none of these images, so no session can be served; available: base",
        "profiles.c.sandbox.backends: the daemon's backend is 'local', so it can serve none of these sessions",
    ]


def test_a_pool_that_the_policy_does_not_grant_is_told_of() -> None:
    warm = (WarmSection(image="data", size=1, profile="z"), WarmSection(image="base", size=1, profile="a"))
    found = unserved(policy("[profiles.a]\nsandbox.images = ['data']"), config("docker", warm))
    assert [str(problem).partition(":")[0] for problem in found] == ["pool.warm.0.profile", "pool.warm.1"]


def test_a_policy_that_can_be_served_has_no_problem() -> None:
    assert unserved(policy("[profiles.a]\nsandbox.images = ['data', 'base']"), config("docker")) == []


def test_a_sentence_does_not_list_a_thousand_profiles() -> None:
    profiles = "".join(f"[profiles.p{number}]\n" for number in range(1000))
    (problem,) = problems(f"default = 'x'\n{profiles}")
    assert problem.startswith("default: no such profile; available: p0, p1,")
    assert problem.endswith("p19 and 980 more (it is 'x')")


def test_a_key_of_a_megabyte_is_cut() -> None:
    (problem,) = problems(f"{'k' * 1_000_000} = 1\n[profiles.a]")
    assert len(problem) < 500


def test_a_long_line_of_profiles_is_read_once() -> None:
    """Each profile is looked at as often as in a short line, not once for each that extends it."""

    class Counted(dict[str, Any]):
        looks = 0

        def __getitem__(self, name: str) -> Any:
            Counted.looks += 1
            return super().__getitem__(name)

    names = [f"p{number}" for number in range(500)]
    profiles = Counted({name: {"extends": parent} for name, parent in pairwise(names)})
    profiles[names[-1]] = {}
    resolved, found = with_inherited(profiles)
    assert (len(resolved), found) == (500, [])
    assert Counted.looks <= 5 * len(names)
