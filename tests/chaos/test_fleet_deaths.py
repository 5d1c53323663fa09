"""Nodes of a fleet that are killed, stopped or cut off: their sessions are lost within seconds, once and for all, and
no other session notices.

Three nodes suffer at a time, each with a session in which an execution runs, and are back for the next round. A hundred
of each kind are tried by `make test-all`, and three by `make test`.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_client import ExecutionResult, ExecutorClient, Outcome, Session, VariablesState
from tests.chaos.observe import Sandbox, executing, only_sandbox
from tests.chaos.witness import Witness
from tests.support.backends import require
from tests.support.machines import Fleet, NodeMachine, fleet
from tests.support.polling import eventually
from tests.support.rounds import ALL, rounds

VICTIMS = ("n1", "n-2", "3")
SURVIVOR = "quiet-one"
PARTS = range(rounds(7, 1))
ROUNDS = rounds(5, 1)
"""Rounds of a part; together with the three victims of each round they make a hundred tries."""
# A loaded machine may take its time in `make test`; `make test-all` proves what is promised.
LOST_WITHIN_S = 5.0 if ALL else 30.0
LEASE_S = 3.0
WAIT_S = 60.0
RUNNING = "print(call(), flush=True)\nimport time\nwhile True: time.sleep(0.05)"


@dataclass(frozen=True)
class Harm:
    """An accident of a node, and its end."""

    name: str
    do: Callable[[NodeMachine], None]
    undo: Callable[[NodeMachine], None]


HARMS = (
    Harm("killed", NodeMachine.kill, NodeMachine.start),
    Harm("stopped", lambda node: node.send(signal.SIGSTOP), lambda node: node.send(signal.SIGCONT)),
    Harm("cut off", NodeMachine.unplug, NodeMachine.plug_in),
)


@pytest.fixture
def machines() -> Iterator[Fleet]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with fleet(directory, *VICTIMS, SURVIVOR) as made:
        yield made
    shutil.rmtree(directory)


@pytest.fixture
def client(machines: Fleet) -> Iterator[ExecutorClient]:
    with machines.client() as made:
        yield made


@dataclass
class Suffering:
    """A session on a node that is about to suffer, and what a witness sees of it."""

    node: NodeMachine
    session: Session
    result: Future[ExecutionResult]
    sandbox: Sandbox
    from_front: Witness
    hurt_at_s: float = 0.0

    @property
    def id(self) -> str:
        return self.session.session_id


def session_on(client: ExecutorClient, node: str) -> Session:
    return client.create_session(node_labels={"name": node}, authorized_imports=["time"])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("harm", HARMS[:2], ids=lambda harm: harm.name)
def test_sessions_of_a_node_in_trouble_are_lost_within_seconds_and_stay_lost(
    machines: Fleet, client: ExecutorClient, harm: Harm, part: int
) -> None:
    with session_on(client, SURVIVOR) as survivor, executing(survivor, "print(1, flush=True)\nn = 0") as first:
        first.result()
        for number in range(ROUNDS):
            one_round(machines, client, harm)
            assert survivor.execute("n += 1\nn").output == number + 1
            assert survivor.refresh().generation == 1


def test_a_session_is_lost_whose_node_is_back_at_once_with_an_empty_disk(
    machines: Fleet, client: ExecutorClient
) -> None:
    node = machines.nodes[VICTIMS[0]]
    session = session_on(client, node.name)
    assert session.execute("1 + 1").output == 2
    node.kill()
    for path in node.state_dir.iterdir():
        if path.name != "sandboxes":  # by which the next daemon finds what it must remove
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    node.start()
    result = session.execute("1 + 1")
    assert (result.outcome, result.state) == (Outcome.LOST, VariablesState.LOST), result


# After the lease: a node that lives ends its sandboxes then, and those of a dead or stopped daemon end themselves.
FENCE_S = 10.0
RUNS_ON_S = {"killed": 2 * FENCE_S, "stopped": 2 * FENCE_S, "cut off": FENCE_S}
SLACK_S = 5.0 if ALL else 30.0


def test_code_of_a_lost_session_runs_on_no_longer_than_it_says_in_the_documentation(
    machines: Fleet, client: ExecutorClient
) -> None:
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        suffering = {
            harm: begin(machines, client, machines.nodes[name], calls, stack)
            for harm, name in zip(HARMS, VICTIMS, strict=True)
        }
        for harm, each in suffering.items():
            each.hurt_at_s = time.monotonic()
            harm.do(each.node)
        try:
            for harm, each in suffering.items():
                most_s = LEASE_S + RUNS_ON_S[harm.name] + SLACK_S
                left_s = each.hurt_at_s + most_s - time.monotonic()
                assert eventually(each.sandbox.is_gone, timeout_s=left_s), f"{harm.name}: longer than {most_s} s"
        finally:
            for harm, each in suffering.items():
                harm.undo(each.node)
        machines.wait_serving(*VICTIMS)


def one_round(machines: Fleet, client: ExecutorClient, harm: Harm) -> None:
    calls: Counter[str] = Counter()
    epochs = {each.node: each.epoch for each in machines.seen()}
    with ExitStack() as stack:
        sufferings = [begin(machines, client, machines.nodes[name], calls, stack) for name in VICTIMS]
        for each in sufferings:
            each.hurt_at_s = time.monotonic()
            harm.do(each.node)
        for each in sufferings:
            check_lost(each)
        for each in sufferings:
            harm.undo(each.node)
        for each in sufferings:
            back(machines, each, epochs[each.node.name])
    assert calls == Counter({each.id: 1 for each in sufferings})


def begin(
    machines: Fleet, client: ExecutorClient, node: NodeMachine, calls: Counter[str], stack: ExitStack
) -> Suffering:
    """A session on this node, in which an execution has called a tool of the host, and goes on."""
    session = session_on(client, node.name)
    assert session.session_id.startswith(f"{node.name}-")

    def call() -> str:
        calls[session.session_id] += 1
        return "called"

    session.register_tools({"call": call})
    result = stack.enter_context(executing(session, RUNNING))
    return Suffering(
        node,
        session,
        result,
        only_sandbox(node),
        stack.enter_context(Witness(machines.front.address, machines.token, session.session_id)),
    )


def check_lost(each: Suffering) -> None:
    assert eventually(lambda: each.from_front.lost_at_s is not None, timeout_s=WAIT_S), each.from_front.answers
    assert each.from_front.lost_at_s is not None
    took_s = each.from_front.lost_at_s - each.hurt_at_s
    assert took_s <= LOST_WITHIN_S, f"lost after {took_s:.2f} s"
    assert each.node.name in each.from_front.lost_reason
    result = each.result.result(timeout=WAIT_S)
    assert (result.outcome, result.state) == (Outcome.LOST, VariablesState.LOST), result


def back(machines: Fleet, each: Suffering, epoch: int) -> None:
    """The node serves again, under the next epoch and without the session, which stays lost."""

    def is_back() -> bool:
        return any(
            (seen.node, seen.epoch, machines.states()[seen.node]) == (each.node.name, epoch + 1, "SERVING")
            for seen in machines.seen()
        )

    assert eventually(is_back, timeout_s=WAIT_S), f"{machines.seen()}\n{machines.logs()}"
    assert eventually(each.sandbox.is_gone)
    assert each.from_front.lost_at_s is not None
    assert each.from_front.served_at_s < each.from_front.lost_at_s, "a session that was lost was served"
    asked = each.from_front.answers["LOST"]
    assert eventually(lambda: each.from_front.answers["LOST"] > asked), each.from_front.answers
