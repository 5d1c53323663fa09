"""No trouble of a fleet brings back a session that was reported lost, or lets anything be made or run twice.

Fronts, nodes and clients live in virtual time; their processes are killed, stopped and continued, disks are full,
machines lose or get back an old state directory, the network loses, delays, repeats and is cut, and clocks run at rates
that differ as much as the margin allows (tests/unit/fleet/membership/simulated_fleet).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.rounds import rounds
from tests.unit.fleet.membership.simulated_fleet.front import Front
from tests.unit.fleet.membership.simulated_fleet.node import Machine
from tests.unit.fleet.membership.simulated_fleet.world import SESSIONS, Network, World

IN_MEMORY = Path("/dev/shm")
TENANTS = ("a", "b")
rates = st.sampled_from([0.9, 0.97, 1.0, 1.03, 1.1])
waits = st.sampled_from([0.02, 0.3, 0.3, 1.0, 2.0, 3.2, 4.5, 15.0])
picks = st.integers(0, 7)


class Fleet(RuleBasedStateMachine):
    """Three to five nodes, a front, sometimes a second one, and clients of two tenants."""

    @initialize(seed=st.integers(0, 2**32), node_rates=st.lists(rates, min_size=3, max_size=5), front_rate=rates)
    def begin(self, seed: int, node_rates: list[float], front_rate: float) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
        self.world = world = World(seed)
        self.nodes = [Machine(world, f"n{index}", rate) for index, rate in enumerate(node_rates)]
        self.front_rate = front_rate
        self.front: Front | None = Front(world, self.directory / "fleet.db", front_rate)
        self.second: Front | None = None
        self.requests: list[tuple[str, str]] = []
        self.calls: dict[tuple[str, str], int] = {}
        self.executions = 0
        world.advance(3)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.recover()
        finally:
            for front in (self.front, self.second):
                if front is not None:
                    front.kill()
            shutil.rmtree(self.directory)

    # -- clients ---------------------------------------------------------------------------------------------------

    @rule(tenant=st.sampled_from(TENANTS), wait_s=waits)
    def create(self, tenant: str, wait_s: float) -> None:
        request = tenant, f"r{len(self.requests)}"
        self.requests.append(request)
        self.call(request)
        self.world.advance(wait_s)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, wait_s=waits)
    def repeat(self, pick: int, wait_s: float) -> None:
        """A client that has no answer asks again."""
        request = self.requests[-1 - pick % len(self.requests)]
        if request not in self.world.handed_out:
            self.call(request)
        self.world.advance(wait_s)

    def call(self, request: tuple[str, str]) -> None:
        number = self.calls[request] = self.calls.get(request, 0) + 1
        front = self.front
        if front is None or front.process.is_stopped:
            return

        def take(session_id: str) -> None:
            if self.calls[request] == number:  # the answer to a call that the client has given up goes nowhere
                self.world.note_answer(*request, session_id)

        front.create(*request, take)

    @precondition(lambda self: self.world.handed_out)
    @rule(pick=picks, again=st.booleans(), wait_s=waits)
    def execute(self, pick: int, again: bool, wait_s: float) -> None:
        """A client begins an execution, or sends one again whose answer it has not got."""
        session_id = self.handed_out(pick)
        if not again:
            self.executions += 1
        [tenant] = [request[0] for request, each in self.world.handed_out.items() if each == session_id]
        if self.front is not None:
            self.front.execute(tenant, session_id, f"e{self.executions}-{session_id}")
        self.world.advance(wait_s)

    @precondition(lambda self: self.world.handed_out)
    @rule(pick=picks)
    def delete(self, pick: int) -> None:
        if self.front is not None:
            self.front.delete(self.handed_out(pick))

    @precondition(lambda self: self.world.handed_out)
    @rule(pick=picks)
    def ask_for(self, pick: int) -> None:
        if self.front is not None:
            self.front.ask_for(self.handed_out(pick))
        self.world.check()

    def handed_out(self, pick: int) -> str:
        found = list(self.world.handed_out.values())
        return found[-1 - pick % len(found)]

    # -- trouble ---------------------------------------------------------------------------------------------------

    @rule(wait_s=waits)
    def wait(self, wait_s: float) -> None:
        self.world.advance(wait_s)

    @rule(
        delay_s=st.sampled_from([0.01, 0.1, 0.6, 2.0]),
        loss=st.sampled_from([0, 0, 0.05, 0.3]),
        repetition=st.sampled_from([0, 0.2]),
    )
    def change_network(self, delay_s: float, loss: float, repetition: float) -> None:
        self.world.network = Network(delay_s, loss, repetition, self.world.network.cut)

    @rule(pick=picks, wait_s=waits)
    def cut_off(self, pick: int, wait_s: float) -> None:
        self.world.network.cut ^= {self.node(pick).name}
        self.world.advance(wait_s)

    @rule(pick=picks, wait_s=waits)
    def kill_daemon(self, pick: int, wait_s: float) -> None:
        self.node(pick).kill()
        self.world.advance(wait_s)

    @rule(pick=picks)
    def start_daemon(self, pick: int) -> None:
        self.node(pick).start()

    @rule(pick=picks, wait_s=waits)
    def stop_or_continue_daemon(self, pick: int, wait_s: float) -> None:
        daemon = self.node(pick).daemon
        if daemon is not None and daemon.process.is_stopped:
            self.world.proceed(daemon.process)
        elif daemon is not None:
            daemon.process.is_stopped = True
        self.world.advance(wait_s)

    @rule(pick=picks, index=picks)
    def restore_state_directory(self, pick: int, index: int) -> None:
        self.node(pick).restore(index)

    @rule(pick=picks)
    def replace_machine(self, pick: int) -> None:
        self.node(pick).replace()

    @rule(pick=picks)
    def break_or_mend_disk_of_node(self, pick: int) -> None:
        node = self.node(pick)
        node.is_disk_broken = not node.is_disk_broken

    @precondition(lambda self: self.front is not None)
    @rule()
    def break_or_mend_disk_of_front(self) -> None:
        assert self.front is not None
        self.front.store.is_broken = not self.front.store.is_broken

    @rule(wait_s=waits)
    def kill_or_start_front(self, wait_s: float) -> None:
        if self.front is not None:
            self.front.kill()
            self.front = None
        else:
            self.start_front()
        self.world.advance(wait_s)

    @precondition(lambda self: self.front is not None)
    @rule(wait_s=waits)
    def stop_or_continue_front(self, wait_s: float) -> None:
        assert self.front is not None
        process = self.front.process
        if process.is_stopped:
            self.world.proceed(process)
        else:
            process.is_stopped = True
        self.world.advance(wait_s)

    @rule(rate=rates, wait_s=waits)
    def start_or_end_second_front(self, rate: float, wait_s: float) -> None:
        """Another front, with a state directory of its own, looks for the same nodes."""
        if self.second is None:
            self.second = Front(self.world, self.directory / "second.db", rate)
        else:
            self.second.kill()
            self.second = None
        self.world.advance(wait_s)

    def start_front(self) -> None:
        self.world.front_began_s = self.world.now_s
        self.front = Front(self.world, self.directory / "fleet.db", self.front_rate)

    def node(self, pick: int) -> Machine:
        return self.nodes[pick % len(self.nodes)]

    # -- the end ---------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """When all trouble is over, all nodes serve again, counts are right, and nothing is left over."""
        world = self.world
        if self.second is not None:
            self.second.kill()
            self.second = None
        world.network = Network()
        for node in self.nodes:
            node.is_disk_broken = False
            node.start()
            if node.daemon is not None and node.daemon.process.is_stopped:
                world.proceed(node.daemon.process)
        if self.front is None:
            self.start_front()
        assert self.front is not None
        self.front.store.is_broken = False
        if self.front.process.is_stopped:
            world.proceed(self.front.process)
        world.advance(45)
        served = {node.name: node.served_epoch() for node in self.nodes}
        assert all(served.values()), f"nodes that do not serve: {served}"
        for tenant in TENANTS:
            live = world.live(tenant)
            assert self.front.members.sessions.count(tenant) == len(live), "a count is wrong"
            assert len({each.request_id for each in live}) == len(live), "a request has two sessions"
            assert len(live) <= SESSIONS or not world.is_exact


@pytest.mark.parametrize("part", range(rounds(40, 1)))
def test_no_trouble_lets_two_nodes_serve_a_session_or_a_lost_one_come_back(part: int) -> None:
    limits = settings(
        max_examples=rounds(250, 25),
        stateful_step_count=30,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(Fleet, settings=limits)


def test_a_creation_that_a_node_has_refused_does_not_come_to_it_again() -> None:
    """A node refused a creation for want of a lease, and made it when a copy of the call came: a fifth session of b.

    The real front calls over gRPC, which delivers a call once; and it withdraws one that may still be on its way.
    """
    fleet = Fleet()
    try:
        fleet.begin(seed=934, node_rates=[0.97, 1.0, 0.97, 1.1], front_rate=0.97)
        fleet.stop_or_continue_daemon(pick=0, wait_s=0.02)
        fleet.replace_machine(pick=1)
        fleet.replace_machine(pick=3)
        fleet.change_network(delay_s=0.6, loss=0, repetition=0)
        fleet.kill_daemon(pick=1, wait_s=0.3)
        fleet.replace_machine(pick=2)
        fleet.create(tenant="a", wait_s=15.0)
        fleet.stop_or_continue_daemon(pick=2, wait_s=0.02)
        fleet.change_network(delay_s=2.0, loss=0, repetition=0)
        fleet.kill_daemon(pick=1, wait_s=4.5)
        fleet.replace_machine(pick=0)
        fleet.stop_or_continue_daemon(pick=2, wait_s=0.02)
        fleet.replace_machine(pick=1)
        fleet.stop_or_continue_daemon(pick=1, wait_s=0.02)
        fleet.create(tenant="b", wait_s=3.2)
        fleet.replace_machine(pick=3)
        fleet.create(tenant="a", wait_s=0.02)
        fleet.change_network(delay_s=0.6, loss=0, repetition=0.2)
        for tenant, wait_s in (("b", 0.02), ("b", 0.3), ("b", 0.02), ("a", 4.5)):
            fleet.create(tenant=tenant, wait_s=wait_s)
    finally:
        fleet.teardown()
