"""ExecutorService over Connect: every method of its descriptor, forwarded to the daemon with the caller's own token.

This module names no method. A client's deadline is that of the call to the daemon, and a client that leaves
cancels the call. The daemon's refusals reach the client with their codes, messages and details.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.method import IdempotencyLevel, MethodInfo
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from executor_api.v1 import executor_service_pb2 as pb
from executor_client.errors import ExecutorClientError
from executor_server.gateway import errors
from executor_server.gateway.clients import Clients
from executor_server.gateway.codecs import CODECS, MESSAGE_BYTES_MAX, BoundedGzip

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"]
PATH = f"/{SERVICE.full_name}"
METHODS: Mapping[str, MethodDescriptor] = {f"{PATH}/{each.name}": each for each in SERVICE.methods}
"""The methods by their paths."""

Context = RequestContext[Message, Message]


class ConnectService(ConnectASGIApplication[Clients]):
    @property
    def path(self) -> str:
        return PATH

    def __init__(self, clients: Clients) -> None:
        super().__init__(
            service=clients,
            endpoints=lambda clients: {path: _endpoint(each, clients) for path, each in METHODS.items()},
            read_max_bytes=MESSAGE_BYTES_MAX,
            compressions=(BoundedGzip(),),
            codecs=CODECS,
        )


def _endpoint(method: MethodDescriptor, clients: Clients) -> Any:
    info = MethodInfo(
        name=method.name,
        service_name=SERVICE.full_name,
        input=GetMessageClass(method.input_type),
        output=GetMessageClass(method.output_type),
        idempotency_level=IdempotencyLevel.UNKNOWN,
    )

    async def one_answer(request: Any, context: Context) -> Message:
        with _border(method.name):
            token = bearer_token(context.request_headers)
            stub, sent = await _stub(clients, token), _Requests.of(request)
            try:
                answer: Message = await getattr(stub, method.name)(sent, **_options(context, token))
            except asyncio.CancelledError:
                raise _why_cancelled(sent) from None
            return answer

    async def answers(request: Any, context: Context) -> AsyncIterator[Message]:
        with _border(method.name):
            token = bearer_token(context.request_headers)
            stub, sent = await _stub(clients, token), _Requests.of(request)
            call = getattr(stub, method.name)(sent, **_options(context, token))
            try:
                async for answer in call:
                    yield answer
            except asyncio.CancelledError:
                raise _why_cancelled(sent) from None
            finally:
                call.cancel()

    if method.client_streaming:
        return (
            Endpoint.bidi_stream(info, answers) if method.server_streaming else Endpoint.client_stream(info, one_answer)
        )
    return Endpoint.server_stream(info, answers) if method.server_streaming else Endpoint.unary(info, one_answer)


async def _stub(clients: Clients, token: str) -> Any:
    # The client's public methods assemble and repeat; here each message is forwarded as it is.
    return (await clients.of(token))._transport.channel.stub


class _Requests:
    """A client's stream of requests. If it fails, gRPC cancels the call and drops the error; this object keeps it."""

    def __init__(self, requests: AsyncIterator[Message]) -> None:
        self._requests = requests
        self.error: ConnectError | None = None

    @classmethod
    def of(cls, request: Any) -> Any:
        return request if isinstance(request, Message) else cls(request)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._kept()

    async def _kept(self) -> AsyncIterator[Message]:
        try:
            async for request in self._requests:
                yield request
        except ConnectError as error:
            self.error = error
            raise


def _why_cancelled(sent: Any) -> ConnectError:
    """Returns why gRPC cancelled a call: its requests failed, the channel was closed, or our task was cancelled."""
    failed = sent.error if isinstance(sent, _Requests) else None
    return failed or errors.of_cancellation()


def bearer_token(headers: Mapping[str, str]) -> str:
    """Returns the caller's token. Raises ConnectError without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise ConnectError(
            Code.UNAUTHENTICATED,
            "the request has no token: send the header `authorization: Bearer TOKEN`, with a token made by "
            "`executor-server token new`",
        )
    return token


def _options(context: Context, token: str) -> dict[str, Any]:
    timeout_ms = context.timeout_ms
    if timeout_ms is not None and timeout_ms <= 0:
        raise ConnectError(Code.DEADLINE_EXCEEDED, "the call's connect-timeout-ms was over before it began")
    return {
        "metadata": (("authorization", f"Bearer {token}"),),
        "timeout": None if timeout_ms is None else timeout_ms / 1000,
    }


@contextmanager
def _border(method: str) -> Iterator[None]:
    try:
        yield
    except ConnectError:
        raise
    except ExecutorClientError as error:
        raise errors.of_client(error) from error
    except grpc.RpcError as error:
        raise errors.of_status(error) from error
    except Exception as error:  # the border
        raise errors.of_bug(method, error) from error
