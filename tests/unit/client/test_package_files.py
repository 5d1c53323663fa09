"""The packages that a person's files name: scripts with a header (PEP 723), requirements.txt, pylock.toml (PEP 751)."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from executor_client import InvalidRequest
from executor_client.cli.package_files import FILE_BYTES_MAX, packages_of
from executor_client.cli.script_header import ScriptHeader, read_header

HEADER = """\
#!/usr/bin/env python
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "polars>=1",  # the fast one
#   "scikit-learn",
# ]
#
# [tool.uv]
# anything = "goes"
# ///
import polars
"""


# -- headers of scripts


def test_a_header_names_packages_and_a_python() -> None:
    header = read_header(HEADER, "s.py")
    assert header == ScriptHeader("s.py", ("polars>=1", "scikit-learn"), ">=3.11,<3.14", 3)


def test_a_script_without_a_header_asks_for_nothing() -> None:
    assert read_header("import os\n# dependencies = ['x']\n", "s.py") == ScriptHeader("s.py")
    assert read_header("# /// test\n# whatever\n# ///\n", "s.py") == ScriptHeader("s.py")
    assert read_header("", "s.py") == ScriptHeader("s.py")


def test_the_last_line_that_may_end_a_header_does() -> None:
    """By PEP 723, whose reference parser is greedy."""
    text = "# /// script\n# dependencies = [\n# ///\n# ]\n# ///\n"
    with pytest.raises(InvalidRequest, match="not valid TOML"):
        read_header(text, "s.py")


def test_a_header_that_never_ends_is_none_and_is_found() -> None:
    header = read_header("\n# /// script\n# dependencies = ['x']\nimport os\n# ///\n", "s.py")
    assert (header.dependencies, header.unclosed_line) == ((), 2)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["# dependencies = ["], "s.py, line 2: the header is not valid TOML"),
        (["# x = 1", "# = 2"], "at line 4"),
        (["# dependencies = []", "# depends = []"], "s.py, line 4: unknown key 'depends'"),
        (["# [dependency-groups]", "# dev = []"], "s.py, line 3: unknown key 'dependency-groups'"),
        (["# dependencies = 'polars'"], "s.py, line 3: dependencies is not a list of strings"),
        (["# dependencies = [1]"], "s.py, line 3: dependencies is not a list of strings"),
        (["# requires-python = 3.11"], "s.py, line 3: requires-python is not a string"),
        (["#", "# requires-python = '3.11'"], "s.py, line 4: requires-python is not a version specifier"),
        (["# ///", "", "# /// script"], "s.py, line 5: a second header; the first is in line 2"),
    ],
)
def test_a_mistake_in_a_header_is_said_with_its_line(lines: list[str], said: str) -> None:
    text = "\n".join(["", "# /// script", *lines, "# ///", "print()"])
    with pytest.raises(InvalidRequest) as refused:
        read_header(text, "s.py")
    assert said in str(refused.value)


def test_another_python_is_said_with_the_line_that_asks_for_it() -> None:
    header = read_header(HEADER, "s.py")
    header.check_python("3.12.4", "base")
    with pytest.raises(
        InvalidRequest, match=r"s.py, line 3: the script needs Python >=3.11,<3.14, but the image 'old'"
    ):
        header.check_python("3.10.2", "old")


def test_a_pre_release_of_python_is_compared_and_an_odd_version_is_not() -> None:
    read_header(HEADER, "s.py").check_python("3.13.0rc1", "base")
    read_header(HEADER, "s.py").check_python("not a version", "base")


# -- files


def written(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text, "utf-8")
    return str(directory / name)


REQUIREMENTS = """\
# by a tool
numpy==2.5.5 \\
    --hash=sha256:aaaa \\
    --hash=sha256:bbbb
    # via pandas
pandas[excel]>=2, <4   # a comment
six ; python_version < "3.13"

