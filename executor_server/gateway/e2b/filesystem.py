"""The files of a sandbox as E2B's envd serves them, over `session.files`.

A watch is coarser than envd's: it reports one change for each path, the net effect since the last report. A new file
is reported as CREATE, CHMOD and WRITE, like an upload to envd, and a moved one as REMOVE and CREATE. A change of
permissions alone is not reported. If changes were missed, the watch ends with an error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import stat
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Self

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from starlette.types import ASGIApp

from executor_client.aio_files import AsyncSessionFiles
from executor_client.aio_session import AsyncSession
from executor_client.aio_watch import AsyncFileWatch
from executor_client.errors import FileError, FileExists, InvalidRequest, PolicyViolationError
from executor_client.file_results import FileChange, FileChanges, FileInfo
from executor_server.gateway.e2b.envd import filesystem_connect
from executor_server.gateway.e2b.envd import filesystem_pb2 as pb
from executor_server.gateway.e2b.envd.calls import CODECS, USER, keepalive_s, sandbox_of
from executor_server.gateway.e2b.paths import absolute, inside, name_of, shown
from executor_server.gateway.e2b.records import Sandbox, Sandboxes

LINKS_MAX = 256
"""Links of a listing that are followed. Further ones are described as links."""
TURN_ENTRIES = 256
"""Entries of a listing that are described before other requests get their turn."""
WATCHERS_MAX = 8
"""Polled watches of a sandbox. The daemon allows a session as many watches, polled and streamed together."""
EVENTS_MAX = 4096
"""Events after which a poll is answered, even if more wait."""
QUIET_S = 0.15
"""A poll waits this long for the next changes, which a sandbox gathers for 50 ms."""
POLL_S = 1.0

_OWNERS = {0: "root", 65534: "nobody"}
_FIRST_USER = 1000

Context = RequestContext[Any, Any]


def filesystem_app(sandboxes: Sandboxes) -> ASGIApp:
    """Returns the service `filesystem.Filesystem`."""
    service = FilesystemService(sandboxes)
    return filesystem_connect.FilesystemASGIApplication(service, codecs=CODECS, compressions=())


class FilesystemService(filesystem_connect.Filesystem):
    """Each method is one of envd's; E2B's clients define what it promises."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def stat(self, request: pb.StatRequest, ctx: Context, /) -> pb.StatResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            return pb.StatResponse(entry=await _entry_at(sandbox.session.files, absolute(request.path)))

    async def list_dir(self, request: pb.ListDirRequest, ctx: Context, /) -> pb.ListDirResponse:
        """Lists a directory to a depth. A listing that would be incomplete is refused."""
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            path, depth = absolute(request.path), request.depth or 1
            listed = await sandbox.session.files.list(inside(path), recursive=depth > 1)
            if listed.truncated:
                raise ConnectError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{path} can't be listed in full: it has too many entries, or some can't be read; list a directory "
                    "in it, with less depth, or run `find`",
                )
            found = await asyncio.to_thread(_sorted, listed, inside(path), depth)
            links, entries = 0, []
            for number, (name, info) in enumerate(found):
                if not number % TURN_ENTRIES:
                    await asyncio.sleep(0)
                links += info.is_link
                there = str(PurePosixPath(path, name))
                follow = links <= LINKS_MAX
                entries.append(await _entry(sandbox.session.files, there, info, follow=follow))
            return pb.ListDirResponse(entries=entries)

    async def make_dir(self, request: pb.MakeDirRequest, ctx: Context, /) -> pb.MakeDirResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            path, files = absolute(request.path), sandbox.session.files
            try:
                info = await files.mkdir(inside(path), exist_ok=False)
            except FileExists as error:
                if (await files.stat(inside(path))).is_directory:
                    raise ConnectError(Code.ALREADY_EXISTS, f"directory already exists: {path}") from error
                message = f"path already exists but it is not a directory: {path}"
                raise ConnectError(Code.INVALID_ARGUMENT, message) from error
            return pb.MakeDirResponse(entry=await _entry(files, path, info))

    async def move(self, request: pb.MoveRequest, ctx: Context, /) -> pb.MoveResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            source, target, files = absolute(request.source), absolute(request.destination), sandbox.session.files
            await files.stat(
                inside(source), follow=False
            )  # otherwise a missing source would leave a new directory behind
            await files.mkdir(inside(str(PurePosixPath(target).parent)))
            try:
                await files.move(inside(source), inside(target))
            except FileError as error:
                # A move between file systems: E2B's sandboxes have only one. Other errors have their own classes.
                if type(error) is not FileError or not await _moved(sandbox.session, inside(source), inside(target)):
                    raise
            return pb.MoveResponse(entry=await _entry_at(files, target))

    async def remove(self, request: pb.RemoveRequest, ctx: Context, /) -> pb.RemoveResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            await sandbox.session.files.remove(inside(absolute(request.path)), recursive=True, missing_ok=True)
            return pb.RemoveResponse()

    # Watches

    async def watch_dir(self, request: pb.WatchDirRequest, ctx: Context, /) -> AsyncIterator[pb.WatchDirResponse]:
        async with sandbox_of(self._sandboxes, ctx) as sandbox, await Watcher.begun(sandbox, request) as watcher:
            yield pb.WatchDirResponse(start=pb.WatchDirResponse.StartEvent())
            silence_s = keepalive_s(ctx)
            while True:
                if not await watcher.has_changes(silence_s):
                    yield pb.WatchDirResponse(keepalive=pb.WatchDirResponse.KeepAlive())
                    continue
                for event in await watcher.events(sandbox.session.files):
                    yield pb.WatchDirResponse(filesystem=event)

    async def create_watcher(self, request: pb.CreateWatcherRequest, ctx: Context, /) -> pb.CreateWatcherResponse:
        """Begins a polled watch. It ends with the sandbox or the gateway."""
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            if len(sandbox.watchers) >= WATCHERS_MAX:
                message = f"this sandbox has {WATCHERS_MAX} watchers, its maximum; stop one"
                raise ConnectError(Code.RESOURCE_EXHAUSTED, message)
            watcher_id = f"w{secrets.token_hex(10)}"
            sandbox.watchers[watcher_id] = await Watcher.begun(sandbox, request)
            return pb.CreateWatcherResponse(watcher_id=watcher_id)

    async def get_watcher_events(
        self, request: pb.GetWatcherEventsRequest, ctx: Context, /
    ) -> pb.GetWatcherEventsResponse:
        """Waits until the sandbox has reported all changes before the call, and returns the events."""
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            watcher = _watcher(sandbox, request.watcher_id)
            events: list[pb.FilesystemEvent] = []
            async with watcher.lock:
                until = time.monotonic() + POLL_S
                while len(events) < EVENTS_MAX and time.monotonic() < until and await watcher.has_changes(QUIET_S):
                    events += await watcher.events(sandbox.session.files)
            return pb.GetWatcherEventsResponse(events=events)

    async def remove_watcher(self, request: pb.RemoveWatcherRequest, ctx: Context, /) -> pb.RemoveWatcherResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            watcher = _watcher(sandbox, request.watcher_id)
            del sandbox.watchers[request.watcher_id]
            await watcher.close()
            return pb.RemoveWatcherResponse()


