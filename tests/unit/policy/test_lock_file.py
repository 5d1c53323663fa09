"""The lock of a profile: what is taken of a pylock.toml, what is refused, and what sessions get of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor_server.core import PackagesSpec, PolicyViolation, Principal, SessionSpec
from executor_server.core.config import ConfigError
from executor_server.policy.decide import Policy
from executor_server.policy.explain.diff import differences
from executor_server.policy.file import PolicyFile, parse_policy
from executor_server.policy.lock_file import MAX_LOCK_BYTES, Locked, read_lock
from executor_server.policy.packages import PackagesSummary
from executor_server.policy.requested import RequestedSession

ALICE = Principal("local", "token")
HASH = "ab" * 32

PANDAS = f"""
[[packages]]
name = "pandas"
version = "3.1.1"
index = "https://packages.example.com/simple"
wheels = [{{ url = "https://packages.example.com/pandas-3.1.1-cp312-cp312-manylinux_2_28_x86_64.whl", hashes = {{ sha256 = "{HASH}" }} }}]
"""
NUMPY = f"""
[[packages]]
name = "numpy"
version = "2.4.6"
marker = "python_full_version < '3.12'"
wheels = [{{ url = "https://packages.example.com/numpy-2.4.6-py3-none-any.whl", hashes = {{ sha256 = "{HASH}" }} }}]
[[packages]]
name = "numpy"
version = "2.5.5"
marker = "python_full_version >= '3.12'"
sdist = {{ url = "https://packages.example.com/numpy-2.5.5.tar.gz", hashes = {{ sha256 = "{HASH}" }} }}
wheels = [{{ url = "https://packages.example.com/numpy-2.5.5-py3-none-any.whl", hashes = {{ sha256 = "{HASH}" }} }}]
"""
LOCK = f'lock-version = "1.0"\ncreated-by = "uv"\n{PANDAS}{NUMPY}'

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a lock file that no other user could write, and returns its path."""

    def written(text: str) -> Path:
        path = tmp_path / "pylock.toml"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return written


def file_of(lock: Path, more: str = "") -> PolicyFile:
    text = f"default = 'a'\n[profiles.a.packages]\nlock = '{lock}'\n{more}"
    return parse_policy(text.encode(), Path("p.toml"))


def policy(lock: Path, more: str = "") -> Policy:
    return Policy(file_of(lock, more), images=["base"], backend="local", orphan_time_s=60.0)


def packages_of(policy: Policy, *asked: str) -> PackagesSpec | None:
    return policy.decide(ALICE, RequestedSession(packages=asked)).sandbox.packages


