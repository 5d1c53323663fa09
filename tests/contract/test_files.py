"""Files of the workspace, while the program in it may be hostile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator

import pytest

from executor_server.core.errors import ExecutorError, InvalidRequest, NotFound, ResourceExhausted
from executor_server.core.model import FileInfo
from executor_server.sessions.session import Session
from tests.contract.harness import MIB, Harness, follow, pieces
from tests.contract.marks import promise


async def read(session: Session, path: str, *, tar: bool = False) -> bytes:
    return b"".join([part async for part in session.get_file(path, tar=tar) if isinstance(part, bytes)])


def archive(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info


@promise("files-transfer")
async def test_files_are_put_listed_and_got(harness: Harness) -> None:
    session = await harness.session()
    data = bytes(range(256)) * 8192
    info = await session.put_file("deep/er/file.bin", len(data), pieces(data))
    assert (info.path, info.size_bytes, info.is_directory) == ("deep/er/file.bin", len(data), False)
    assert (await harness.run(session, "with open('deep/er/file.bin', 'rb') as f: n = len(f.read())\nn")).output == len(
        data
    )
    await harness.run(session, "with open('made.txt', 'w') as f: f.write('by the program')")
    entries, truncated = await session.list_files("")
    assert [entry.path for entry in entries] == ["deep", "deep/er", "deep/er/file.bin", "made.txt"] and not truncated
    assert await read(session, "made.txt") == b"by the program"
    assert await read(session, "deep/er/file.bin") == data


@promise("files-transfer")
async def test_an_empty_file_is_a_file(harness: Harness) -> None:
    session = await harness.session()
    assert (await session.put_file("empty", 0, pieces(b""))).size_bytes == 0
    assert await read(session, "empty") == b""


async def sent(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@promise("files-transfer")
async def test_an_upload_that_is_not_what_it_announced_leaves_the_file_that_was_there(harness: Harness) -> None:
    """The guest puts a file in its place with the last byte that was announced, before it is known that more comes."""
    session = await harness.session()
    for old in (b"old", b""):
        await session.put_file("a", len(old), pieces(old))
        for size_bytes, chunks in ((3, (b"new", b"more")), (3, (b"newmore",)), (3, (b"ne",)), (3, ()), (0, (b"x",))):
            with pytest.raises(InvalidRequest, match=r"announced|declare"):
                await session.put_file("a", size_bytes, sent(*chunks))
            assert await read(session, "a") == old


@promise("files-transfer")
async def test_an_archive_that_goes_on_after_its_size_leaves_the_file_that_was_there(harness: Harness) -> None:
    session = await harness.session()
    await session.put_file("a", 3, pieces(b"old"))
    data = archive(member("a", size=3), content=b"new")
    with pytest.raises(InvalidRequest, match=r"announced|declare"):
        await session.put_file("", len(data), sent(data, b"x"), tar=True)
    assert await read(session, "a") == b"old"


@promise("files-busy")
async def test_files_are_served_while_a_program_hangs(harness: Harness) -> None:
    session = await harness.session()
    execution = await harness.begin(session, "print('runs')\nimport time\ntime.sleep(1e6)")
    await anext(execution.events())
    await session.put_file("a", 1, pieces(b"x"))
    assert await read(session, "a") == b"x"
    execution.cancel()


@promise("files-paths")
async def test_a_path_that_leaves_the_workspace_is_refused(harness: Harness) -> None:
    session = await harness.session()
    for path in ("/etc/passwd", "../x", "a/../../x", "..", "a\0b", "x" * 300, "a/" * 100 + "x"):
        with pytest.raises(InvalidRequest):
            await read(session, path)
        with pytest.raises(InvalidRequest):
            await session.put_file(path, 1, pieces(b"x"))


@promise("files-hostile")
async def test_only_regular_files_of_the_workspace_are_read(harness: Harness) -> None:
    session = await harness.session()
    for made, path, said in (
        ("os.symlink('/etc/shadow', 'link')", "link", "'link' is not a regular file"),
        ("os.symlink('/etc', 'dir')", "dir/shadow", "Not a directory"),
        ("os.symlink('/proc/1/environ', 'env')", "env", "'env' is not a regular file"),
        ("os.symlink('/dev/zero', 'zero')", "zero", "'zero' is not a regular file"),
        ("os.mkfifo('fifo')", "fifo", "'fifo' is not a regular file"),
        ("os.mkdir('folder')", "folder", "'folder' is not a regular file"),
        ("import socket; socket.socket(socket.AF_UNIX).bind('sock')", "sock", "'sock' is not a regular file"),
    ):
        await harness.run(session, f"import os\n{made}")
        with pytest.raises(InvalidRequest, match=said):
            await read(session, path)
        if path != "folder":
            with pytest.raises(InvalidRequest):
                await read(session, path, tar=True)
    assert (await harness.run(session, "1")).output == 1


@promise("files-hostile")
async def test_a_device_is_not_read_nor_can_one_be_made(harness: Harness) -> None:
    session = await harness.session()
    made = await harness.run(session, "import os, stat\nos.mknod('device', stat.S_IFCHR | 0o666, os.makedev(1, 5))")
    assert made.outcome == "exception"
    for path in ("/dev/zero", "../dev/zero"):
        with pytest.raises(InvalidRequest):
            await read(session, path)


@promise("limit-disk")
async def test_a_sparse_file_of_100_gb_cannot_be_made_or_is_refused_before_it_is_read(harness: Harness) -> None:
    session = await harness.session()
    made = await harness.run(session, "open('f', 'w').truncate(100 * 2**30)")
    if made.outcome != "succeeded":
        assert "File too large" in made.message
        return
    for path, tar in (("f", False), ("", True)):
        with pytest.raises(ResourceExhausted, match="'f'"):
            await read(session, path, tar=tar)


@promise("files-archives")
async def test_a_directory_goes_in_and_comes_out_as_an_archive(harness: Harness) -> None:
    session = await harness.session()
    data = archive(member("a/b", size=5), member("none", tarfile.DIRTYPE), member("large", size=5), content=b"12345")
    info = await session.put_file("in/to", len(data), pieces(data), tar=True)
    assert (info.path, info.is_directory) == ("in/to", True)
    code = "import os\nos.symlink('/etc', 'in/link')\nopen('in/to/large', 'wb').write(bytes(3_000_000))"
    assert (await harness.run(session, f"{code}\nsorted(os.listdir('in/to'))")).output == ["a", "large", "none"]
    for path, prefix in (("", "in/to/"), ("in/to", "")):
        with tarfile.open(fileobj=io.BytesIO(await read(session, path, tar=True))) as tar:
            sizes = {each.name.removeprefix(prefix): each.size for each in tar if each.isreg()}
            assert not any(each.issym() for each in tar)
        assert sizes == {"a/b": 5, "large": 3_000_000}


@promise("files-archives-hostile")
async def test_a_hostile_member_is_refused_by_name_and_what_came_before_stays(harness: Harness) -> None:
    session = await harness.session()
    hostile = [
        member("/etc/x"),
        member("../x"),
        member("link", tarfile.SYMTYPE),
        member("hard", tarfile.LNKTYPE),
        member("null", tarfile.CHRTYPE),
        member("fifo", tarfile.FIFOTYPE),
    ]
    for count, bad in enumerate(hostile, 1):
        data = archive(member(f"first-{count}"), bad, member("last"))
        with pytest.raises(InvalidRequest, match=f"'{bad.name}'"):
            await session.put_file("", len(data), pieces(data), tar=True)
        there = [entry.path for entry in (await session.list_files(""))[0]]
        assert there == [f"first-{number}" for number in range(1, count + 1)]


@promise("files-hostile")
async def test_an_archive_is_not_unpacked_through_a_link(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import os\nos.makedirs('/tmp/outside')\nos.symlink('/tmp/outside', 'out')")
    data = archive(member("out/x"))
    with pytest.raises(InvalidRequest, match="'out/x'"):
        await session.put_file("", len(data), pieces(data), tar=True)
    assert (await harness.run(session, "os.listdir('/tmp/outside')")).output == []


@promise("files-artifacts")
async def test_a_result_lists_the_files_that_the_execution_made_or_changed(harness: Harness) -> None:
    session = await harness.session()
    await session.put_file("kept", 1, pieces(b"x"))
    await session.put_file("changed", 1, pieces(b"x"))
    code = "import os\nos.mkdir('d')\nopen('d/made', 'w').write('12')\nopen('changed', 'a').write('y')"
    ended = (await harness.run(session, code)).ended
    assert [(each.path, each.size_bytes, each.is_directory) for each in ended.artifacts] == [
        ("changed", 2, False),
        ("d/made", 2, False),
    ]
    assert not ended.artifacts_truncated
    assert (await harness.run(session, "1")).ended.artifacts == ()


@promise("files-artifacts")
@pytest.mark.parametrize(
    ("end", "outcome"),
    [("1/0", "exception"), ("while True: pass", "timeout"), ("os._exit(3)", "exited"), ("os.abort()", "crashed")],
)
async def test_artifacts_are_listed_however_the_execution_ends(harness: Harness, end: str, outcome: str) -> None:
    session = await harness.session()
    limits = {"wall_time_s": 0.5} if outcome == "timeout" else {}
    made = await harness.run(session, f"import os\nopen('made', 'w').close()\n{end}", **limits)
    assert (made.outcome, [each.path for each in made.ended.artifacts]) == (outcome, ["made"])


@promise("files-artifacts")
async def test_artifacts_are_bounded(harness: Harness) -> None:
    session = await harness.session()
    name = "\U0001f600" * 60  # characters of the largest size in a frame
    code = f"import os\nos.makedirs('{name}/{name}/{name}')\nos.chdir('{name}/{name}/{name}')\n"
    code += f"for i in range(300):\n    open(f'{{i}}{name[:60]}', 'w').close()"
    made = await harness.run(session, code)
    assert (made.outcome, len(made.ended.artifacts), made.ended.artifacts_truncated) == ("succeeded", 256, True)


@promise("files-artifacts")
async def test_a_file_that_a_client_puts_while_a_program_runs_is_not_the_programs(harness: Harness) -> None:
    session = await harness.session()
    execution = await harness.begin(session, "print('runs')\nimport os\nwhile not os.path.exists('go'): pass")
    await anext(execution.events())
    await session.put_file("go", 0, pieces(b""))
    transcript = await follow(execution)
    assert (transcript.outcome, transcript.ended.artifacts) == ("succeeded", ())


@promise("files-hostile")
async def test_nothing_is_written_through_a_link(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        "import os\nos.makedirs('/tmp/outside')\nos.symlink('/tmp/outside', 'out')\nos.symlink('/tmp/outside/f', 'f')",
    )
    with pytest.raises(InvalidRequest):
        await session.put_file("out/x", 1, pieces(b"x"))
    await session.put_file("f", 1, pieces(b"x"))  # takes the link's place
    assert (await harness.run(session, "os.listdir('/tmp/outside'), os.path.islink('f')")).output == ([], False)


@promise("files-whole")
async def test_a_file_that_breaks_off_or_lies_about_its_size_leaves_nothing(harness: Harness) -> None:
    session = await harness.session()
    for sent in (b"short", b"far too long"):
        with pytest.raises(InvalidRequest):
            await session.put_file("f", 6, pieces(sent))
    assert await session.list_files("") == ([], False)
    assert (await harness.run(session, "import os\nos.listdir('.')")).output == []


@promise("limit-disk")
async def test_a_full_disk_is_reported(harness: Harness) -> None:
    session = await harness.session(disk_bytes=2 * MIB)
    large = bytes(3 * MIB // 2)
    await session.put_file("first", len(large), pieces(large))
    with pytest.raises(ExecutorError, match="could not be written"):
        await session.put_file("second", len(large), pieces(large))
    await session.put_file("small", 1, pieces(b"x"))


@promise("files-transfer")
async def test_a_missing_file_is_not_found(harness: Harness) -> None:
    session = await harness.session()
    with pytest.raises(NotFound):
        await read(session, "nothing")
    with pytest.raises(NotFound):
        await session.list_files("nowhere")


@promise("files-listing")
async def test_names_that_are_not_text_and_many_files_do_not_break_a_listing(harness: Harness) -> None:
    session = await harness.session()
    code = "import os\nopen(b'\\xff\\xfe', 'w')\nfor i in range(12_000):\n    open(f'f{i}', 'w').close()"
    assert (await harness.run(session, code)).outcome == "succeeded"
    entries, truncated = await session.list_files("")
    assert truncated and 0 < len(entries) <= 10_000
    assert all(isinstance(entry, FileInfo) for entry in entries)
