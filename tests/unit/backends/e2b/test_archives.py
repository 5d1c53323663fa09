"""Archives of environments: the same bytes for the same files, bounded, kept for the next machine."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

import pytest

from executor_server.backends.e2b.archives import Archives, pack
from executor_server.backends.environments import Environment
from executor_server.core.errors import SandboxFailure, SpecUnsupported
from executor_server.guest.cloud.environment import Environment as InMachine
from executor_server.guest.cloud.environment import unpack
from tests.support.environments import make_environment

MIB = 2**20


def environment_of(directory: Path, environment_id: str = "env-1") -> Environment:
    return Environment(environment_id, directory, 0, ())


def state_of(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(directory)): (path.stat().st_mode, int(path.stat().st_mtime), path.read_bytes())
        for path in files
    }


def test_the_same_environment_gives_the_same_bytes(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    first = pack(made, MIB)
    again = make_environment(tmp_path / "elsewhere")
    for path in (made, *made.rglob("*")):
        twin = again / path.relative_to(made)
        os.utime(twin, (0, path.stat().st_mtime))
    assert pack(again, MIB) == first


def test_what_a_machine_unpacks_is_what_was_packed(tmp_path: Path) -> None:
    """With the times of the files, or their bytecode would count as old."""
    made = make_environment(tmp_path / "a")
    (made / "site" / "alias.py").symlink_to("greeting/words.py")
    (made / "site" / "twin.py").hardlink_to(made / "site" / "greeting" / "words.py")
    os.utime(made / "site" / "greeting" / "words.py", (1e9, 1e9))
    archive = tmp_path / "env.tar.gz"
    archive.write_bytes(pack(made, MIB))
    for _ in range(2):  # again where an attempt did not end
        inside = InMachine(str(archive), sys.version_info[:2])
        mask = os.umask(0o077)
        unpack(inside)
        assert os.umask(mask) == 0o077
    unpacked = Path(inside.directory)
    assert state_of(unpacked) == state_of(made)
    assert (unpacked / "site" / "alias.py").readlink() == Path("greeting/words.py")
    assert {path.stat().st_mode & 0o777 for path in (unpacked, *unpacked.rglob("*/"))} == {0o755}


def test_packages_of_another_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"for Python 3\.8, and this is 3"):
        unpack(InMachine(str(tmp_path / "none"), (3, 8)))


@pytest.mark.parametrize("data", [b"", b"no archive", b"\x1f\x8b\x08\x00"])
def test_a_damaged_archive_is_reported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "env.tar.gz").write_bytes(data)
    with pytest.raises((ValueError, OSError)):
        unpack(InMachine(str(tmp_path / "env.tar.gz"), sys.version_info[:2]))


async def test_an_archive_is_made_once_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    archives = Archives(tmp_path / "archives", MIB)
    first = await archives.packed(environment_of(made))
    (made / "site" / "later.py").touch()
    assert await Archives(tmp_path / "archives", MIB).packed(environment_of(made)) == first
    for number in range(2, 12):
        await archives.packed(environment_of(made, f"env-{number}"))
        os.utime(tmp_path / "archives" / f"env-{number}.tar.gz", (number, number))
    assert len(list((tmp_path / "archives").iterdir())) == 8


async def test_an_archive_that_is_too_large_is_refused_with_what_to_do(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    (made / "site" / "large.bin").write_bytes(os.urandom(2 * MIB))
    archives = Archives(tmp_path / "archives", MIB)
    for _ in range(2):
        with pytest.raises(SpecUnsupported, match=r"more than 1 MiB .* environments\.max_archive_bytes"):
            await archives.packed(environment_of(made))
    assert not (tmp_path / "archives").exists()
    assert len((await Archives(tmp_path / "archives", 4 * MIB).packed(environment_of(made))).data) > 2 * MIB
    with pytest.raises(SpecUnsupported):
        await Archives(tmp_path / "archives", MIB).packed(environment_of(made))


@pytest.mark.parametrize("environment_id", ["", "..", "env-/../x", "env-" + "a" * 200])
async def test_an_id_is_no_path(tmp_path: Path, environment_id: str) -> None:
    with pytest.raises(SandboxFailure, match="not the id"):
        await Archives(tmp_path, MIB).packed(environment_of(tmp_path, environment_id))


async def test_an_environment_that_goes_meanwhile_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure, match="no archive of env-1"):
        await Archives(tmp_path / "archives", MIB).packed(environment_of(tmp_path / "gone"))


def test_a_special_file_is_refused(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    os.mkfifo(made / "site" / "pipe")
    with pytest.raises(OSError, match="neither a file nor a directory"):
        pack(made, MIB)


def test_every_entry_belongs_to_root(tmp_path: Path) -> None:
    archive = tmp_path / "env.tar.gz"
    archive.write_bytes(pack(make_environment(tmp_path / "a"), MIB))
    with tarfile.open(archive) as read:
        assert {(member.uid, member.gid, member.name.partition("/")[0]) for member in read} == {(0, 0, "site")}
