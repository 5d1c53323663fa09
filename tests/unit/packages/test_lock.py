"""Locks: one strict form is read, everything else is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.packages.lock import (
    Lock,
    LockError,
    Pin,
    Wheel,
    canonical,
    names_of,
    read_lock_file,
    read_resolved,
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


def printed(*packages: str) -> str:
    """A lock as uv prints it."""
    return "\n".join(['lock-version = "1.0"', 'created-by = "uv"', *packages])


def package(name: str, version: str = "1", wheel: str = "", sha256: str = A, **more: str) -> str:
    url = wheel or f"https://files.example/{name.replace('-', '_')}-{version}-py3-none-any.whl"
    fields = "".join(f"{key} = {value}\n" for key, value in more.items())
    return (
        f'[[packages]]\nname = "{name}"\nversion = "{version}"\n{fields}'
        f'wheels = [{{ url = "{url}", size = 1, hashes = {{ sha256 = "{sha256}" }} }}]\n'
    )


def test_what_uv_prints_becomes_one_line_for_each_package() -> None:
    wheels = read_resolved(printed(package("beta", "1.0rc1", sha256=B), package("al-pha", "2+cpu")))
    assert wheels[0] == Wheel(
        "al-pha", "2+cpu", A, "https://files.example/al_pha-2+cpu-py3-none-any.whl", "al_pha-2+cpu-py3-none-any.whl"
    )
    lock = Lock(canonical(wheels), "cpython-3.12", "x86_64", "1", tuple(map(str, wheels)))
    assert lock.text == f"al-pha==2+cpu --hash=sha256:{A}\nbeta==1.0rc1 --hash=sha256:{B}\n"
    assert lock.hashes == (A, B) and lock.pins == ("al-pha==2+cpu", "beta==1.0rc1")


def test_the_best_of_several_wheels_is_taken_and_of_those_that_a_lock_lists_where_there_is_one() -> None:
    """Many projects have a compiled wheel and a pure one, and an index may get a better one after a lock was made."""
    tags = ["py3-none-any", "cp312-cp312-manylinux_2_17_x86_64", "cp312-cp312-manylinux_2_28_x86_64", "cp39-abi3-linux"]
    hashes = [f"{number:064x}" for number in range(len(tags))]
    wheels = [
        f'{{ url = "https://files.example/a-1-{tag}.whl", hashes = {{ sha256 = "{sha256}" }} }}'
        for tag, sha256 in zip(tags, hashes, strict=True)
    ]
    text = printed(f'[[packages]]\nname = "a"\nversion = "1"\nwheels = [{", ".join(wheels)}]\n')
    chosen = [read_resolved(text, known)[0].sha256 for known in (None, {hashes[0], hashes[1]}, {hashes[0], hashes[3]})]
    assert chosen == [hashes[2], hashes[1], hashes[3]]
    assert read_resolved(text, {hashes[0]})[0].sha256 == hashes[0]
    with pytest.raises(LockError, match="Hash mismatch"):
        read_resolved(text, {A})


@pytest.mark.parametrize(
    "refused",
    [
        package("alpha", wheel="file:///etc/alpha-1-py3-none-any.whl"),
        package("alpha", wheel="ftp://files.example/alpha-1-py3-none-any.whl"),
        package("alpha", wheel="https://files.example/a b/alpha-1-py3-none-any.whl"),
        package("alpha", wheel="https://files.example/beta-1-py3-none-any.whl"),
        package("alpha", wheel="https://files.example/alpha-1.tar.gz"),
        package("alpha", wheel="https://files.example/alpha-1-py3-none-any.whl%2F..%2Fx.whl"),
        package("alpha", wheel="https://files.example/alpha-%2e%2e%00.whl"),
        package("alpha", wheel="https://files.example/"),
        package("alpha", "1 --index-url https://evil.example"),
        package("alpha", "1.*"),
        package("--index-url"),
        package("älpha"),
        package("alpha", sha256=A[:-1]),
        package("alpha", sha256=A.upper()),
        package("alpha") + package("alpha", "2"),
        package("alpha", marker="\"os_name == 'nt'\"") + package("alpha", "2", marker="\"os_name != 'nt'\""),
        package("alpha").replace("}]", "}, { }]"),
        '[[packages]]\nname = "alpha"\nversion = "1"\nsdist = { url = "https://files.example/alpha-1.tar.gz" }\n',
        '[[packages]]\nname = "alpha"\nversion = "1"\nwheels = [1]\n',
        "packages = 1",
    ],
)
def test_everything_else_is_refused(refused: str) -> None:
    with pytest.raises(LockError):
        read_resolved(printed(refused))


@pytest.mark.parametrize(
    "hidden",
    [
        "{} = 1",
        "[{}]",
        "x = {{ y = '\"', {} = 1 }}",
        'x = {{ y = "\\"", {} = \'"\' }}',
        "# '\n{} = 1 # '",
        'x = """\n " """\n{} = "',
        "x = '''\n'''\n{} = ''",
    ],
)
def test_keys_that_take_tomllib_the_square_of_their_parts_are_refused_unread(hidden: str) -> None:
    """Half a megabyte of them would take a quarter of an hour."""
    text = printed(hidden.format("a." * 250_000 + "a"), package("alpha"))
    with pytest.raises(LockError, match="which uv never prints"):
        read_resolved(text)


def test_quotes_without_end_are_refused_in_linear_time() -> None:
    with pytest.raises(LockError, match="no TOML"):
        read_resolved(printed('x = "' + '\\"' * 1_000_000))


def test_a_number_of_too_many_digits_is_no_lock() -> None:
    with pytest.raises(LockError, match="no TOML"):
        read_resolved(printed("x = " + "1" * 5000))


def test_a_lock_may_not_be_endless() -> None:
    with pytest.raises(LockError, match="2,000"):
        read_resolved(printed(*(package(f"a{n}") for n in range(2001))))
    with pytest.raises(LockError, match="longer"):
        read_resolved("\n" * (8 * 2**20 + 1))
    many = ", ".join(f"{{ hashes = {{ sha256 = '{n:064x}' }} }}" for n in range(1001))
    with pytest.raises(LockError, match="more files"):
        read_lock_file(printed(f'[[packages]]\nname = "a"\nversion = "1"\nwheels = [{many}]\n'))


@given(st.text(alphabet=st.sampled_from(list("abz019 =;@-._'\\n:/#[]<>~!h")), max_size=40))
def test_what_is_read_is_written_in_a_form_that_holds_nothing_else(text: str) -> None:
    for name, version in (("a", text), (text, "1")):
        try:
            wheels = read_resolved(printed(package(name, version, "https://files.example/a-1-py3-none-any.whl")))
        except LockError:
            continue
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.!+]* --hash=sha256:[0-9a-f]{64}\n", canonical(wheels))


def test_a_lock_file_gives_versions_and_hashes_and_nothing_of_where_they_are() -> None:
    pins = read_lock_file(PYLOCK)
    assert pins == (
        Pin("alpha-beta", "1.2.post1", "python_version >= '3.9'", (A,)),
        Pin("zeta", "2.0+cpu", "", (B,)),
    )
    assert [pin.requirement for pin in pins] == ["alpha-beta==1.2.post1 ; python_version >= '3.9'", "zeta==2.0+cpu"]


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
