"""A machine with a disk, a clock of its own, and a daemon that dies and starts again while its sandboxes live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from executor_server.fleet.membership.heartbeat import Heartbeat, NodeRecord
from executor_server.fleet.membership.ids import epoch_of
from executor_server.fleet.membership.members import MemberState
from executor_server.fleet.membership.messages import (
    FrontHello,
    NodeBackend,
    NodeHello,
    NodeReport,
    NodeSession,
    Renewal,
    TenantUse,
)
from executor_server.fleet.membership.timing import NodeRefused, Timing
from tests.unit.fleet.membership.simulated_fleet.world import EXECUTIONS, Connection, Process, World

TIMING = Timing()
MAX_SESSIONS = 6
CHECK_S = 0.25

Request = tuple[str, str]
Answer = Callable[[str, str], None]
"""Takes the session's id, or an empty one and the reason of a refusal."""


@dataclass(eq=False)
class Sandbox:
    session_id: str
    tenant: str
    request_id: str
    executions: set[str] = field(default_factory=set)  # the journal: all that were begun
    running: set[str] = field(default_factory=set)


class Machine:
    """Outlives its daemons: the state directory, the sandboxes, the clock."""

    def __init__(self, world: World, name: str, rate: float) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self.record = NodeRecord(f"{name}-0")
        self.records = [self.record]
        self.is_disk_broken = False
        self.sandboxes: dict[str, Sandbox] = {}
        self.daemon: Daemon | None = None
        world.machines[name] = self
        self.start()

    def clock(self) -> float:
        return 50.0 + self.world.now_s * self.rate

    def persist(self, record: NodeRecord) -> None:
        if self.is_disk_broken:
            raise OSError("the disk is full")
        self.record = record
        self.records.append(record)

    def start(self) -> None:
        if self.daemon is None:
            self.daemon = Daemon(self)

    def kill(self) -> None:
        """Kills the daemon. Its sandboxes end themselves later, unless another daemon takes them over."""
        if (daemon := self.daemon) is None:
            return
        self.daemon = None
        daemon.process.is_alive = False
        if daemon.connection is not None:
            daemon.connection.break_off()
        self.world.after(TIMING.fence_s, None, self._end_orphans)

    def restore(self, index: int) -> None:
        """The machine starts again with an old copy of its state directory; its sandboxes are no more."""
        self.kill()
        self.sandboxes.clear()
        self.record = self.records[index % len(self.records)]
        self.start()

    def replace(self) -> None:
        """Another machine takes this one's name, with an empty state directory."""
        self.kill()
        self.sandboxes.clear()
        self.record = NodeRecord(f"{self.name}-{len(self.records)}")
        self.records.append(self.record)
        self.start()

    def _end_orphans(self) -> None:
        if self.daemon is None:
            self.sandboxes.clear()

    def served_epoch(self) -> int | None:
        """The epoch whose sessions a front serves from this node at this moment; None when none does."""
        daemon = self.daemon
        if daemon is None or daemon.process.is_stopped:
            return None
        for front in self.world.fronts:
            member, linked = front.members.get(self.name), front.links.get(self.name)
            is_linked = member is not None and member.state is MemberState.LINKED
            if is_linked and linked is not None and linked.connection.is_open and daemon.obeys(front.instance):
                return daemon.heartbeat.epoch
        return None


