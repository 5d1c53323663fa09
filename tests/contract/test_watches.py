"""Watches of the workspace: each change is reported once, or that changes were lost; hostile programs among the causes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from executor_server.core import FileChange, FileChanges, InvalidRequest, NotFound, Reason, ResourceExhausted
from executor_server.sessions import Session
from executor_server.sessions.watches import MAX_WATCHES
from tests.contract.harness import Harness, pieces
from tests.contract.marks import promise
from tests.support.polling import eventually_awaited

WAIT_S = 20.0


class Seen:
    """The changes that a watch has reported, the last one of each path, in the order of their coming."""

    def __init__(self, changes: AsyncGenerator[FileChanges, None]) -> None:
        self._changes = changes
        self.kinds: dict[str, str] = {}
        self.reported = 0
        self.overflowed = False
        self.directories: set[str] = set()

    async def begun(self) -> None:
        async with asyncio.timeout(WAIT_S):
            assert await anext(self._changes) == FileChanges()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                batch = await anext(self._changes)
                self.overflowed = self.overflowed or batch.overflowed
                for change in batch.changes:
                    self._add(change)

    def _add(self, change: FileChange) -> None:
        self.kinds.pop(change.path, None)
        self.kinds[change.path] = change.kind
        self.reported += 1
        if change.is_directory:
            self.directories.add(change.path)


@promise("files-watched")
async def test_files_that_are_made_changed_renamed_and_deleted_are_reported(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "open('old', 'w').write('x'); open('gone', 'w').write('x')")
    async with aclosing(session.watches.changes("", recursive=True)) as changes:
        seen = Seen(changes)
        await seen.begun()
        code = """
