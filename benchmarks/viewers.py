"""Viewers of a session, in a process of their own, as a console follows it: `FollowSession`, contents included.

The process has the lowest priority. It stands for consoles on other machines, so it must not compete with the daemon
and its caller for the processors of this one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import uvloop

from benchmarks.daemon import Daemon
from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc

_STOP_TIMEOUT_S = 10.0


@contextmanager
def watching(daemon: Daemon, session_id: str, count: int) -> Iterator[None]:
    """Runs `count` viewers for the block. They have received all that the session had, and get everything new.

    The process also runs with no viewers.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.viewers", daemon.unix_address, session_id, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{daemon.token}\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise RuntimeError("the viewers did not start")
        yield
    finally:
        process.stdin.close()  # they watch until then
        process.stdout.close()
        process.wait(_STOP_TIMEOUT_S)


# ---------------------------------------------------------------------------------------------------------------------
# The viewers' process


async def _watch_all(address: str, session_id: str, count: int) -> None:
    os.nice(19)
    token = sys.stdin.readline().strip()
    async with grpc.aio.insecure_channel(address) as channel:
        ready = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(_watch(channel, token, session_id, each)) for each in ready]
        await asyncio.gather(*(each.wait() for each in ready))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(channel: grpc.aio.Channel, token: str, session_id: str, ready: asyncio.Event) -> None:
    call = pb_grpc.AdminServiceStub(channel).FollowSession(
        pb.FollowSessionRequest(session_id=session_id), metadata=(("authorization", f"Bearer {token}"),)
    )
    async for message in call:
        if message.complete:
            ready.set()


if __name__ == "__main__":
    uvloop.run(_watch_all(sys.argv[1], sys.argv[2], int(sys.argv[3])))
