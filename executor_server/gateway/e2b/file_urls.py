"""Files over HTTP as E2B's envd serves them: `GET` and `POST /files`, and the signatures of their URLs.

The parts of an upload become files of the sandbox one after the other. The gateway collects each part, like a download,
before it passes it on. A part has at most as many bytes as the sandbox's disk (spool.py).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import quote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, request_response
from starlette.types import Message, Receive, Scope, Send

from executor_client.errors import ExecutorClientError, ResourceExhaustedError
from executor_server.gateway.codecs import GZIP_BITS, GzipMember
from executor_server.gateway.e2b.envd.calls import check_user
from executor_server.gateway.e2b.errors import not_offered, refusal_of
from executor_server.gateway.e2b.paths import absolute, inside, name_of
from executor_server.gateway.e2b.records import Sandbox, Sandboxes
from executor_server.gateway.e2b.spool import Room, Spool
from executor_server.gateway.errors import Refusal
from executor_server.gateway.leaving import EndsWithClient
from executor_server.gateway.routing import current_target

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FILES_MAX = 1000
"""Files of one upload, and parts of its form."""
IDLE_S = 60.0
"""A request ends when its client sends or takes nothing for this time."""
OTHER_BYTES_MAX = 4 << 20
"""Bytes of a form that are in none of its files. Compressed ones can be a thousand times as many as were sent."""
_TURN_BYTES = 64 << 10
"""Bytes of an upload, decompressed, that are parsed before other requests get their turn."""
_PIECE_BYTES = 1 << 20
_GZIP_LEVEL = 1
_SIGNATURE = re.compile(r"v1_[A-Za-z0-9+/]{43}")
_EXPIRATION = re.compile(r"-?[0-9]{1,18}")


def files_route(sandboxes: Sandboxes) -> Route:
    serve = request_response(_Files(sandboxes).serve)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(IDLE_S):
                await send(message)

        await serve(scope, receive, send_in_time)

    return Route("/files", EndsWithClient(app), methods=["GET", "POST"])


class _Files:
    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._room = Room()

    async def serve(self, request: Request) -> Response:
        is_upload = request.method == "POST"
        sandbox = await self._authorized(request, "write" if is_upload else "read")
        try:
            return await (self._upload(request, sandbox) if is_upload else self._download(request, sandbox))
        except ResourceExhaustedError as error:
            if error.reason != "TOO_LARGE":
                raise refusal_of(error) from error
            raise Refusal(507, error.message) from error
        except ExecutorClientError as error:
            raise refusal_of(error) from error

    async def _authorized(self, request: Request, operation: str) -> Sandbox:
        """Returns the sandbox for a request with its access token, or with a signature. Raises Refusal.

        A client that uses one address for all sandboxes puts no id into its URLs. The signature then identifies it.
        """
        query, sandbox_id = request.query_params, current_target().sandbox_id
        check_user(query.get("username"), self._sandboxes.users)
        access_token = request.headers.get("x-access-token")
        if access_token and sandbox_id:
            return await self._sandboxes.find(sandbox_id, access_token)
        possible = [self._sandboxes.known(sandbox_id)] if sandbox_id else self._sandboxes.running()
        signature, expiration = query.get("signature"), query.get("signature_expiration")
        if signature is None:
            raise Refusal(401, "missing signature query parameter")
        if _SIGNATURE.fullmatch(signature) is None or _EXPIRATION.fullmatch(expiration or "0") is None:
            raise Refusal(401, "invalid signature")
        given = base64.b64decode(signature.removeprefix("v1_") + "=")
        signed = hashlib.sha256(
            f"{query.get('path', '')}:{operation}:{query.get('username', '')}:".encode(errors="replace")
        )
        tokens = ((each, each.record.access_token) for each in possible)
        sandbox = next((each for each, token in tokens if _is_signed(given, signed, token, expiration)), None)
        if sandbox is None:
            raise Refusal(401, "invalid signature")
        if expiration is not None and int(expiration) < time.time():
            raise Refusal(401, "signature is already expired")
        return await self._sandboxes.open(sandbox)

    async def _upload(self, request: Request, sandbox: Sandbox) -> Response:
        if any(name.startswith("x-metadata-") for name in request.headers):
            raise not_offered("Metadata of files")
        path = request.query_params.get("path")
        kind, options = parse_options_header(request.headers.get("content-type"))
        body = _body(request)
        if kind == b"application/octet-stream":
            if path is None:
                raise Refusal(400, "path query parameter is required for raw body upload")
            parts = _one_part(body)
        elif kind.startswith(b"multipart/"):
            parts = _parts(body, options.get(b"boundary", b""))
        else:
            raise Refusal(400, "unsupported content type: send multipart/form-data or application/octet-stream")
        async with contextlib.aclosing(parts):
            return JSONResponse(await self._write(parts, path, sandbox))

    async def _write(self, parts: AsyncIterator[_Event], path: str | None, sandbox: Sandbox) -> list[dict[str, str]]:
        written: dict[str, dict[str, str]] = {}  # by path
        target = ""
        with Spool(self._room, sandbox.record.token, sandbox.session.info.limits.disk_bytes) as spool:
            async for event in parts:
                if isinstance(event, bytes):
                    await spool.add(event)
                elif event is None:
                    await spool.put(sandbox.session.files, inside(target))
                    written[target] = {"path": target, "name": name_of(target), "type": "file"}
                else:
                    target = absolute(event if path is None else path)
                    if target in written:
                        raise Refusal(400, f"you cannot upload several files to {target!r} in one request")
        return [*written.values()]

    async def _download(self, request: Request, sandbox: Sandbox) -> Response:
        """Collects the whole file before it answers, so that a slow client does not tie up the sandbox."""
        path = absolute(request.query_params.get("path", ""))
        spool = Spool(self._room, sandbox.record.token)
        try:
            async with sandbox.downloads, contextlib.aclosing(sandbox.session.files.stream(inside(path))) as pieces:
                async for piece in pieces:
                    await spool.add(piece)
            headers = {
                # Sandboxes choose names and contents. No browser may show them as pages of the gateway.
                "Content-Disposition": f"inline; filename*=UTF-8''{quote(name_of(path), safe='')}",
                "X-Content-Type-Options": "nosniff",
                "Vary": "Accept-Encoding",
            }
            gzipped = _accepts_gzip(request.headers)
            headers |= {"Content-Encoding": "gzip"} if gzipped else {"Content-Length": str(spool.size_bytes)}
            content = _pieces(spool, gzipped=gzipped)
            return StreamingResponse(content, headers=headers, media_type="application/octet-stream")
        except BaseException:
            spool.close()
            raise


def _is_signed(given: bytes, signed: hashlib._Hash, access_token: str, expiration: str | None) -> bool:
    """True for the digest of path, operation, user, token and expiration; `signed` has taken the first three."""
    whole = signed.copy()
    whole.update((access_token if expiration is None else f"{access_token}:{expiration}").encode())
    return hmac.compare_digest(whole.digest(), given)


async def _pieces(spool: Spool, *, gzipped: bool) -> AsyncGenerator[bytes, None]:
    """Yields the content of a spool, and closes it."""
    deflate = zlib.compressobj(_GZIP_LEVEL, wbits=GZIP_BITS) if gzipped else None
    with spool:
        for start in range(0, spool.size_bytes, _PIECE_BYTES):
            piece = await spool.read(start, _PIECE_BYTES)
            yield piece if deflate is None else await asyncio.to_thread(deflate.compress, piece)
    if deflate is not None:
        yield deflate.flush()


def _accepts_gzip(headers: Headers) -> bool:
    """True if gzip is the only encoding that the client names. Clients that name several need no compression."""
    return headers.get("accept-encoding", "").strip().lower() == "gzip"


# Uploads. Each file is an event with its name, events with its content, then None.
_Event = str | bytes | None


async def _body(request: Request) -> AsyncGenerator[bytes, None]:
    """Yields the content of a request, decompressed, in small pieces; others get their turn between them.

    Raises Refusal.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise Refusal(400, f"unsupported Content-Encoding: {encoding[:50]}, supported: gzip")
    member = GzipMember() if encoding == "gzip" else None
    chunks = request.stream()
    try:
        while True:
            async with asyncio.timeout(IDLE_S):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            for start in range(0, len(chunk), _TURN_BYTES):
                piece = chunk[start : start + _TURN_BYTES]
                while piece:
                    await asyncio.sleep(0)
                    yield piece if member is None else member.decompress(piece, _TURN_BYTES)
                    piece = b"" if member is None else member.rest
        if member is not None:
            yield member.end()
    except zlib.error as error:
        raise Refusal(400, f"error decompressing request body: {error}") from error
    except TimeoutError as error:
        raise Refusal(408, f"the upload sent nothing for {IDLE_S:.0f} s") from error
    except ClientDisconnect as error:
        raise Refusal(400, "the upload broke off") from error


