"""Guards of a node's calls: it serves only while its lease holds, and makes sessions for its front only.

The lease is looked at when a call begins, and again before each message that leaves: a daemon that was stopped and goes
on finds messages of its guests and of its clients ready at the same moment, and its front may have reported the session
lost long ago. `cut` ends the calls that wait for something when the lease lapses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api import checks
from executor_server.api.auth import current_principal
from executor_server.api.handlers import EXECUTOR_METHODS, Around, Behaviour, Context
from executor_server.core import ExecutorError, PreconditionFailed, Principal, Reason, Unavailable

RETRY_S = 1.0
"""Seconds after which a client may ask a node again that has no lease."""

_CREATE, _PREPARE = f"{EXECUTOR_METHODS}CreateSession", f"{EXECUTOR_METHODS}PrepareEnvironment"


def fenced() -> Unavailable:
    return Unavailable(
        Reason.NODE_FENCED, "the node has no lease of its front now, so it serves no sessions", retry_after_s=RETRY_S
    )


class LeaseGuard(Around):
    """Refuses the calls of ExecutorService while `serves` returns False. AdminService goes on, for operators."""

    def __init__(self, serves: Callable[[], bool]) -> None:
        super().__init__(self._guarded)
        self._serves = serves
        self._running: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        """Ends all calls that are running, as if they had begun now."""
        for task in self._running - self._cut:
            self._cut.add(task)
            task.cancel()

    def _require(self) -> None:
        if not self._serves():
            raise fenced()

    def _guarded(self, method: str, behaviour: Behaviour) -> Behaviour:
        if not method.startswith(EXECUTOR_METHODS):
            return behaviour

        async def guarded(request: Any, context: Context) -> Any:
            self._require()
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            self._running.add(task)
            try:
                answer = await behaviour(request, cast("Context", _GuardedContext(context, self._require)))
            except asyncio.CancelledError:
                if task not in self._cut:
                    raise
                task.uncancel()
                raise fenced() from None
            except ExecutorError:
                self._require()  # the refusal may come of the end of the lease
                raise
            finally:
                self._running.discard(task)
                self._cut.discard(task)
            self._require()
            return answer

        return guarded


class _GuardedContext:
    """The context of a call that looks at the lease before each message."""

    def __init__(self, context: Context, require: Callable[[], None]) -> None:
        self._context = context
        self._require = require

    async def write(self, message: Any) -> None:
        self._require()
        await self._context.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def placed_by_front(made: Callable[[Principal, str], Awaitable[object | None]]) -> Around:
    """Refuses to make sessions and environments for clients: the front counts them, and chooses the node.

    `made` returns what a request has made before, by its id; such a request is answered.
    """

    def around(method: str, behaviour: Behaviour) -> Behaviour:
        async def only_repeated(request: service_pb.CreateSessionRequest, context: Context) -> Any:
            request_id = checks.identifier(request.request_id, "request_id")
            if await made(current_principal.get(), request_id) is None:
                _refuse()
            return await behaviour(request, context)

        async def refused(_request: Any, _context: Context) -> Any:
            _refuse()

        return {_CREATE: only_repeated, _PREPARE: refused}.get(method, behaviour)

    return Around(around)


def _refuse() -> NoReturn:
    message = "the sessions of this fleet are made at its front, not at a node; connect to the front"
    raise PreconditionFailed(Reason.NODE_ELSEWHERE, message)
