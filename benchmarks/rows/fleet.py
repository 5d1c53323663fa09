"""A fleet on one machine: what its front costs more than a daemon alone, and how fast it notices a lost node."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.bench import Bench, serving
from benchmarks.figures import AtMost, AtMostMore, Figure, Reference, in_turns, timed
from benchmarks.references import Unmeasurable
from benchmarks.rows.sessions import warm_session
from executor_client import ExecutorClient, ExecutorClientError, Session
from executor_server.core.config import read_token
from executor_server.fleet.ray.layout import FleetFiles
from executor_server.fleet.ray.local_cluster import read_cluster
from tests.chaos.witness import Witness
from tests.support.machines import QUIET, Fleet, NodeMachine, fleet, new_id
from tests.support.polling import eventually

_ROUNDS = 100
_EXECUTIONS = 200
_DEATHS = 10
_DEATHS_ON_RAY = 5
_REFILL_S = 0.15
_OUTPUTS = 60
_OUTPUT_BYTES = 10_000_000
_WAIT_S = 60.0
_POOL = "[pool]\nsize = 2\n"
_NO_POOL = QUIET


@contextmanager
def _of_one_node(**options: object) -> Iterator[tuple[Fleet, ExecutorClient]]:
    """A front with one node, whose settings are those of the daemon that it is compared with."""
    with (
        TemporaryDirectory(prefix="bench-", dir="/tmp") as directory,
        fleet(Path(directory), "n1", has_cables=False, **options) as made,
        made.client() as client,
    ):
        yield made, client


def creation(bench: Bench) -> Iterator[Figure]:
    """`create_session()` through a front, compared with a daemon alone; both have a pool."""
    with serving("local", _POOL) as alone, _of_one_node(node_config=_POOL) as (_, client):
        ours, reference = in_turns(
            _ROUNDS, lambda: warm_session(client, _REFILL_S), lambda: warm_session(alone.client, _REFILL_S)
        )
        yield Figure("create through a front", "ms", ours, Reference("a daemon alone", reference), AtMostMore(5))
        yield Figure(
            "create through a front", "ms", ours, Reference("a daemon alone", reference), AtMostMore(10), by_p99=True
        )


def execution(bench: Bench) -> Iterator[Figure]:
    """`execute("1+1")` and a large output, in a session of a fleet and in one of a daemon alone."""
    with ExitStack() as stack:
        alone = stack.enter_context(serving("local", _NO_POOL))
        _, passed_on = stack.enter_context(_of_one_node())
        direct = stack.enter_context(alone.daemon.client(alone.daemon.tcp_address))
        sessions = [each.create_session(authorized_imports=["numpy"]) for each in (passed_on, direct)]
        one = partial(_execute, code="1+1")
        passed_on_ms, direct_ms = in_turns(_EXECUTIONS, *(partial(one, each) for each in sessions))
        reference = Reference("a daemon alone", direct_ms)
        yield Figure("execute 1+1, through the front", "ms", passed_on_ms, reference)
        large = partial(_execute, code=f"b'x' * {_OUTPUT_BYTES}")
        passed_on_ms, direct_ms = in_turns(_OUTPUTS, *(partial(large, each) for each in sessions))
        reference = Reference("a daemon alone", direct_ms)
        yield Figure("10 MB as an output, through the front", "ms", passed_on_ms, reference, by_best=True)


def _execute(session: Session, code: str) -> float:
    return timed(lambda: session.execute(code))


def deaths(bench: Bench) -> Iterator[Figure]:
    """From the signal until the front answers that a session of the node is lost; the other node serves meanwhile."""
    with (
        TemporaryDirectory(prefix="bench-", dir="/tmp") as directory,
        fleet(Path(directory), "n1", "n2", has_cables=False) as machines,
        machines.client() as client,
    ):
        other = client.create_session(node_labels={"name": "n2"})
        killed_s = _losses(machines, _kill, NodeMachine.start)
        yield Figure("lost after SIGKILL", "s", killed_s, aim=AtMost(5), by_p99=True)
        stopped_s = _losses(machines, _stop, _go_on)
        yield Figure("lost after SIGSTOP", "s", stopped_s, aim=AtMost(5), by_p99=True)
        assert other.refresh().generation == 1


def _losses(
    machines: Fleet, harm: Callable[[NodeMachine], None], undo: Callable[[NodeMachine], None]
) -> tuple[float, ...]:
    return tuple(_loss_s(machines, harm, undo) for _ in range(_DEATHS))


def _loss_s(machines: Fleet, harm: Callable[[NodeMachine], None], undo: Callable[[NodeMachine], None]) -> float:
    node = machines.nodes["n1"]
    machines.wait_serving("n1")
    session = machines.create(new_id(), "n1")
    assert session is not None
    with Witness(machines.front.address, machines.token, session.session_id) as witness:
        harmed_s = time.monotonic()
        harm(node)
        assert eventually(lambda: witness.lost_at_s is not None, timeout_s=_WAIT_S)
    undo(node)
    machines.wait_serving("n1")
    assert witness.lost_at_s is not None
    return witness.lost_at_s - harmed_s


def _kill(node: NodeMachine) -> None:
    node.kill()


def _stop(node: NodeMachine) -> None:
    node.send(signal.SIGSTOP)


def _go_on(node: NodeMachine) -> None:
    node.send(signal.SIGCONT)


def fronts(bench: Bench) -> Iterator[Figure]:
    """From the front's SIGKILL, with the next front started at once, until that has made a session."""
    with _of_one_node() as (machines, _):
        yield Figure(
            "session after the front's SIGKILL",
            "s",
            tuple(_next_front_s(machines) for _ in range(_DEATHS)),
            aim=AtMost(3),
            by_p99=True,
        )


