"""Calls from a front to its nodes, one by one or all at once, on the links' own connections.

A node refuses a call with a status of ours, which has an ErrorInfo; the client gets it unchanged. Any other status
comes from gRPC itself: the node could not be reached, or the connection broke. Then the call may have had an effect.
The text of gRPC may name addresses, so the client gets one of ours instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import structlog
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api.errors import DETAILS_KEY, DOMAIN, PassedOn
from executor_server.api.handlers import Context
from executor_server.core import ExecutorError, PreconditionFailed, Principal, Reason, ResourceExhausted, Unavailable
from executor_server.fleet.api.wire import PRINCIPAL_KEY, principal_bytes

if TYPE_CHECKING:
    from executor_server.fleet.api.front_link import FrontLink

T = TypeVar("T")

RETRY_S = 1.0
"""Seconds after which a client may repeat a call that a node did not answer."""
RETRY_MAX_S = 30.0
"""Limit of the growing wait before a stream that a node has refused is opened again."""
ASK_TIME_S = 3.0
"""Seconds for the answer to a call to all nodes; a slower node is left out."""

# Metadata of a client's call that go on to the node: its trace.
_PASSED_ON = frozenset({"traceparent", "tracestate"})
# A client refuses trailers above 8 KiB and sees that instead of the refusal.
_MAX_DETAILS_BYTES = 6000

Metadata = Sequence[tuple[str, str | bytes]]

_log = structlog.get_logger(__name__)


class RefusedByNode(PassedOn):
    """The node has refused the call, with a reason of ours."""

    def __init__(self, node: str, code: grpc.StatusCode, message: str, details: bytes) -> None:
        super().__init__(code, message, details)
        self.node = node
        self.reason = ""
        self.retry_after_s: float | None = None


class NodeSilent(Unavailable):
    """The node has not answered the call, which may have had an effect. A client that gets this must try again."""

    def __init__(self, node: str, problem: str = "") -> None:
        super().__init__(Reason.NODE_FENCED, f"the node {node} did not answer; it may come back", retry_after_s=RETRY_S)
        self.node = node
        self.problem = problem  # for operators


def metadata_for(link: FrontLink, principal: Principal, context: Context | None = None) -> Metadata:
    """Returns the metadata for a call on behalf of this caller, with the trace of the caller's own call."""
    metadata: list[tuple[str, str | bytes]] = [(PRINCIPAL_KEY, principal_bytes(principal, link.front_instance))]
    if context is not None:
        metadata += [(key, value) for key, value in context.invocation_metadata() or () if key in _PASSED_ON]
    return metadata


def time_left_s(context: Context) -> float | None:
    """Returns the seconds until the deadline of the client's call; None when it has none."""
    left: float | None = cast("Any", context).time_remaining()
    return left


def _paths() -> dict[str, tuple[str, Any]]:
    """Returns the path of each method and the class of its answer, by its name; no two services share a name."""
    return {
        method.name: (f"/{service.full_name}/{method.name}", message_factory.GetMessageClass(method.output_type))
        for file in (service_pb.DESCRIPTOR, admin_pb.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }


_METHODS = _paths()


async def ask(link: FrontLink, method: str, request: Message, principal: Principal, time_s: float | None) -> Any:
    """Returns the answer of a node to a call with one message. Raises RefusedByNode, ExecutorError."""
    path, answer_class = _METHODS[method]
    send = link.channel.unary_unary(
        path,
        request_serializer=lambda message: cast("bytes", message.SerializeToString()),
        response_deserializer=answer_class.FromString,
    )
    call = send(request, metadata=cast("Any", metadata_for(link, principal)), timeout=time_s)
    return await answer_of(cast("Any", call), link.node)


async def keep_following(node: str, follow: Callable[[], Awaitable[None]], event: str) -> None:
    """Repeats `follow`, which reads a stream of a node, until cancelled; with growing waits while it ends soon.

    Its errors (ExecutorError, PassedOn) are logged as `event`.
    """
    wait_s = RETRY_S
    while True:
        began_s = time.monotonic()
        try:
            await follow()
        except (ExecutorError, PassedOn) as error:
            _log.warning(event, node=node, problem=str(error))
        if time.monotonic() - began_s > RETRY_MAX_S:
            wait_s = RETRY_S
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, RETRY_MAX_S)


