"""Archives of environments: the same bytes for the same files, bounded, kept for the next machine."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from executor_server.backends.e2b import archives as archives_module
from executor_server.backends.e2b.archives import Archives, PackedEnvironment
from executor_server.backends.e2b.packing import Stopped, TooLarge, Walk
from executor_server.backends.e2b.packing import pack as pack_into
from executor_server.backends.environments import Environment
from executor_server.core.errors import ImageNotReady, SandboxFailure, SpecUnsupported
from executor_server.guest.cloud.environment import Environment as InMachine
from executor_server.guest.cloud.environment import unpack
from tests.support.environments import make_environment
from tests.support.polling import eventually_async, eventually_awaited

MIB = 2**20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for an archive as long as a busy machine takes, except in tests of what is said meanwhile."""
    monkeypatch.setattr(archives_module, "_ANSWER_WAIT_S", 60.0)


def environment_of(directory: Path, environment_id: str = "env-1") -> Environment:
    return Environment(environment_id, directory, 0, ())


def pack(directory: Path, max_bytes: int = MIB) -> bytes:
    target = io.BytesIO()
    pack_into(directory, target, max_bytes, Walk())
    return target.getvalue()


def content_of(packed: PackedEnvironment) -> bytes:
    return b"".join(map(packed.part, range(packed.parts)))


def in_parts(archive: Path, data: bytes, part_bytes: int) -> int:
    """Writes the archive as a machine gets it; returns the number of parts."""
    parts = [data[at : at + part_bytes] for at in range(0, len(data), part_bytes)]
    for number, part in enumerate(parts):
        archive.with_name(f"{archive.name}.{number}").write_bytes(part)
    return len(parts)


def state_of(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(directory)): (path.stat().st_mode, int(path.stat().st_mtime), path.read_bytes())
        for path in files
    }


def test_the_same_environment_gives_the_same_bytes(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    first = pack(made)
    again = make_environment(tmp_path / "elsewhere")
    for path in (made, *made.rglob("*")):
        twin = again / path.relative_to(made)
        os.utime(twin, (0, path.stat().st_mtime))
    assert pack(again) == first


@pytest.mark.parametrize("part_bytes", [100, MIB])
def test_what_a_machine_unpacks_is_what_was_packed(tmp_path: Path, part_bytes: int) -> None:
    """With the times of the files, or their bytecode would count as old. The parts are gone then."""
    made = make_environment(tmp_path / "a")
    (made / "site" / "alias.py").symlink_to("greeting/words.py")
    (made / "site" / "twin.py").hardlink_to(made / "site" / "greeting" / "words.py")
    os.utime(made / "site" / "greeting" / "words.py", (1e9, 1e9))
    archive = tmp_path / "machine" / "env.tar.gz"
    archive.parent.mkdir()
    inside = InMachine(str(archive), in_parts(archive, pack(made), part_bytes), sys.version_info[:2])
    unfinished = Path(inside.directory) / "site" / "of an attempt that did not end"
    unfinished.mkdir(parents=True)
    mask = os.umask(0o077)
    unpack(inside)
    assert os.umask(mask) == 0o077
    unpacked = Path(inside.directory)
    assert state_of(unpacked) == state_of(made)
    assert (unpacked / "site" / "alias.py").readlink() == Path("greeting/words.py")
    assert {path.stat().st_mode & 0o777 for path in (unpacked, *unpacked.rglob("*/"))} == {0o755}
    assert list(archive.parent.iterdir()) == [unpacked]


def test_packages_of_another_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"for Python 3\.8, and this is 3"):
        unpack(InMachine(str(tmp_path / "none"), 1, (3, 8)))


