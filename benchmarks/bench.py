"""What all measurements share: the daemon, a client, the echo service, and how to get a session."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.daemon import Daemon, running_daemon
from benchmarks.echo import Echo, running_echo
from executor_client import ExecutorClient, Session

_POOL_SHAPE_MEMORY_BYTES = 2 << 30
_memory_bytes = itertools.count(_POOL_SHAPE_MEMORY_BYTES - 1, -1)


@dataclass(frozen=True)
class Bench:
    daemon: Daemon
    client: ExecutorClient
    echo: Echo
    tcp_echo: Echo

    def cold_session(self, *authorized_imports: str) -> Session:
        """A session of a shape that the pool does not hold, so it is made on the spot."""
        session = self.client.create_session(
            authorized_imports=authorized_imports, limits={"memory_bytes": next(_memory_bytes)}
        )
        assert not session.info.warm
        return session


@contextmanager
def running_bench() -> Iterator[Bench]:
    """Starts all of it; nothing is left at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory,
        running_daemon() as daemon,
        daemon.client() as client,
        running_echo(Path(directory)) as (unix_address, tcp_address),
    ):
        echo, tcp_echo = Echo(unix_address), Echo(tcp_address)
        try:
            yield Bench(daemon, client, echo, tcp_echo)
        finally:
            echo.close()
            tcp_echo.close()
