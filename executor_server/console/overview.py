"""The first page: sessions, load, pool, quotas, an hour of samples, and what needs attention."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_server.console.console import Console


def routes(console: Console) -> list[BaseRoute]:
    async def overview(request: Request) -> Response:
        return console.page(request, "overview.html", status_=console.daemon.status)

    return [Route("/", overview)]
