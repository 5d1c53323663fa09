"""A front with its state directory: calls members, reservations, usage and placement as the real one does."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from executor_server.core import ResourceExhausted
from executor_server.fleet.membership.ids import epoch_of, node_of
from executor_server.fleet.membership.members import TICK_S, Link, Members, Whereabouts
from executor_server.fleet.membership.messages import FrontHello, NodeHello, NodeReport, Renewal
from executor_server.fleet.membership.placement import Placement, Wanted
from executor_server.fleet.membership.reservations import Reservations
from executor_server.fleet.membership.session_index import Creation
from executor_server.fleet.membership.store import FleetStore, StoredNode, Tombstone
from executor_server.fleet.membership.timing import NodeRefused
from executor_server.fleet.membership.usage import FleetUsage
from tests.unit.fleet.membership.simulated_fleet.node import TIMING, Daemon, Machine
from tests.unit.fleet.membership.simulated_fleet.world import QUOTAS, Connection, Process, World

DIAL_S = 0.5
AGAIN_S = 0.2
CALL_TIME_S = 2.0
PARK_S = 8.0


class BreakableStore(FleetStore):
    """A store whose disk can be full."""

    is_broken = False

    def write_nodes(self, nodes: list[StoredNode], tombstones: tuple[Tombstone, ...] = ()) -> None:  # type: ignore[override]
        if self.is_broken:
            raise sqlite3.OperationalError("the disk is full")
        super().write_nodes(nodes, tombstones)


@dataclass(eq=False)
class Linked:
    """A connection to a node, and what came of it."""

    connection: Connection
    heard_s: float
    link: Link | None = None


@dataclass(eq=False)
class Making:
    """A creation that the front carries out, for all callers that wait for it."""

    creation: Creation
    until_s: float
    answers: list[Callable[[str], None]] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    is_unanswered: bool = False
    calls: int = 0


class Front:
    """One start of a front on a state directory."""

    def __init__(self, world: World, path: Path, rate: float) -> None:
        self.world = world
        self.rate = rate
        self.process = Process("front")
        self.store = BreakableStore(path)
        self.members = Members(self.store, TIMING, self.now_s, 1e9 + world.now_s)
        self.instance = self.members.hello().instance
        self.creations = Reservations(self.members, lambda tenant: QUOTAS)
        self.usage = FleetUsage(lambda tenant: QUOTAS)
        world.fronts.append(self)
        self.placement = Placement(self.members, random.Random(world.draws.random()))
        self.links: dict[str, Linked] = {}
        self.making: dict[tuple[str, str], Making] = {}
        self.began_s = world.now_s
        self.is_settled = False
        self._tick()
        self._dial()

    @property
    def now_s(self) -> float:
        return 7.0 + self.world.now_s * self.rate

    def kill(self) -> None:
        self.process.is_alive = False
        self.world.fronts.remove(self)
        for linked in list(self.links.values()):
            linked.connection.break_off()
        self.store.close()

    # -- time ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        try:
            for lost in self.members.tick(self.now_s):
                self.usage.lost(lost.node, self.now_s)
                lost_ids = [each.session_id for each in lost.tombstones]
                self.world.note_lost(self.members.front_id, lost.node, lost.epoch, lost_ids)
                self._drop(lost.node)
        except sqlite3.Error:
            pass  # the next tick tries again
        for node, linked in list(self.links.items()):
            if self.now_s - linked.heard_s > TIMING.lease_s / 2:
                self._drop(node)
        self.world.after(TICK_S, self.process, self._tick)

    def _drop(self, node: str) -> None:
        linked = self.links.get(node)
        if linked is not None:
            linked.connection.break_off()

    # -- links -----------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        for machine in self.world.machines.values():
            if machine.name not in self.links and machine.daemon is not None:
                self._link(machine, machine.daemon)
        self.world.after(DIAL_S, self.process, self._dial)

    def _link(self, machine: Machine, daemon: Daemon) -> None:
        connection = Connection(machine.name)
        linked = self.links[machine.name] = Linked(connection, self.now_s)
        connection.on_break.append(lambda: self._unlinked(machine.name, linked))
        hello = self.members.hello(machine.name)
        self.world.send(connection, daemon.process, lambda: self._greet(daemon, linked, hello))

    def _greet(self, daemon: Daemon, linked: Linked, hello: FrontHello) -> None:
        daemon.on_hello(linked.connection, self.process, hello, lambda answer: self._linked(daemon, linked, answer))

    def _unlinked(self, node: str, linked: Linked) -> None:
        if self.links.get(node) is linked:
            del self.links[node]
        if linked.link is not None and self.process.is_alive:
            self.members.unlinked(linked.link)

    def _linked(self, daemon: Daemon, linked: Linked, hello: NodeHello) -> None:
        if linked.link is not None:
            return
        linked.heard_s = self.now_s
        try:
            linked.link = self.members.linked(hello, self.now_s)
        except (NodeRefused, sqlite3.Error):
            linked.connection.break_off()
            return
        self.world.after(0, daemon.process, lambda: self._report(daemon, linked, full=True))

    def _report(self, daemon: Daemon, linked: Linked, *, full: bool) -> None:
        """In the node: sends a report, and the next one an interval later."""
        report = daemon.report(linked.connection, full=full)
        if report is None:
            return
        self.world.send(linked.connection, self.process, lambda: self._reported(daemon, linked, report))
        interval_s = TIMING.report_interval_s / daemon.machine.rate
        self.world.after(interval_s, daemon.process, lambda: self._report(daemon, linked, full=False))

    def _reported(self, daemon: Daemon, linked: Linked, report: NodeReport) -> None:
        assert linked.link is not None
        linked.heard_s = self.now_s
        node = linked.link.node
        try:
            if not self.members.reported(linked.link, report, self.now_s):
                return
        except NodeRefused:
            linked.connection.break_off()
            return
        for session_id in self.members.take_surplus(node, self.now_s):
            self.world.send(linked.connection, daemon.process, partial(daemon.delete, self.instance, session_id))
        renewal = Renewal(report.sequence, self.usage.reported(node, report.tenants))
        self.world.send(linked.connection, daemon.process, lambda: daemon.on_renewal(renewal))

    # -- sessions --------------------------------------------------------------------------------------------------

    def create(self, tenant: str, request_id: str, answer: Callable[[str], None]) -> None:
        """Answers with a session's id; a refusal, or a lost session, is no answer in here."""
        if not self.members.is_settled(self.now_s):
            self.world.after(AGAIN_S, self.process, lambda: self.create(tenant, request_id, answer))
            return
        self._note_settled()
        making = self.making.get((tenant, request_id))
        if making is not None:
            making.answers.append(answer)
            return
        earlier = self.creations.find(tenant, request_id)
        if earlier is not None:
            if earlier.node:
                self._call(earlier.node, tenant, request_id, lambda session_id, _: _pass_on(answer, session_id), None)
            return
        try:
            creation = self.creations.begin(tenant, request_id, self.now_s)
        except ResourceExhausted:
            return
        making = self.making[tenant, request_id] = Making(creation, self.now_s + PARK_S, [answer])
        self._place(making)

    def _note_settled(self) -> None:
        """A front that has waited in vain for a node does not know the sessions there, and its counts are too low."""
        if not self.is_settled:
            self.is_settled = True
            for machine in self.world.machines.values():
                member = self.members.get(machine.name)
                if machine.sandboxes and not (member is not None and member.has_reported):
                    self.world.is_exact = False

    def _place(self, making: Making) -> None:
        member = self.placement.choose(Wanted(), making.tried)
        if member is None:
            if self.now_s >= making.until_s:
                self._end(making)
                return
            making.tried.clear()
            self.world.after(AGAIN_S, self.process, lambda: self._place(making))
            return
        self.creations.place(making.creation, member.name)
        making.is_unanswered = False
        self._ask(making)

    def _ask(self, making: Making) -> None:
        creation = making.creation
        if self.creations.may_move(creation):  # the node is lost
            self._place(making)
            return
        making.calls += 1
        call = making.calls
        sent = self._call(
            creation.node,
            creation.tenant,
            creation.request_id,
            lambda session_id, problem: self._answered(making, call, session_id, problem),
            lambda: self._silent(making, call),
        )
        if not sent:
            self.world.after(AGAIN_S, self.process, lambda: self._silent(making, call))

    def _answered(self, making: Making, call: int, session_id: str, problem: str) -> None:
        if making.calls != call:
            return
        making.calls += 1
        creation = making.creation
        if session_id:
            if self.creations.answered(creation, session_id, self.now_s):
                self._end(making)
                for answer in making.answers:
                    answer(session_id)
            else:
                self._place(making)
        elif making.is_unanswered:
            # The first call may still be on its way; the real front withdraws it first. Here it is asked again.
            self.world.after(AGAIN_S, self.process, lambda: self._ask(making))
        else:
            making.tried.add(creation.node)
            self.creations.refused(creation, is_full=problem == "full")
            self._place(making)

    def _silent(self, making: Making, call: int) -> None:
        if making.calls == call:
            making.is_unanswered = True
            self._ask(making)

    def _end(self, making: Making) -> None:
        self.making.pop(making.creation.request, None)
        self.creations.end(making.creation)

    def _call(
        self,
        node: str,
        tenant: str,
        request_id: str,
        answer: Callable[[str, str], None],
        silent: Callable[[], None] | None,
    ) -> bool:
        """Calls CreateSession on a node. Returns False when there is no connection."""
        machine, linked = self.world.machines[node], self.links.get(node)
        daemon = machine.daemon
        if linked is None or linked.link is None or daemon is None:
            return False
        connection = linked.connection

        def back(session_id: str, problem: str) -> None:
            self.world.send(connection, self.process, lambda: answer(session_id, problem))

        self.world.send(
            connection, daemon.process, partial(daemon.create, self.instance, tenant, request_id, back), is_call=True
        )
        if silent is not None:
            self.world.after(CALL_TIME_S, self.process, silent)
        return True

    def execute(self, tenant: str, session_id: str, execution_id: str) -> None:
        """Passes an execution on to the session's node, and counts it until it has ended."""
        where, member, _ = self.members.where(session_id, self.now_s)
        linked = self.links.get(member.name) if member is not None else None
        daemon = self.world.machines[node_of(session_id) or ""].daemon
        if self.process.is_stopped or where is not Whereabouts.NODE or linked is None or daemon is None:
            return
        counted = ExitStack()
        try:
            counted.enter_context(self.usage.executing(tenant, linked.connection.node, (session_id, execution_id)))
        except ResourceExhausted:
            return
        connection = linked.connection

        def over() -> None:
            self.world.send(connection, self.process, counted.close)

        def broken() -> None:
            error = ConnectionError()
            counted.pop_all().__exit__(ConnectionError, error, None)

        connection.on_break.append(broken)
        begin = partial(daemon.execute, self.instance, session_id, execution_id, over)
        self.world.send(connection, daemon.process, begin, is_call=True)

    def delete(self, session_id: str) -> None:
        linked, daemon = (
            self.links.get(node_of(session_id) or ""),
            self.world.machines[node_of(session_id) or ""].daemon,
        )
        if linked is not None and daemon is not None and not self.process.is_stopped:
            self.world.send(linked.connection, daemon.process, partial(daemon.delete, self.instance, session_id))

    def ask_for(self, session_id: str) -> None:
        """A client asks for a session; the front may say that it is lost."""
        if not self.process.is_stopped and self.members.where(session_id, self.now_s)[0] is Whereabouts.LOST:
            node, epoch = node_of(session_id) or "", epoch_of(session_id)
            self.world.note_lost(self.members.front_id, node, epoch, [session_id])


def _pass_on(answer: Callable[[str], None], session_id: str) -> None:
    if session_id:
        answer(session_id)
