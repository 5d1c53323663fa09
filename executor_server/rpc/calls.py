"""How many calls a tenant may have open, and make in a second.

Right after authentication, before anything of a request is read, a call above `quotas.calls` is refused at once; one
above `quotas.calls_per_second` waits for its time, as an open call, and is refused when too many wait already or it
would wait too long. So what one tenant sends costs the daemon no more than its quotas say, and of the calls that the
daemon serves at one time others always find some.

A call counts until its task ends: grpc.aio runs the interceptors and the handler of a call in one task, which also ends
when the caller goes away in the middle of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from executor_server.errors import ExecutorError, Reason, ResourceExhausted
from executor_server.quotas import Quotas
from executor_server.rpc.auth import current_principal
from executor_server.rpc.errors import Context, Handler, refuse

# What a tenant did not use of its calls in the last second, it may use at once.
BURST_S = 1.0
# A call waits no longer for its time, and no more of one tenant wait; beyond, it is better off asking again.
MAX_WAIT_S = 5.0
MAX_WAITING_CALLS = 128


@dataclass
class _Pace:
    """Where a tenant is in its calls."""

    next_s: float = 0.0  # when the next call is due, if they came evenly
    waiting: int = 0


class CallLimiter(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Holds tenants to their quotas of calls; `on_refusal` is told the method and the error of what is refused."""

    def __init__(self, quotas: Quotas, on_refusal: Callable[[str, ExecutorError], None]) -> None:
        self._quotas = quotas
        self._on_refusal = on_refusal
        self._paces: dict[str, _Pace] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        principal = current_principal.get(None)
        if principal is not None:
            try:
                await self._admit(principal.tenant)
            except ResourceExhausted as error:
                self._on_refusal(handler_call_details.method, error)
                return _refusing(error)
        return await continuation(handler_call_details)

    async def _admit(self, tenant: str) -> None:
        """Returns when the call may go on. Raises ResourceExhausted."""
        release = self._quotas.reserve_call(tenant)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _task: release())
        rate = self._quotas.calls_per_second(tenant)
        if rate is not None:
            await self._wait_for_time(tenant, rate)

    async def _wait_for_time(self, tenant: str, rate: int) -> None:
        now_s = asyncio.get_running_loop().time()
        pace = self._pace_of(tenant, now_s)
        due_s = max(pace.next_s, now_s - BURST_S)
        wait_s = due_s - now_s
        if wait_s > 0 and (wait_s > MAX_WAIT_S or pace.waiting >= MAX_WAITING_CALLS):
            message = f"quota calls_per_second: {rate}, and {pace.waiting} more wait already"
            raise ResourceExhausted(Reason.QUOTA_EXCEEDED, message, retry_after_s=wait_s)
        pace.next_s = due_s + 1 / rate
        if wait_s > 0:
            pace.waiting += 1
            try:
                await asyncio.sleep(wait_s)
            finally:
                pace.waiting -= 1

    def _pace_of(self, tenant: str, now_s: float) -> _Pace:
        pace = self._paces.get(tenant)
        if pace is None:
            # Those that are as if they had never called.
            for name in [name for name, each in self._paces.items() if each.next_s < now_s - BURST_S]:
                del self._paces[name]
            pace = self._paces[tenant] = _Pace()
        return pace


def _refusing(error: ExecutorError) -> Handler:
    """A stream handler whatever the method is: it answers before it reads anything."""

    async def answer(_requests: Any, context: Context) -> None:
        await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(answer)
