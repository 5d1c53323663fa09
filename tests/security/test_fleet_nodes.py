"""Nodes that lie: what a node says costs itself its link, and never another node its lease or its sessions.

The front is real. Its nodes are fake ones with real certificates: an honest one, which notes each renewal of its lease,
and one that says what no node should.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import pytest

from executor_api.v1 import fleet_service_pb2 as fleet_pb
from executor_api.v1 import types_pb2 as pb
from executor_api.v1.fleet_service_pb2 import NodeHello as Hello
from executor_api.v1.fleet_service_pb2 import NodeReport as Report
from executor_server.fleet.membership.certificates import issue_node
from tests.security.lying_node import LyingNode
from tests.support.machines import START_TIMEOUT_S, Fleet, new_id
from tests.support.polling import eventually
from tests.support.rounds import ALL

T = TypeVar("T")

LEASE_S = 3.0
MEMORY_BYTES = 200 * 1024 * 1024
CPU_S = 1.0
"""Bounds of what one report may cost the front. It looks at its nodes meanwhile, which takes a tenth of the time."""
ID = "liar-EPOCH"
"""Stands for the beginning of the liar's ids."""
ID_REST = "0" * 24
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class World:
    """A front, an honest node, and the one that lies."""

    fleet: Fleet
    honest: LyingNode
    liar: LyingNode

    def problem(self, node: str) -> str:
        """The front's words for what is wrong with a node, or with the address that it links to."""
        address = {"honest": self.honest, "liar": self.liar}[node].address
        found = (each for each in self.fleet.seen() if node == each.node or each.link_address == address)
        return next((each.problem for each in found), "")

    def state(self, node: str) -> str:
        return self.fleet.states().get(node, "")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with ExitStack() as stack:
        # Each test has the liar refused, and goes on with the next link.
        fleet = Fleet(directory, stack, front_config="wrong_retry_s = 0.2\n")
        honest, liar = (
            stack.enter_context(LyingNode(issue_node(directory / "ca", name).folder, name))
            for name in ("honest", "liar")
        )
        stack.callback(fleet.close)
        fleet.others += [honest.address, liar.address]
        fleet.start()
        yield World(fleet, honest, liar)
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def the_honest_node_keeps_its_lease(world: World) -> Iterator[None]:
    """Both serve before the test; after it the liar may be anything, and the honest one has not noticed."""
    world.liar.hello, world.liar.report, world.liar.session = _same, _same, _same
    assert eventually(lambda: world.state("liar") == "SERVING", timeout_s=START_TIMEOUT_S), world.fleet.logs()
    assert eventually(lambda: world.state("honest") == "SERVING"), world.fleet.logs()
    epoch, renewals = world.honest.epoch, world.honest.renewals
    world.honest.forget_waits()
    yield
    assert eventually(lambda: world.honest.renewals > renewals + 2)
    assert world.honest.longest_wait_s < LEASE_S
    assert (world.honest.epoch, world.state("honest")) == (epoch, "SERVING")


def _same(message: T) -> T:
    return message


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def changed(**fields: object) -> Callable[[Report], Report]:
    """Reports that are honest but for these fields; ids of the liar's are of its present epoch."""

    def change(report: Report) -> Report:
        epoch = report.epoch
        report.MergeFrom(Report(**fields))  # type: ignore[arg-type]
        for each in report.opened:
            each.session_id = each.session_id.replace(ID, f"liar-{epoch:08x}")
        return report

    return change


def session(session_id: str = f"{ID}{ID_REST}", tenant: str = "local", request_id: str = "r") -> fleet_pb.NodeSession:
    return fleet_pb.NodeSession(session_id=session_id, tenant=tenant, request_id=request_id)


LIES = {
    "ids of another node": changed(opened=[session(f"honest-00000001{ID_REST}")]),
    "ids without a node": changed(opened=[session(f"00000001{ID_REST}")]),
    "ids that are paths": changed(opened=[session("liar-../../../../../../etc/passwd")]),
    "one id twice": changed(opened=[session(), session(request_id="other")]),
    "the end of another node's session": changed(closed=[f"honest-00000001{ID_REST}"]),
    "a tenant that can not be": changed(opened=[session(tenant="\x1b[31m\n")]),
    "a load that is no number": changed(load=math.nan),
    "a load without end": changed(load=math.inf),
    "a load below nothing": changed(load=-1.0),
    "time without end": changed(tenants=[fleet_pb.NodeTenant(tenant="local", cpu_time_s=math.inf)]),
    "time below nothing": changed(tenants=[fleet_pb.NodeTenant(tenant="local", cpu_time_s=-1e9)]),
    "one tenant twice": changed(tenants=[fleet_pb.NodeTenant(tenant="local")] * 2),
    "another epoch": changed(epoch=2**40),
    "an epoch beyond all numbers": changed(epoch=2**64 - 1),
    "a sequence beyond all numbers": changed(sequence=2**64 - 1),
    "places without end": changed(max_sessions=2**32 - 1),
    "a problem that steers the terminal": changed(control_problem="\x1b]0;owned\x07"),
    "a long problem": changed(control_problem="x" * 1_000_000),
    "an image with a line's end": changed(backends=[fleet_pb.NodeBackend(name="local", images=["a\nb"])]),
    "a hundred thousand backends": changed(backends=[fleet_pb.NodeBackend(name="b")] * 100_000),
    "a hundred thousand sessions": changed(
        opened=[session(f"{ID}{n:024x}", request_id=str(n)) for n in range(100_000)]
    ),
}


# tests/unit/fleet/membership has each of them. Here each takes the seconds that pass before the front tries a liar again.
SOME_LIES = LIES if ALL else dict(list(LIES.items())[::8])


