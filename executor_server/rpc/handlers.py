"""Putting something around the handlers of our own services, as the server's interceptors do.

The handlers are coroutines (service.py says why), so what is put around one is a coroutine function too. Handlers of
grpc's own services, which may be generators, stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc

from executor_api.v1 import admin_service_pb2, executor_service_pb2
from executor_server.rpc.errors import Context, Handler

Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"

OWN_METHODS = frozenset(
    f"/{service.full_name}/{method.name}"
    for file in (executor_service_pb2.DESCRIPTOR, admin_service_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
)
"""The paths of all methods of ours."""


class Around(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Puts `around(method, behaviour)` in place of each behaviour of ours."""

    def __init__(self, around: Callable[[str, Behaviour], Behaviour]) -> None:
        self._around = around
        # As in the error border, one for each method: what further interceptors return never changes.
        self._made: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method not in OWN_METHODS:
            return await continuation(handler_call_details)
        made = self._made.get(method)
        if made is None:
            made = self._made[method] = _rewrapped(await continuation(handler_call_details), method, self._around)
        return made


def status_of(context: Context) -> str:
    """The name of the status that a call ended with, once its handler has returned or raised."""
    code = cast("Any", context).code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _NAMES.get(code, "UNKNOWN")


_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def _rewrapped(handler: Handler, method: str, around: Callable[[str, Behaviour], Behaviour]) -> Handler:
    make, behaviour = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[(handler.request_streaming, handler.response_streaming)]
    assert behaviour is not None and not inspect.isasyncgenfunction(behaviour), "handlers of ours are coroutines"
    return make(
        cast("Any", around(method, cast("Behaviour", behaviour))),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