def _watcher(sandbox: Sandbox, watcher_id: str) -> Watcher:
    watcher = sandbox.watchers.get(watcher_id)
    if watcher is None:
        raise ConnectError(Code.NOT_FOUND, f"watcher with id {watcher_id[:64]} not found")
    return watcher


class Watcher:
    """A watch with its next changes. As a context manager it closes itself."""

    def __init__(self, watch: AsyncFileWatch, path: str, root: str, *, include_entry: bool) -> None:
        self._watch = watch
        self._changes = aiter(watch)
        self._path = path  # as the client named it
        self._root = root  # without links, as the watch reports it
        self._include_entry = include_entry
        self._next = self._following()
        self.lock = asyncio.Lock()

    @classmethod
    async def begun(cls, sandbox: Sandbox, request: pb.WatchDirRequest | pb.CreateWatcherRequest) -> Self:
        """Raises Refusal and the client's errors."""
        path, files = absolute(request.path), sandbox.session.files
        root = await files.realpath(inside(path))
        watch = await files.watch(root, recursive=request.recursive)
        return cls(watch, path, root, include_entry=request.include_entry)

    def _following(self) -> asyncio.Task[FileChanges | None]:
        following = asyncio.create_task(self._anext())
        following.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may never be read
        return following

    async def _anext(self) -> FileChanges | None:
        return await anext(self._changes, None)

    async def has_changes(self, timeout_s: float) -> bool:
        """True once changes or the end of the watch can be read, false after the time."""
        return bool((await asyncio.wait((self._next,), timeout=timeout_s))[0])

    async def events(self, files: AsyncSessionFiles) -> list[pb.FilesystemEvent]:
        """Returns the changes. Raises ConnectError if some were missed, and the error with which the watch ended."""
        changes = None if self._next.cancelled() else self._next.result()
        if changes is None:
            raise ConnectError(Code.NOT_FOUND, "the watch was stopped")
        self._next = self._following()
        if changes.overflowed:
            raise ConnectError(
                Code.DATA_LOSS,
                f"changes in {self._path} were missed, because there were too many or the connection broke: list it to "
                "see its state, and watch it again",
            )
        return [event for change in changes for event in await self._events_of(change, files)]

    async def _events_of(self, change: FileChange, files: AsyncSessionFiles) -> list[pb.FilesystemEvent]:
        name = str(PurePosixPath(change.path).relative_to(self._root))
        entry = None
        if self._include_entry and change.kind != "deleted":
            with contextlib.suppress(FileError):  # gone again
                entry = await _entry_at(files, str(PurePosixPath(self._path, name)))
        return [pb.FilesystemEvent(name=name, type=kind, entry=entry) for kind in _kinds(change)]

    async def close(self) -> None:
        self._next.cancel()
        await asyncio.gather(self._next, return_exceptions=True)
        self._watch.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def _moved(session: AsyncSession, source: str, target: str) -> bool:
    """Moves by copying; false if the sandbox can't."""
    try:
        return (await session.processes.run(["mv", "-T", "--", source, target])).exit_code == 0
    except (InvalidRequest, PolicyViolationError):
        return False


