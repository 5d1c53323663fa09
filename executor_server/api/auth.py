"""Authenticates the caller of every method, before anything of the call is read.

A call with a wrong token is denied by its metadata alone. All denials of an unknown caller are one status with one
message: it learns neither what was wrong nor which methods exist. `_ROLES` and `_check_role` say who may call what:
nothing else compares a caller's role with a method.

Every method is served by a handler that reads its requests as a stream, also where there is one request only. The
caller is known and counted before the first message is awaited, the wait for it has a limit, and a call without a
message is answered. grpc.aio's own unary handlers do none of this: they wait for a message without end, and to a call
that ends without one they send no status, so that it keeps its place among the calls of the server for as long as its
connection lasts, when its task has ended and its quota has been given back.

Only the health service's Check is open, so that probes need no secret; it reports only whether the daemon serves. Since
probes are charged to no tenant, few may be open at a time, and each for a short time.

A call whose caller is no longer known (its token was revoked or has expired, the policy maps its certificate to another
tenant) ends within `CHECK_INTERVAL_S` as if it had just been made. The execution that it streamed goes on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
import structlog

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api.callers import CallerSource, unauthenticated
from executor_server.api.errors import refuse
from executor_server.api.handlers import Behaviour, Context, Handler, behaviour_of
from executor_server.core import (
    ExecutorError,
    Forbidden,
    InvalidRequest,
    Principal,
    Reason,
    ResourceExhausted,
    Unauthenticated,
)
from executor_server.policy.identity import APPROVER, USER, VIEWER, effective_roles

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
CHECK_INTERVAL_S = 1.0
FIRST_MESSAGE_TIME_S = 30.0
"""Seconds to wait for the one message of a call; the largest arrives in time at 140 kB/s."""
PROBE_MESSAGE_TIME_S = 5.0
MAX_PROBES = 64
"""Calls of open methods at one time, by all callers together."""
PROBE_RETRY_S = 1.0

_ADMIN_METHODS = f"/{admin_pb.DESCRIPTOR.services_by_name['AdminService'].full_name}/"
_USER_METHODS = f"/{service_pb.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/"
_READING = (
    "WatchSessions",
    "InspectSession",
    "GetSessionNetwork",
    "ListExecutions",
    "FollowExecution",
    "FollowSession",
    "TailAudit",
    "GetUsage",
    "ExplainPolicy",
)
# The methods of AdminService that a role may call; the others are for admins.
_ROLES = {
    **{f"{_ADMIN_METHODS}{name}": APPROVER for name in ("WatchApprovals", "DecideApproval")},
    **{f"{_ADMIN_METHODS}{name}": VIEWER for name in _READING},
}

current_principal: ContextVar[Principal] = ContextVar("current_principal")
"""The caller, for handlers and the functions around them. grpc.aio runs all of a call in one task.

