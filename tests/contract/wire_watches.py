"""Watches of a session behind a front, with the calls of `executor_server.sessions.Watches`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import FileChange, FileChanges

if TYPE_CHECKING:
    from tests.contract.wire import WireSession


class WireWatches:
    def __init__(self, session: WireSession) -> None:
        self._session = session

    async def changes(self, path: str, *, recursive: bool) -> AsyncGenerator[FileChanges, None]:
        request = service_pb.WatchFilesRequest(session_id=self._session.session_id, path=path, recursive=recursive)
        async with aclosing(self._session.read(request)) as answers:
            async for answer in answers:
                yield FileChanges(tuple(map(_change_from, answer.changes)), answer.overflowed)


def _change_from(wire: pb.FileChange) -> FileChange:
    kind = pb.FileChangeKind.Name(wire.kind).removeprefix("FILE_CHANGE_KIND_").lower()
    return FileChange(wire.path, kind, wire.is_directory)