def begin_stream(
    link: FrontLink, method: str, request: Message, principal: Principal, context: Context | None = None
) -> Any:
    """Begins a call whose answer is a stream; read its messages inside `translated`.

    `context` is the client's call that this one serves: its trace and its deadline are passed on.
    """
    path, answer_class = _METHODS[method]
    send = link.channel.unary_stream(
        path,
        request_serializer=lambda message: cast("bytes", message.SerializeToString()),
        response_deserializer=answer_class.FromString,
    )
    time_s = None if context is None else time_left_s(context)
    return send(request, metadata=cast("Any", metadata_for(link, principal, context)), timeout=time_s)


async def ask_all(
    links: Sequence[FrontLink], method: str, request: Message, principal: Principal, time_s: float = ASK_TIME_S
) -> list[tuple[str, Any]]:
    """Returns the answers of all nodes that answer in time, with their names."""
    answers = await answers_of(links, method, request, principal, time_s)
    return [
        (link.node, answer)
        for link, answer in zip(links, answers, strict=True)
        if not isinstance(answer, (ExecutorError, PassedOn))
    ]


async def answers_of(
    links: Sequence[FrontLink], method: str, request: Message, principal: Principal, time_s: float = ASK_TIME_S
) -> list[Any]:
    """Returns the answer of each node, or the ExecutorError or RefusedByNode in its place."""

    async def one(link: FrontLink) -> Any:
        try:
            return await ask(link, method, request, principal, time_s)
        except (ExecutorError, PassedOn) as error:
            _log.info("fleet_node_left_out", node=link.node, method=method, problem=str(error))
            return error

    return await asyncio.gather(*map(one, links))


async def answer_of(call: Awaitable[T], node: str) -> T:
    """Returns the answer of a node. Raises RefusedByNode, NodeSilent. Ends the call when the caller is cancelled."""
    try:
        with translated(node):
            return await call
    finally:
        cast("Any", call).cancel()


@contextmanager
def translated(node: str) -> Iterator[None]:
    """Translates the ends of calls to a node."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise refusal_of(node, error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The link was closed, which cancels the calls on its connection.
        raise NodeSilent(node, "its link was closed") from None


def refusal_of(node: str, error: grpc.aio.AioRpcError) -> RefusedByNode | ExecutorError:
    """Returns the error for the status of a call to a node; NodeSilent if the call may have had an effect."""
    code, message = error.code(), error.details() or ""
    details = next((value for key, value in cast("Any", error).trailing_metadata() or () if key == DETAILS_KEY), b"")
    if isinstance(details, bytes) and 0 < len(details) <= _MAX_DETAILS_BYTES:
        refused = RefusedByNode(node, code, message, details)
        if _read_details(refused):
            if refused.reason != Reason.UNAUTHENTICATED.value:
                return refused
            # This refuses the front, which has authenticated the client: the node obeys another front by now.
            return NodeSilent(node, f"it refuses this front: {message}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ResourceExhausted(Reason.TOO_LARGE, f"the answer of the node {node} is too large to pass on")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        # Its gRPC has answered, so the call had no effect; repeating it does not help while the node has this program.
        message = f"the node {node} does not know this call: its program is older than the front's"
        return PreconditionFailed(Reason.NODE_REFUSED, message)
    return NodeSilent(node, f"{code.name}: {message}")


def _read_details(refused: RefusedByNode) -> bool:
    """Reads reason and delay; False when the details are not those of a status of ours."""
    status, info, retry = status_pb2.Status(), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status.ParseFromString(refused.details)
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(retry)
    except DecodeError:
        return False
    if info.domain != DOMAIN or not info.reason or status.code != refused.code.value[0]:
        return False
    refused.reason = info.reason
    if retry.HasField("retry_delay"):
        refused.retry_after_s = max(0.0, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    return True
