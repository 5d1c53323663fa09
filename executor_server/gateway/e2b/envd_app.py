"""E2B's service at port 49983 of a sandbox: health, processes, the file system, and files over HTTP."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from executor_server.gateway.e2b.envd.calls import admitting
from executor_server.gateway.e2b.envd.process import process_app
from executor_server.gateway.e2b.errors import REFUSALS
from executor_server.gateway.e2b.file_urls import files_route
from executor_server.gateway.e2b.filesystem import filesystem_app
from executor_server.gateway.e2b.records import Sandboxes
from executor_server.gateway.leaving import EndsWithClient
from executor_server.gateway.routing import current_target


def envd_app(sandboxes: Sandboxes) -> Starlette:
    async def health(_: Request) -> Response:
        await sandboxes.open(sandboxes.known(current_target().sandbox_id), anew=True, by_visitor=True)
        return Response(status_code=204)

    routes = [
        Route("/health", health),
        Mount("/process.Process", admitting(EndsWithClient(process_app(sandboxes)), sandboxes)),
        Mount("/filesystem.Filesystem", admitting(EndsWithClient(filesystem_app(sandboxes)), sandboxes)),
        files_route(sandboxes),
    ]
    return Starlette(routes=routes, exception_handlers=REFUSALS)