@pytest.mark.parametrize("lie", SOME_LIES.values(), ids=SOME_LIES)
def test_a_report_that_no_node_should_send_ends_the_link(world: World, lie: Callable[[Report], Report]) -> None:
    world.liar.report = lie
    assert eventually(lambda: world.state("liar") != "SERVING"), "the front believes it"
    assert world.fleet.front.is_running
    assert not CONTROLS.search(world.fleet.front.log)
    assert not CONTROLS.search(world.problem("liar"))


@pytest.mark.parametrize("what", ["a million sessions", "sixteen million of nothing"])
def test_a_report_without_end_costs_the_front_neither_time_nor_memory(world: World, what: str) -> None:
    """Read whole, the second one takes a second of the front's loop for each four million entries, and 80 bytes each."""
    whole = response_of({"a million sessions": million_sessions, "sixteen million of nothing": nothing}[what]())
    assert world.fleet.front.process is not None
    front = psutil.Process(world.fleet.front.process.pid)
    before_bytes, before_s = front.memory_info().rss, sum(front.cpu_times()[:2])
    links = len(world.liar.links)
    world.liar.report = lambda _: whole
    assert eventually(lambda: world.state("liar") != "SERVING")
    assert eventually(lambda: len(world.liar.links) > links + 1), "it is not tried again"
    assert front.memory_info().rss - before_bytes < MEMORY_BYTES
    assert sum(front.cpu_times()[:2]) - before_s < CPU_S


def million_sessions() -> bytes:
    """Made of one session's bytes: messages would keep this process, which is both nodes, from answering for seconds."""
    one = Report(opened=[session(f"liar-00000001{0:024x}", request_id=f"{0:032x}")]).SerializeToString()
    many = one.replace(b"%", b"%%").replace(b"0" * 32, b"%032x").replace(b"0" * 24, b"%024x")
    head = Report(sequence=1, epoch=1, full=True).SerializeToString()
    return b"".join((head, *(many % (n, n) for n in range(1_000_000))))


def nothing() -> bytes:
    """Entries of `opened` without a field, two bytes each."""
    return b"\x5a\x00" * (16 * 1024 * 1024)


def response_of(report: bytes) -> bytes:
    """A LinkResponse with this report."""
    length, prefix = len(report), b"\x12"
    while length >= 0x80:
        length, prefix = length >> 7, prefix + bytes([length & 0x7F | 0x80])
    return prefix + bytes([length]) + report


# ---------------------------------------------------------------------------------------------------------------------
# Hellos


HELLOS = {
    "the name of another node": {"node": "honest"},
    "no name": {"node": ""},
    "another version": {"protocol": 99},
    "no version": {"protocol": 0},
    "no epoch": {"epoch": 0},
    "an epoch beyond all numbers": {"epoch": 2**63},
    "an instance that steers the terminal": {"instance": "\x1b[2J"},
    "a version that steers the terminal": {"program_version": "\x1b[2J"},
    "a label that steers the terminal": {"labels": {"zone": "\x1b[2J"}},
    "many labels": {"labels": {f"label-{n}": "x" for n in range(1000)}},
}


SOME_HELLOS = HELLOS if ALL else dict(list(HELLOS.items())[::6])


@pytest.mark.parametrize("fields", SOME_HELLOS.values(), ids=SOME_HELLOS)
def test_a_hello_that_no_node_should_send_gets_no_lease(world: World, fields: dict[str, Any]) -> None:
    world.liar.hello = lambda honest: with_fields(honest, **fields)
    world.liar.hang_up()
    links = len(world.liar.links)
    assert eventually(lambda: len(world.liar.links) > links + 1)
    assert [link.renewals for link in world.liar.links[links:]] == [0] * len(world.liar.links[links:])
    assert not CONTROLS.search(world.fleet.front.log)


def with_fields(message: Hello, **fields: Any) -> Hello:
    """The same hello but for these fields."""
    return Hello(**{**{each.name: value for each, value in message.ListFields()}, **fields})


def test_a_version_that_does_not_fit_is_shown_to_the_operator(world: World) -> None:
    world.liar.hello = lambda honest: with_fields(honest, protocol=99)
    world.liar.hang_up()
    assert eventually(lambda: "version 99" in world.problem("liar")), world.fleet.seen()
    assert world.state("liar") in ("", "REFUSED", "SILENT", "LOST", "CONNECTING")


def test_an_old_epoch_gets_no_lease(world: World) -> None:
    """A node whose disk was restored from a copy: what it had since then must not look as if it had ended well."""
    newest = world.liar.epoch = world.liar.epoch + 5
    world.liar.hang_up()
    assert eventually(lambda: any(link.epoch == newest and link.renewals > 0 for link in world.liar.links))
    links = len(world.liar.links)
    world.liar.hello = lambda honest: with_fields(honest, epoch=1)
    world.liar.hang_up()
    assert eventually(lambda: world.liar.links[-1].hello.lost_epoch >= newest), "its epoch is not lost"
    assert sum(link.renewals for link in world.liar.links[links:]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Answers


@pytest.mark.parametrize("whose", ["honest", ""])
def test_a_session_whose_id_is_not_the_nodes_own_is_not_handed_out(world: World, whose: str) -> None:
    """A client would look for it at another node, where it counts for another session."""
    session_id = f"{whose}-{'0' * 7}1{'a' * 24}"
    world.liar.session = lambda _: pb.Session(session_id=session_id, state=pb.SESSION_STATE_IDLE)
    asked = world.liar.asked
    with pytest.raises(grpc.RpcError) as refusal:
        world.fleet.create(new_id(), "liar")
    assert world.liar.asked > asked
    assert session_id not in str(refusal.value)
