"""Handlers of grpc, taken apart and put together, and interceptors around those of our own services.

Our handlers are coroutines (service.py says why), so the function around one is a coroutine function too. Handlers of
grpc's own services, which may be generators, are left as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any, TypeAlias, cast

import grpc

from executor_api.v1 import admin_service_pb2, executor_service_pb2

# Generic in the stubs only, hence the quotes, and the comments at the interceptors.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"

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
    handler: Handler, behaviour: Callable[..., Any], request_deserializer: Callable[[bytes], Any] | None
) -> Handler:
    """Returns a handler of the same form that calls `behaviour`."""
    construct = _CONSTRUCTORS[(handler.request_streaming, handler.response_streaming)]
    made = construct(
        behaviour, request_deserializer=request_deserializer, response_serializer=handler.response_serializer
    )
    return cast("Handler", made)


class Around(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Puts `around(method, behaviour)` in place of each behaviour of our services. It belongs to one server."""

    def __init__(self, around: Callable[[str, Behaviour], Behaviour]) -> None:
        self._around = around
        # By method: what further interceptors return for one never changes.
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method not in OWN_METHODS:
            return await continuation(handler_call_details)
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            behaviour = behaviour_of(handler)
            assert not inspect.isasyncgenfunction(behaviour), "our handlers are coroutines"
            self._handlers[method] = with_behaviour(
                handler, self._around(method, behaviour), handler.request_deserializer
            )
        return self._handlers[method]


class MethodTable:
    """Gathers the handlers of services, and gives them to a server as one handler that looks each method up.

    For each method that is registered with it, grpc.aio keeps a task that waits for the next call, and with every call
    that arrives it waits for all of them again (`asyncio.wait`): with 50 methods that is 300 function calls. A method
    that is only looked up costs nothing until it is called. But all of those share one task and one queue of calls that
    no handler has taken yet. So the few methods in `by_themselves` are registered: however many calls of others arrive,
    these go their own way.
    """

    def __init__(self, by_themselves: Set[str]) -> None:
        self._by_themselves = by_themselves
        self._handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Does nothing: generated code adds all methods of a service in this way too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Adds methods, as generated code does. The last that has a method serves it."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def serve_by(self, server: grpc.aio.Server) -> None:
        """Gives all methods to a server."""
        for path in self._by_themselves & self._handlers.keys():
            service, _, name = path.strip("/").rpartition("/")
            cast("Any", server).add_registered_method_handlers(service, {name: self._handlers[path]})
        server.add_generic_rpc_handlers((_LookUp(self._handlers),))


class _LookUp(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        return self._handlers.get(handler_call_details.method)


def status_of(context: Context) -> str:
    """Returns the name of the status that a call ended with, once its handler has returned or raised."""
    code = cast("Any", context).code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _STATUS_NAMES.get(code, "UNKNOWN")