import os
open('new', 'w').write('one')
open('old', 'a').write('more')
os.remove('gone')
open('short', 'w').close(); os.remove('short')
os.mkdir('sub')
open('end', 'w').close()
"""
        await harness.run(session, code)
        await seen.until(lambda: "end" in seen.kinds)
        assert seen.kinds == {"new": "created", "old": "changed", "gone": "deleted", "sub": "created", "end": "created"}
        assert seen.directories == {"sub"} and not seen.overflowed
        await harness.run(session, "os.rename('new', 'sub/moved')")
        await seen.until(lambda: "sub/moved" in seen.kinds and seen.kinds.get("new") == "deleted")
        assert seen.kinds["sub/moved"] == "created"
        await session.put_file("put.txt", 3, pieces(b"abc"))
        await seen.until(lambda: "put.txt" in seen.kinds)
        assert not [path for path in seen.kinds if "executor-part" in path]


@promise("files-watched")
async def test_directories_that_come_later_are_watched_with_all_that_is_in_them(harness: Harness) -> None:
    session = await harness.session()
    async with aclosing(session.watches.changes("", recursive=True)) as changes:
        seen = Seen(changes)
        await seen.begun()
        await harness.run(session, "import os; os.makedirs('a/b/c'); open('a/b/c/deep', 'w').close()")
        await seen.until(lambda: "a/b/c/deep" in seen.kinds)
        assert next(iter(seen.kinds)) == "a" and seen.directories == {"a", "a/b", "a/b/c"}
        await harness.run(session, "os.rename('a', 'z'); open('z/b/c/later', 'w').close()")
        await seen.until(lambda: "z/b/c/later" in seen.kinds)
        assert seen.kinds["a"] == "deleted"
        assert "a/b/c/later" not in seen.kinds


@promise("files-watched")
async def test_a_watch_that_is_not_recursive_sees_its_own_directory_only(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import os; os.makedirs('here/below')")
    async with aclosing(session.watches.changes("here", recursive=False)) as changes:
        seen = Seen(changes)
        await seen.begun()
        await harness.run(session, "[open(f'here/{name}', 'w').close() for name in ('below/unseen', 'seen')]")
        await seen.until(lambda: "here/seen" in seen.kinds)
        assert seen.kinds == {"here/seen": "created"}


@promise("files-watched")
async def test_a_directory_elsewhere_is_watched_by_its_absolute_path_also_through_a_link(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import os; os.makedirs('/tmp/there/below'); os.symlink('/tmp/there', 'link')")
    for path in ("/tmp/there", "/workspace/link"):
        async with aclosing(session.watches.changes(path, recursive=True)) as changes:
            assert await anext(changes) == FileChanges()
            await harness.run(session, "open('/tmp/there/below/seen', 'a').write('more')")
            async with asyncio.timeout(WAIT_S):
                assert [change.path for change in (await anext(changes)).changes] == ["/tmp/there/below/seen"]


@promise("files-watched")
async def test_the_end_of_its_directory_ends_a_watch(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import os; os.mkdir('here')")
    async with aclosing(session.watches.changes("here", recursive=True)) as changes:
        seen = Seen(changes)
        await seen.begun()
        await harness.run(session, "os.rmdir('here')")
        with pytest.raises(NotFound) as ended:
            await seen.until(lambda: False)
        assert ended.value.reason is Reason.FILE_NOT_FOUND


@promise("files-watched")
async def test_a_path_that_is_no_directory_is_refused(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import os; os.symlink('/etc', 'link'); open('file', 'w').close()")
    refused = ("../..", "/etc/passwd", "/proc", "link", "file")
    for path in ("missing", "/missing", *refused):
        async with aclosing(session.watches.changes(path, recursive=True)) as changes:
            with pytest.raises(InvalidRequest if path in refused else NotFound):
                await anext(changes)


@promise("files-watched")
async def test_more_than_can_wait_is_told_as_lost_and_the_watch_goes_on(harness: Harness) -> None:
    session = await harness.session()
    async with aclosing(session.watches.changes("", recursive=True)) as changes:
        seen = Seen(changes)
        await seen.begun()
        # The first batch is on its way, and not taken, while the flood comes.
        await harness.run(session, "open('first', 'w').close()")
        await harness.run(session, "for n in range(10_000): open(f'f{n}', 'w').close()")
        await seen.until(lambda: seen.overflowed)
        assert seen.reported < 10_000
        await harness.run(session, "open('after', 'w').close()")
        await seen.until(lambda: "after" in seen.kinds)
        assert (await harness.run(session, "1 + 1")).output == 2


@promise("files-watched")
async def test_a_file_that_changes_without_end_is_reported_as_one(harness: Harness) -> None:
    session = await harness.session()
    async with aclosing(session.watches.changes("", recursive=True)) as changes:
        seen = Seen(changes)
        await seen.begun()
        code = "with open('log', 'w', buffering=1) as log:\n    for n in range(20_000): print(n, file=log)\nopen('end', 'w')"
        await harness.run(session, code)
        await seen.until(lambda: "end" in seen.kinds)
        assert seen.reported < 200 and not seen.overflowed


@promise("files-watched")
async def test_a_tree_of_thousands_of_directories_is_refused_or_told_as_lost(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import os\nfor n in range(50): os.makedirs(f'many/{n}')")
    async with aclosing(session.watches.changes("", recursive=True)) as changes:
        seen = Seen(changes)
        await seen.begun()
        await harness.run(session, "for n in range(2500): os.mkdir(f'many/d{n}')")
        await seen.until(lambda: seen.overflowed)
    async with aclosing(session.watches.changes("", recursive=True)) as changes:
        with pytest.raises(ResourceExhausted):
            await anext(changes)
    async with aclosing(session.watches.changes("many/0", recursive=True)) as changes:
        assert await anext(changes) == FileChanges()


@promise("files-watched")
async def test_watches_are_counted_and_given_back(harness: Harness) -> None:
    session = await harness.session()
    open_ones = [session.watches.changes("", recursive=True) for _ in range(MAX_WATCHES)]
    for each in open_ones:
        await anext(each)
    one_more = session.watches.changes("", recursive=True)
    with pytest.raises(ResourceExhausted) as refused:
        await anext(one_more)
    assert refused.value.reason is Reason.TOO_MANY_WATCHES
    for each in open_ones:
        await each.aclose()
    # Behind a front a watch has ended when its node has heard of it.
    assert await eventually_awaited(lambda: _opens(session))


async def _opens(session: Session) -> bool:
    async with aclosing(session.watches.changes("", recursive=True)) as changes:
        try:
            return await anext(changes) == FileChanges()
        except ResourceExhausted:
            return False