def _next_front_s(machines: Fleet) -> float:
    machines.wait_serving("n1")
    began_s = time.monotonic()
    machines.front.kill()
    machines.front.start()
    made = eventually(lambda: machines.create(new_id()), timeout_s=_WAIT_S)
    took_s = time.monotonic() - began_s
    assert made is not None
    with machines.client() as client:
        client.get_session(made.session_id).close()
    return took_s


def fronts_on_ray(bench: Bench) -> Iterator[Figure]:
    """From the front's SIGKILL until Ray's actor has started the next one and that has made a session.

    An earlier session must be untouched. In the second row the actor is killed at the same moment.
    """
    if find_spec("ray") is None:
        raise Unmeasurable("Ray is not installed: make demo-fleet does it")
    with _on_ray() as files:
        state_dir = files.front.daemon.state_dir
        with ExecutorClient(f"unix:{state_dir / 'executor.sock'}", token=read_token(state_dir / "token")) as client:
            survivor = client.create_session()
            for name, kill in (("front", _kill_front), ("front and its actor", _kill_front_and_actor)):
                took_s = tuple(_next_session_s(client, partial(kill, files)) for _ in range(_DEATHS_ON_RAY))
                yield Figure(f"session after SIGKILL of the {name}, on Ray", "s", took_s)
            assert survivor.refresh().generation == 1


@contextmanager
def _on_ray() -> Iterator[FleetFiles]:
    """A fleet of one node on a Ray of its own."""
    with TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        command = (sys.executable, "-m", "executor_server", "ray")
        state_dir = ("--state-dir", directory)
        try:
            subprocess.run((*command, "up", "--nodes=1", *state_dir), check=True, capture_output=True)
            yield FleetFiles(Path(directory))
        finally:
            subprocess.run((*command, "down", *state_dir), check=True, capture_output=True)


def _kill_front(files: FleetFiles) -> None:
    front = files.front.daemon.identity()
    assert front is not None
    front.send(signal.SIGKILL)


def _kill_front_and_actor(files: FleetFiles) -> None:
    cluster = read_cluster(files.cluster)
    assert cluster is not None
    # Ray names the process of an actor by its class.
    processes = [psutil.Process(each.pid) for each in cluster.processes()]
    (actor,) = (each for each in processes if " ".join(each.cmdline()).startswith("ray::FrontActor"))
    actor.kill()
    _kill_front(files)


def _next_session_s(client: ExecutorClient, kill: Callable[[], None]) -> float:
    began_s = time.monotonic()
    kill()
    made = eventually(lambda: _created(client), timeout_s=_WAIT_S)
    took_s = time.monotonic() - began_s
    assert made is not None
    made.close()
    return took_s


def _created(client: ExecutorClient) -> Session | None:
    try:
        return client.create_session()
    except ExecutorClientError:
        return None
