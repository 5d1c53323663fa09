"""Nodes on a real network, each in a namespace of its own, whose cable is cut: what the relays of test_fleet_deaths.py
imitate. TCP itself finds out here, or does not.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor_client import ExecutorClient, Outcome, Session, VariablesState
from tests.chaos.observe import executing, only_sandbox
from tests.chaos.witness import Witness
from tests.support.backends import require
from tests.support.machine_network import network
from tests.support.machines import Fleet, fleet
from tests.support.polling import eventually
from tests.support.rounds import ALL, rounds

VICTIM, SURVIVOR = "n1", "n2"
# A loaded machine may take its time in `make test`; `make test-all` proves what is promised.
LOST_WITHIN_S = 5.0 if ALL else 30.0
WAIT_S = 60.0
RUNNING = "print(call(), flush=True)\nimport time\nwhile True: time.sleep(0.05)"


@pytest.fixture
def machines() -> Iterator[Fleet]:
    """The front alone is on the network of the nodes."""
    require("local")
    with ExitStack() as stack:
        made = stack.enter_context(network())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="d-", ignore_cleanup_errors=True)))
        yield stack.enter_context(fleet(directory, VICTIM, SURVIVOR, network=made))


def session_on(client: ExecutorClient, node: str) -> Session:
    return client.create_session(node_labels={"name": node}, authorized_imports=["time"])


def test_sessions_of_a_node_whose_cable_is_cut_are_lost_within_seconds_and_stay_lost(machines: Fleet) -> None:
    with machines.client() as client, session_on(client, SURVIVOR) as survivor:
        survivor.execute("n = 0")
        for number in range(rounds(10, 1)):
            one_cut(machines, client)
            assert survivor.execute("n += 1\nn").output == number + 1
            assert survivor.refresh().generation == 1


def one_cut(machines: Fleet, client: ExecutorClient) -> None:
    node = machines.nodes[VICTIM]
    [epoch] = [each.epoch for each in machines.seen() if each.node == VICTIM]
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        session = session_on(client, VICTIM)
        session.register_tools({"call": lambda: calls.update(["call"])})
        result = stack.enter_context(executing(session, RUNNING))
        sandbox = only_sandbox(node)
        from_front = stack.enter_context(Witness(machines.front.address, machines.token, session.session_id))
        assert eventually(lambda: from_front.served_at_s > 0), from_front.answers
        cut_at_s = time.monotonic()
        node.unplug()
        assert eventually(lambda: from_front.lost_at_s is not None, timeout_s=WAIT_S), from_front.answers
        assert from_front.lost_at_s is not None
        assert from_front.lost_at_s - cut_at_s <= LOST_WITHIN_S
        ended = result.result(timeout=WAIT_S)
        assert (ended.outcome, ended.state) == (Outcome.LOST, VariablesState.LOST), ended
        with client.create_session() as other:
            assert other.info.node == SURVIVOR
        node.plug_in()
        back = (VICTIM, epoch + 1)
        assert eventually(lambda: back in {(each.node, each.epoch) for each in machines.seen()}, timeout_s=WAIT_S), (
            f"{machines.seen()}\n{machines.logs()}"
        )
        machines.wait_serving(VICTIM)
        assert eventually(sandbox.is_gone)
        assert from_front.served_at_s < from_front.lost_at_s, "a session that was lost was served"
    assert calls == Counter(call=1)


def test_a_cut_that_is_shorter_than_a_lease_loses_nothing(machines: Fleet) -> None:
    """Nor is the front's next connection held up by the one on which packets were lost."""
    node = machines.nodes[VICTIM]
    with machines.client(reconnect_timeout_s=WAIT_S) as client, session_on(client, VICTIM) as session:
        session.execute("n = 41")
        for _ in range(rounds(5, 1)):
            node.unplug()
            assert not eventually(lambda: machines.states().get(VICTIM) == "LOST", timeout_s=1.0)
            node.plug_in()
            assert session.execute("n + 1").output == 42
            assert session.refresh().generation == 1
        machines.wait_serving(VICTIM, SURVIVOR)
