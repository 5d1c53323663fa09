"""Checks requests to ExecutorService, and offers plain JSON to callers without a Connect library.

Connect's streams have an envelope around each message, which a shell can't make. So a method that streams answers also
takes one plain JSON object, and answers with lines of JSON. If the stream fails, the last line is an object with
`error`. If it fails before the first answer, the HTTP status says so, as for other methods.
"""

from __future__ import annotations

import json
import struct

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from google.protobuf.descriptor import MethodDescriptor
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from executor_client.errors import ExecutorClientError
from executor_server.gateway import errors
from executor_server.gateway.bodies import body_of
from executor_server.gateway.clients import Clients
from executor_server.gateway.codecs import MESSAGE_BYTES_MAX
from executor_server.gateway.connect.service import METHODS, bearer_token
from executor_server.gateway.errors import Refusal

_ENVELOPE = struct.Struct(">BI")
_END = 0b10
_JSON = "application/json"
# The last one is the type of `curl --data`. Its content is JSON here.
_PLAIN_TYPES = ("", _JSON, "application/x-www-form-urlencoded")
_UNARY_TYPES = (_JSON, "application/proto")
_STREAM_TYPES = ("application/connect+json", "application/connect+proto")
_ACCEPT = (b"accept-encoding", b"connect-accept-encoding")
LINES_TYPE = "application/x-ndjson"


class PlainJson:
    """Passes Connect's requests on to `app`, translates plain JSON, and refuses everything else with a reason."""

    def __init__(self, app: ASGIApp, clients: Clients) -> None:
        self._app = app
        self._clients = clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = METHODS.get(scope["path"])
        try:
            given = _content_type(scope)
            if method is None:
                raise Refusal(
                    404, f"there is no {scope['path']}; /openapi.json lists the methods", code=Code.UNIMPLEMENTED
                )
            if scope["method"] != "POST":
                raise Refusal(405, f"{method.name} is called by POST", code=Code.UNIMPLEMENTED)
            streams = method.client_streaming or method.server_streaming
            is_connect = given in (_STREAM_TYPES if streams else _UNARY_TYPES)
            if not is_connect and (given not in _PLAIN_TYPES or method.client_streaming):
                raise Refusal(415, _expected(method, given), code=Code.UNIMPLEMENTED)
            try:  # before the body of a stranger is read
                await self._clients.of(bearer_token(Headers(scope=scope)))
            except (ConnectError, ExecutorClientError) as error:
                if given not in _STREAM_TYPES:
                    raise
                # In Connect, a stream that ends at once.
                refusal = errors.of_client(error) if isinstance(error, ExecutorClientError) else error
                end = json.dumps({"error": errors.to_json(refusal)}).encode()
                return await Response(_ENVELOPE.pack(_END, len(end)) + end, media_type=given)(scope, receive, send)
            if is_connect:
                return await self._app(_with_type(scope, given), receive, send)
            if not streams:
                return await self._app(_with_type(scope, _JSON), receive, send)
            body = await body_of(Request(scope, receive), MESSAGE_BYTES_MAX, too_large=429)
        except ExecutorClientError as error:
            return await errors.response(errors.of_client(error))(scope, receive, send)
        except ConnectError as error:
            return await errors.response(error)(scope, receive, send)
        lines = _Lines(scope, receive, send)
        whole = _ENVELOPE.pack(0, len(body)) + body
        return await self._app(_with_type(scope, _STREAM_TYPES[0]), _after(whole, receive), lines.send)


def _content_type(scope: Scope) -> str:
    if not all(value.isascii() for _, value in scope["headers"]):
        raise Refusal(400, "a header has characters outside ASCII")
    return Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()


def _with_type(scope: Scope, content_type: str) -> Scope:
    """Returns the scope with another type, and without compressions: compressing answers costs more than it saves."""
    headers = [each for each in scope["headers"] if each[0] not in (b"content-type", *_ACCEPT)]
    return {**scope, "headers": [*headers, (b"content-type", content_type.encode())]}


def _expected(method: MethodDescriptor, given: str) -> str:
    if method.client_streaming:
        return (
            f"{method.name} takes a stream: send one of {', '.join(_STREAM_TYPES)} (Connect), not {given or 'nothing'}"
        )
    types = (_JSON, *_STREAM_TYPES) if method.server_streaming else _UNARY_TYPES
    return f"{method.name} does not take {given}: send one of {', '.join(types)}; gRPC is served by the daemon itself"


def _after(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class _Lines:
    """Sends the messages of a Connect stream as lines. connectrpc sends each in its envelope as a piece of its own."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._begun = False

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            return  # the head waits for the first message, which decides its status
        flags, _ = _ENVELOPE.unpack_from(message["body"])
        content = message["body"][_ENVELOPE.size :]
        error = json.loads(content).get("error") if flags & _END else None
        if error is not None and not self._begun:
            await JSONResponse(error, errors.status_of(Code(error["code"])))(self._scope, self._receive, self._send)
            return
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", LINES_TYPE.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if flags & _END:
            content = b"" if error is None else json.dumps({"error": error}).encode()
        line = content + b"\n" if content else b""
        await self._send({"type": "http.response.body", "body": line, "more_body": not flags & _END})
