"""The check of an installed tree: what may be in an environment, and that nothing outside of it is touched."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor_server.packages import tree


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    for name, text in {
        "alpha/__init__.py": "x = 1\n",
        "alpha/data.bin": "data",
        "beta.py": "",
        "fast.cpython-311-x86_64-linux-gnu.so": "",
        "alpha-1.0.dist-info/RECORD": "alpha-1.0.dist-info/RECORD,,\n",
        "Be_ta-2.0.dist-info/RECORD": "Be_ta-2.0.dist-info/RECORD,,\n",
        "bin/tool": "#!/old/python\nprint()\n",
        ".lock": "",
        "notes.txt": "",
        "some.pth": "",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


def test_an_ordinary_tree_is_taken_over(site: Path, parent: int) -> None:
    (site / "alpha").chmod(0o777)
    (site / "beta.py").chmod(0o666)
    (site / "bin/tool").chmod(0o6777)
    found = tree.take_over(parent, "site", 10**6)
    assert (found.modules, found.pins) == (["alpha", "beta", "fast"], ["alpha==1.0", "be-ta==2.0"])
    assert found.size_bytes == sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    modes = {str(path.relative_to(site)): stat.S_IMODE(path.stat().st_mode) for path in site.rglob("*")}
    assert (modes["alpha"], modes["beta.py"], modes["bin/tool"]) == (0o755, 0o644, 0o755)
    assert ".lock" not in modes
    assert sorted(found.infos) == ["Be_ta-2.0.dist-info", "alpha-1.0.dist-info"]


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _directory_link(path: Path) -> None:
    path.symlink_to("/etc")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize("make", [_link, _directory_link, os.mkfifo, _socket])
def test_what_is_no_file_is_refused(site: Path, parent: int, make: Callable[[Path], None]) -> None:
    make(site / "alpha/odd")
    with pytest.raises(tree.TreeRefused, match=r"symbolic link|no file"):
        tree.take_over(parent, "site", 10**6)


def test_the_top_itself_may_be_no_link(site: Path, parent: int, tmp_path: Path) -> None:
    site.rename(tmp_path / "elsewhere")
    site.symlink_to("elsewhere")
    with pytest.raises(OSError, match=r"directory|symbolic"):
        tree.take_over(parent, "site", 10**6)


@pytest.mark.parametrize("name", [b"new\nline", b"esc\x1b[31m", b"\xff\xfe", b"back\\slash"])
def test_a_name_that_cannot_be_written_down_is_refused(site: Path, parent: int, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(site) + b"/" + name)).write_text("")
    with pytest.raises(tree.TreeRefused, match="name"):
        tree.take_over(parent, "site", 10**6)


def test_bytes_entries_and_depth_are_bounded(site: Path, parent: int) -> None:
    with pytest.raises(tree.TreeRefused, match="more than 5 bytes"):
        tree.take_over(parent, "site", 5)
    with pytest.raises(tree.TreeRefused, match="more than 3 files"):
        tree.take_over(parent, "site", 10**6, max_entries=3)
    (site / "/".join("d" * 70)).mkdir(parents=True)
    with pytest.raises(tree.TreeRefused, match="deep"):
        tree.take_over(parent, "site", 10**6)


def test_a_sparse_file_counts_by_its_length(site: Path, parent: int) -> None:
    with (site / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(tree.TreeRefused, match="bytes"):
        tree.take_over(parent, "site", 2**30)


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to give a file away")
def test_everything_becomes_the_daemons(site: Path, parent: int) -> None:
    for path in (site, *site.rglob("*")):
        os.chown(path, 12345, 12345)
    tree.take_over(parent, "site", 10**6)
    assert {path.stat().st_uid for path in (site, *site.rglob("*"))} == {0}


LONG = "/a/path with spaces/bin/python"


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("#!/old/python\n# code\n", "/old/python"),
        (f"#!/bin/sh\n'''exec' '{LONG}' \"$0\" \"$@\"\n' '''\n# code\n", LONG),
    ],
)
def test_scripts_are_run_by_the_python_on_the_path(site: Path, text: str, python: str) -> None:
    (site / "bin/script").write_text(text)
    (site / "bin/script").chmod(0o755)
    fd = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
    try:
        tree.make_scripts_portable(fd, python)
    finally:
        os.close(fd)
    assert (site / "bin/script").read_text() == "#!/usr/bin/env python3\n# code\n"
    assert stat.S_IMODE((site / "bin/script").stat().st_mode) == 0o755


def test_other_scripts_stay_as_they_are(site: Path) -> None:
    (site / "bin/shell").write_text("#!/bin/sh\necho\n")
    (site / "bin/binary").write_bytes(b"\x7fELF\0\xff")
    (site / "bin/link").symlink_to("/etc/passwd")
    fd = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
    try:
        tree.make_scripts_portable(fd, "/another/python")
    finally:
        os.close(fd)
    assert (site / "bin/tool").read_text().startswith("#!/old/python\n")
    assert (site / "bin/shell").read_text() == "#!/bin/sh\necho\n"