Other interceptors must not read it: a caller without a token is known only when the handler runs.
"""

_named: ContextVar[Any] = ContextVar("named")  # from `CallerSource.named_in`

_log = structlog.get_logger(__name__)


@dataclass
class _Stream:
    shown: Hashable
    principal: Principal
    cut_off: bool = False


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The first interceptor: admits the calls of callers that `callers` knows.

    `on_denial` receives the method and the error of each denial. `admit_call`, given tenant and method, returns when a
    call may go on, or raises an ExecutorError.
    """

    def __init__(
        self,
        callers: CallerSource,
        *,
        on_denial: Callable[[str, ExecutorError], None],
        admit_call: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._callers = callers
        self._checks_connections = callers.checks_connections
        self._on_denial = on_denial
        self._admit_call = admit_call
        self._streams: dict[asyncio.Task[Any], _Stream] = {}
        self._probes = 0
        # By method: what further interceptors return for one never changes.
        self._handlers: dict[str, Handler] = {}
        self._watcher: asyncio.Task[None] | None = None

    # -- calls -------------------------------------------------------------------------------------------------------

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        is_open = method in OPEN_METHODS
        try:
            if not is_open:
                try:
                    named = self._callers.named_in(handler_call_details)
                except Unauthenticated:
                    await self._callers.refresh()  # the token may have been made this second
                    named = self._callers.named_in(handler_call_details)
                _named.set(named)
                if not self._checks_connections:
                    principal = self._admit(method, self._callers.shown_by(named, None))
                    await self._admit_call(principal.tenant, method)
        except ExecutorError as denial:
            return _denying(self._denied(method, denial))
        serving = self._handlers.get(method)
        if serving is None:
            handler = cast("Handler | None", await continuation(handler_call_details))
            serve = self._serving_probes(handler) if is_open else self._serving_known_callers(method, handler)
            serving = _reading_streams(handler, serve)
            if handler is not None:  # a caller can make up any number of names
                self._handlers[method] = serving
        return serving

    def _admit(self, method: str, shown: Hashable) -> Principal:
        """Returns the caller. Raises Unauthenticated, Forbidden."""
        principal = self._callers.principal_of(shown)
        if principal is None:
            raise unauthenticated()
        current_principal.set(principal)
        _check_role(principal, method)
        return principal

    def _serving_known_callers(self, method: str, handler: Handler | None) -> _Serve:
        """Serves a call while its caller is known, and ends it when it no longer is."""
        behaviour = _coroutine_of(handler)

        async def serve(requests: AsyncIterator[Any], context: Context) -> Any:
            if self._checks_connections:
                try:
                    shown = self._callers.shown_by(_named.get(), context)
                    principal = self._admit(method, shown)
                    await self._admit_call(principal.tenant, method)
                except ExecutorError as denial:
                    await refuse(context, self._denied(method, denial))
            else:  # it was admitted before its handler was looked for, in the same task
                shown, principal = self._callers.shown_by(_named.get(), None), current_principal.get()
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            stream = self._streams[task] = _Stream(shown, principal)
            try:
                return await _serve(handler, behaviour, requests, context, FIRST_MESSAGE_TIME_S)
            except asyncio.CancelledError:
                if not stream.cut_off:
                    raise
                task.uncancel()
                ended: ExecutorError = unauthenticated()
            except MessageMissing as missing:
                ended = missing.refusal
            finally:
                del self._streams[task]
            return await refuse(context, self._denied(method, ended))

        return serve

    def _denied(self, method: str, denial: ExecutorError) -> ExecutorError:
        """Reports a denial, and returns the refusal for the caller."""
        self._on_denial(method, denial)
        return denial

    def _serving_probes(self, handler: Handler | None) -> _Serve:
        """Serves any caller, a few at a time: unknown callers must not be able to use up the calls of the server."""
        behaviour = _coroutine_of(handler)

        async def serve(requests: AsyncIterator[Any], context: Context) -> Any:
            if self._probes >= MAX_PROBES:
                text = f"{MAX_PROBES} probes are open already"
                await refuse(context, ResourceExhausted(Reason.QUEUE_FULL, text, retry_after_s=PROBE_RETRY_S))
            self._probes += 1
            try:
                return await _serve(handler, behaviour, requests, context, PROBE_MESSAGE_TIME_S)
            except MessageMissing as missing:
                return await refuse(context, missing.refusal)
            finally:
                self._probes -= 1

        return serve

    # -- calls that go on ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begins to read the tokens again and to end the calls of callers that are no longer known."""
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self._callers.refresh()
                self.cut_off_strangers()
            except Exception:  # noqa: BLE001 - a background owner: a bug must not keep revoked tokens valid
                _log.exception("looking_after_tokens_broke")

    def cut_off_strangers(self) -> None:
        """Ends the calls whose credentials no longer belong to the same principal."""
        held: dict[Hashable, Principal | None] = {}
        for task, stream in self._streams.items():
            if stream.shown not in held:
                held[stream.shown] = self._callers.principal_of(stream.shown)
            if held[stream.shown] != stream.principal and not stream.cut_off:
                stream.cut_off = True
                task.cancel()


def _check_role(principal: Principal, method: str) -> None:
    """Raises Forbidden. Other services, such as reflection, are open to each known caller."""
    if principal.is_admin:
        return
    role = _ROLES.get(method)
    if role is None and method.startswith(_ADMIN_METHODS):
        raise Forbidden(Reason.ADMIN_ONLY, "this call is for admins: it needs a token that was made with --admin")
    if role is None and method.startswith(_USER_METHODS):
        role = USER
    roles = effective_roles(principal.roles)
    if role is not None and role not in roles:
        text = (
            f"this call needs the role {role}, and the caller's credential has only {', '.join(roles)}: "
            f"use a token that was made with --role {role}"
        )
        raise Forbidden(Reason.ROLE_MISSING, text)


def _denying(denial: ExecutorError) -> Handler:
    async def deny(_requests: Any, context: Context) -> None:
        await refuse(context, denial)

    # A stream handler for every method: it answers before it reads anything that an unknown caller sends.
    return grpc.stream_stream_rpc_method_handler(deny)


# ---------------------------------------------------------------------------------------------------------------------
# Handlers that read a stream, in place of any handler: on the wire they are the same

_Serve: TypeAlias = "Callable[[AsyncIterator[Any], Context], Awaitable[Any]]"


class MessageMissing(Exception):
    """A call that has one message ended without it, or it was not whole in time."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.refusal = InvalidRequest(Reason.INVALID_FIELD, problem)


def _reading_streams(handler: Handler | None, serve: _Serve) -> Handler:
    """Returns `serve` as a handler. A single answer is sent together with its status, in one batch."""
    make = (
        grpc.stream_stream_rpc_method_handler
        if handler is None or handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return make(
        cast("Any", serve),
        request_deserializer=handler.request_deserializer if handler is not None else None,
        response_serializer=handler.response_serializer if handler is not None else None,
    )


async def _unimplemented(_request: Any, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")  # grpc's own words


async def _serve(
    handler: Handler | None,
    behaviour: Behaviour,
    requests: AsyncIterator[Any],
    context: Context,
    first_message_time_s: float,
) -> Any:
    """Returns the answer of a handler; None when it has streamed its answers. Raises MessageMissing."""
    streams = handler is None or handler.request_streaming
    request = requests if streams else await _only(context, first_message_time_s)
    return await behaviour(request, context)


def _coroutine_of(handler: Handler | None) -> Behaviour:
    """Returns what serves a handler's calls as a coroutine function; handlers of grpc's own may be generators."""
    if handler is None:
        return _unimplemented
    behaviour = behaviour_of(handler)
    if not inspect.isasyncgenfunction(behaviour):
        return cast("Behaviour", behaviour)

    async def streamed(request: Any, context: Context) -> None:
        async for response in behaviour(request, context):
            await context.write(response)

    return streamed


async def _only(context: Context, time_s: float) -> Any:
    try:
        async with asyncio.timeout(time_s):
            message = await cast("Any", context).read()
    except TimeoutError:
        raise MessageMissing(f"the message of the call was not whole within {time_s:g} s") from None
    if message is cast("Any", grpc.aio).EOF:
        raise MessageMissing("the call has no message")
    return message
