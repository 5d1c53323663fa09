"""What E2B's SDK expects of watches, polled and streamed, with the real SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from e2b import (
    AsyncSandbox,
    FileNotFoundException,
    FilesystemEvent,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxException,
)
from e2b.sandbox_sync.filesystem.watch_handle import WatchHandle

from tests.support.gateway import Gateway
from tests.support.polling import eventually

CREATE, WRITE, CHMOD = FilesystemEventType.CREATE, FilesystemEventType.WRITE, FilesystemEventType.CHMOD
REMOVE = FilesystemEventType.REMOVE
WAIT_S = 30.0


@pytest.fixture(scope="module")
def sandbox(e2b: Gateway) -> Iterator[Sandbox]:
    with Sandbox.create() as sandbox:
        yield sandbox


@pytest.fixture
async def async_sandbox(e2b: Gateway) -> AsyncIterator[AsyncSandbox]:
    async with await AsyncSandbox.create() as sandbox:
        yield sandbox


def names(events: list[FilesystemEvent]) -> list[tuple[FilesystemEventType, str]]:
    return [(event.type, event.name) for event in events]


class Polled:
    """The events of a polled watch: a poll may come before the last ones."""

    def __init__(self, handle: WatchHandle) -> None:
        self._handle = handle
        self.events: list[FilesystemEvent] = []

    def has(self, kind: FilesystemEventType, name: str) -> bool:
        def seen() -> bool:
            self.events += self._handle.get_new_events()
            return (kind, name) in names(self.events)

        return eventually(seen)


def test_a_poll_brings_what_happened_before_it(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("polled/below")
    handle = sandbox.files.watch_dir("polled")
    assert handle.get_new_events() == []
    sandbox.files.write("polled/new", "x")
    sandbox.files.write("polled/below/unseen", "x")
    polled = Polled(handle)
    assert polled.has(WRITE, "new") and names(polled.events) == [(CREATE, "new"), (CHMOD, "new"), (WRITE, "new")]
    sandbox.commands.run("echo more >> new; mkdir later; rm -r below", cwd="polled")
    polled = Polled(handle)
    assert polled.has(REMOVE, "below")
    assert {(WRITE, "new"), (CREATE, "later")} <= {*names(polled.events)}
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()


def test_a_recursive_watch_sees_what_comes_below_with_entries(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir -p deep/a; ln -s deep to-deep")
    handle = sandbox.files.watch_dir("to-deep", recursive=True, include_entry=True)
    sandbox.files.write("deep/a/file", "12345")
    sandbox.files.write("deep/new/below/file", "")
    polled = Polled(handle)
    assert polled.has(WRITE, "new/below/file") and polled.has(WRITE, "a/file")
    assert {(CREATE, "new"), (CREATE, "new/below")} <= {*names(polled.events)}
    entry = next(event.entry for event in polled.events if event.name == "a/file")
    assert entry is not None
    assert (entry.path, entry.type, entry.size) == ("/home/user/to-deep/a/file", FileType.FILE, 5)
    sandbox.files.remove("deep/a/file")
    assert polled.has(REMOVE, "a/file")
    assert next(event.entry for event in polled.events if event.type is REMOVE) is None
    handle.stop()


def test_any_directory_is_watched(sandbox: Sandbox) -> None:
    handle = sandbox.files.watch_dir("/tmp")
    sandbox.files.write("/tmp/new", "x")
    assert Polled(handle).has(WRITE, "new")
    handle.stop()


@pytest.mark.parametrize(("path", "refusal"), [("missing", FileNotFoundException), ("file", InvalidArgumentException)])
def test_only_a_directory_is_watched(sandbox: Sandbox, path: str, refusal: type[Exception]) -> None:
    sandbox.files.write("file", "")
    with pytest.raises(refusal, match=path):
        sandbox.files.watch_dir(path)


def test_watches_of_a_sandbox_are_counted_and_given_back(sandbox: Sandbox) -> None:
    handles = [sandbox.files.watch_dir("/tmp") for _ in range(8)]
    with pytest.raises(SandboxException, match="its maximum"):
        sandbox.files.watch_dir("/tmp")
    for handle in handles:
        handle.stop()
    sandbox.files.watch_dir("/tmp").stop()


def test_a_watcher_belongs_to_its_sandbox(sandbox: Sandbox) -> None:
    handle = sandbox.files.watch_dir("/tmp")
    with Sandbox.create() as other:
        theirs = other.files.watch_dir("/tmp")
        theirs._watcher_id, handle._watcher_id = handle._watcher_id, theirs._watcher_id
        for each in (theirs, handle):
            with pytest.raises(NotFoundException, match="not found"):
                each.get_new_events()
            with pytest.raises(NotFoundException):
                each.stop()


def test_missed_changes_are_reported_as_missed(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("many")
    handle = sandbox.files.watch_dir("many")
    sandbox.commands.run("cd many; seq 12000 | xargs touch")

    def missed() -> bool:
        try:
            handle.get_new_events()
        except SandboxException as error:
            return "changes in /home/user/many were missed" in str(error)
        return False

    assert eventually(missed)
    handle.stop()


async def test_a_stream_brings_events_until_it_is_stopped(async_sandbox: AsyncSandbox) -> None:
    files, seen, arrived = async_sandbox.files, list[FilesystemEvent](), asyncio.Event()

    def on_event(event: FilesystemEvent) -> None:
        seen.append(event)
        arrived.set()

    async def until(done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                arrived.clear()
                await arrived.wait()

    await files.make_dir("streamed")
    handle = await files.watch_dir("streamed", on_event, recursive=True)
    await files.write("streamed/below/file", "x")
    await until(lambda: (WRITE, "below/file") in names(seen))
    assert names(seen)[0] == (CREATE, "below")
    await handle.stop()
    # The watches of clients that left are given back.
    for _ in range(20):
        await (await files.watch_dir("streamed", on_event)).stop()


async def test_a_stream_ends_with_its_sandbox_and_with_an_error(async_sandbox: AsyncSandbox) -> None:
    ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    await async_sandbox.files.watch_dir("/tmp", lambda _: None, on_exit=ended.set_result, timeout=0)
    await async_sandbox.kill()
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await ended, Exception)
