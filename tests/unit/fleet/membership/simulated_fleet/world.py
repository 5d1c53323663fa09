"""Virtual time, processes that stop and die, a network that loses, delays and repeats; and what must always hold."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from executor_server.fleet.membership.ids import epoch_of
from executor_server.policy import QuotasTable

if TYPE_CHECKING:
    from tests.unit.fleet.membership.simulated_fleet.front import Front
    from tests.unit.fleet.membership.simulated_fleet.node import Machine, Sandbox

SESSIONS = 4
EXECUTIONS = 2
QUOTAS = QuotasTable(sessions=SESSIONS, executions=EXECUTIONS)
"""The quotas of each tenant."""

Action = Callable[[], None]


@dataclass(eq=False)
class Process:
    """A front or a daemon: what happens in it happens while it lives, and waits while it is stopped."""

    name: str
    is_alive: bool = True
    is_stopped: bool = False
    waiting: list[Action] = field(default_factory=list)


@dataclass(eq=False)
class Connection:
    """One connection of a front to a node: what is on its way when it breaks never arrives."""

    node: str
    is_open: bool = True
    on_break: list[Action] = field(default_factory=list)

    def break_off(self) -> None:
        if self.is_open:
            self.is_open = False
            for notify in self.on_break:
                notify()


@dataclass
class Network:
    """The state of the network: seconds of delay at most, and how often messages are lost or repeated."""

    delay_s: float = 0.01
    loss: float = 0.0
    repetition: float = 0.0
    cut: set[str] = field(default_factory=set)  # nodes that no message reaches or leaves


class World:
    """Runs events in order of time, and checks what must always hold."""

    def __init__(self, seed: int) -> None:
        self.now_s = 1000.0
        self.draws = random.Random(seed)
        self.network = Network()
        self.machines: dict[str, Machine] = {}
        self.fronts: list[Front] = []
        self.lost_epochs: dict[tuple[str, str], int] = {}  # by front and node
        self.lost_sessions: set[str] = set()
        self.handed_out: dict[tuple[str, str], str] = {}  # session by tenant and request
        self.ran: dict[tuple[str, str, str], str] = {}  # session by tenant, request and execution
        self.executions: dict[str, int] = {}
        self.is_exact = True
        self.front_began_s = -math.inf  # the last start of a front after the first one
        self._events: list[tuple[float, int, Process | None, Action]] = []
        self._numbers = itertools.count()

    def new_session_id(self, node: str, epoch: int) -> str:
        """Returns an id that is the same in each run, because the order of ids is that of some messages."""
        return f"{node}-{epoch:08x}{next(self._numbers):024x}"

    # -- time ------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, process: Process | None, action: Action) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), process, action))

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, process, action = heapq.heappop(self._events)
            self.run(process, action)
        self.now_s = end_s
        self.check()

    def run(self, process: Process | None, action: Action) -> None:
        if process is None or (process.is_alive and not process.is_stopped):
            action()
        elif process.is_alive:
            process.waiting.append(action)

    def proceed(self, process: Process) -> None:
        """Lets a stopped process go on: all that waited for it happens at once, in any order."""
        process.is_stopped = False
        waiting, process.waiting = process.waiting, []
        self.draws.shuffle(waiting)
        self.check()
        for action in waiting:
            self.run(process, action)

    # -- network ---------------------------------------------------------------------------------------------------

    def send(self, connection: Connection, receiver: Process, deliver: Action, *, is_call: bool = False) -> None:
        """Sends a message, which may be lost, delayed and repeated. A call arrives once at most, as gRPC's do.

        Otherwise a node that has refused a creation would get it again, and make a session that the front does not
        count.
        """
        is_repeated = self.draws.random() < self.network.repetition
        copies = 2 if is_repeated and not is_call else 1
        for _ in range(copies):
            if connection.node in self.network.cut or self.draws.random() < self.network.loss:
                continue
            delay_s = self.draws.random() * self.network.delay_s
            self.after(delay_s, receiver, lambda: self._deliver(connection, deliver))

    def _deliver(self, connection: Connection, deliver: Action) -> None:
        if connection.is_open and connection.node not in self.network.cut:
            deliver()

    # -- what must always hold -------------------------------------------------------------------------------------

    def check(self) -> None:
        for machine in self.machines.values():
            self.check_machine(machine)

    def check_machine(self, machine: Machine) -> None:
        """Nothing is served from a node that was reported lost."""
        epoch = machine.served_epoch()
        if epoch is not None:
            lost_epoch = self.lost_epochs.get((machine.record.front_id, machine.name), 0)
            assert epoch > lost_epoch, f"{machine.name} serves epoch {epoch}; up to {lost_epoch} all was reported lost"
            back = self.lost_sessions.intersection(machine.sandboxes)
            assert not back, f"{machine.name} serves sessions that were reported lost: {back}"

    def note_lost(self, front_id: str, node: str, epoch: int, session_ids: Iterable[str]) -> None:
        """A front says that all sessions of a node up to this epoch are lost; clients learn it of some."""
        self.lost_epochs[front_id, node] = max(self.lost_epochs.get((front_id, node), 0), epoch)
        self.lost_sessions.update(session_ids)
        self.check()

    def note_answer(self, tenant: str, request_id: str, session_id: str) -> None:
        """A client has got a session for a request; there is only one for each."""
        before = self.handed_out.setdefault((tenant, request_id), session_id)
        assert before == session_id, f"request {request_id} has led to {before} and to {session_id}"

    def note_run(self, tenant: str, request_id: str, execution_id: str, session_id: str) -> None:
        before = self.ran.setdefault((tenant, request_id, execution_id), session_id)
        self.executions[execution_id] = self.executions.get(execution_id, 0) + 1
        assert self.executions[execution_id] == 1, f"execution {execution_id} ran in {before} and in {session_id}"

    # -- quotas ----------------------------------------------------------------------------------------------------

    def live(self, tenant: str) -> list[Sandbox]:
        """The sandboxes of a tenant whose sessions were not reported lost."""
        return [
            sandbox
            for machine in self.machines.values()
            for sandbox in machine.sandboxes.values()
            if sandbox.tenant == tenant and not self._is_lost(machine, sandbox.session_id)
        ]

    def _is_lost(self, machine: Machine, session_id: str) -> bool:
        lost_epoch = self.lost_epochs.get((machine.record.front_id, machine.name), 0)
        return session_id in self.lost_sessions or epoch_of(session_id) <= lost_epoch

    def check_sessions(self, tenant: str) -> None:
        """The quota of sessions is exact, unless a front had to begin without knowing all sessions."""
        live = self.live(tenant)
        assert len(live) <= SESSIONS or not self.is_exact, f"{len(live)} sessions of {tenant}"

    def check_executions(self, tenant: str) -> None:
        """The bound that fleet/membership/usage.py states; each node holds its tenants to the quota by itself."""
        running = sum(len(sandbox.running) for sandbox in self.live(tenant))
        is_first = self.front_began_s == -math.inf
        assert running <= EXECUTIONS * (1 if is_first else len(self.machines)), f"{running} executions run"
