"""`executor mcp --http`: the streamable HTTP transport, stateless, on the SDK's ASGI application and uvicorn.

Each request brings a token of a tenant, which the daemon authenticates. Between requests nothing is kept here but
clients of the daemon, so any number of these servers can stand behind one balancer.

`_Gate` refuses requests before the SDK reads them: without a token, too many, too large, too slow. From a caller that
the daemon does not know, only the head is read. The SDK checks Host and Origin, against DNS rebinding by web pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from executor_api.json_size import JSON_VALUES_MAX, has_too_many_values
from executor_client._core.endpoint import is_loopback
from executor_client.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigurationError,
    ExecutorClientError,
    ResourceExhaustedError,
)
from executor_client.mcp import sdk
from executor_client.mcp.callers import Callers, TooManyCalls, current_sessions
from executor_client.mcp.server import make_server
from executor_client.mcp.sessions import Sessions

PATH = "/mcp"
BODY_BYTES_MAX = 12 << 20
"""Bytes of a request: a file of 8 MiB in base64, and the JSON around it."""
HEAD_TIME_S = 30.0
"""Seconds to wait for the head of a connection's next request."""
BODY_TIME_S = 30.0
CALL_TIME_S = 3600.0
CONNECTIONS_MAX = 512
TOKEN_CHARS_MAX = 4096
STOP_GRACE_S = 10
"""Seconds that running calls have to end when the server stops. Then they are cancelled, and with them their code."""

_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{1,{TOKEN_CHARS_MAX}}}=*")
_WELL_KNOWN = "/.well-known/oauth-protected-resource"
_REQUEST_REFUSED = -32600


@dataclass(frozen=True)
class HttpOptions:
    """Where to listen. `public_url` is the URL that hosts use, if it differs from the address.

    `authorization_server` issues tokens that the daemon accepts. Hosts find that server by RFC 9728.
    """

    host: str
    port: int
    public_url: str | None = None
    cert: str | None = None
    key: str | None = None
    authorization_server: str | None = None

    def check(self) -> None:
        """Raises ConfigurationError for options that would expose tokens, or that name no URL."""
        if (self.cert is None) != (self.key is None):
            raise ConfigurationError("a certificate needs its key: pass both --http-cert and --http-key")
        for option, url in (("--public-url", self.public_url), ("--authorization-server", self.authorization_server)):
            if url is not None and not _is_url(url):
                raise ConfigurationError(f"{option} {url!r} is not a URL; write https://HOST/PATH")
        if is_loopback(self.host):
            return
        if self.public_url is None:
            raise ConfigurationError(
                f"other machines can reach {self.host}, and the server must know its own name to refuse requests to "
                f"others: pass --public-url https://HOST{PATH}"
            )
        if self.cert is None and not self.public_url.startswith("https://"):
            raise ConfigurationError(
                f"other machines can reach {self.host}, and tokens would be sent unprotected: pass --http-cert and "
                "--http-key, or put a proxy with TLS in front and name its URL with --public-url https://..."
            )

    def url(self, port: int) -> str:
        """Returns the URL that hosts use."""
        return self.public_url or f"{self._scheme}://{_authority(self.host, port)}{PATH}"

    def authorities(self, port: int) -> list[str]:
        """Returns the Host headers that requests to this server have."""
        hosts = ("127.0.0.1", "localhost", "::1") if is_loopback(self.host) else (self.host,)
        names = [_authority(host, port) for host in hosts]
        if self.public_url is not None:
            names.append(urllib.parse.urlsplit(self.public_url).netloc)
        return names

    def origins(self, port: int) -> list[str]:
        origins = [f"{self._scheme}://{_authority(self.host, port)}"]
        if self.public_url is not None:
            origins.append("{0.scheme}://{0.netloc}".format(urllib.parse.urlsplit(self.public_url)))
        return origins

    @property
    def _scheme(self) -> str:
        return "https" if self.cert else "http"


