"""Passes calls for sessions on to their nodes, as raw bytes.

A request is parsed only to find its session, with the parser that the node uses too, so that both see the same id. Its
bytes go on unchanged, and so do those of the answer. Streams are passed on message by message: each message waits until
the other side has taken it, so nothing piles up here. The call that ends first ends the other one: a client that leaves
cancels the node's call, its deadline is the node's, and the node's status is the client's.

Handlers are coroutines that write to their context; service.py says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api import checks
from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context, Handler
from executor_server.api.upload import PIECE_TIMEOUT_S
from executor_server.core import InvalidRequest, Reason
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_link import FrontLink
from executor_server.fleet.api.node_calls import (
    Metadata,
    RefusedByNode,
    answer_of,
    metadata_for,
    time_left_s,
    translated,
)

_SERVICE = service_pb.DESCRIPTOR.services_by_name["ExecutorService"]
_ADMIN = admin_pb.DESCRIPTOR.services_by_name["AdminService"]

T = TypeVar("T")

_Descriptor: TypeAlias = Any  # protobuf's descriptors have no types
_Read: TypeAlias = Callable[[Message], str]


def proxy_handlers(fleet: FrontFleet, *, by_hand: frozenset[str]) -> dict[str, dict[str, Handler]]:
    """Returns the handlers of all methods whose request names a session, except those written `by_hand`.

    The keys are the names of service and method, as RpcServer needs them.
    """
    return {
        service.full_name: {
            method.name: _handler(method, fleet)
            for method in service.methods
            if method.name not in by_hand and _names_session(method)
        }
        for service in (_SERVICE, _ADMIN)
    }


def _names_session(method: _Descriptor) -> bool:
    return method.client_streaming or "session_id" in method.input_type.fields_by_name


def _handler(method: _Descriptor, fleet: FrontFleet) -> Handler:
    path = f"/{method.containing_service.full_name}/{method.name}"
    first_parts, request_class = _first_parts(method), message_factory.GetMessageClass(method.input_type)
    session_in = _reader(first_parts)

    def route(request: bytes, context: Context) -> tuple[FrontLink, Metadata]:
        parsed = _parsed(request_class, request)
        routed = _routed(fleet, path, session_in(parsed), context)
        if _starts_code(method.name, parsed):
            fleet.usage.check_use(current_principal.get().tenant)
        return routed

    async def unary(request: bytes, context: Context) -> bytes:
        link, metadata = route(request, context)
        call = link.channel.unary_unary(path)(request, metadata=metadata, timeout=time_left_s(context))
        return cast("bytes", await answer_of(call, link.node))

    async def answers(request: bytes, context: Context) -> None:
        link, metadata = route(request, context)
        call = link.channel.unary_stream(path)(request, metadata=metadata, timeout=time_left_s(context))
        await receive(call, link.node, context)

    async def requests(pieces: AsyncIterator[bytes], context: Context) -> bytes:
        first = await _first(pieces, first_parts)
        link, metadata = route(first, context)
        call = link.channel.stream_unary(path)(metadata=metadata, timeout=time_left_s(context))
        answer: bytes = await _both(_send(call, first, pieces), answer_of(call, link.node))
        return answer

    async def both(pieces: AsyncIterator[bytes], context: Context) -> None:
        first = await _first(pieces, first_parts)
        link, metadata = route(first, context)
        call = link.channel.stream_stream(path)(metadata=metadata, timeout=time_left_s(context))
        await _both(_send(call, first, pieces), receive(call, link.node, context))

    if method.name == "Execute":
        return grpc.unary_stream_rpc_method_handler(cast("Any", _execute(path, fleet)))
    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(cast("Any", both))
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(cast("Any", requests))
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(cast("Any", answers))
    return grpc.unary_unary_rpc_method_handler(cast("Any", unary))


def _starts_code(method: str, request: Message) -> bool:
    """True for calls that a node refuses while the tenant's CPU time or output is spent; the front knows the sums.

    Execute and CreateSession are checked where they are counted.
    """
    if method == "RegisterTools":
        tools = cast("service_pb.RegisterToolsRequest", request).tools
        return any(tool.HasField("shipped") for tool in tools)
    return method in ("StartProcess", "SetVariables", "GetVariables", "ExportState", "RestoreState")


def _execute(path: str, fleet: FrontFleet) -> Callable[[bytes, Context], Coroutine[Any, Any, None]]:
    """Returns the handler of Execute, which counts the execution for its tenant's quotas."""

    async def execute(request: bytes, context: Context) -> None:
        parsed = cast("service_pb.ExecuteRequest", _parsed(service_pb.ExecuteRequest, request))
        link, metadata = _routed(fleet, path, parsed.session_id, context)
        execution = parsed.session_id, checks.identifier(parsed.execution_id, "execution_id")
        with fleet.usage.executing(current_principal.get().tenant, link.node, execution) as counted:
            call = link.channel.unary_stream(path)(request, metadata=metadata, timeout=time_left_s(context))
            begun = asyncio.Event()
            try:
                await receive(call, link.node, context, begun)
            except RefusedByNode:
                counted.is_over = not begun.is_set()
                raise

    return execute