class Daemon:
    """One start of a node's daemon: calls its heartbeat as fleet/daemons/node does."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.world = world = machine.world
        self.process = Process(machine.name)
        self.heartbeat = Heartbeat(machine.record, machine.persist, TIMING, machine.clock())
        self.sequence = 0
        self.connection: Connection | None = None
        self.creating: dict[Request, list[Answer]] = {}
        self.reported: set[str] = set()
        self.is_ending = False
        for session_id in [each for each in machine.sandboxes if epoch_of(each) != self.heartbeat.epoch]:
            del machine.sandboxes[session_id]
        world.after(CHECK_S, self.process, self._check)

    @property
    def now_s(self) -> float:
        return self.machine.clock()

    def _check(self) -> None:
        if self.heartbeat.must_end(self.now_s):
            self.end_all()
        self.world.after(CHECK_S, self.process, self._check)

    # -- the link --------------------------------------------------------------------------------------------------

    def on_hello(
        self, connection: Connection, front: Process, hello: FrontHello, answer: Callable[[NodeHello], None]
    ) -> None:
        if not connection.is_open:
            return
        try:
            is_taken = self.heartbeat.hello(hello, self.now_s)
        except (NodeRefused, OSError):
            connection.break_off()
            return
        if not is_taken:
            self.end_all()
            self.world.after(0.3, self.process, lambda: self.on_hello(connection, front, hello, answer))
            return
        if self.connection is not None and self.connection is not connection:
            self.connection.break_off()
        self.connection = connection
        self.reported = set()
        mine = NodeHello(self.machine.name, self.heartbeat.epoch, self.heartbeat.record.instance)
        self.world.send(connection, front, lambda: answer(mine))

    def report(self, connection: Connection, *, full: bool) -> NodeReport | None:
        """The next report on this connection; None when it is over."""
        if connection is not self.connection or not connection.is_open or self.is_ending:
            return None
        self.sequence += 1
        sandboxes = self.machine.sandboxes
        before = set() if full else self.reported
        opened = tuple(
            NodeSession(each.session_id, each.tenant, each.request_id)
            for each in sandboxes.values()
            if each.session_id not in before
        )
        report = NodeReport(
            self.sequence,
            self.heartbeat.epoch,
            MAX_SESSIONS,
            backends=(NodeBackend("local"),),
            full=full,
            opened=opened,
            closed=tuple(before - sandboxes.keys()),
            creating=tuple(NodeSession("", *request) for request in self.creating),
            tenants=self._tenants(),
        )
        self.reported = set(sandboxes)
        return report

    def _tenants(self) -> dict[str, TenantUse]:
        found: dict[str, int] = {}
        for each in self.machine.sandboxes.values():
            found[each.tenant] = found.get(each.tenant, 0) + len(each.running)
        return {tenant: TenantUse(executions) for tenant, executions in found.items()}

    def on_renewal(self, _renewal: Renewal) -> None:
        self.heartbeat.renewed(self.now_s)
        self.world.check_machine(self.machine)

    def obeys(self, front_instance: str) -> bool:
        """True while the node takes calls of this start of a front."""
        return not self.is_ending and self.heartbeat.record.front_instance == front_instance

    # -- the end of an epoch ---------------------------------------------------------------------------------------

    def end_all(self) -> None:
        if not self.is_ending:
            self.is_ending = True
            self.world.after(self.world.draws.random() * 2, self.process, self._ended)

    def _ended(self) -> None:
        self.machine.sandboxes.clear()
        for answers in self.creating.values():
            for answer in answers:
                answer("", "fenced")
        self.creating.clear()
        try:
            self.heartbeat.ended(self.now_s)
        except OSError:
            self.world.after(0.5, self.process, self._ended)
            return
        self.is_ending = False
        if self.connection is not None:
            self.connection.break_off()
            self.connection = None

    # -- calls -----------------------------------------------------------------------------------------------------

    def create(self, front_instance: str, tenant: str, request_id: str, answer: Answer) -> None:
        if not self.obeys(front_instance):
            return answer("", "fenced")
        request = tenant, request_id
        found = self._by_request(request)
        if found is not None:
            return answer(found.session_id, "")
        if request in self.creating:
            return self.creating[request].append(answer)
        if len(self.machine.sandboxes) + len(self.creating) >= MAX_SESSIONS:
            return answer("", "full")
        self.creating[request] = [answer]
        epoch = self.heartbeat.epoch
        self.world.after(self.world.draws.random() * 1.5, self.process, lambda: self._created(request, epoch))
        return None

    def _created(self, request: Request, epoch: int) -> None:
        answers = self.creating.pop(request, None)
        if answers is None or epoch != self.heartbeat.epoch:
            return
        session_id = self.world.new_session_id(self.machine.name, epoch)
        self.machine.sandboxes[session_id] = Sandbox(session_id, *request)
        self.world.check_sessions(request[0])
        for answer in answers:
            answer(session_id, "")

    def execute(self, front_instance: str, session_id: str, execution_id: str, over: Callable[[], None]) -> None:
        """Runs an execution once, if the front, the session and the quota let it. `over` is called at its end."""
        sandbox = self.machine.sandboxes.get(session_id)
        if sandbox is None or not self.obeys(front_instance):
            return over()
        if execution_id in sandbox.executions:
            return None if execution_id in sandbox.running else over()
        running = sum(len(each.running) for each in self.machine.sandboxes.values() if each.tenant == sandbox.tenant)
        if running >= EXECUTIONS:
            return over()
        self.world.note_run(sandbox.tenant, sandbox.request_id, execution_id, session_id)
        sandbox.executions.add(execution_id)
        sandbox.running.add(execution_id)
        self.world.check_executions(sandbox.tenant)

        def end() -> None:
            sandbox.running.discard(execution_id)
            over()

        self.world.after(self.world.draws.random() * 6, None, end)
        return None

    def delete(self, front_instance: str, session_id: str) -> None:
        if self.obeys(front_instance):
            self.machine.sandboxes.pop(session_id, None)

    def _by_request(self, request: Request) -> Sandbox | None:
        found = (each for each in self.machine.sandboxes.values() if (each.tenant, each.request_id) == request)
        return next(found, None)