def serve_http(options: HttpOptions, callers: Callers, started: Callable[[str], None]) -> None:
    """Serves until a signal stops it. Calls `started` with a sentence that has the URL.

    Raises ConfigurationError if it can't listen there, or can't use the certificate.
    """
    options.check()
    listener = _listener(options)
    with listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            _application(options, port, callers),
            loop="asyncio",
            http=_Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_GRACE_S,
            ssl_certfile=options.cert,
            ssl_keyfile=options.key,
        )
        try:
            config.load()
        except OSError as error:  # SSLError is an OSError
            raise ConfigurationError(f"{options.cert} and {options.key} can't be used: {error}") from error
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)  # uvicorn raises the signal again when it has stopped
        behind = "" if options.public_url is None else f", listening at {_authority(options.host, port)}"
        started(f"serving MCP at {options.url(port)}{behind}")
        uvicorn.Server(config).run(sockets=[listener])


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _listener(options: HttpOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise ConfigurationError(f"can't listen at {_authority(options.host, options.port)}: {error}") from error


def _application(options: HttpOptions, port: int, callers: Callers) -> ASGIApp:
    @contextlib.asynccontextmanager
    async def sessions(_: Any) -> AsyncIterator[Callable[[], Sessions]]:
        yield current_sessions

    app = sdk.http_app(
        make_server(sessions, named=True),
        path=PATH,
        hosts=options.authorities(port),
        origins=options.origins(port),
        body_bytes_max=BODY_BYTES_MAX,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with callers, app.router.lifespan_context(app):
            yield

    challenge, routes = "Bearer", []
    if options.authorization_server is not None:
        resource = AnyHttpUrl(options.url(port))
        challenge = f'Bearer resource_metadata="{build_resource_metadata_url(resource)}"'
        routes = create_protected_resource_routes(resource, [AnyHttpUrl(options.authorization_server)])
        routes.append(Route(_WELL_KNOWN, routes[0].endpoint, methods=["GET", "OPTIONS"]))
    # A class, not a function: Starlette passes it the request as it is.
    routes.append(Route(PATH, _Gate(app, callers, challenge)))
    gated = Starlette(routes=routes, lifespan=lifespan)
    gated.router.redirect_slashes = False  # behind a proxy with TLS, it would send a host with its token to http://
    return gated


class _Refused(Exception):
    """The answer to a request that is refused."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Gate:
    """Passes the requests of callers that the daemon knows to the SDK's application, within limits."""

    def __init__(self, app: ASGIApp, callers: Callers, challenge: str) -> None:
        self._app = app
        self._callers = callers
        self._challenge = challenge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._pass_on(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except _Refused as refused:
            if has_begun:  # the host sees a stream without an answer
                await send({"type": "http.response.body", "body": b""})
                return
            error = {"code": _REQUEST_REFUSED, "message": str(refused)}
            content = {"jsonrpc": "2.0", "id": None, "error": error}
            await JSONResponse(content, refused.status, refused.headers)(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method != "POST":
            raise _Refused(405, "only POST is served: there are no streams or sessions of the transport", allow="POST")
        token = _token_of(request.headers)
        if token is None:
            raise self._unauthenticated("a token of the executor's daemon is needed: Authorization: Bearer TOKEN")
        try:
            async with self._callers.call(token):
                body = await _body_of(request)
                await self._timed(scope, _replay(body, receive), send)
        except TooManyCalls as error:
            raise _Refused(429, f"{error}; try again", retry_after="1") from error
        except asyncio.CancelledError as error:  # by uvicorn, whose task ends here
            raise _Refused(503, "this server has stopped", retry_after="1") from error
        except AuthenticationError as error:
            raise self._unauthenticated("the daemon does not accept this token", "invalid_token") from error
        except AuthorizationError as error:
            raise _Refused(403, error.message) from error
        except ResourceExhaustedError as error:
            raise _Refused(429, error.message, retry_after=str(round(error.retry_after_s or 1))) from error
        except ExecutorClientError as error:
            # Its message has the daemon's address, and the caller is not known.
            raise _Refused(503, "the executor's daemon does not answer; try again later", retry_after="5") from error

    async def _timed(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(CALL_TIME_S):
                await self._app(scope, receive, send)
        except TimeoutError as error:
            raise _Refused(504, f"the call took more than {CALL_TIME_S:g} s") from error

    def _unauthenticated(self, message: str, error: str = "") -> _Refused:
        separator = "," if "=" in self._challenge else ""
        challenge = f'{self._challenge}{separator} error="{error}"' if error else self._challenge
        return _Refused(401, message, www_authenticate=challenge)


def _token_of(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and _TOKEN.fullmatch(token) else None


async def _body_of(request: Request) -> bytes:
    """Reads the whole body. Raises ClientDisconnect, and _Refused if it is too large, too slow or not JSON."""
    too_large = _Refused(413, f"the request has more than {BODY_BYTES_MAX:,} bytes", connection="close")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > BODY_BYTES_MAX:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIME_S):
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    raise too_large
    except TimeoutError as error:
        raise _Refused(408, f"the request did not arrive within {BODY_TIME_S:g} s", connection="close") from error
    if has_too_many_values(body):
        raise _Refused(400, f"the request has more than {JSON_VALUES_MAX:,} values; send data as text or in a file")
    try:
        # Decoded here, because the values of UTF-16 were not counted. Parsed here, because version 1 of the SDK fails
        # with 500 and a traceback for some invalid JSON.
        json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise _Refused(400, "the request is not JSON") from error
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the whole body first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class _Connection(H11Protocol):
    """A connection that is closed if no request begins within HEAD_TIME_S; uvicorn waits for ever for the first one,
    and for the rest of a head that has begun."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        self.loop.call_later(HEAD_TIME_S, self._close_unless_new, self.cycle)

    def _close_unless_new(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return valid and text.isascii() and text.isprintable() and not set(text) & set(' "\\@?#')


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