async def _one_part(body: AsyncIterator[bytes]) -> AsyncGenerator[_Event, None]:
    yield ""
    async for data in body:
        yield data
    yield None


async def _parts(body: AsyncIterator[bytes], boundary: bytes) -> AsyncGenerator[_Event, None]:
    """Yields the files of a form: its parts with the name "file". Raises Refusal."""
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks())
        async for data in body:
            form.other_bytes += len(data)
            parser.write(data)
            for event in form.taken():
                yield event
            if form.other_bytes > OTHER_BYTES_MAX:
                raise Refusal(400, f"a form has at most {OTHER_BYTES_MAX:,} bytes outside of its files")
    except FormParserError as error:
        raise Refusal(400, f"error reading form: {error}") from error
    if not form.is_complete:
        raise Refusal(400, "error reading form: it is incomplete")


class _Form:
    """Turns the parser's calls into events."""

    def __init__(self) -> None:
        self.is_complete = False
        self.other_bytes = 0
        """Bytes of the form so far without those of its files."""
        self._parts = 0
        self._events: list[_Event] = []
        self._name, self._value, self._disposition = b"", b"", b""
        self._in_file = False

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def taken(self) -> list[_Event]:
        events, self._events = self._events, []
        return events

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > FILES_MAX:
            raise Refusal(400, f"an upload has at most {FILES_MAX} files: send the others in another one")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._in_file = options.get(b"name") == b"file"
        if self._in_file:
            self._events.append(options.get(b"filename", b"").decode(errors="replace"))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.other_bytes -= end - start
            self._events.append(data[start:end])

    def _on_part_end(self) -> None:
        if self._in_file:
            self._events.append(None)

    def _on_end(self) -> None:
        self.is_complete = True
