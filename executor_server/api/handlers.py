"""Handlers of grpc, taken apart and put together, and the table that wraps each method of a server once.

Wrappers take the place of interceptors, which grpc.aio runs again for each call. Our handlers are coroutines
(service.py says why). Those of grpc's own services may be generators, and are made coroutines before they are wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias, cast

import grpc

from executor_api.v1 import admin_service_pb2, executor_service_pb2

# Generic in the stubs only, hence the quotes.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"
Wrapper: TypeAlias = "Callable[[str, Handler], Handler]"
"""Returns a handler that does something around another one, given the path of its method."""

OWN_METHODS = frozenset(
    f"/{service.full_name}/{method.name}"
    for file in (executor_service_pb2.DESCRIPTOR, admin_service_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
)
"""The paths of all methods of our services."""

EXECUTOR_METHODS = f"/{executor_service_pb2.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/"
"""The beginning of the paths of all methods of ExecutorService."""

# By (request_streaming, response_streaming), as grpc's cython layer chooses.
_CONSTRUCTORS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def behaviour_of(handler: Handler) -> Any:
    """Returns the function that serves a handler's calls: one of four fields, named by the handler's two flags."""
    if handler.request_streaming:
        behaviour = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
    assert behaviour is not None
    return behaviour


def with_behaviour(
    handler: Handler,
    behaviour: Behaviour,
    request_deserializer: Callable[[bytes], Any] | None,
    *,
    request_streaming: bool | None = None,
) -> Handler:
    """Returns a handler that calls `behaviour`, of the same form unless `request_streaming` is given."""
    is_stream = handler.request_streaming if request_streaming is None else request_streaming
    construct = _CONSTRUCTORS[(is_stream, handler.response_streaming)]
    made = construct(
        behaviour, request_deserializer=request_deserializer, response_serializer=handler.response_serializer
    )
    return cast("Handler", made)


def around_own_methods(around: Callable[[str, Behaviour], Behaviour]) -> Wrapper:
    """Returns a wrapper that puts `around(method, behaviour)` in place of each behaviour of our services."""

    def wrap(method: str, handler: Handler) -> Handler:
        if method not in OWN_METHODS:
            return handler
        return with_behaviour(handler, around(method, behaviour_of(handler)), handler.request_deserializer)

    return wrap


class MethodTable:
    """Gathers the handlers of services, wraps each, and gives them to a server as one handler that looks methods up.

    The first of the `wrappers` is the outermost. They are also put around the answer to a method that does not exist.

    For each registered method, grpc.aio keeps a task that waits for the next call. With every call that arrives, it
    waits for all these tasks again (`asyncio.wait`): with 50 methods that is 300 function calls. A method that is only
    looked up costs nothing until it is called. But all such methods share one task and one queue of calls that no
    handler has taken yet. So the few methods in `by_themselves` are registered: their calls don't wait behind those of
    other methods.
    """

    def __init__(self, by_themselves: Set[str], wrappers: Sequence[Wrapper] = ()) -> None:
        self._by_themselves = by_themselves
        self._wrappers = wrappers
        self._handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Does nothing: generated code adds all methods of a service in this way too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Adds methods, as generated code does. The last that has a method serves it."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def serve_by(self, server: grpc.aio.Server) -> None:
        """Gives all methods to a server."""
        wrapped = {path: self._wrapped(path, _as_coroutine(handler)) for path, handler in self._handlers.items()}
        for path in self._by_themselves & wrapped.keys():
            service, _, name = path.strip("/").rpartition("/")
            cast("Any", server).add_registered_method_handlers(service, {name: wrapped[path]})
        server.add_generic_rpc_handlers((_LookUp(wrapped, self._wrapped),))

    def _wrapped(self, path: str, handler: Handler) -> Handler:
        for wrap in reversed(self._wrappers):
            handler = wrap(path, handler)
        return handler


class _LookUp(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, handlers: Mapping[str, Handler], wrapped: Wrapper) -> None:
        self._handlers = handlers
        self._wrapped = wrapped

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        method = handler_call_details.method
        # Unknown ones are not kept: a caller can make up any number of names.
        return self._handlers.get(method) or self._wrapped(method, _UNIMPLEMENTED)


async def _unimplemented(_requests: Any, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")  # grpc's own words


_UNIMPLEMENTED: Handler = grpc.stream_stream_rpc_method_handler(cast("Any", _unimplemented))


def _as_coroutine(handler: Handler) -> Handler:
    behaviour = behaviour_of(handler)
    if not inspect.isasyncgenfunction(behaviour):
        return handler

    async def streamed(request: Any, context: Context) -> None:
        async for response in behaviour(request, context):
            await context.write(response)

    return with_behaviour(handler, streamed, handler.request_deserializer)


def status_of(context: Context) -> str:
    """Returns the name of the status that a call ended with, once its handler has returned or raised."""
    code = cast("Any", context).code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _STATUS_NAMES.get(code, "UNKNOWN")
