"""Fleets in simulation: the front's own classes in real time, nodes that only report and make sandboxes.

A simulated node makes `AT_ONCE` sandboxes at a time, each in about `CREATION_S`. The front's work is not simulated: it
is done, and the processor time that it takes is added to the virtual time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from executor_server.fleet.membership import NodeBackend, NodeHello, NodeReport, NodeSession, TenantUse, WarmKind
from executor_server.fleet.membership.ids import new_session_id
from executor_server.fleet.membership.members import Link, Members
from executor_server.fleet.membership.placement import Placement, Wanted
from executor_server.fleet.membership.reservations import Reservations
from executor_server.fleet.membership.session_index import Creation
from executor_server.fleet.membership.store import FleetStore
from executor_server.fleet.membership.timing import Timing
from executor_server.fleet.membership.usage import FleetUsage
from executor_server.policy import QuotasTable

AT_ONCE = 4
CREATION_S = 0.1
MAX_SESSIONS = 256
TENANTS = 50
_QUOTAS = QuotasTable(executions=64, cpu_time_s_per_hour=36_000)
_WANTED = Wanted(("local",), "base", kind=WarmKind("local", "base"))
Event = Callable[[], None]
_BACKENDS = (NodeBackend("local", images=("base", "data")),)


class SimulatedFleet:
    """A front and its nodes at a virtual time."""

    def __init__(self, directory: Path, nodes: int, seed: int = 1) -> None:
        self.now_s = 0.0
        self.draws = random.Random(seed)
        self.store = FleetStore(directory / "fleet.db")
        self.members = Members(self.store, Timing(), self.now_s, time.time())
        self.creations = Reservations(self.members, lambda tenant: _QUOTAS)
        self.placement = Placement(self.members, self.draws)
        self.usage = FleetUsage(lambda tenant: _QUOTAS)
        self.names = [f"n{number}" for number in range(nodes)]
        self.links: dict[str, Link] = {}
        self.sequences = dict.fromkeys(self.names, 0)
        self.numbers = itertools.count()
        self.made = 0

    def link_all(self, sessions: int) -> None:
        """Links each node, which reports this number of sessions."""
        for name in self.names:
            self.links[name] = self.members.linked(NodeHello(name, 1, name), self.now_s)
            opened = tuple(
                NodeSession(new_session_id(name, 1), self.tenant(), f"request-{next(self.numbers):032x}")
                for _ in range(sessions)
            )
            self.report(name, opened=opened, full=True)

    def tenant(self) -> str:
        return f"tenant-{self.draws.randrange(TENANTS)}"

    def report(
        self, name: str, opened: tuple[NodeSession, ...] = (), closed: tuple[str, ...] = (), *, full: bool = False
    ) -> None:
        """Takes a node's report and answers it."""
        self.sequences[name] += 1
        tenants = {f"tenant-{number}": TenantUse(1, 1.0) for number in range(10)}
        report = NodeReport(
            self.sequences[name],
            1,
            MAX_SESSIONS,
            load=self.draws.random(),
            backends=_BACKENDS,
            warm={WarmKind("local", "base"): self.draws.randrange(4)},
            full=full,
            opened=opened,
            closed=closed,
            tenants=tenants,
        )
        assert self.members.reported(self.links[name], report, self.now_s)
        self.usage.reported(name, report.tenants)

    def answer_report(self, name: str) -> float:
        """Takes a node's report and answers it; returns the seconds of processor time that this took."""
        begin_s = time.thread_time()
        self.report(name)
        return time.thread_time() - begin_s

    def place(self) -> float:
        """Places a session and takes the answer; returns the seconds of processor time that this took."""
        begin_s = time.thread_time()
        creation = self.creations.begin(self.tenant(), f"r{next(self.numbers)}", self.now_s)
        member = self.placement.choose(_WANTED)
        assert member is not None
        self.creations.place(creation, member.name)
        assert self.creations.answered(creation, new_session_id(member.name, 1), self.now_s)
        return time.thread_time() - begin_s

    def creations_per_s(self, seconds: float) -> float:
        """Sessions that clients get in a virtual second, when they ask for twice as many as can be made at once.

        Each session ends when it is there, and its client asks for the next one.
        """
        hands = {name: [0.0] * AT_ONCE for name in self.names}  # when a node can begin its next ones
        closed: dict[str, list[str]] = {name: [] for name in self.names}
        numbers = itertools.count()
        events: list[tuple[float, int, Event]] = []

        def at(at_s: float, event: Event) -> None:
            heapq.heappush(events, (at_s, next(numbers), event))

        def ask() -> None:
            creation = self.creations.begin(self.tenant(), f"r{next(self.numbers)}", self.now_s)
            member = self.placement.choose(_WANTED)
            assert member is not None
            self.creations.place(creation, member.name)
            begin_s = max(self.now_s, heapq.heappop(hands[member.name]))
            end_s = begin_s + CREATION_S * self.draws.uniform(0.8, 1.2)
            heapq.heappush(hands[member.name], end_s)
            at(end_s, partial(answer, creation))

        def answer(creation: Creation) -> None:
            session_id, node = new_session_id(creation.node, 1), creation.node
            assert self.creations.answered(creation, session_id, self.now_s)
            closed[node].append(session_id)
            self.made += 1
            ask()

        def report(name: str) -> None:
            self.report(name, closed=tuple(closed[name]))
            closed[name].clear()
            at(self.now_s + self.members.timing.report_interval_s, partial(report, name))

        for _ in range(2 * AT_ONCE * len(self.names)):
            at(0.0, ask)
        for name in self.names:
            at(self.draws.uniform(0, 0.5), partial(report, name))
        self.made, free_s = 0, 0.0
        while events[0][0] < seconds:
            at_s, _, event = heapq.heappop(events)
            self.now_s = max(at_s, free_s)  # the front does one thing after the other
            begin_s = time.thread_time()
            event()
            free_s = self.now_s + time.thread_time() - begin_s
        return self.made / seconds


@contextmanager
def simulated_fleet(nodes: int, sessions: int = 0) -> Iterator[SimulatedFleet]:
    """A fleet whose nodes are linked, with this number of sessions each."""
    with TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        fleet = SimulatedFleet(Path(directory), nodes)
        try:
            fleet.link_all(sessions)
            yield fleet
        finally:
            fleet.store.close()
