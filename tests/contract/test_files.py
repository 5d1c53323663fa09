"""Files of the workspace, while the program in it may be hostile."""

from __future__ import annotations

import pytest

from executor_server.errors import ExecutorError, InvalidRequest, NotFound
from executor_server.model import FileInfo
from executor_server.session import Session
from tests.contract.harness import MIB, Harness, pieces


async def read(session: Session, path: str) -> bytes:
    return b"".join([part async for part in session.get_file(path) if isinstance(part, bytes)])


async def test_files_are_put_listed_and_got(harness: Harness) -> None:
    session = await harness.session()
    data = bytes(range(256)) * 8192
    info = await session.put_file("deep/er/file.bin", len(data), pieces(data))
    assert (info.path, info.size_bytes, info.is_directory) == ("deep/er/file.bin", len(data), False)
    assert (await harness.run(session, "len(open('deep/er/file.bin', 'rb').read())")).output == len(data)
    await harness.run(session, "open('made.txt', 'w').write('by the program')")
    entries, truncated = await session.list_files("")
    assert [entry.path for entry in entries] == ["deep", "deep/er", "deep/er/file.bin", "made.txt"] and not truncated
    assert await read(session, "made.txt") == b"by the program"
    assert await read(session, "deep/er/file.bin") == data


async def test_an_empty_file_is_a_file(harness: Harness) -> None:
    session = await harness.session()
    assert (await session.put_file("empty", 0, pieces(b""))).size_bytes == 0
    assert await read(session, "empty") == b""


async def test_files_are_served_while_a_program_hangs(harness: Harness) -> None:
    session = await harness.session()
    execution = harness.begin(session, "print('runs')\nimport time\ntime.sleep(1e6)")
    await anext(execution.events())
    await session.put_file("a", 1, pieces(b"x"))
    assert await read(session, "a") == b"x"
    execution.cancel()


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "..", "a\0b", "x" * 300, "a/" * 100 + "x"])
async def test_a_path_that_leaves_the_workspace_is_refused(harness: Harness, path: str) -> None:
    session = await harness.session()
    with pytest.raises(InvalidRequest):
        await read(session, path)
    with pytest.raises(InvalidRequest):
        await session.put_file(path, 1, pieces(b"x"))


@pytest.mark.parametrize(
    ("made", "path"),
    [
        ("os.symlink('/etc/passwd', 'link')", "link"),
        ("os.symlink('/etc', 'dir')", "dir/passwd"),
        ("os.symlink('/proc/1/environ', 'env')", "env"),
        ("os.mkfifo('fifo')", "fifo"),
        ("os.mkdir('folder')", "folder"),
        ("import socket; socket.socket(socket.AF_UNIX).bind('sock')", "sock"),
    ],
)
async def test_what_is_not_a_regular_file_of_the_workspace_is_not_read(harness: Harness, made: str, path: str) -> None:
    session = await harness.session()
    await harness.run(session, f"import os, resource\n{made}")
    with pytest.raises(ExecutorError):
        await read(session, path)
    assert (await harness.run(session, "1")).output == 1


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


async def test_a_file_that_breaks_off_or_lies_about_its_size_leaves_nothing(harness: Harness) -> None:
    session = await harness.session()
    for sent in (b"short", b"far too long"):
        with pytest.raises(InvalidRequest):
            await session.put_file("f", 6, pieces(sent))
    assert await session.list_files("") == ([], False)
    assert (await harness.run(session, "import os\nos.listdir('.')")).output == []


async def test_a_full_disk_is_said(harness: Harness) -> None:
    session = await harness.session(disk_bytes=2 * MIB)
    with pytest.raises(ExecutorError, match="could not be written"):
        await session.put_file("big", 4 * MIB, pieces(bytes(4 * MIB)))
    await session.put_file("small", 1, pieces(b"x"))


async def test_what_is_missing_is_not_found(harness: Harness) -> None:
    session = await harness.session()
    with pytest.raises(NotFound):
        await read(session, "nothing")
    with pytest.raises(NotFound):
        await session.list_files("nowhere")


async def test_names_that_are_not_text_and_many_files_do_not_break_a_listing(harness: Harness) -> None:
    session = await harness.session()
    code = "import os\nopen(b'\\xff\\xfe', 'w')\nfor i in range(12_000):\n    open(f'f{i}', 'w').close()"
    assert (await harness.run(session, code)).outcome == "succeeded"
    entries, truncated = await session.list_files("")
    assert truncated and 0 < len(entries) <= 10_000
    assert all(isinstance(entry, FileInfo) for entry in entries)