@pytest.mark.parametrize("damage", ["empty", "no archive", "half", "another byte", "a part less"])
def test_a_damaged_archive_is_reported(tmp_path: Path, damage: str) -> None:
    data = pack(make_environment(tmp_path / "a"))
    at = len(data) - 8  # the checksum, behind the last entry
    damaged = {
        "empty": b"",
        "no archive": b"no archive",
        "half": data[: len(data) // 2],
        "another byte": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "a part less": data[:-100],
    }
    archive = tmp_path / "env.tar.gz"
    parts = in_parts(archive, damaged[damage], 100)
    with pytest.raises((ValueError, OSError)):
        unpack(InMachine(str(archive), parts, sys.version_info[:2]))


async def test_an_archive_is_made_once_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    archives = Archives(tmp_path / "archives", MIB)
    with await archives.packed(environment_of(made)) as packed:
        first = content_of(packed)
    (made / "site" / "later.py").touch()
    with await Archives(tmp_path / "archives", MIB).packed(environment_of(made)) as packed:
        assert content_of(packed) == first
        for number in range(2, 12):
            with await archives.packed(environment_of(made, f"env-{number}")):
                os.utime(tmp_path / "archives" / f"env-{number}.tar.gz", (number, number))
        assert len(list((tmp_path / "archives").iterdir())) == 8
        (tmp_path / "archives" / "env-1.tar.gz").unlink()
        assert content_of(packed) == first, "what is open stays readable"


async def test_an_archive_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives_module, "PART_BYTES", 100)
    made = make_environment(tmp_path / "a")
    with await Archives(tmp_path / "archives", MIB).packed(environment_of(made)) as packed:
        assert packed.parts > 2
        assert {len(packed.part(number)) for number in range(packed.parts - 1)} == {100}
        assert content_of(packed) == pack(made)
        assert packed.size_bytes == len(pack(made))


async def test_the_answer_while_an_archive_is_being_made_says_how_far_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives_module, "_ANSWER_WAIT_S", 0.0)
    archives = Archives(tmp_path / "archives", MIB)
    environment = environment_of(make_environment(tmp_path / "a"))
    with pytest.raises(ImageNotReady, match="being packed for a machine of E2B: packing") as waiting:
        await archives.packed(environment)
    assert waiting.value.retry_after_s is not None
    assert waiting.value.progress is not None

    async def made() -> bool:
        try:
            with await archives.packed(environment):
                return True
        except ImageNotReady:
            return False

    assert await eventually_awaited(made)


async def test_a_failure_that_came_while_nobody_waited_is_the_next_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives_module, "_ANSWER_WAIT_S", 0.0)
    archives = Archives(tmp_path / "archives", MIB)
    environment = environment_of(tmp_path / "gone")
    with pytest.raises(ImageNotReady):
        await archives.packed(environment)
    assert await eventually_async(lambda: archives._packings["env-1"].task.done())
    with pytest.raises(SandboxFailure, match="no archive of env-1"):
        await archives.packed(environment)


async def test_an_archive_that_waits_to_be_made_at_the_end_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives_module, "_ANSWER_WAIT_S", 0.0)
    archives = Archives(tmp_path / "archives", MIB)
    async with archives._one_at_a_time:
        with pytest.raises(ImageNotReady):
            await archives.packed(environment_of(make_environment(tmp_path / "a")))
        packing = archives._packings["env-1"]
        closing = asyncio.create_task(archives.close())
        assert await eventually_async(lambda: packing.walk.is_stopped)
    await closing
    assert packing.task.done()
    assert list((tmp_path / "archives").glob("*")) == []


def test_packing_that_is_stopped_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        pack_into(make_environment(tmp_path / "a"), io.BytesIO(), MIB, Walk(is_stopped=True))


async def test_what_a_killed_daemon_left_half_made_is_removed(tmp_path: Path) -> None:
    half = tmp_path / "archives" / ".env-7.tar.gz.00"
    half.parent.mkdir()
    half.touch()
    with await Archives(tmp_path / "archives", MIB).packed(environment_of(make_environment(tmp_path / "a"))):
        assert not half.exists()


async def test_an_archive_that_is_too_large_is_refused_with_what_to_do(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    (made / "site" / "large.bin").write_bytes(os.urandom(2 * MIB))
    archives = Archives(tmp_path / "archives", MIB)
    for _ in range(2):
        with pytest.raises(SpecUnsupported, match=r"more than 1 MiB .* environments\.max_archive_bytes"):
            await archives.packed(environment_of(made))
    assert list((tmp_path / "archives").iterdir()) == []
    with await Archives(tmp_path / "archives", 4 * MIB).packed(environment_of(made)) as packed:
        assert packed.size_bytes > 2 * MIB
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
        pack(made)


def test_packing_ends_where_the_archive_gets_too_large(tmp_path: Path) -> None:
    made = make_environment(tmp_path / "a")
    (made / "site" / "large.bin").write_bytes(os.urandom(2 * MIB))
    with pytest.raises(TooLarge):
        pack(made)


def test_every_entry_belongs_to_root(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(pack(make_environment(tmp_path / "a")))) as read:
        assert {(member.uid, member.gid, member.name.partition("/")[0]) for member in read} == {(0, 0, "site")}
