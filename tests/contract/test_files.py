"""Files of the workspace, while the program in it may be hostile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing

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


async def sent(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@promise("files-transfer", "files-whole")
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


async def reason_of(asking: Awaitable[object]) -> str:
    with pytest.raises(ExecutorError) as refused:
        await asking
    return refused.value.reason.value


@promise("files-paths")
async def test_paths_and_links_lead_where_the_kernel_follows_them(harness: Harness) -> None:
    session = await harness.session()
    code = """import os
os.makedirs('/tmp/outside/deep')
os.symlink('/tmp/outside', 'out')
os.symlink('out/deep/../f', 'chain')
os.symlink('loop', 'loop')"""
    await harness.run(session, code)
    assert (await session.put_file("chain", 2, pieces(b"by"))).path == "chain"
    assert (await session.put_file("out/new/g", 1, pieces(b"g"))).path == "out/new/g"
    for path in ("chain", "out/f", "/tmp/outside/f", "/tmp/../tmp/outside/f", "./out//f"):
        assert await read(session, path) == b"by"
    looked = "import os\nos.path.islink('chain'), open('/tmp/outside/f').read(), os.listdir('/tmp/outside/new')"
    assert (await harness.run(session, looked)).output == (True, "by", ["g"])
    described = await session.manage_file("stat", "out", follow=False)
    assert described is not None and (described.is_link, described.target) == (True, "/tmp/outside")
    for path, real in (("chain", "/tmp/outside/f"), ("out/no/../no", "/tmp/outside/no"), ("", "/workspace")):
        assert (resolved := await session.manage_file("realpath", path)) is not None
        assert resolved.path == real
    for path in ("a\0b", "x" * 300, "loop", "loop/f"):
        assert await reason_of(read(session, path)) == "PATH_REFUSED"


@promise("files-paths")
async def test_the_kernels_refusals_have_their_reasons(harness: Harness) -> None:
    session = await harness.session()
    code = "import os\nos.mkdir('d')\nopen('f', 'w').close()\nos.mkdir('closed', 0o500)\nos.mkdir('full')\nopen('full/x', 'w').close()"
    await harness.run(session, code)
    manage = session.manage_file
    for asking, reason in (
        (read(session, "d"), "FILE_IS_DIRECTORY"),
        (session.put_file("d", 1, pieces(b"x")), "FILE_IS_DIRECTORY"),
        (manage("remove", "d"), "FILE_IS_DIRECTORY"),
        (read(session, "f/x"), "FILE_NOT_DIRECTORY"),
        (session.list_files("f"), "FILE_NOT_DIRECTORY"),
        (session.put_file("closed/x", 1, pieces(b"x")), "FILE_PERMISSION_DENIED"),
        (session.put_file("/run/executor/guest.pyz", 1, pieces(b"x")), "FILE_PERMISSION_DENIED"),
        (manage("mkdir", "f", exist_ok=True), "FILE_EXISTS"),
        (manage("mkdir", "d"), "FILE_EXISTS"),
        (manage("move", "d", target="full"), "FILE_EXISTS"),
        (manage("mkdir", "no/x"), "FILE_NOT_FOUND"),
        (manage("move", "no", target="x"), "FILE_NOT_FOUND"),
        (manage("remove", "no"), "FILE_NOT_FOUND"),
        (manage("stat", "no", follow=True), "FILE_NOT_FOUND"),
        (manage("remove", "/"), "PATH_REFUSED"),
        (manage("remove", "d/..", recursive=True), "PATH_REFUSED"),
    ):
        assert await reason_of(asking) == reason


@promise("files-manage")
async def test_entries_are_made_moved_listed_and_removed(harness: Harness) -> None:
    session = await harness.session()
    manage = session.manage_file
    made = await manage("mkdir", "a/b/c", parents=True)
    assert made is not None and (made.path, made.is_directory) == ("a/b/c", True)
    assert await manage("mkdir", "a/b", exist_ok=True) is not None
    put = await session.put_file("a/b/c/f", 2, pieces(b"12"), mode=0o750)
    assert put.mode == 0o750
    await session.put_file("a/b/c/f", 2, pieces(b"34"), append=True)
    assert (await session.put_file("a/b/c/g", 1, pieces(b"x"), append=True, mode=0o600)).mode == 0o600
    moved = await manage("move", "a/b/c", target="/workspace/d")
    assert moved is not None and moved.path == "/workspace/d"
    await harness.run(session, "import os\nos.symlink('f', 'd/link')\nos.mkfifo('d/fifo')")
    entries, truncated = await session.list_files("d", recursive=False)
    shown = [(each.path, each.size_bytes, each.mode, each.target) for each in entries]
    assert shown == [("d/f", 4, 0o750, ""), ("d/g", 1, 0o600, ""), ("d/link", 1, 0o777, "f")] and not truncated
    assert [each.path for each in (await session.list_files("/workspace", recursive=False))[0]] == [
        "/workspace/a",
        "/workspace/d",
    ]
    whole = [part async for part in session.get_file("d/f", offset=1, length=2)]
    assert whole[1:] == [b"23"]
    await manage("remove", "d/link")
    await manage("remove", "a", recursive=True)
    await manage("remove", "a", recursive=True, missing_ok=True)
    assert [each.path for each in (await session.list_files(""))[0]] == ["d", "d/f", "d/g"]


@promise("files-transfer")
async def test_a_download_ends_with_its_caller(harness: Harness) -> None:
    session = await harness.session()
    await session.put_file("large", 16 * MIB, pieces(bytes(16 * MIB)))
    for _ in range(20):  # more than a sandbox transfers at a time
        async with aclosing(session.get_file("large")) as parts:
            assert isinstance(await anext(parts), FileInfo)
    assert len(await read(session, "large")) == 16 * MIB


@promise("files-whole")
async def test_a_file_that_cannot_be_replaced_is_written_in_place(harness: Harness) -> None:
    session = await harness.session()
    code = (
        "import os\nos.mkdir('d')\nopen('d/f', 'w').write('old content')\nos.chmod('d/f', 0o640)\nos.chmod('d', 0o500)"
    )
    await harness.run(session, code)
    assert (await session.put_file("d/f", 3, pieces(b"new"))).mode == 0o640
    assert await read(session, "d/f") == b"new"
    await harness.run(session, "import os\nos.chmod('d/f', 0o400)")
    assert await reason_of(session.put_file("d/f", 1, pieces(b"x"))) == "FILE_PERMISSION_DENIED"


@promise("files-hostile")
async def test_only_regular_files_are_read_and_written(harness: Harness) -> None:
    session = await harness.session()
    for made, path, said in (
        ("os.symlink('/dev/zero', 'zero')", "zero", "'zero' is not a regular file"),
        ("os.mkfifo('fifo')", "fifo", "'fifo' is not a regular file"),
        ("import socket; socket.socket(socket.AF_UNIX).bind('sock')", "sock", "'sock' is not a regular file"),
    ):
        await harness.run(session, f"import os\n{made}")
        for asking in (
            read(session, path),
            session.put_file(path, 1, pieces(b"x")),
            session.put_file(path, 1, pieces(b"x"), append=True),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await asking
        assert await reason_of(read(session, path, tar=True)) == "FILE_NOT_DIRECTORY"
    assert (await harness.run(session, "1")).output == 1


@promise("files-hostile")
async def test_no_path_and_no_link_leads_to_what_process_1_holds(harness: Harness) -> None:
    """Process 1 opens the paths: links of /proc would lead to its own memory, descriptors and rights."""
    session = await harness.session()
    links = {
        "mem": "/proc/self/mem",
        "self": "/proc/self",
        "thread": "/proc/thread-self/fd",
        "one": "/proc/1/root",
        "up": "/tmp/../proc/1",
        "stdin": "/dev/stdin",
        "fds": "/dev/fd",
    }
    code = "import os\n" + "\n".join(f"os.symlink({target!r}, {name!r})" for name, target in links.items())
    await harness.run(session, code)
    paths = ["mem", "self/mem", "self/fd/0", "thread/3", "one/etc/hostname", "up/environ", "stdin", "fds/0"]
    paths += ["/proc/self/mem", "/proc/1/environ", "/dev/fd/3", "self/cwd/mem", "self/root/workspace/mem"]
    for path in paths:
        for asking in (
            read(session, path),
            session.put_file(path, 1, pieces(b"x")),
            session.put_file(path, 1, pieces(b"x"), append=True),
            session.put_file(path, 0, pieces(b""), tar=True),
            read(session, path, tar=True),
            session.list_files(path),
            session.manage_file("stat", path, follow=True),
            session.manage_file("mkdir", path, exist_ok=True, parents=True),
            session.manage_file("move", "mem", target=f"{path}/x"),
        ):
            assert await reason_of(asking) in ("PATH_REFUSED", "FILE_NOT_DIRECTORY", "FILE_NOT_FOUND"), path
    assert (await harness.run(session, "1")).output == 1


@promise("files-hostile")
async def test_a_swap_of_what_a_path_leads_to_shows_only_what_the_program_could_read(harness: Harness) -> None:
    session = await harness.session()
    code = """import os, time
