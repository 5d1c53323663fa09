"""Authenticates the caller of every method, before anything of the call is read.

A call with a wrong token is denied by its metadata alone. All denials of an unknown caller are one status with one
message: it learns neither what was wrong nor which methods exist. `_ROLES` and `_check_role` decide who may call what:
nothing else compares a caller's role with a method.

Every method is served by a handler that reads its requests as a stream, even if there is only one request. The caller
is known and counted before the first message is awaited, the wait for it has a limit, and a call without a message is
answered. grpc.aio's own unary handlers do none of this. They wait for a message without end, and they send no status to
a call that ends without one. Such a call keeps its place among the calls of the server as long as its connection lasts,
although its task has ended and its quota has been given back.

Only the health service's Check is open, so that probes need no secret; it reports only whether the daemon serves. Since
probes are charged to no tenant, few may be open at a time, and each for a short time.

A call whose caller is no longer known (its token was revoked or has expired, the policy maps its certificate to another
tenant) ends within `CHECK_INTERVAL_S` as if it had just been made. The execution that it streamed goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc
import structlog

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api.callers import CallerSource, unauthenticated
from executor_server.api.errors import refuse
from executor_server.api.handlers import Behaviour, Context, Handler, behaviour_of, with_behaviour
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
"""The caller, for handlers and the functions around them. grpc.aio runs all of a call in one task."""

_log = structlog.get_logger(__name__)


@dataclass
class _Stream:
    shown: Hashable
    principal: Principal
    cut_off: bool = False


class Authentication:
    """Admits the calls of callers that `callers` knows; `around` is the outermost wrapper.

    `on_denial` receives the method and the error of each denial. `admit_call`, given tenant and method, returns when a
    call may go on, or raises an ExecutorError. Without it every known caller's call may.
    """

    def __init__(
        self,
        callers: CallerSource,
        *,
        on_denial: Callable[[str, ExecutorError], None],
        admit_call: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        self._callers = callers
        self._on_denial = on_denial
        self._admit_call = admit_call
        self._streams: dict[asyncio.Task[Any], _Stream] = {}
        self._probes = 0
        self._watcher: asyncio.Task[None] | None = None

    # -- calls -------------------------------------------------------------------------------------------------------

    def around(self, method: str, handler: Handler) -> Handler:
        """Returns a handler that serves known callers, while they are known, or any caller of an open method."""
        if method in OPEN_METHODS:
            serve = self._serving_probes(_reading(handler, PROBE_MESSAGE_TIME_S))
        else:
            serve = self._serving_known_callers(method, _reading(handler, FIRST_MESSAGE_TIME_S))
        # A single answer is sent together with its status, in one batch.
        return with_behaviour(handler, serve, handler.request_deserializer, request_streaming=True)

    async def _admit(self, method: str, context: Context) -> _Stream:
        """Returns when a call may go on. Raises Unauthenticated, Forbidden, ResourceExhausted."""
        try:
            shown = self._callers.shown_by(method, context)
        except Unauthenticated:
            await self._callers.refresh()  # the token may have been made this second
            shown = self._callers.shown_by(method, context)
        principal = self._callers.principal_of(shown)
        if principal is None:
            raise unauthenticated()
        current_principal.set(principal)
        _check_role(principal, method)
        if self._admit_call is not None:
            await self._admit_call(principal.tenant, method)
        return _Stream(shown, principal)

    def _serving_known_callers(self, method: str, behaviour: Behaviour) -> Behaviour:
        """Serves a call while its caller is known, and ends it when it no longer is."""

        async def serve(requests: AsyncIterator[Any], context: Context) -> Any:
            try:
                stream = await self._admit(method, context)
            except ExecutorError as denial:
                return await self._deny(method, denial, context)
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            self._streams[task] = stream
            try:
                return await behaviour(requests, context)
            except asyncio.CancelledError:
                if not stream.cut_off:
                    raise
                task.uncancel()
                ended: ExecutorError = unauthenticated()
            except MessageMissing as missing:
                ended = missing.refusal
            finally:
                del self._streams[task]
            return await self._deny(method, ended, context)

        return serve

    async def _deny(self, method: str, denial: ExecutorError, context: Context) -> NoReturn:
        self._on_denial(method, denial)
        await refuse(context, denial)

    def _serving_probes(self, behaviour: Behaviour) -> Behaviour:
        """Serves any caller, a few at a time: unknown callers must not be able to use up the calls of the server."""

        async def serve(requests: AsyncIterator[Any], context: Context) -> Any:
            if self._probes >= MAX_PROBES:
                text = f"{MAX_PROBES} probes are open already"
                await refuse(context, ResourceExhausted(Reason.QUEUE_FULL, text, retry_after_s=PROBE_RETRY_S))
            self._probes += 1
            try:
                return await behaviour(requests, context)
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


class MessageMissing(Exception):
    """A call that has one message ended without it, or the message was not complete in time."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.refusal = InvalidRequest(Reason.INVALID_FIELD, problem)


def _reading(handler: Handler, first_message_time_s: float) -> Behaviour:
    """Returns a behaviour that serves a stream of requests as `handler` serves its own. It raises MessageMissing."""
    behaviour = cast("Behaviour", behaviour_of(handler))
    if handler.request_streaming:
        return behaviour

    async def serve(_requests: AsyncIterator[Any], context: Context) -> Any:
        return await behaviour(await _only(context, first_message_time_s), context)

    return serve


async def _only(context: Context, time_s: float) -> Any:
    try:
        async with asyncio.timeout(time_s):
            message = await cast("Any", context).read()
    except TimeoutError:
        raise MessageMissing(f"the message of the call was not whole within {time_s:g} s") from None
    if message is cast("Any", grpc.aio).EOF:
        raise MessageMissing("the call has no message")
    return message