numpy==2.5.5
"""


def test_requirements_are_read_without_their_hashes(tmp_path: Path) -> None:
    path = written(tmp_path, "requirements.txt", REQUIREMENTS)
    assert packages_of(path) == ("numpy==2.5.5", "pandas[excel]>=2, <4", 'six ; python_version < "3.13"')


def test_requirements_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("polars\n"))
    assert packages_of("-") == ("polars",)


def test_too_much_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages beyond the limit were ignored."""
    monkeypatch.setattr("sys.stdin", io.StringIO("polars\n" + "#" * FILE_BYTES_MAX + "\nnumpy"))
    with pytest.raises(InvalidRequest, match="standard input is larger than"):
        packages_of("-")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-r other.txt", "the option -r can't be used: copy the lines of that file into this one"),
        ("--constraint=c.txt", "the option --constraint can't be used: write the version bounds"),
        ("-e .", "the option -e can't be used: only packages of the index"),
        ("-ihttps://user:secret@index.example/", "the option -i can't be used: the daemon's operator"),
        ("--extra-index-url https://index.example/", "the option --extra-index-url can't be used: the daemon's"),
        ("--find-links ./wheels", "the option --find-links can't be used: the daemon's operator"),
        ("--require-hashes", "the option --require-hashes can't be used: this always applies; remove the line"),
        ("--no-binary :all:", "the option --no-binary can't be used: only wheels"),
        ("--use-feature=x", "the option --use-feature can't be used: it has no effect here"),
        ('numpy --config-settings="a=b"', "the option --config-settings can't be used"),
        ("numpy==${VERSION}", "variables are not supported"),
        ("./wheels/x-1.0-py3-none-any.whl", "is not a package of an index"),
        ("x-1.0-py3-none-any.whl", "is not a package of an index"),
        ("x @ https://files.example/x.zip", "is not a package of an index"),
        ("git+https://git.example/x", "is not a package of an index"),
        ("x@file:x.whl", "is not a package of an index"),
        ("C:\\x", "is not a package of an index"),
    ],
)
def test_what_is_no_package_of_the_index_is_refused_with_what_to_do(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, "requirements.txt", f"numpy\n{line}\n")
    with pytest.raises(InvalidRequest) as refused:
        packages_of(path)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


LOCK = """
lock-version = "1.0"
created-by = "test"
requires-python = ">=3.11"
[[packages]]
name = "numpy"
version = "2.5.5"
wheels = [{ name = "numpy-2.5.5-py3-none-any.whl", url = "https://index.example/n.whl", hashes = { sha256 = "aa" } }]
[[packages]]
name = "colorama"
version = "0.4.6"
marker = "sys_platform == 'win32'"
wheels = [{ name = "c.whl", hashes = { sha256 = "bb" } }]
"""


def test_a_lock_is_read_as_its_versions(tmp_path: Path) -> None:
    for name in ("pylock.toml", "pylock.dev.toml"):
        path = written(tmp_path, name, LOCK)
        assert packages_of(path) == ("numpy==2.5.5", "colorama==0.4.6; sys_platform == 'win32'")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x =", "is not valid TOML"),
        ("", "lock-version is None"),
        ('lock-version = "2.0"', "lock-version is '2.0'; locks of version"),
        ('lock-version = "1.0"', "names no packages"),
        ('lock-version = "1.0"\npackages = [1]', "packages is not a list of tables"),
        ('lock-version = "1.0"\n[[packages]]\nversion = "1"', "a package has no name"),
        ('lock-version = "1.0"\n[[packages]]\nname = "x"\nversion = 1', "a package has no name"),
        ('lock-version = "1.0"\n[[packages]]\nname = "x"\nwheels = [{}]', "x has no version"),
        ('lock-version = "1.0"\n[[packages]]\nname = "x"\nversion = "1"', "x 1 has no wheel"),
        ('lock-version = "1.0"\n[[packages]]\nname = "x"\nvcs = {}', "x is locked to vcs"),
        ('lock-version = "1.0"\n[[packages]]\nname = "x"\narchive = {}', "x is locked to archive"),
        (
            'lock-version = "1.0"\n[[packages]]\nname = "x"\nversion = "1"\nwheels = [{}]\nmarker = "\'a\' in extras"',
            "x depends on extras or groups",
        ),
    ],
)
def test_a_lock_that_can_not_be_installed_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, "pylock.toml", text)
    with pytest.raises(InvalidRequest) as refused:
        packages_of(path)
    assert said in str(refused.value)


def test_a_script_is_read_by_its_header(tmp_path: Path) -> None:
    assert packages_of(written(tmp_path, "s.py", HEADER)) == ("polars>=1", "scikit-learn")
    with pytest.raises(InvalidRequest, match="names no packages"):
        packages_of(written(tmp_path, "t.py", "import polars"))


def test_what_can_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    for name, said in (
        ("missing.txt", "cannot be read"),
        ("binary.txt", "cannot be read"),
        ("large.txt", "is larger than"),
        ("pyproject.toml", "is not a lock file"),
    ):
        (tmp_path / "pyproject.toml").write_text("[project]")
        with pytest.raises(InvalidRequest, match=said):
            packages_of(str(tmp_path / name))
