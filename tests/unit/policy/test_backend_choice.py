"""The backends of a session follow from the profile's order, the client's choice, and the backends that have the image."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.core.config.backend_config import DockerSection, E2BSection, LocalSection
from executor_server.core.config.config import Config, ServerSection
from executor_server.core.config.key_types import ConfigError
from executor_server.core.config.problems import validated
from executor_server.core.errors import InvalidRequest, PolicyViolation, Reason, Violation, ViolationKind
from executor_server.core.model import Principal
from executor_server.policy.check import policy_for, unserved
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, parse_policy
from executor_server.policy.requested import RequestedSession

ALICE = Principal("local", "token")
IMAGES = {"docker": ("base", "data"), "e2b": ("base", "gpu"), "local": ("host",)}


def file_of(profile: str) -> PolicyFile:
    return parse_policy(f"default = 'a'\n[profiles.a]\n{profile}".encode(), Path("p.toml"))


def policy(profile: str = "") -> Policy:
    others = {name: images for name, images in IMAGES.items() if name != "docker"}
    return Policy(file_of(profile), images=IMAGES["docker"], backend="docker", other_images=others, orphan_time_s=60.0)


def placed(profile: str, image: str = "", backend: str = "") -> tuple[str, tuple[str, ...]]:
    sandbox = policy(profile).decide(ALICE, RequestedSession(image=image, backend=backend)).sandbox
    return sandbox.image, sandbox.backends


BOTH = "sandbox.backends = ['docker', 'e2b']"


@pytest.mark.parametrize(
    ("profile", "image", "backend", "expected"),
    [
        ("", "", "", ("base", ("docker",))),
        ("", "data", "docker", ("data", ("docker",))),
        (BOTH, "", "", ("base", ("docker", "e2b"))),
        ("sandbox.backends = ['e2b', 'docker']", "", "", ("base", ("e2b", "docker"))),
        (BOTH, "base", "e2b", ("base", ("e2b",))),
        (BOTH, "data", "", ("data", ("docker",))),
        (BOTH, "gpu", "", ("gpu", ("e2b",))),
        (BOTH, "", "e2b", ("base", ("e2b",))),
        (f"{BOTH}\nsandbox.images = ['gpu', 'base']", "", "", ("gpu", ("e2b",))),
        (f"{BOTH}\nsandbox.images = ['gpu', 'data']", "", "docker", ("data", ("docker",))),
        ("sandbox.backends = ['local']", "", "", ("host", ("local",))),
    ],
)
def test_a_session_may_go_to_those_that_its_profile_lists_and_that_have_its_image_in_that_order(
    profile: str, image: str, backend: str, expected: tuple[str, tuple[str, ...]]
) -> None:
    assert placed(profile, image, backend) == expected


@pytest.mark.parametrize(
    ("profile", "image", "backend", "violation"),
    [
        ("", "", "e2b", ("backend", "NOT_ALLOWED", "e2b", "docker", "profiles.a.sandbox.backends")),
        (BOTH, "", "local", ("backend", "NOT_ALLOWED", "local", "docker, e2b", "profiles.a.sandbox.backends")),
        (BOTH, "", "podman", ("backend", "UNSUPPORTED", "podman", "docker, e2b", "server.backend")),
        (
            "sandbox.backends = []",
            "",
            "",
            ("backend", "NOT_ALLOWED", "docker", "nothing", "profiles.a.sandbox.backends"),
        ),
        ("", "gpu", "", ("image", "NOT_ALLOWED", "gpu", "base, data", "profiles.a.sandbox.backends")),
        (
            f"{BOTH}\nsandbox.images = ['data']",
            "gpu",
            "",
            ("image", "NOT_ALLOWED", "gpu", "data", "profiles.a.sandbox.images"),
        ),
    ],
)
def test_what_is_not_granted_is_refused_with_what_would_be(
    profile: str, image: str, backend: str, violation: tuple[str, str, str, str, str]
) -> None:
    with pytest.raises(PolicyViolation) as caught:
        placed(profile, image, backend)
    field, kind, *rest = violation
    assert caught.value.violations == (Violation(field, ViolationKind[kind], *rest),)


SECRET = """
network.allowed = ["api.example.com", "pypi.org"]
[[profiles.a.network.secrets]]
host = "api.example.com"
header = "X-Key"
value = "${key}"
"""


def asked(profile: str, host: str, backend: str = "") -> tuple[str, ...]:
    request = RequestedSession(network=(host,), backend=backend)
    return policy(f"{profile}\n{SECRET}").decide(ALICE, request).sandbox.backends


def test_a_host_with_a_secret_passes_over_backends_that_set_no_headers() -> None:
    assert asked("sandbox.backends = ['e2b', 'docker']", "pypi.org") == ("e2b", "docker")
    assert asked("sandbox.backends = ['e2b', 'docker']", "api.example.com:443") == ("docker",)
    unsupported = ("hosts without secrets on the e2b backend", "profiles.a.network.secrets")
    for profile, backend in (("sandbox.backends = ['e2b']", ""), (BOTH, "e2b")):
        with pytest.raises(PolicyViolation) as caught:
            asked(profile, "api.example.com:443", backend)
        expected = Violation("network", ViolationKind.UNSUPPORTED, "api.example.com", *unsupported)
        assert caught.value.violations == (expected,)


def test_hosts_to_ask_for_pass_over_backends_that_hold_no_connections() -> None:
    def backends(listed: str) -> tuple[str, ...]:
        profile = f"sandbox.backends = {listed}\nnetwork.ask = ['a.example']"
        return policy(profile).decide(ALICE, RequestedSession()).sandbox.backends

    assert backends("['e2b', 'docker']") == ("docker",)
    with pytest.raises(PolicyViolation) as caught:
        backends("['e2b']")
    unsupported = ("hosts without an approval on the e2b backend", "profiles.a.network.ask")
    assert caught.value.violations == (Violation("network", ViolationKind.UNSUPPORTED, "a.example", *unsupported),)


@pytest.mark.parametrize(
    ("image", "backend", "message"),
    [
        ("nowhere", "", "no image 'nowhere'; available: base, data, gpu"),
        ("gpu", "docker", "the docker backend has no image 'gpu'; available: base, data"),
    ],
)
def test_an_image_that_none_of_those_in_question_has_is_unknown(image: str, backend: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        placed(BOTH, image, backend)
    assert caught.value.reason is Reason.UNKNOWN_IMAGE


def test_a_client_is_told_the_order_and_the_images_of_all() -> None:
    summary = policy(BOTH).describe(ALICE)
    assert (summary.backends, summary.images) == (("docker", "e2b"), ("base", "data", "gpu"))


def test_a_session_stays_allowed_where_it_runs_whatever_the_new_order() -> None:
    spec = policy(BOTH).decide(ALICE, RequestedSession())
    turned = policy("sandbox.backends = ['e2b', 'docker']")
    assert not isinstance(turned.tightened(ALICE, spec, "docker"), str)
    without = policy("sandbox.backends = ['docker']")
    assert without.tightened(ALICE, spec, "e2b") == "the policy does not allow the e2b backend any more"


def test_a_sandbox_is_made_of_the_same_wherever_else_it_might_have_been_made() -> None:
    by_order, named = (
        policy(BOTH).decide(ALICE, RequestedSession(backend=backend)).sandbox for backend in ("", "docker")
    )
    assert by_order != named, "the pool must not serve the one for the other"
    assert by_order.fingerprint == named.fingerprint


def test_a_backend_is_listed_once() -> None:
    with pytest.raises(ConfigError) as caught:
        file_of("sandbox.backends = ['docker', 'e2b', 'docker']")
    assert "sandbox.backends: lists 'docker' twice" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"other_backends": ["docker", "docker"]}, "lists 'docker' twice"),
        ({"backend": "docker", "other_backends": ["local", "docker"]}, "other_backends lists 'docker', which is the"),
        ({"other_backends": ["podman"]}, "'local', 'docker' or 'e2b'"),
    ],
)
def test_the_daemon_runs_each_backend_once(server: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Config, {"server": server})
    assert problem in " ".join(caught.value.problems)


def config(**server: object) -> Config:
    return Config(
        server=ServerSection.model_validate(server),
        local=LocalSection.model_validate({"images": {"host": "/usr"}}),
        docker=DockerSection.model_validate({"images": {"base": "x"}}),
        e2b=E2BSection.model_validate({"images": {"base": "t", "gpu": "u"}}),
    )


def test_a_policy_is_of_all_backends_that_the_daemon_runs() -> None:
    found = policy_for(file_of(BOTH), config(backend="docker", other_backends=["e2b"]))
    assert found.describe(ALICE).images == ("base", "gpu")


def test_a_listed_backend_that_does_not_run_is_told_of() -> None:
    problems = [str(each) for each in unserved(file_of(BOTH), config(backend="docker"))]
    assert problems == [
        "profiles.a.sandbox.backends: the daemon does not run the e2b backend (server.other_backends), so no session "
        "goes there"
    ]
    assert unserved(file_of(BOTH), config(backend="docker", other_backends=["e2b"])) == []


def test_a_profile_that_none_of_several_serves_is_told_of() -> None:
    both = config(backend="docker", other_backends=["e2b"])
    (problem,) = unserved(file_of("sandbox.backends = ['local']"), both)
    assert "the daemon's backends are 'docker' and 'e2b', so it can serve none of these sessions" in str(problem)
    (problem,) = unserved(file_of(f"{BOTH}\nsandbox.images = ['host']"), both)
    assert "the backends docker and e2b" in str(problem)
