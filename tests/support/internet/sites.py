"""The world's web sites.

The host of a request says which of them answers, whatever name stands before it:

    files.   bytes: what a test has put there, `/bytes/N`, `/endless`, and `/upload`, which counts
    pypi.    package indexes (tests/support/package_index): one of the world, and those that tests made
    git.     repositories over git's smart protocol
    ws.      a WebSocket that sends back what it gets
    api.     JSON that shows the request as it arrived
    www.     two pages for people and browsers
    odd.     answers that break HTTP, each by a path of its own (odd.py)

All of them answer over HTTPS and over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import WSMsgType, web

from tests.support.internet import odd
from tests.support.package_index.index import PackageIndex

CHUNK = bytes(64 * 1024)
_MOST_UPLOADED_BYTES = 4 * 2**30
_MOST_GIT_BYTES = 64 * 2**20
_GIT_TIMEOUT_S = 60.0
PAGES = {
    "/": "<title>First page</title><h1>First page</h1><a href='/second'>Onwards</a>",
    "/second": "<title>Second page</title><h1>Second page</h1>",
}


@dataclass(frozen=True)
class Request:
    """A request as it arrived at a site."""

    host: str
    scheme: str
    method: str
    path: str  # with the query, as it was sent
    headers: tuple[tuple[str, str], ...]
    peer: str  # "ADDRESS:PORT"; the same in requests of one connection

    def values(self, header: str) -> list[str]:
        """Every value of a header; one for each time that it was sent."""
        return [value for name, value in self.headers if name.lower() == header.lower()]


@dataclass
class Sites:
    """The goods of the sites, and the requests that they got."""

    suffix: str
    repositories: Path  # bare git repositories
    files: dict[str, bytes] = field(default_factory=dict)  # path to content
    indexes: list[PackageIndex] = field(default_factory=list)  # the first one answers under every other name
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sites: Mapping[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            "api": _api,
            "files": self._files,
            "git": self._git,
            "odd": odd.answer,
            "pypi": self._index,
            "ws": _echo,
            "www": _page,
        }

    def seen(self, host: str) -> list[Request]:
        """The requests that a site got under this name, in order."""
        return [request for request in self.requests if request.host == host]

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers as the site of the `Host` header does."""
        host = request.host.lower().rpartition(":")[0] if ":" in request.host else request.host.lower()
        peer = request.transport.get_extra_info("peername") if request.transport else None
        self.requests.append(
            Request(
                host,
                "https" if request.secure else "http",
                request.method,
                request.raw_path,
                tuple(
                    (name.decode(errors="replace"), value.decode(errors="replace"))
                    for name, value in request.raw_headers
                ),
                "{}:{}".format(*peer) if peer else "",
            )
        )
        site = host.removesuffix(f".{self.suffix}").rpartition(".")[2]
        if not host.endswith(f".{self.suffix}") or site not in self._sites:
            return web.Response(text=f"{host} is here\n")
        return await self._sites[site](request)

    async def _files(self, request: web.BaseRequest) -> web.StreamResponse:
        _, _, first, *_ = [*request.path.split("/"), "", ""]
        if request.method in ("POST", "PUT"):
            return web.json_response({"received_bytes": await _counted(request)})
        if request.path in self.files:
            return web.Response(body=self.files[request.path])
        if request.path.startswith("/bytes/"):
            return await _stream(request, int(first))
        if request.path == "/endless":
            return await _stream(request, None)
        if request.path.startswith("/packages/"):
            return await self._index_of(request).answer_file(request)
        return web.Response(status=404, text="there is no such file\n")

    async def _index(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._index_of(request).answer_page(request)

    def _index_of(self, request: web.BaseRequest) -> PackageIndex:
        """The index that has this host for its pages or its files."""
        host = request.host.lower().partition(":")[0]
        return next((index for index in self.indexes if host in (index.host, index.files_host)), self.indexes[0])

    async def _git(self, request: web.BaseRequest) -> web.StreamResponse:
        """Runs git's own server, which speaks CGI."""
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.repositories),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query_string,
            "REQUEST_METHOD": request.method,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            # Git refuses repositories of another user otherwise.
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        body = await request.content.read(_MOST_GIT_BYTES)
        pipe = asyncio.subprocess.PIPE
        server = await asyncio.create_subprocess_exec("git", "http-backend", env=environment, stdin=pipe, stdout=pipe)
        async with asyncio.timeout(_GIT_TIMEOUT_S):
            output, _ = await server.communicate(body)
        head, _, content = output.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
        status = int(headers.pop("Status", "200").split()[0])
        return web.Response(status=status, body=content, headers=headers)


async def _api(request: web.BaseRequest) -> web.StreamResponse:
    received = await request.read()
    shown = {
        "method": request.method,
        "host": request.host,
        "path": request.raw_path,
        "headers": [[name.decode(), value.decode(errors="replace")] for name, value in request.raw_headers],
        "body": received.decode(errors="replace"),
    }
    return web.json_response(shown)


async def _page(request: web.BaseRequest) -> web.StreamResponse:
    page = PAGES.get(request.path)
    if page is None:
        return web.Response(status=404, text="there is no such page\n")
    return web.Response(text=f"<!DOCTYPE html><html><body>{page}</body></html>", content_type="text/html")


async def _echo(request: web.BaseRequest) -> web.StreamResponse:
    socket = web.WebSocketResponse(max_msg_size=0)
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await socket.send_bytes(message.data)
    return socket


async def _counted(request: web.BaseRequest) -> int:
    counted = 0
    async for chunk in request.content.iter_any():
        counted += len(chunk)
        assert counted <= _MOST_UPLOADED_BYTES
    return counted


async def _stream(request: web.BaseRequest, size_bytes: int | None) -> web.StreamResponse:
    """Sends so many bytes; without a number, until the client has had enough."""
    response = web.StreamResponse()
    if size_bytes is not None:
        response.content_length = size_bytes
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        while size_bytes is None or size_bytes > 0:
            chunk = CHUNK if size_bytes is None else CHUNK[:size_bytes]
            await response.write(chunk)
            # Where there is room, the above does not wait. On a connection that is lost there always is, and the event loop
            # has to run before the library learns of the loss.
            await asyncio.sleep(0)
            size_bytes = None if size_bytes is None else size_bytes - len(chunk)
    return response
