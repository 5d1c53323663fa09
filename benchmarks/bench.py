"""The setup of all measurements: daemons, a client of each, the echo service, and sessions."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from benchmarks.daemon import Daemon, running_daemon
from benchmarks.echo import Echo, running_echo
from benchmarks.figures import WARM_UP_ROUNDS, Measured, in_turns
from benchmarks.references import DOCKER_IMAGE, Unmeasurable, require_docker_image
from benchmarks.web import running_gateway
from executor_client import ExecutorClient, Session
from executor_server.core import SandboxSpec

_POOL_SHAPE_MEMORY_BYTES = 2 << 30
_POLICY = """
default = "open"
[profiles.open.sandbox]
fork_server = "{}"
"""
_FORKS_TIMEOUT_S = 60.0
_FORKS_POLL_S = 0.5
# Subtracted for sessions with half a GiB.
LESS_MEMORY_BYTES = 3 << 29
_ASKED_MEMORY_BYTES = 3 << 29
# Both shapes have a fork server then.
_FORKED_POOL = f"""
[[pool.warm]]
image = "base"
size = 2
[[pool.warm]]
image = "base"
size = 1
memory_bytes = {_POOL_SHAPE_MEMORY_BYTES - LESS_MEMORY_BYTES}
"""
_memory_bytes = itertools.count(_POOL_SHAPE_MEMORY_BYTES - 1, -1)


@dataclass(frozen=True)
class Served:
    """A daemon that runs, and a client of it."""

    daemon: Daemon
    client: ExecutorClient

    def asked_session(self) -> Session:
        """A session of a shape that earlier sessions requested."""
        return self.client.create_session(limits={"memory_bytes": _ASKED_MEMORY_BYTES})

    def cold_session(
        self,
        *authorized_imports: str,
        network: Sequence[str] = (),
        packages: Sequence[str] = (),
        less_memory_bytes: int = 0,
    ) -> Session:
        """A session of a shape that the pool does not hold, so it is made on the spot."""
        session = self.client.create_session(
            authorized_imports=authorized_imports,
            limits={"memory_bytes": next(_memory_bytes) - less_memory_bytes},
            network=network,
            packages=packages,
        )
        assert not session.info.warm
        return session


@dataclass(frozen=True)
class Effort:
    """Factors for the usual number of samples and the usual size of programs, and the number of sessions in a crowd."""

    samples: float = 1.0
    programs: float = 1.0
    sessions: int = 600


class Bench:
    """Starts each daemon and service at its first use; they live as long as the stack."""

    def __init__(self, stack: ExitStack, effort: Effort = Effort()) -> None:
        self._stack = stack
        self.effort = effort

    def rounds(self, usual: int) -> int:
        return max(1, math.ceil(usual * self.effort.samples))

    def in_turns(
        self, usual_rounds: int, *measured: Measured, warm_up: int = WARM_UP_ROUNDS
    ) -> list[tuple[float, ...]]:
        """`figures.in_turns` with fewer rounds. A row taken in many parts needs no warm-up but that of its session."""
        if self.effort.samples < 1:
            warm_up = min(warm_up, 1)
        return in_turns(self.rounds(usual_rounds), *measured, warm_up=warm_up)

    def drop_dead(self) -> None:
        """Forgets daemons that a failure has ended, so that the next row starts them again."""
        for name in ("local", "recording", "forked", "docker"):
            served = self.__dict__.get(name)
            if served is not None and not served.daemon.lives:
                del self.__dict__[name]

    @cached_property
    def local(self) -> Served:
        """The local backend with everything at its defaults, except that bubblewrap makes its sandboxes."""
        return self._local("off")

    @cached_property
    def recording(self) -> Served:
        """As `local`, with a policy that records sessions."""
        return self._local("off", policy="""[profiles.open.record]\nmode = "full"\n""")

    @cached_property
    def forked(self) -> Served:
        """The local backend with its fork server, once that makes sandboxes. Raises Unmeasurable."""
        served = self._local("shared", _FORKED_POOL)
        for less_memory_bytes in (0, LESS_MEMORY_BYTES):
            _await_forks(served, less_memory_bytes)
        return served

    def _local(self, fork_server: str, pool: str = "", policy: str = "") -> Served:
        if "fork_server" not in SandboxSpec.__dataclass_fields__:  # a commit that has no fork server
            if fork_server != "off":
                raise Unmeasurable("there is no fork server")
            return self._stack.enter_context(serving("local"))
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp"))
        file = Path(directory) / "policy.toml"
        file.write_text(_POLICY.format(fork_server) + policy)
        return self._stack.enter_context(serving("local", f"{pool}[policy]\nfile = {json.dumps(str(file))}\n"))

    @cached_property
    def docker(self) -> Served:
        """The Docker backend with everything at its defaults. Raises Unmeasurable."""
        require_docker_image(DOCKER_IMAGE)
        return self._stack.enter_context(serving("docker"))

    @cached_property
    def gateway(self) -> str:
        """The URL of a gateway of `local`, whose token is a key of it."""
        return self._stack.enter_context(running_gateway(self.local.daemon))

    @cached_property
    def echo(self) -> Echo:
        return self._connected(self._echo_addresses[0])

    @cached_property
    def tcp_echo(self) -> Echo:
        return self._connected(self._echo_addresses[1])

    @cached_property
    def _echo_addresses(self) -> tuple[str, str]:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp"))
        return self._stack.enter_context(running_echo(Path(directory)))

    def _connected(self, address: str) -> Echo:
        echo = Echo(address)
        self._stack.callback(echo.close)
        return echo


def _await_forks(served: Served, less_memory_bytes: int) -> None:
    """Waits until bubblewrap no longer makes such sessions: the fork server starts after repeated requests for them."""
    daemon = psutil.Process(served.daemon.pid)
    deadline_s = time.monotonic() + _FORKS_TIMEOUT_S
    while True:
        before = set(daemon.children(recursive=True))
        with served.cold_session(less_memory_bytes=less_memory_bytes) as session:
            session.execute("1+1")
            new = set(daemon.children(recursive=True)) - before
            if not any(_name(process) == "bwrap" for process in new):
                return
        if time.monotonic() > deadline_s:
            raise Unmeasurable(f"the fork server made no sandbox in {_FORKS_TIMEOUT_S:.0f} s")
        time.sleep(_FORKS_POLL_S)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def serving(backend: str, settings: str = "", *, parent: Path = Path("/tmp")) -> Iterator[Served]:
    """A daemon with `settings` (TOML) and a client of it; see `benchmarks.daemon`."""
    with running_daemon(backend, settings, parent=parent) as daemon, daemon.client() as client:
        yield Served(daemon, client)


@contextmanager
def running_bench(effort: Effort = Effort()) -> Iterator[Bench]:
    """A bench; at the end nothing that it started is left."""
    with ExitStack() as stack:
        yield Bench(stack, effort)
