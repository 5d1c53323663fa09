"""The guest in one file: the same bytes each time, its bytecode really used, no path of the host in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executor_server.backends import guest_archive
from executor_server.backends.guest_archive import pack_archive, pack_guest
from executor_server.guest.wire.paths import GUEST_PATH, import_program

PYTHONS = Path("~/.pyenv/versions").expanduser()
OTHER_PYTHONS = [path for version in (9, 10, 12, 13) for path in PYTHONS.glob(f"3.{version}.*/bin/python3")]

MAIN = b"""\
%s
from package import module
print(type(module.__loader__).__name__, module.fail.__doc__)
if len(sys.argv) > 1:
    module.fail()
""" % import_program("sys.path[0]").encode()
MODULE = b"def fail() -> None:\n    'Documented.'\n    raise RuntimeError('wrong')\n"
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


def test_an_existing_archive_is_not_written_again(tmp_path: Path) -> None:
    path = pack_archive(SOURCES, tmp_path).path
    before = path.stat()
    assert pack_archive(SOURCES, tmp_path).path.stat().st_ino == before.st_ino
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_every_user_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        assert pack_archive(SOURCES, tmp_path).path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(umask)


def test_the_interpreter_takes_the_bytecode(tmp_path: Path) -> None:
    assert _run(sys.executable, pack_archive(SOURCES, tmp_path).path).stdout == "Importer None\n"


@pytest.mark.parametrize("python", OTHER_PYTHONS, ids=lambda path: path.parts[-3])
def test_another_interpreter_takes_the_source(tmp_path: Path, python: Path) -> None:
    assert _run(python, pack_archive(SOURCES, tmp_path).path).stdout == "zipimporter Documented.\n"


def test_tracebacks_name_the_path_inside_the_sandbox(tmp_path: Path) -> None:
    traceback = _run(sys.executable, pack_archive(SOURCES, tmp_path).path, "fail").stderr
    assert f'File "{GUEST_PATH}/package/module.py", line 3, in fail' in traceback


def test_the_guest_packs_whole(tmp_path: Path) -> None:
    with zipfile.ZipFile(pack_guest(tmp_path).path) as archive:
        names = set(archive.namelist())
    assert {
        "bytecode",
        "executor_guest/main.py",
        "executor_api/values/__init__.py",
    } <= names
    assert not any("__pycache__" in name or "v1" in name for name in names)


def test_it_may_be_packed_by_several_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        packed = list(threads.map(lambda _: pack_archive(SOURCES, tmp_path), range(9)))
    assert len(set(packed)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [packed[0].path.name]


# ---------------------------------------------------------------------------------------------------------------------
# The cache


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "guests"


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, bytes]]:
    """The sources that were compiled, since the fixture began."""
    packed: list[Mapping[str, bytes]] = []
    zipped = guest_archive._zipped

    def noted(sources: Mapping[str, bytes]) -> bytes:
        packed.append(sources)
        return zipped(sources)

    monkeypatch.setattr(guest_archive, "_zipped", noted)
    return packed


def _packed_into(directory: Path, cache: Path) -> bytes:
    directory.mkdir()
    return pack_archive(SOURCES, directory, cache).path.read_bytes()


def test_another_directory_takes_it_from_the_cache(tmp_path: Path, cache: Path, packings: list[object]) -> None:
    assert _packed_into(tmp_path / "a", cache) == _packed_into(tmp_path / "b", cache)
    assert len(packings) == 1
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_cache_shares_no_file_with_a_state_directory(tmp_path: Path, cache: Path) -> None:
    _packed_into(tmp_path / "a", cache)
    assert [path.stat().st_nlink for path in (*cache.iterdir(), *(tmp_path / "a").iterdir())] == [1, 1]


def _flip(kept: Path) -> None:
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)


def _link(kept: Path) -> None:
    kept.rename(kept.with_name("elsewhere"))
    kept.symlink_to("elsewhere")


def _pipe(kept: Path) -> None:
    kept.unlink()
    os.mkfifo(kept)


DISTRUSTED: dict[str, Callable[[Path], None]] = {
    "changed": _flip,
    "a link": _link,
    "a pipe": _pipe,
    "a group may write the file": lambda kept: kept.chmod(0o664),
    "others may write the directory": lambda kept: kept.parent.chmod(0o777),
}
if os.geteuid() == 0:
    DISTRUSTED["another user's file"] = lambda kept: os.chown(kept, 1, 1)
    DISTRUSTED["another user's directory"] = lambda kept: os.chown(kept.parent, 1, 1)


@pytest.mark.parametrize("spoil", DISTRUSTED.values(), ids=DISTRUSTED.keys())
def test_what_another_could_have_written_or_is_damaged_is_not_believed(
    tmp_path: Path, cache: Path, packings: list[object], spoil: Callable[[Path], None]
) -> None:
    packed = _packed_into(tmp_path / "a", cache)
    [kept] = cache.iterdir()
    spoil(kept)
    assert _packed_into(tmp_path / "b", cache) == packed
    assert len(packings) == 2


def test_a_damaged_one_is_replaced(tmp_path: Path, cache: Path, packings: list[object]) -> None:
    _packed_into(tmp_path / "a", cache)
    [kept] = cache.iterdir()
    _flip(kept)
    for name in ("b", "c"):
        _packed_into(tmp_path / name, cache)
    assert len(packings) == 2


def test_a_cache_that_cannot_be_used_costs_time_only(tmp_path: Path, packings: list[object]) -> None:
    (tmp_path / "file").touch()
    for name in ("a", "b"):
        _packed_into(tmp_path / name, tmp_path / "file" / "cache")
    assert len(packings) == 2


def test_the_cache_keeps_the_newest_few(tmp_path: Path, cache: Path) -> None:
    for number in range(10):
        pack_archive({"__main__.py": b"%d" % number}, tmp_path, cache)
    assert 0 < len(list(cache.iterdir())) < 10


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/cache"}, Path("/cache/remote-executor/guests")),
        ({"XDG_CACHE_HOME": ""}, Path("~/.cache/remote-executor/guests").expanduser()),
        ({}, Path("~/.cache/remote-executor/guests").expanduser()),
        ({"XDG_CACHE_HOME": "relative"}, None),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(environ: dict[str, str], expected: Path | None) -> None:
    assert guest_archive.default_cache_dir(environ) == expected


def _linked(cache: Path, foreign: Path) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.symlink_to(foreign)


def _given_away(cache: Path, foreign: Path) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    foreign.rename(cache)
    os.chown(cache, 1, 1)


def _open_to_all(cache: Path, foreign: Path) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    foreign.rename(cache)
    cache.chmod(0o777)


UNTRUSTED = [_linked, _open_to_all, *([_given_away] if os.geteuid() == 0 else [])]


@pytest.mark.parametrize("place", UNTRUSTED, ids=["a link", "writable by all", "another user's"][: len(UNTRUSTED)])
def test_nothing_is_written_or_deleted_in_a_directory_of_another_user(
    tmp_path: Path, cache: Path, place: Callable[[Path, Path], None]
) -> None:
    """A daemon that deletes as root, in a directory that a user chose, would delete what the user wants."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    names = {f"file-{number}" for number in range(20)}
    for name in names:
        (foreign / name).write_text(name)
    place(cache, foreign)
    assert _packed_into(tmp_path / "a", cache)
    assert {path.name for path in cache.iterdir()} == names
