"""Installed files are compared with the lists of their packages: damage, and two packages with one file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from executor_server.packages import tree
from executor_server.packages.tree import TreeRefused

ALPHA, BETA = "alpha-1.0.dist-info", "be_ta-2.0.dist-info"


def hash_of(content: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()


def install(site: Path, info: str, files: Mapping[str, str], more: str = "") -> None:
    """Writes files, and their list."""
    for name, content in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(content)
    (site / info).mkdir()
    rows = [f"{name},{hash_of(content)},{len(content)}\n" for name, content in files.items()]
    (site / info / "RECORD").write_text("".join([*rows, f"{info}/RECORD,,\n", more]))


def check(parent: Path) -> None:
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        tree.take_over(fd, "site", 10**6)
    finally:
        os.close(fd)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    install(site, ALPHA, {"alpha/__init__.py": "x = 1\n", "alpha/words.py": "WORD = 1\n", "bin/alpha": "#!x\n"})
    install(site, BETA, {"beta.py": "", "notes, and more.txt": "note"} | {})
    (site / BETA / "RECORD").write_text(
        f'beta.py,{hash_of("")},0\n"notes, and more.txt",{hash_of("note")},4\n{BETA}/RECORD,,\n'
    )
    return site


def test_files_that_are_as_their_packages_list_them_pass(site: Path, tmp_path: Path) -> None:
    (site / "listed_by_no_package.py").touch()
    check(tmp_path)


@pytest.mark.parametrize("damage", ["another byte", "empty", "missing"])
def test_a_file_that_is_not_as_listed_is_named_with_its_package(site: Path, tmp_path: Path, damage: str) -> None:
    file = site / "alpha" / "words.py"
    if damage == "missing":
        file.unlink()
    else:
        file.write_text("" if damage == "empty" else "WORD = 2\n")
    with pytest.raises(TreeRefused, match=r"'alpha/words\.py' is not the file that alpha 1\.0 lists"):
        check(tmp_path)


@pytest.mark.parametrize("content", [None, "", "beta.py,sha256=x", '"unfinished', "\0\n"])
def test_a_list_that_is_missing_or_not_whole_counts_as_damage(site: Path, tmp_path: Path, content: str | None) -> None:
    file = site / BETA / "RECORD"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(TreeRefused, match=r"be_ta 2\.0"):
        check(tmp_path)


def test_two_packages_with_one_file_of_different_contents_are_refused_by_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, ALPHA, {"shared/__init__.py": "of alpha"})
    install(site, BETA, {"shared/__init__.py": "of beta"})
    with pytest.raises(
        TreeRefused, match=r"alpha 1\.0 and be_ta 2\.0, have the file 'shared/__init__\.py' with different"
    ):
        check(tmp_path)


def test_two_packages_with_one_file_of_the_same_content_pass(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, ALPHA, {"shared/__init__.py": ""})
    install(site, BETA, {"shared/__init__.py": ""})
    check(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        "../../etc/passwd,{hash},1",
        "/etc/passwd,{hash},1",
        "alpha/old.pyc,{hash},1",
        "alpha/words.py,md5=x,1",
        "alpha/words.py,,",
        "one field",
        "",
    ],
)
def test_rows_with_nothing_to_compare_are_left_out(tmp_path: Path, row: str) -> None:
    install(tmp_path / "site", ALPHA, {"alpha/words.py": "x"}, row.format(hash=hash_of("")) + "\n")
    check(tmp_path)


def test_a_list_that_is_a_directory_or_endless_is_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MAX_LISTS_BYTES", 100)
    with pytest.raises(TreeRefused, match="more than 100 bytes"):
        check(tmp_path)
    monkeypatch.undo()
    (site / BETA / "RECORD").unlink()
    (site / BETA / "RECORD").mkdir()
    with pytest.raises(TreeRefused, match="RECORD"):
        check(tmp_path)
