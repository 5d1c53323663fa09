"""Locks: one strict form is read, everything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.environments.lock import (
    LockError,
    Pin,
    canonical,
    names_of,
    read_lock_file,
    read_requirements,
)

A, B = "a" * 64, "b" * 64
PYLOCK = f"""
lock-version = "1.0"
created-by = "tests"
[[packages]]
name = "Alpha_Beta"
version = "1.2.post1"
marker = "python_version >= '3.9'"
index = "https://elsewhere.example/simple"
wheels = [{{ name = "x", url = "https://elsewhere.example/x.whl", hashes = {{ sha256 = "{A}" }} }}]
[[packages]]
name = "zeta"
version = "2.0+cpu"
wheels = [{{ name = "y", url = "file:///etc/passwd", hashes = {{ sha256 = "{B}", md5 = "1" }} }}]
"""


def test_what_uv_prints_becomes_one_line_for_each_package() -> None:
    text = f"beta==1.0rc1 ; python_full_version < '3.13' \\\n    --hash=sha256:{B} \\\n    --hash=sha256:{A}\nalpha==2 --hash=sha256:{A}\n"
    pins = read_requirements(text)
    assert [str(pin) for pin in pins] == ["alpha==2", "beta==1.0rc1"]
    assert pins[1] == Pin("beta", "1.0rc1", "python_full_version < '3.13'", (A, B))
    written = canonical(pins)
    assert written == (
        f"alpha==2 --hash=sha256:{A}\nbeta==1.0rc1 ; python_full_version < '3.13' --hash=sha256:{A} --hash=sha256:{B}\n"
    )
    assert read_requirements(written) == pins


@pytest.mark.parametrize(
    "line",
    [
        "alpha==1",
        f"alpha @ https://evil.example/a.whl --hash=sha256:{A}",
        f"alpha>=1 --hash=sha256:{A}",
        f"--index-url https://evil.example alpha==1 --hash=sha256:{A}",
        "--index-url https://evil.example",
        "-r /etc/passwd",
        "-e .",
        f"./alpha==1 --hash=sha256:{A}",
        f"alpha[extra]==1 --hash=sha256:{A}",
        f"Alpha==1 --hash=sha256:{A}",
        f"alpha==1 --hash=md5:{A}",
        f"alpha==1 --hash=sha256:{A[:-1]}",
        f"alpha==1 --hash=sha256:{A} --no-binary alpha",
        f"alpha==1 ; python_version > '3' \x0b --hash=sha256:{A}",
        f"alpha==1 ; {'x' * 2000} --hash=sha256:{A}",
        f"# alpha==1 --hash=sha256:{A}",
        f"alpha==1.*  --hash=sha256:{A}",
        f"älpha==1 --hash=sha256:{A}",
    ],
)
def test_every_other_line_is_refused(line: str) -> None:
    with pytest.raises(LockError):
        read_requirements(f"first==1 --hash=sha256:{B}\n{line}\n")


def test_a_name_has_one_version_unless_markers_choose() -> None:
    two = f"a==1 --hash=sha256:{A}\na==2 --hash=sha256:{A}\n"
    with pytest.raises(LockError, match="several versions"):
        read_requirements(two)
    chosen = f"a==1 ; os_name == 'nt' --hash=sha256:{A}\na==2 ; os_name != 'nt' --hash=sha256:{A}\n"
    assert len(read_requirements(chosen)) == 2


def test_a_lock_may_not_be_endless() -> None:
    with pytest.raises(LockError, match="2,000"):
        read_requirements("".join(f"a{n}==1 --hash=sha256:{A}\n" for n in range(2001)))
    with pytest.raises(LockError, match="longer"):
        read_requirements("\n" * (8 * 2**20 + 1))
    with pytest.raises(LockError, match="more files"):
        read_requirements("a==1 " + " ".join(f"--hash=sha256:{n:064x}" for n in range(1001)))


@given(st.text(alphabet=st.sampled_from(list("abz019 =;@-._'\"\\\n:/#[]<>~!h")), max_size=80))
def test_what_is_read_is_written_in_a_form_that_holds_nothing_else(text: str) -> None:
    try:
        pins = read_requirements(text)
    except LockError:
        return
    assert read_requirements(canonical(pins)) == pins
    assert all("://" not in line and "@" not in line for line in canonical(pins).splitlines())


def test_a_lock_file_gives_versions_and_hashes_and_nothing_of_where_they_are() -> None:
    pins = read_lock_file(PYLOCK)
    assert pins == (
        Pin("alpha-beta", "1.2.post1", "python_version >= '3.9'", (A,)),
        Pin("zeta", "2.0+cpu", "", (B,)),
    )
    assert "example" not in canonical(pins)


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        (("[[packages]]", "[[pack"), "no TOML"),
        (('lock-version = "1.0"', 'lock-version = "2.0"'), "lock-version"),
        (('"zeta"', '"ze ta"'), "no name"),
        (('version = "2.0+cpu"', ""), "no version"),
        (('version = "2.0+cpu"', 'version = "2 --index-url x"'), "no version"),
        ((f'sha256 = "{B}", ', ""), "SHA-256"),
        (("python_version >= '3.9'", "'dev' in dependency_groups"), "dependency groups"),
        (("python_version >= '3.9'", "python_version\\n--index-url"), "marker"),
        (('name = "zeta"', 'name = "alpha.beta"'), "several versions"),
    ],
)
def test_a_lock_file_that_is_not_understood_is_refused(change: tuple[str, str], clause: str) -> None:
    with pytest.raises(LockError, match=clause):
        read_lock_file(PYLOCK.replace(*change))


@pytest.mark.parametrize("source", ["vcs = { type = 'git' }", "directory = { path = '.' }", "sdist = { name = 'x' }"])
def test_a_lock_file_with_something_else_than_wheels_is_refused(source: str) -> None:
    with pytest.raises(LockError, match="no wheels"):
        read_lock_file(f'lock-version = "1.0"\n[[packages]]\nname = "a"\nversion = "1"\n{source}\n')


def test_names_are_compared_as_the_index_compares_them() -> None:
    assert names_of(["Pan_das.Extra--X"]) == ("pan-das-extra-x",)
    assert names_of(["Scikit_Learn[extra]>=1.5", "polars", "scikit-learn<2"]) == ("scikit-learn", "polars")