def _kinds(change: FileChange) -> tuple[pb.EventType, ...]:
    if change.kind == "deleted":
        return (pb.EVENT_TYPE_REMOVE,)
    if change.is_directory:
        return (pb.EVENT_TYPE_CREATE,)
    if change.kind == "changed":
        return (pb.EVENT_TYPE_WRITE,)
    return pb.EVENT_TYPE_CREATE, pb.EVENT_TYPE_CHMOD, pb.EVENT_TYPE_WRITE


def _sorted(listed: Iterable[FileInfo], top: str, depth: int) -> list[tuple[PurePosixPath, FileInfo]]:
    """Returns the entries down to a depth with their relative paths, parents first. Slow for thousands."""
    found = [(PurePosixPath(info.path).relative_to(top), info) for info in listed]
    return sorted((each for each in found if len(each[0].parts) <= depth), key=lambda each: each[0].parts)


async def _entry_at(files: AsyncSessionFiles, path: str) -> pb.EntryInfo:
    return await _entry(files, path, await files.stat(inside(path), follow=False))


async def _entry(files: AsyncSessionFiles, path: str, info: FileInfo, *, follow: bool = True) -> pb.EntryInfo:
    """Describes an entry. A link gets the type and the mode of its target; without `follow`, its own."""
    entry = pb.EntryInfo(
        name=name_of(path),
        path=path,
        type=pb.FILE_TYPE_DIRECTORY if info.is_directory else pb.FILE_TYPE_FILE,
        size=info.size_bytes,
        mode=info.mode & 0o777,
        permissions=_permissions(info),
        owner=_owner(info.user_id),
        group=_owner(info.group_id),
        modified_time=info.modify_time,
    )
    if info.is_link:
        entry.type, entry.mode, entry.symlink_target = pb.FILE_TYPE_UNSPECIFIED, 0, path
        if not follow:
            entry.type, entry.symlink_target = pb.FILE_TYPE_SYMLINK, info.target
            return entry
        with contextlib.suppress(FileError):  # it leads nowhere
            target = await files.stat(inside(path))
            entry.type = pb.FILE_TYPE_DIRECTORY if target.is_directory else pb.FILE_TYPE_FILE
            entry.mode = target.mode & 0o777
            entry.symlink_target = shown(await files.realpath(inside(path)))
    return entry


def _permissions(info: FileInfo) -> str:
    """Returns the mode as Go writes it: the kind and the special bits, then the rights."""
    kind = "d" if info.is_directory else "L" if info.is_link else ""
    special = "".join(
        name for bit, name in ((stat.S_ISUID, "u"), (stat.S_ISGID, "g"), (stat.S_ISVTX, "t")) if info.mode & bit
    )
    return (kind + special or "-") + stat.filemode(info.mode & 0o777)[1:]


def _owner(number: int) -> str:
    """Returns the name of a user or a group. A sandbox has one ordinary user, whose number depends on the backend."""
    if number >= _FIRST_USER and number not in _OWNERS:
        return USER
    return _OWNERS.get(number, str(number))