def _routed(fleet: FrontFleet, path: str, session_id: str, context: Context) -> tuple[FrontLink, Metadata]:
    principal = current_principal.get()
    link = fleet.route(principal, checks.identifier(session_id, "session_id"), path)
    return link, metadata_for(link, principal, context)


async def _first(pieces: AsyncIterator[bytes], parts: Sequence[str]) -> bytes:
    try:
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            first = await anext(pieces, None)
    except TimeoutError as error:
        raise InvalidRequest(Reason.INVALID_FIELD, f"nothing came for {PIECE_TIMEOUT_S:g} s") from error
    if first is None:
        raise checks.invalid(" or ".join(parts), "must be the first message")
    return first


async def _both(send: Coroutine[Any, Any, None], receive: Coroutine[Any, Any, T]) -> T:
    """Runs `send`, which passes the client's messages on, until `receive` ends the call. Returns its result.

    A client that has sent everything can still receive. A client whose stream breaks ends the call.
    """
    sending, receiving = asyncio.create_task(send), asyncio.create_task(receive)
    try:
        await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()  # the client's stream broke
        return await receiving
    finally:
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)


async def receive(call: Any, node: str, context: Context, begun: asyncio.Event | None = None) -> None:
    """Passes a node's messages on; sets `begun` at the first one. Ends the call when the caller is cancelled.

    Raises RefusedByNode, NodeSilent.
    """
    try:
        with translated(node):
            async for message in call:
                if begun is not None:
                    begun.set()
                await context.write(message)
    finally:
        call.cancel()


async def _send(call: Any, first: bytes, pieces: AsyncIterator[bytes]) -> None:
    """Passes a client's messages on. A node that has ended the call takes no more: its answer says why."""
    try:
        await call.write(first)
        async for piece in pieces:
            await call.write(piece)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return


# ---------------------------------------------------------------------------------------------------------------------
# Messages


def _parsed(request_class: type[Message], request: bytes) -> Message:
    try:
        return request_class.FromString(request)
    except DecodeError:
        raise InvalidRequest(Reason.INVALID_FIELD, "the message is malformed (text must be UTF-8)") from None


def _first_parts(method: _Descriptor) -> Sequence[str]:
    """Returns the parts of a stream's first message that name the session; none where the request itself does."""
    if "session_id" in method.input_type.fields_by_name:
        return ()
    parts = [field for field in method.input_type.fields if field.message_type is not None]
    return [field.name for field in parts if "session_id" in field.message_type.fields_by_name]


def _reader(parts: Sequence[str]) -> _Read:
    """Returns the function that finds the session in a request; of a stream, in its first message."""
    if not parts:
        return lambda request: cast("Any", request).session_id

    def read(request: Message) -> str:
        """Returns an empty id when the message has another part."""
        return next((getattr(request, part).session_id for part in parts if request.HasField(part)), "")

    return read
