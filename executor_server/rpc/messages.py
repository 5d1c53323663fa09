"""Messages of a stream that are served as the calls they stand for.

A message of Converse does what a plain call does, so it must pass all that such a call passes: admission of its caller,
metrics, traces, the error border, the guards of a node. `MessageCalls` gives each message the handler that its method
has on this server, with every interceptor around it; no check is written twice, and none can be forgotten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias

import grpc

from executor_server.rpc.handlers import (
    CONVERSE,
    EXECUTOR_METHODS,
    Behaviour,
    Context,
    Handler,
    behaviour_of,
    with_behaviour,
)

METHODS = {
    "execute": f"{EXECUTOR_METHODS}Execute",
    "attach": f"{EXECUTOR_METHODS}AttachExecution",
    "cancel": f"{EXECUTOR_METHODS}CancelExecution",
    "tool_result": f"{EXECUTOR_METHODS}SubmitToolResult",
}
"""The method of each message, by the field that it comes in."""

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"

current_calls: ContextVar[Mapping[str, Behaviour]] = ContextVar("current_calls")
"""The behaviours of these methods on the server that serves the call, interceptors included."""


class MessageCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Gives the handler of Converse the handlers of its messages.

    Comes last: gRPC's continuation can be asked for several handlers there, and gives them as the service has them.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]]) -> None:
        """`interceptors` are those around each call, behind the authentication."""
        self._interceptors = interceptors
        self._handler: Handler | None = None

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        if handler_call_details.method != CONVERSE:
            return await continuation(handler_call_details)
        if self._handler is None:
            handler = await continuation(handler_call_details)
            details = type(handler_call_details)  # gRPC takes those of its own class only
            calls = {
                method: behaviour_of(await self._intercepted(0, continuation, details(method, ())))  # type: ignore[call-arg]
                for method in METHODS.values()
            }
            serve = _with_calls(behaviour_of(handler), calls)
            self._handler = with_behaviour(handler, serve, handler.request_deserializer)
        return self._handler

    async def _intercepted(self, first: int, inner: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        """Returns the handler of a method, with the interceptors from the given one on around it."""
        if first == len(self._interceptors):
            return await inner(details)
        return await self._interceptors[first].intercept_service(
            lambda further: self._intercepted(first + 1, inner, further), details
        )


def _with_calls(behaviour: Behaviour, calls: Mapping[str, Behaviour]) -> Behaviour:
    async def serve(requests: Any, context: Context) -> Any:
        current_calls.set(calls)
        return await behaviour(requests, context)

    return serve


class MessageContext:
    """The context of a message, in the place of a call's: its answers go into the stream."""

    takes_batches = True
    """`write` takes a list of events, instead of a response with one."""

    def __init__(
        self, stream: Context, metadata: tuple[tuple[str, str], ...], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        self.details = b""
        """After `abort`: the serialized status."""
        self._stream = stream
        self._metadata = metadata
        self._code = grpc.StatusCode.OK
        self.write = send

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    async def send_initial_metadata(self, _metadata: object) -> None:
        """Does nothing: those of the stream have been sent."""

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        """Ends the message with a status. The error border gives each its details."""
        self._code = code
        self.details = trailing_metadata[0][1]
        raise grpc.aio.AbortError(details)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
