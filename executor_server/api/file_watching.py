"""The call WatchFiles: changes of a session's files, as they come."""

from __future__ import annotations

from contextlib import aclosing

from executor_api.messages import write
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api import checks
from executor_server.api.handlers import Context
from executor_server.sessions import Session


async def watch_files(request: service_pb.WatchFilesRequest, context: Context, session: Session) -> None:
    """Serves the call until the caller leaves, or the watch or the session ends."""
    path = checks.workspace_path(request.path, "path", may_be_empty=True)
    async with aclosing(session.watches.changes(path, recursive=request.recursive)) as found:
        async for changes in found:
            await context.write(write(service_pb.WatchFilesResponse, changes))
