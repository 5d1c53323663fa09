"""A tenant that makes others wait as much as it can: `python -m benchmarks.flood ADDRESS KIND`, token in the
environment.

Each kind is a few loops that call again at once, refused or not, with no regard for retry delays; our own client would
wait. It runs as a process of its own at the lowest priority, since a real one would compute on another machine: only
the work of the daemon and its sandboxes is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import grpc
import uvloop

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc

KINDS = ("creations", "executions", "output", "files", "streams", "calls")
TOKEN_VARIABLE = "FLOOD_TOKEN"
START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0
_NICE = 19
_LOOPS = 16
_STREAMS = 600
_CONNECTIONS = 4
_BURN = "while True: pass"
_PRINT = "line = 'x' * 100\nwhile True: print(line)"
_FILE_BYTES = 64 << 20
_SLEEP = "import time\nwhile True: time.sleep(1)"


class Tenant:
    """Its connections; counts its calls by their results."""

    def __init__(self, stubs: list[Any], token: str) -> None:
        self._stubs = itertools.cycle(stubs)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._numbers = itertools.count()
        self.calls: Counter[str] = Counter()

    def name(self) -> str:
        return f"flood-{os.getpid()}-{next(self._numbers)}"

    def call(self, method: str, request: Any) -> Any:
        return getattr(next(self._stubs), method)(request, metadata=self._metadata)

    async def tried(self, method: str, request: Any) -> Any:
        """The answer, or None."""
        try:
            answer = await self.call(method, request)
        except grpc.aio.AioRpcError as error:
            self.calls[f"{method} {error.code().name}"] += 1
            return None
        self.calls[f"{method} OK"] += 1
        return answer

    async def drained(self, method: str, request: Any) -> None:
        """Reads a stream to its end as fast as it can."""
        try:
            async for _ in self.call(method, request):
                self.calls[f"{method} event"] += 1
        except grpc.aio.AioRpcError as error:
            self.calls[f"{method} {error.code().name}"] += 1

    async def session(self) -> str | None:
        answer = await self.tried("CreateSession", pb.CreateSessionRequest(request_id=self.name()))
        return None if answer is None else answer.session.session_id

    async def execute(self, session_id: str, code: str) -> None:
        request = pb.ExecuteRequest(session_id=session_id, execution_id=self.name(), code=code)
        await self.drained("Execute", request)


async def _create(tenant: Tenant) -> None:
    session_id = await tenant.session()
    if session_id is not None:
        await tenant.tried("DeleteSession", pb.DeleteSessionRequest(session_id=session_id))


def _executing(code: str) -> Callable[[Tenant], Awaitable[None]]:
    async def execute(tenant: Tenant) -> None:
        session_id = await tenant.session()
        while session_id is not None:
            await tenant.execute(session_id, code)

    return execute


async def _get_file(tenant: Tenant) -> None:
    """Reads a file again and again; larger ones would cost no more for each byte."""
    session_id = await tenant.session()
    if session_id is None:
        return
    await tenant.execute(session_id, f"open('file', 'wb').truncate({_FILE_BYTES})")
    while True:
        await tenant.drained("GetFile", pb.GetFileRequest(session_id=session_id, path="file"))


async def _stream(tenant: Tenant) -> None:
    """One execution that does nothing, followed by as many streams as there can be."""
    session_id = await tenant.session()
    if session_id is None:
        return
    execution_id = tenant.name()
    request = pb.ExecuteRequest(session_id=session_id, execution_id=execution_id, code=_SLEEP)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tenant.drained("Execute", request))
        follow = pb.AttachExecutionRequest(session_id=session_id, execution_id=execution_id)
        for _ in range(_STREAMS // _LOOPS):
            tasks.create_task(_for_ever(lambda: tenant.drained("AttachExecution", follow)))


async def _ask(tenant: Tenant) -> None:
    await tenant.tried("GetPolicy", pb.GetPolicyRequest())


_FLOODS: dict[str, Callable[[Tenant], Awaitable[None]]] = {
    "creations": _create,
    "executions": _executing(_BURN),
    "output": _executing(_PRINT),
    "files": _get_file,
    "streams": _stream,
    "calls": _ask,
}


async def _for_ever(act: Callable[[], Awaitable[None]]) -> None:
    while True:
        await act()


async def _flood(address: str, kind: str, token: str) -> None:
    async with AsyncExitStack() as stack:
        stubs = [
            pb_grpc.ExecutorServiceStub(await stack.enter_async_context(_channel(address))) for _ in range(_CONNECTIONS)
        ]
        tenant = Tenant(stubs, token)
        loops = [asyncio.create_task(_for_ever(lambda: _FLOODS[kind](tenant))) for _ in range(_LOOPS)]
        try:
            await asyncio.to_thread(sys.stdin.read)  # until the process that started this closes it
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            await _clean_up(tenant)
            print(dict(tenant.calls), flush=True)


@asynccontextmanager
async def _channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


async def _clean_up(tenant: Tenant) -> None:
    """Ends the sessions, so that the next figure begins as this one did. Calls may be refused for a while."""
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S / 2
    while time.monotonic() < deadline_s:
        listed = await tenant.tried("ListSessions", pb.ListSessionsRequest())
        if listed is not None and not listed.sessions:
            return
        for session in listed.sessions if listed is not None else ():
            await tenant.tried("DeleteSession", pb.DeleteSessionRequest(session_id=session.session_id))
        await asyncio.sleep(0.1)


@contextmanager
def flooding(address: str, token: str, *kinds: str) -> Iterator[None]:
    """Each kind of flood, from a process of its own, while the context is open."""
    processes = []
    try:
        for kind in kinds:
            processes.append(
                subprocess.Popen(
                    ["nice", "-n", str(_NICE), sys.executable, "-m", "benchmarks.flood", address, kind],
                    env={**os.environ, TOKEN_VARIABLE: token},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL if "FLOOD_SHOW" not in os.environ else None,
                )
            )
        yield
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            process.kill()
            process.wait()


if __name__ == "__main__":
    uvloop.run(_flood(sys.argv[1], sys.argv[2], os.environ[TOKEN_VARIABLE]))