open('mine', 'w').write('mine')
os.symlink('/proc/self/comm', 'theirs')
os.symlink('mine', 'swapped')
print('runs')
n = 0
while not os.path.exists('stop'):
    for target in ('theirs', 'mine'):
        os.symlink(target, 'next')
        os.rename('next', 'swapped')"""
    execution = await harness.begin(session, code)
    await anext(execution.events())
    seen = set()
    for _ in range(100):
        try:
            seen.add(await read(session, "swapped"))
            await session.put_file("swapped", 4, pieces(b"mine"))
        except ExecutorError as refused:
            seen.add(refused.reason.value.encode())
    await session.put_file("stop", 0, pieces(b""))
    assert (await follow(execution)).outcome == "succeeded"
    assert seen <= {b"mine", b"PATH_REFUSED"}


@promise("files-hostile")
async def test_no_device_can_be_made(harness: Harness) -> None:
    session = await harness.session()
    made = await harness.run(session, "import os, stat\nos.mknod('device', stat.S_IFCHR | 0o666, os.makedev(1, 5))")
    assert made.outcome == "exception"


@promise("files-manage")
async def test_a_wide_and_deep_tree_is_removed_while_the_session_works(harness: Harness) -> None:
    session = await harness.session()
    code = """import os
os.mkdir('tree')
os.makedirs('/tmp/kept/x')
os.symlink('/tmp/kept', 'tree/link')
for i in range(3000): open(f'tree/{i}', 'w').close()
fd = os.open('tree', os.O_RDONLY)
for _ in range(1500):
    os.mkdir('d', dir_fd=fd)
    inner = os.open('d', os.O_RDONLY, dir_fd=fd)
    os.close(fd)
    fd = inner
os.close(fd)"""
    assert (await harness.run(session, code)).outcome == "succeeded"
    await session.manage_file("remove", "tree", recursive=True)
    looked = "import os\nos.listdir('.'), os.listdir('/tmp/kept')"
    assert (await harness.run(session, looked)).output == ([], ["x"])


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
@pytest.mark.parametrize(("end", "outcome"), [("while True: pass", "timeout"), ("os._exit(3)", "exited")])
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
