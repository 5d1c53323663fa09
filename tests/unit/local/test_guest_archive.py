"""The guest in one file: the same bytes each time, its bytecode really used, no path of the host in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executor_server.guest_archive import GUEST_PATH, pack_archive, pack_guest

PYTHONS = Path("~/.pyenv/versions").expanduser()
OTHER_PYTHONS = [path for version in (9, 10, 12, 13) for path in PYTHONS.glob(f"3.{version}.*/bin/python3")]

MAIN = b"""\
import sys
from package import module
print(module.__file__)
if len(sys.argv) > 1:
    module.fail()
"""
MODULE = b"def fail():\n    raise RuntimeError('wrong')\n"
SOURCES = {"__main__.py": MAIN, "package/__init__.py": b"", "package/module.py": MODULE}


def _run(python: str | Path, archive: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-I", "-S", archive, *arguments], capture_output=True, text=True, check=False)


def test_the_same_sources_give_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = pack_archive(SOURCES, tmp_path / "a"), pack_archive(SOURCES, tmp_path / "b")
    assert first.version == second.version
    assert first.path.name == second.path.name == f"guest-{first.version}.pyz"
    assert first.path.read_bytes() == second.path.read_bytes()


def test_another_byte_gives_another_version(tmp_path: Path) -> None:
    changed = {**SOURCES, "package/module.py": MODULE + b"#"}
    assert pack_archive(SOURCES, tmp_path).path != pack_archive(changed, tmp_path).path


def test_one_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    path = pack_archive(SOURCES, tmp_path).path
    before = path.stat()
    assert pack_archive(SOURCES, tmp_path).path.stat().st_ino == before.st_ino
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_everybody_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        assert pack_archive(SOURCES, tmp_path).path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(umask)


def test_the_interpreter_takes_the_bytecode(tmp_path: Path) -> None:
    assert _run(sys.executable, pack_archive(SOURCES, tmp_path).path).stdout.strip().endswith("package/module.pyc")


@pytest.mark.parametrize("python", OTHER_PYTHONS, ids=lambda path: path.parts[-3])
def test_another_interpreter_takes_the_source(tmp_path: Path, python: Path) -> None:
    assert _run(python, pack_archive(SOURCES, tmp_path).path).stdout.strip().endswith("package/module.py")


def test_tracebacks_name_the_place_inside_the_sandbox(tmp_path: Path) -> None:
    told = _run(sys.executable, pack_archive(SOURCES, tmp_path).path, "fail").stderr
    assert f'File "{GUEST_PATH}/package/module.py", line 2, in fail' in told


def test_the_guest_packs_whole(tmp_path: Path) -> None:
    with zipfile.ZipFile(pack_guest(tmp_path).path) as archive:
        names = set(archive.namelist())
    assert {
        "executor_guest/main.py",
        "executor_guest/main.pyc",
        "executor_api/values/__init__.py",
    } <= names
    assert not any("__pycache__" in name or "v1" in name for name in names)


def test_it_may_be_packed_by_several_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        packed = list(threads.map(lambda _: pack_guest(tmp_path), range(8)))
    assert len(set(packed)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [packed[0].path.name]
