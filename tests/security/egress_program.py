"""A proxy in a process of its own, on uvloop as the daemon's is: `python -m tests.security.egress_program FD FD …`.

Each descriptor is a listener of one session, which may reach `*.allowed.example`, all of it on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_rules import Rules
from executor_server.guest.egress.protocols import Limits
from executor_server.guest.egress.proxy import Proxy

SOON_S = 30


class Silent:
    def opened(self, session_id: str, connection: dict[str, Any]) -> None: ...

    def closed(self, session_id: str, connection: dict[str, Any]) -> None: ...

    async def denied(self, session_id: str, denial: dict[str, Any]) -> None: ...

    async def ask(self, session_id: str, target: Target) -> str:
        raise AssertionError("the rules ask for nothing")

    def misused(self, session_id: str) -> None: ...

    def moved(self, session_id: str, sent_bytes: int, received_bytes: int) -> None: ...


class Loopback:
    async def resolve(self, host: str) -> list[str]:
        return ["127.0.0.1"]

    def why_refused(self, address: str) -> str | None:
        return None


async def _serve(descriptors: list[int], port: int, accepts_per_s: float) -> None:
    limits = Limits(accept_burst=int(accepts_per_s), accepts_per_s=accepts_per_s)
    proxy = Proxy(resolver=Loopback(), classifier=Loopback(), reporter=Silent(), limits=limits)
    rules = Rules.read({"allowed": [f"*.allowed.example:{port}"], "max_new_connections_per_minute": 60})
    for descriptor in descriptors:
        proxy.serve(str(descriptor), socket.socket(fileno=descriptor), rules)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print("ready", flush=True)  # noqa: T201 - what the test waits for
    await stopped.wait()
    await proxy.close()


@contextmanager
def proxy_process(
    sessions: int = 1, port: int = 9, accepts_per_s: float = 20.0
) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Gives the process's id and the address of each session. `port` is the one that they may reach."""
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(sessions)]
    descriptors = [listener.fileno() for listener in listeners]
    command = [sys.executable, "-m", __name__, str(port), str(accepts_per_s), *map(str, descriptors)]
    process = subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        addresses = [listener.getsockname() for listener in listeners]
        for listener in listeners:
            listener.close()
        yield process.pid, addresses
        process.terminate()
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.wait(SOON_S)
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    uvloop.run(_serve([int(argument) for argument in sys.argv[3:]], int(sys.argv[1]), float(sys.argv[2])))
