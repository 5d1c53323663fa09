"""The packages of a profile: what a file may say, what a session is granted, and what is left when the policy changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core import PackagesSpec
from executor_server.core.config import Config, ConfigError, PoolSection, validated
from executor_server.core.errors import InvalidRequest, PolicyViolation, Violation, ViolationKind
from executor_server.core.model import Principal, SessionSpec
from executor_server.policy.check import policy_for, unserved
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, built_in_policy, parse_policy
from executor_server.policy.packages import PackagesSummary
from executor_server.policy.requested import MAX_REQUESTED_PACKAGES, RequestedSession

ALICE = Principal("local", "token")
ABOVE, NOT_ALLOWED, UNSUPPORTED = ViolationKind.ABOVE_CEILING, ViolationKind.NOT_ALLOWED, ViolationKind.UNSUPPORTED
OWN_INDEX = {"environments": {"index_url": "https://packages.example.com/simple"}}

PROFILE = """
[profiles.a.packages]
allowed = ["Pandas[Excel]>=2", "scikit_learn<2", "pyyaml"]
exclude_newer = "14d"
max_requirements = 3
max_environment_bytes = "1GiB"
"""


def file_of(text: str) -> PolicyFile:
    return parse_policy(f"default = 'a'\n[profiles.a]\n{text}".encode(), Path("p.toml"))


def policy(text: str = PROFILE, *, own_index: bool = False) -> Policy:
    return Policy(file_of(text), images=["base"], backend="local", orphan_time_s=60.0, own_index=own_index)


def decided(*asked: str, text: str = PROFILE, own_index: bool = False, imports: tuple[str, ...] = ()) -> SessionSpec:
    request = RequestedSession(packages=asked, authorized_imports=imports)
    return policy(text, own_index=own_index).decide(ALICE, request)


def granted(*asked: str, text: str = PROFILE, own_index: bool = False) -> tuple[str, ...]:
    packages = decided(*asked, text=text, own_index=own_index).sandbox.packages
    assert packages is not None
    return packages.requirements


def violations(*asked: str, text: str = PROFILE, own_index: bool = False) -> list[Violation]:
    with pytest.raises(PolicyViolation) as caught:
        decided(*asked, text=text, own_index=own_index)
    return list(caught.value.violations)


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        file_of(text)
    return list(caught.value.problems)


def refused(requested: str, allowed: str) -> Violation:
    return Violation("packages", NOT_ALLOWED, requested, allowed, "profiles.a.packages.allowed")


# -- files


def test_a_profile_without_packages_grants_none() -> None:
    for text in ("", "packages.auto = true", "packages.exclude_newer = '14d'"):
        assert decided(text=text).sandbox.packages is None
        assert policy(text).describe(ALICE).packages == PackagesSummary()
        assert violations("pandas", text=text) == [refused("pandas", "none")]


def test_one_package_is_written_in_one_form_only() -> None:
    one, other = (file_of(f"packages.allowed = ['{text}']") for text in ("Pan_Das >= 2.0", "pan-das>=2.0"))
    assert one.profiles["a"].packages.allowed == ("pan-das>=2.0",) and one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "allowed = ['x @ https://a.example/x.whl']",
            "allowed.0: is a URL, but packages come from the daemon's index",
        ),
        ("allowed = ['-r x']", "allowed.0: is an option"),
        ("allowed = ['./x']", "allowed.0: is a path"),
        ("allowed = ['']", "allowed.0: is empty"),
        ("allowed = ['x', '\u0440y']", "allowed.1: has the character U+0440"),
        ("allowed = ['x*']", "allowed.0: can't be read"),
        ("allowed = ['*>1']", "allowed.0: can't be read"),
        ("""allowed = ['x; python_version > "3"']""", "allowed.0: has a marker; bounds hold everywhere"),
        ("allowed = ['x>2,<1']", "allowed.0: has bounds that exclude every version"),
        ("allowed = ['x>1', 'X<3']", "allowed.1: allows x twice; write its bounds in one entry"),
        ("allowed = ['*', '*']", "allowed.1: allows * twice"),
        (f"allowed = {[f'x{number}' for number in range(513)]}", "allowed: Tuple should have at most 512 items"),
        ("auto = 1", "auto: "),
        ("wheels_only = false", "wheels_only: must be true: a source distribution runs its own code while it is built"),
        ("exclude_newer = '14'", 'exclude_newer: is not an age; it must be an age such as "36h", "14d" or "2w"'),
        ("exclude_newer = '0d'", "exclude_newer: is not an age"),
        ("exclude_newer = 14", "exclude_newer: "),
        ("exclude_newer = '99999w'", "exclude_newer: is more than ten years"),
        ("max_requirements = 0", "max_requirements: "),
        ("max_requirements = 257", "max_requirements: "),
        ("max_environment_bytes = 1000", "max_environment_bytes: "),
        ("imports = { a = 'b>1' }", "imports.a: has more than a name"),
        ("imports = { a = 'b @ file:///b' }", "imports.a: is a URL"),
        ("imports = { 'a-b' = 'c' }", "imports.a-b: must be the dotted name of a module"),
        ("imports = { 'a..b' = 'c' }", 'imports."a..b": must be the dotted name of a module'),
        ("lock = 'relative.toml'", "lock: is not an absolute path"),
        ("lock = 3", "lock: is not text"),
        ("default = ['x']", "default: no such key"),
    ],
)
def test_what_no_policy_can_say_is_refused(line: str, problem: str) -> None:
    (found,) = problems(f"packages.{line}" if not line.startswith("imports") else f"[profiles.a.packages]\n{line}")
    assert found.startswith(f"profiles.a.packages.{problem}")


def test_a_profile_inherits_packages_key_by_key() -> None:
    text = "extends = 'b'\npackages.max_requirements = 2\n[profiles.b.packages]\nallowed = ['x']\nexclude_newer = '36h'"
    spec = decided("x", text=text).sandbox.packages
    assert spec == PackagesSpec(("x",), exclude_newer_s=129_600.0)


def test_what_is_not_a_grant_of_packages_changes_the_fingerprint_all_the_same() -> None:
    lines = ["", "allowed = ['x']", "auto = true", "exclude_newer = '1d'", "imports = { a = 'b' }"]
    found = [file_of("[profiles.a.packages]\n" + line).fingerprint for line in lines]
    assert len(set(found)) == len(found)


# -- requests


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (("pandas",), ("pandas>=2",)),
        (("PANDAS",), ("pandas>=2",)),
        (("pandas>=1",), ("pandas>=1,>=2",)),
        (("pandas==2.1",), ("pandas==2.1,>=2",)),
        (("pandas[excel]<3",), ("pandas[excel]<3,>=2",)),
        (("pandas", "Pandas[EXCEL]"), ("pandas[excel]>=2",)),
        (("pyyaml", "scikit.learn>1"), ("pyyaml", "scikit-learn<2,>1")),
        (("pyyaml==7,==8",), ("pyyaml==7,==8",)),
        (("pandas>3,<2.5",), ("pandas<2.5,>3,>=2",)),
        (("pandas; python_version >= '3.9'",), ('pandas>=2; python_version >= "3.9"',)),
    ],
)
def test_what_is_granted_has_the_bounds_of_both(asked: tuple[str, ...], got: tuple[str, ...]) -> None:
    assert granted(*asked) == got


def test_all_of_the_profiles_rules_reach_the_sandbox() -> None:
    spec = decided("pandas").sandbox
    assert spec.packages == PackagesSpec(("pandas>=2",), "", "", 14 * 86_400.0, 2**30)
    assert spec.fingerprint != decided().sandbox.fingerprint


def test_the_same_packages_in_another_order_are_the_same_sandbox() -> None:
    assert decided("pandas", "pyyaml").sandbox == decided("PyYAML", "pandas", "pandas").sandbox


def test_every_package_that_is_refused_is_listed_with_what_is_allowed() -> None:
    assert violations("torch", "pandas==1.5", "pandas-stubs", "pyyaml[x]", "scikit-learn") == [
        refused("pandas-stubs", "pandas[excel]>=2, scikit-learn<2, pyyaml"),
        refused("pandas==1.5", "pandas[excel]>=2"),
        refused("pyyaml[x]", "pyyaml"),
        refused("torch", "pandas[excel]>=2, scikit-learn<2, pyyaml"),
        Violation("packages", ABOVE, "5", "at most 3", "profiles.a.packages.max_requirements"),
    ]


def test_a_model_can_act_on_a_refusal() -> None:
    with pytest.raises(PolicyViolation) as caught:
        decided("pandas<2", "requests")
    assert str(caught.value) == (
        "the policy refuses this: packages: asked for pandas<2, allowed is pandas[excel]>=2; "
        "packages: asked for requests, allowed is pandas[excel]>=2, scikit-learn<2, pyyaml"
    )


def test_an_unreleased_version_below_a_bound_is_outside_of_it() -> None:
    assert violations("pandas==2.0rc1") == [refused("pandas==2.0rc1", "pandas[excel]>=2")]
    assert granted("pandas==3.0rc1") == ("pandas==3.0rc1,>=2",)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ("pandas", "x @ file:///etc/passwd"),
            "packages[1] is a URL, but packages come from the daemon's index only; ",
        ),
        (("--index-url=https://a.example",), "packages[0] is an option; options of pip or uv can't be given; "),
        (("",), "packages[0] is empty; "),
        (("x" * 10_000,), "packages[0] is longer than 256 characters; "),
        (("x; os_name ~= 'a'",), "packages[0] has a marker that compares what can't be compared"),
        (("x",) * (MAX_REQUESTED_PACKAGES + 1), "packages has more than 256 entries"),
        (
            tuple(f"x; python_version >= '3.{number}'" for number in range(1, 18)),
            "packages has more than 16 different mark",
        ),
        (
            tuple(f"n{number}!=1" + ",!=1" * 60 for number in range(64)),
            "packages has more than 8,192 characters without markers; request fewer packages or bounds",
        ),
        (tuple(f"x!={number}" for number in range(200)), "packages ask for x with too many bounds"),
    ],
)
def test_what_no_policy_could_grant_is_an_invalid_request(asked: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decided(*asked)
    assert str(caught.value).startswith(message)
    if message.endswith("; "):
        assert str(caught.value).endswith(
            'write a package by name, such as "pandas", "pandas>=2,<3" or "pandas[excel]>=2"'
        )


def test_the_owner_of_a_daemon_without_a_policy_file_reads_how_to_allow_packages(tmp_path: Path) -> None:
    daemon = Policy(built_in_policy(), images=["base"], backend="local", orphan_time_s=60.0)
    with pytest.raises(PolicyViolation) as caught:
        daemon.decide(ALICE, RequestedSession(packages=("Pandas>=2", "polars")))
    first, last = caught.value.violations
    rule = "profiles.default.packages.allowed"
    assert first == Violation("packages", NOT_ALLOWED, "pandas>=2", "none", rule)
    assert last == Violation(
        "packages",
        NOT_ALLOWED,
        "polars",
        'none: the daemon has no policy file. Its owner can allow them by a file of three lines, `default = "default"`, '
        '`[profiles.default.packages]` and `allowed = ["pandas", "polars"]`, given to `executor-server serve --policy FILE`',
        rule,
    )
    lines = [part for index, part in enumerate(last.allowed.split("`")) if index % 2][:3]
    allowed = parse_policy("\n".join(lines).encode(), tmp_path)
    spec = Policy(allowed, images=["base"], backend="local", orphan_time_s=60.0).decide(
        ALICE, RequestedSession(packages=("Pandas>=2", "polars"))
    )
    assert spec.sandbox.packages == PackagesSpec(("pandas>=2", "polars"))


def test_the_owner_of_a_daemon_without_a_policy_file_reads_how_to_allow_hosts(tmp_path: Path) -> None:
    daemon = Policy(built_in_policy(), images=["base"], backend="local", orphan_time_s=60.0)
    with pytest.raises(PolicyViolation) as caught:
        daemon.decide(ALICE, RequestedSession(network=("api.github.com",)))
    (only,) = caught.value.violations
    lines = [part for index, part in enumerate(only.allowed.split("`")) if index % 2][:3]
    allowed = parse_policy("\n".join(lines).encode(), tmp_path)
    after = Policy(allowed, images=["base"], backend="local", orphan_time_s=60.0)
    assert after.decide(ALICE, RequestedSession(network=("api.github.com",))).network.allowed == ("api.github.com",)


# -- any package of an index


ANY = "packages.allowed = ['*', 'pandas>=2']"


def test_the_star_stands_for_an_index_of_ones_own() -> None:
    assert granted("torch[x]<3", "pandas", text=ANY, own_index=True) == ("pandas>=2", "torch[x]<3")
    assert violations("pandas==1", text=ANY, own_index=True) == [refused("pandas==1", "pandas>=2")]
    assert policy(ANY, own_index=True).describe(ALICE).packages.allowed == ("*", "pandas>=2")


def test_the_star_stands_for_nothing_of_the_public_index() -> None:
    assert granted("pandas", text=ANY) == ("pandas>=2",)
    allowed = "pandas>=2; others where the daemon has an index of its own"
    assert violations("torch", "pandas", text=ANY) == [
        Violation("packages", UNSUPPORTED, "torch", allowed, "environments.index_url")
    ]
    assert policy(ANY).describe(ALICE).packages.allowed == ("pandas>=2",)


def test_a_check_against_a_configuration_finds_a_star_without_an_index() -> None:
    text = 'the configuration has no index of its own (environments.index_url), so "*" allows nothing'
    assert [str(each) for each in unserved(file_of(ANY), Config())] == [f"profiles.a.packages.allowed: {text}"]
    config = validated(Config, OWN_INDEX)
    assert unserved(file_of(ANY), config) == []
    spec = policy_for(file_of(ANY), config).decide(ALICE, RequestedSession(packages=("torch",)))
    assert spec.sandbox.packages == PackagesSpec(("torch",))


# -- modules that are authorized and missing


AUTO = """
[profiles.a.packages]
allowed = ["scikit-learn<2", "pillow", "pyyaml", "google-cloud-storage", "protobuf", "my-tools", "opencv-python", "polars"]
auto = true
max_requirements = 5
imports = { tools = "my_tools", "corp.tools" = "polars" }
"""


def added(
    *modules: str, text: str = AUTO, asked: tuple[str, ...] = (), imports: tuple[str, ...] = (), own_index: bool = False
) -> tuple[str, ...] | None:
    spec = decided(*asked, text=text, imports=imports, own_index=own_index)
    found = policy(text, own_index=own_index).with_packages(spec, modules)
    if found is None:
        return None
    assert found.sandbox.packages is not None
    assert replace(found, sandbox=replace(found.sandbox, packages=spec.sandbox.packages)) == spec
    return found.sandbox.packages.requirements


def test_packages_of_missing_modules_are_found_by_the_policys_table_ours_and_their_names() -> None:
    assert added("sklearn", "PIL", "yaml") == ("pillow", "pyyaml", "scikit-learn<2")
    assert added("tools", "polars", "cv2") == ("my-tools", "opencv-python", "polars")
    assert added("corp", imports=("corp.tools.*",)) == ("polars",)


def test_of_a_shared_namespace_what_is_authorized_says_which_package_is_meant() -> None:
    imports = ("google.cloud.storage.*", "google.protobuf", "numpy")
    assert added("google", imports=imports) == ("google-cloud-storage", "protobuf")
    assert added("google") is None


@pytest.mark.parametrize("modules", [(), ("torch",), ("os",), ("imp", "distutils"), ("_x",), ("x" * 500,), ("\u0440",)])
def test_nothing_is_added_for_what_no_package_may_be_asked_for(modules: tuple[str, ...]) -> None:
    assert added(*modules) is None
    anything = "packages.allowed = ['*']\npackages.auto = true"
    if modules != ("torch",):
        assert added(*modules, text=anything, own_index=True) is None


def test_any_package_of_an_own_index_is_found_by_the_usual_name() -> None:
    anything = "packages.allowed = ['*']\npackages.auto = true"
    assert added("cv2", "torch", "bs4", text=anything, own_index=True) == (
        "beautifulsoup4",
        "opencv-python-headless",
        "torch",
    )
    assert added("torch", text=anything) is None


def test_what_was_asked_for_stays_and_is_not_added_twice() -> None:
    assert added("sklearn", "yaml", asked=("scikit-learn>1",)) == ("pyyaml", "scikit-learn<2,>1")
    assert added("sklearn", asked=("scikit-learn>1",)) is None


def test_no_more_is_added_than_a_session_may_ask_for() -> None:
    few = AUTO.replace("max_requirements = 5", "max_requirements = 2")
    assert added("sklearn", "PIL", "yaml", text=few) == ("pillow", "scikit-learn<2")
    assert added("sklearn", text=few, asked=("pillow", "pyyaml")) is None


def test_nothing_is_added_without_auto_or_under_another_policy() -> None:
    assert added("sklearn", text=AUTO.replace("auto = true", "")) is None
    assert policy(AUTO + "\n[profiles.b]").with_packages(decided(text=AUTO), ["sklearn"]) is None


# -- policies that change


def tightened(asked: tuple[str, ...], text: str, before: str = PROFILE, *, own_index: bool = False) -> Any:
    spec = decided(*asked, text=before, own_index=own_index)
    found = policy(text, own_index=own_index).tightened(ALICE, spec, "local")
    assert isinstance(found, str) or found.sandbox.packages == spec.sandbox.packages
    return found


ASKED = ("pandas[excel]==2.2", "pyyaml")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        (">=2", ""),
        (">=2", ">=1.5"),
        (">=2", ">=2.1,<3"),
        ('"scikit_learn<2", ', ""),
        ('"14d"', '"13d"'),
        ('"14d"', '"336h"'),
        ("max_requirements = 3", "max_requirements = 2"),
        ("1GiB", "2GiB"),
        ("exclude_newer", "auto = true\nexclude_newer"),
    ],
)
def test_a_session_keeps_packages_that_are_still_allowed(old: str, new: str) -> None:
    assert isinstance(tightened(ASKED, PROFILE.replace(old, new)), SessionSpec)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (', "pyyaml"', "", "the policy does not allow the package pyyaml any more"),
        (">=2", ">=2.3", "the policy does not allow the package pandas[excel]==2.2,>=2 any more"),
        ("[Excel]", "", "the policy does not allow the package pandas[excel]==2.2,>=2 any more"),
        ('"14d"', '"15d"', "its packages may be newer than the policy now allows"),
        ("max_requirements = 3", "max_requirements = 1", "it has 2 packages, and the policy now allows 1"),
        (
            "1GiB",
            "1MiB",
            "its packages may take 1,073,741,824 bytes, and the policy now allows 1,048,576",
        ),
        ("allowed =", "imports.x = 'y' #", "the policy does not allow the package pandas[excel]==2.2,>=2 any more"),
    ],
)
def test_a_session_with_packages_that_are_not_allowed_any_more_ends(old: str, new: str, reason: str) -> None:
    assert tightened(ASKED, PROFILE.replace(old, new)) == reason


def test_an_open_bound_is_not_within_a_narrower_one() -> None:
    """The environment may have a version that only the wider bound admits."""
    assert isinstance(tightened(("pandas",), PROFILE.replace(">=2", ">=2.1")), str)


def test_a_session_without_packages_stays_whatever_becomes_of_them() -> None:
    assert isinstance(tightened((), ""), SessionSpec)


def test_the_star_keeps_what_it_granted_while_it_is_there() -> None:
    assert isinstance(tightened(("torch",), ANY, before=ANY, own_index=True), SessionSpec)
    assert isinstance(tightened(("torch",), "packages.allowed = ['pandas']", before=ANY, own_index=True), str)
    assert isinstance(tightened(("torch",), "packages.allowed = ['*', 'torch<2']", before=ANY, own_index=True), str)


# -- what else is made of a profile


def test_the_summary_says_what_may_be_asked_for() -> None:
    assert policy().describe(ALICE).packages == PackagesSummary(
        allowed=("pandas[excel]>=2", "scikit-learn<2", "pyyaml"),
        max_requirements=3,
        max_environment_bytes=2**30,
        exclude_newer_s=14 * 86_400.0,
    )


def test_sandboxes_that_are_kept_ready_have_no_packages() -> None:
    (warm,) = policy().warm_sandboxes(PoolSection())
    assert warm.spec.packages is None


def test_sandboxes_that_are_kept_ready_have_the_packages_that_a_session_would_get() -> None:
    pool = PoolSection(warm=({"image": "base", "size": 1, "packages": ["PyYAML", "pandas>=2.1"]},))  # type: ignore[arg-type]
    (warm,) = policy().warm_sandboxes(pool)
    assert warm.spec == decided("pandas>=2.1", "pyyaml").sandbox


@pytest.mark.parametrize(
    ("packages", "problem"),
    [
        (["polars"], r"pool\.warm\.0: the policy refuses this: packages: asked for polars"),
        (["x @ file:///x"], r"pool\.warm\.0: packages\[0\] is a URL"),
    ],
)
def test_sandboxes_that_are_kept_ready_have_no_packages_that_the_policy_refuses(
    packages: list[str], problem: str
) -> None:
    pool = PoolSection(warm=({"image": "base", "size": 1, "packages": packages},))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=problem):
        policy().warm_sandboxes(pool)