def problem_with(lock: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        file_of(lock)
    (problem,) = caught.value.problems
    return problem


# -- the file


def test_a_lock_is_its_distributions_and_its_digest(write: Write) -> None:
    path = write(LOCK)
    lock = read_lock(path)
    assert (lock.path, lock.sha256) == (path, hashlib.sha256(LOCK.encode()).hexdigest())
    assert lock.distributions == (Locked("numpy", "2.4.6"), Locked("numpy", "2.5.5"), Locked("pandas", "3.1.1"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (LOCK, "", "is not a PEP 751 lock file: Missing required value in 'lock-version'"),
        (LOCK, "pandas==3.1.1", "can't be used: The lock file is not TOML"),
        (LOCK, "[" * 100_000, "can't be used: The lock file is "),
        ('"1.0"', '"2.0"', "is not a PEP 751 lock file: "),
        (PANDAS + NUMPY, "packages = []", "has no packages"),
        (PANDAS + NUMPY, "packages = 3", "is not a PEP 751 lock file: "),
        ('version = "3.1.1"\n', "", "has pandas without a version"),
        ('"pandas"', '"Pandas"', "is not a PEP 751 lock file: Name 'Pandas' is not normalized"),
        ('"pandas"', '"numpy"', "is not a PEP 751 lock file: "),
        ('sha256 = "ab', 'sha256 = "xy', "has a wheel of pandas without a SHA-256 hash"),
        ("sha256", "md5", "has a wheel of pandas without a SHA-256 hash"),
        ("{ url = ", "{ path = ", "has a wheel of pandas that is not from an index"),
        (
            'wheels = [{ url = "https://packages.example.com/pandas-3.1.1-cp312-cp312-manylinux_2_28_x86_64.whl"',
            'sdist = { url = "https://packages.example.com/pandas-3.1.1.tar.gz"',
            "is not a PEP 751 lock file: ",
        ),
        ("python_full_version < '3.12'", "'x' in extras", "has numpy for some extras or groups only"),
    ],
)
def test_what_is_no_lock_of_wheels_is_refused(write: Write, old: str, new: str, problem: str) -> None:
    text = LOCK.replace(old, new)
    if new.startswith("sdist"):
        text, problem = (
            text.replace("}]", "}", 1),
            "has no wheel of pandas; a source distribution would run its own code",
        )
    found = problem_with(write(text))
    if problem.startswith("can't be used: The lock file is "):
        assert found.startswith("profiles.a.packages.lock: can't be used: The lock file ")
    else:
        assert found.startswith(f"profiles.a.packages.lock: {problem}")
    assert "it must be the path of a lock file of PEP 751" in found


@pytest.mark.parametrize(
    "source",
    [
        'vcs = { type = "git", url = "https://a.example/x", commit-id = "1" }',
        'directory = { path = "." }',
        f'archive = {{ url = "https://a.example/x.tar.gz", hashes = {{ sha256 = "{HASH}" }} }}',
    ],
)
def test_sources_are_refused(write: Write, source: str) -> None:
    text = f'lock-version = "1.0"\ncreated-by = "uv"\n[[packages]]\nname = "x"\nversion = "1"\n{source}\n'
    assert problem_with(write(text)).startswith(
        "profiles.a.packages.lock: has no wheel of x; a source distribution would run its own"
    )


def test_a_lock_that_cannot_be_trusted_is_refused(write: Write, tmp_path: Path) -> None:
    path = write(LOCK)
    path.chmod(0o666)
    assert f"The lock file {path} " in problem_with(path) and "can't be used" in problem_with(path)
    assert "can't be read: No such file or directory" in problem_with(tmp_path / "none.toml")
    assert "is not a regular file" in problem_with(tmp_path)


def test_a_lock_is_bounded(write: Write) -> None:
    assert f"is larger than {MAX_LOCK_BYTES:,} bytes" in problem_with(write("#" * (MAX_LOCK_BYTES + 1)))
    entry = f'{{name = "x", version = "%d", wheels = [{{url = "https://a.example/x-%d-py3-none-any.whl", hashes = {{sha256 = "{HASH}"}}}}]}}'
    many = ",\n".join(entry % (number, number) for number in range(1025))
    text = f'lock-version = "1.0"\ncreated-by = "uv"\npackages = [{many}]\n'
    assert "has more than 1,024 packages" in problem_with(write(text))


def test_a_lock_goes_with_no_list_of_packages(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        file_of(write(LOCK), "allowed = ['pandas']")
    (problem,) = caught.value.problems
    assert problem.startswith("profiles.a.packages.lock: can't be combined with `allowed`: the lock already lists")


def test_another_content_is_another_policy(write: Write) -> None:
    path = write(LOCK)
    before = file_of(path)
    again = file_of(path)
    write(LOCK + "\n# changed\n")
    after = file_of(path)
    assert before.fingerprint == again.fingerprint != after.fingerprint
    (change,) = differences(before, after)
    assert change.key == "profiles.a.packages.lock" and change.direction == ""
    assert change.old == f"{path} sha256:{hashlib.sha256(LOCK.encode()).hexdigest()}" != change.new


# -- sessions


def test_a_session_gets_all_of_the_lock(write: Write) -> None:
    path = write(LOCK)
    spec = PackagesSpec((), str(path), hashlib.sha256(LOCK.encode()).hexdigest(), None, 2**30)
    found = policy(path, "max_environment_bytes = '1GiB'\nexclude_newer = '14d'")
    assert packages_of(found, "pandas") == packages_of(found, "NumPy>=2", "pandas==3.1.1") == spec
    assert packages_of(found) is None


def test_what_the_lock_lacks_is_refused_with_what_it_has(write: Write) -> None:
    with pytest.raises(PolicyViolation) as caught:
        packages_of(policy(write(LOCK)), "polars", "pandas<3", "numpy[x]", "numpy==2.4.6")
    assert [(each.requested, each.allowed, each.rule) for each in caught.value.violations] == [
        ("numpy[x]==2.4.6", "numpy==2.4.6, numpy==2.5.5", "profiles.a.packages.lock"),
        ("pandas<3", "pandas==3.1.1", "profiles.a.packages.lock"),
        ("polars", "numpy, pandas", "profiles.a.packages.lock"),
    ]


def test_the_summary_lists_the_lock(write: Write) -> None:
    locked = ("numpy==2.4.6", "numpy==2.5.5", "pandas==3.1.1")
    most: dict[str, Any] = {"max_requirements": 64, "max_environment_bytes": 4 * 2**30}
    summary = policy(write(LOCK), "auto = true\nexclude_newer = '1d'").describe(ALICE).packages
    assert summary == PackagesSummary(locked=locked, auto=True, **most)


def test_missing_modules_bring_the_lock_that_has_them(write: Write) -> None:
    found = policy(write(LOCK.replace("pandas", "pyyaml")), "auto = true")
    spec = found.decide(ALICE, RequestedSession(authorized_imports=("yaml",)))
    added = found.with_packages(spec, ["yaml"])
    assert added is not None and added.sandbox.packages == packages_of(found, "pyyaml")
    assert found.with_packages(spec, ["torch"]) is None
    assert found.with_packages(added, ["numpy"]) is None


def test_a_session_stays_while_the_lock_is_the_same(write: Write) -> None:
    path = write(LOCK)
    old = policy(path)
    spec = old.decide(ALICE, RequestedSession(packages=("pandas",)))
    assert isinstance(policy(path, "exclude_newer = '14d'\nauto = true").tightened(ALICE, spec, "local"), SessionSpec)
    write(LOCK + "#")
    for other in (policy(path), policy_of("packages.allowed = ['pandas', 'numpy']"), policy_of("")):
        assert other.tightened(ALICE, spec, "local") == "its packages are not from the policy's present lock"


def policy_of(text: str) -> Policy:
    file = parse_policy(f"default = 'a'\n[profiles.a]\n{text}".encode(), Path("p.toml"))
    return Policy(file, images=["base"], backend="local", orphan_time_s=60.0)
