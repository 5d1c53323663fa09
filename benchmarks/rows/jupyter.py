"""smolagents' own DockerExecutor, a Jupyter server in a container, compared with sessions of the Docker backend.

Its image is made by hand (benchmarks/reference/), since the one that it builds for itself needs a registry. So it
installs nothing.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from subprocess import CalledProcessError

import docker
import psutil
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import DockerExecutor

from benchmarks.bench import Bench
from benchmarks.figures import AtMost, Figure, Reference, timed
from benchmarks.references import Unmeasurable, require_docker_image, run
from benchmarks.rows.memory import MIB, pss_bytes
from benchmarks.rows.sessions import created

_IMAGE = "remote-executor-bench/jupyter"
_COLD_ROUNDS = 3
_EXECUTIONS = 30
_CLIENTS = 4
_LIVES_PER_CLIENT = 2
_BATCHES = 2
_SESSIONS = 4
_MEMORY_ROUNDS = 2
_NAMED_S = 5.0


def docker_executor(bench: Bench) -> Iterator[Figure]:
    """Made and used once, `1+1`, and whole lives per second; each compared with ours."""
    _require()
    name = "smolagents' DockerExecutor"

    with _network() as network:

        def cold() -> float:
            start = time.perf_counter()
            with _executor(network) as executor:
                _add(executor)
                return (time.perf_counter() - start) * 1000

        cold_ms, ours_cold_ms = bench.in_turns(
            _COLD_ROUNDS, cold, lambda: created(bench.docker.cold_session, use=True)[0], warm_up=1
        )
        yield Figure(f"{name}: cold + first execute", "ms", cold_ms, Reference("docker session", ours_cold_ms))

        with _executor(network) as executor, bench.docker.cold_session() as session:
            execute_ms, ours_execute_ms = bench.in_turns(
                _EXECUTIONS, lambda: timed(lambda: _add(executor)), lambda: timed(lambda: session.execute("1+1"))
            )
        yield Figure(f"{name}: 1+1", "ms", execute_ms, Reference("docker session", ours_execute_ms))

        def live() -> None:
            with _executor(network) as executor:
                _add(executor)

        def our_life() -> None:
            with bench.docker.client.create_session() as session:
                session.execute("1+1")

        with ThreadPoolExecutor(_CLIENTS) as clients:
            rate, our_rate = bench.in_turns(
                _BATCHES, lambda: _rate(clients, live), lambda: _rate(clients, our_life), warm_up=0
            )
        yield Figure(f"{name}: lives, {_CLIENTS} clients", "1/s", rate, Reference("docker session", our_rate))


def memory(bench: Bench) -> Iterator[Figure]:
    """The memory of a waiting session: its processes, the Engine's for it, and the growth of the daemon.

    As PSS, of one of several sessions, so that shared files and forked memory count once.
    """
    _require()
    daemon = psutil.Process(bench.docker.daemon.pid)

    def ours() -> float:
        with ExitStack() as stack:
            before_bytes = pss_bytes([daemon])
            sessions = [stack.enter_context(bench.docker.cold_session()) for _ in range(_SESSIONS)]
            for session in sessions:
                assert session.execute("1+1").output == 2
            processes = {daemon}.union(*(_processes_of(f"executor-{session.session_id}") for session in sessions))
            return (pss_bytes(processes) - before_bytes) / _SESSIONS / MIB

    with _network() as network:

        def theirs() -> float:
            with ExitStack() as stack:
                executors = [stack.enter_context(_executor(network)) for _ in range(_SESSIONS)]
                for executor in executors:
                    _add(executor)
                processes = set().union(
                    *(_processes_of(executor.container.id) | _forwards(executor) for executor in executors)
                )
                return pss_bytes(processes) / _SESSIONS / MIB

        ours_mib, theirs_mib = bench.in_turns(_MEMORY_ROUNDS, ours, theirs, warm_up=0)
    reference = Reference("smolagents' DockerExecutor", theirs_mib)
    yield Figure(f"docker, idle session, one of {_SESSIONS}", "MiB", ours_mib, reference, AtMost(25))


def _require() -> None:
    require_docker_image(_IMAGE)
    if importlib.util.find_spec("websocket") is None:
        raise Unmeasurable("smolagents' DockerExecutor needs the package websocket-client")


def _add(executor: DockerExecutor) -> None:
    assert executor.run_code_raise_errors("1+1").output == "2"


def _rate(clients: ThreadPoolExecutor, life: Callable[[], None]) -> float:
    """Lives a second."""
    count = _CLIENTS * _LIVES_PER_CLIENT
    start = time.perf_counter()
    for life_ended in [clients.submit(life) for _ in range(count)]:
        life_ended.result()
    return count / (time.perf_counter() - start)


@contextmanager
def _network() -> Iterator[str]:
    """A network of the Engine's: its executor is reached over a port, and an Engine may have no default network."""
    client = docker.from_env()
    name = f"bench-{secrets.token_hex(4)}"
    network = client.networks.create(name)
    try:
        yield name
    finally:
        network.remove()
        client.close()


@contextmanager
def _executor(network: str) -> Iterator[DockerExecutor]:
    executor = DockerExecutor(
        [],
        AgentLogger(level=LogLevel.OFF),
        port=_free_port(),
        image_name=_IMAGE,
        build_new_image=False,
        container_run_kwargs={"network": network},
    )
    try:
        yield executor
    finally:
        executor.cleanup()
        executor.client.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _processes_of(container: str) -> set[psutil.Process]:
    """All in a container, and the Engine's process above them."""
    deadline_s = time.monotonic() + _NAMED_S
    while True:
        try:
            first = psutil.Process(int(run(["docker", "inspect", "--format", "{{.State.Pid}}", container])))
            break
        except CalledProcessError:  # a container gets its session's name a moment after the session has got it
            if time.monotonic() > deadline_s:
                raise
    shim = first.parent()
    assert shim is not None
    return {first, shim, *first.children(recursive=True)}


def _forwards(executor: DockerExecutor) -> set[psutil.Process]:
    """The processes that the Engine runs for its port."""
    return {
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "docker-proxy" and str(executor.port) in process.info["cmdline"]
    }
