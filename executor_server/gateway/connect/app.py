"""The application: ExecutorService by Connect and plain JSON, `/v1/run`, their description and a page to try them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import cast

from connectrpc.code import Code
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route

from executor_server.gateway.clients import Clients
from executor_server.gateway.connect import run, service
from executor_server.gateway.connect.plain import PlainJson
from executor_server.gateway.leaving import EndsWithClient

_PAGE = Path(__file__).parent / "page"
# Users type tokens into the page: it loads nothing from elsewhere, sends nothing elsewhere, and can't be framed.
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_CORS_HEADERS = ("authorization", "connect-protocol-version", "connect-timeout-ms", "x-user-agent")
"""Headers of Connect's clients in browsers that need permission."""


def connect_app(clients: Clients, allowed_origins: Collection[str]) -> Starlette:
    """Returns the application. Pages of `allowed_origins` may use it, too."""
    app = Starlette(
        exception_handlers={HTTPException: _no_such},
        routes=[
            Mount(service.PATH, PlainJson(service.ConnectService(clients), clients)),
            Route(run.PATH, run.Run(clients).answer, methods=["POST"]),
            *(Route(path, _page(name)) for path, name in _PAGES.items()),
        ],
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=_CORS_HEADERS,
            ),
            Middleware(EndsWithClient),
        ],
    )
    app.router.redirect_slashes = False
    return app


def _no_such(request: Request, error: Exception) -> Response:
    status = cast("HTTPException", error).status_code
    asked = f"{request.method} {request.url.path}"
    message = f"there is no {asked} here; GET /openapi.json lists everything, and the page /try calls it"
    return JSONResponse({"code": Code.UNIMPLEMENTED.value, "message": message}, status)


_PAGES = {"/try": "try.html", "/try.js": "try.js", "/try.css": "try.css", "/openapi.json": "openapi.json"}


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_request: Request) -> Response:
        return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)

    return serve
