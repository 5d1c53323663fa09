"""The state of one session, next to its steps: limits as meters, processes, ports, network, savepoints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client.replays.timeline import enum_text
from executor_server.console import formats
from executor_server.console.daemon import Admin

ROWS_MAX = 100
"""Processes, ports, savepoints, connections and refusals that are shown, of each."""
AGE_STEP_S = 10
"""Ages are rounded up to this, so that the panel is not sent again for nothing."""


class Templates(Protocol):
    """Makes HTML of values: `Console.fragment`."""

    def __call__(self, template: str, **values: object) -> str: ...


@dataclass(frozen=True)
class Meter:
    """How much of a limit is used."""

    name: str
    value: int
    limit: int
    text: str


@dataclass(frozen=True)
class Inspected:
    """The daemon's answers about a session that the table lacks."""

    session: admin_pb.InspectSessionResponse
    network: admin_pb.GetSessionNetworkResponse | None


async def ask(admin: Admin, session_id: str) -> Inspected:
    """Asks about a session. Raises DaemonError."""
    found = await admin.InspectSession(admin_pb.InspectSessionRequest(session_id=session_id))
    network: admin_pb.GetSessionNetworkResponse | None = None
    if found.session.owned.session.network:
        network = await admin.GetSessionNetwork(admin_pb.GetSessionNetworkRequest(session_id=session_id))
    return Inspected(found, network)


def html(
    templates: Templates,
    view: admin_pb.SessionView,
    inspected: Inspected | None,
    approvals: Sequence[admin_pb.Approval],
) -> str:
    """Returns the panel. `inspected` has what `view` lacks; `approvals` are the waiting ones of all sessions."""
    if inspected is None or view.HasField("end_time"):
        inspected = Inspected(admin_pb.InspectSessionResponse(), None)
    session, network = view.owned.session, inspected.network
    return templates(
        "session_panel.html",
        view=view,
        session=session,
        state=enum_text(pb.SessionState, session.state, "SESSION_STATE_"),
        labels=sorted(session.labels.items()),
        meters=list(_meters(view, network)),
        processes=[(each, _process_state(each)) for each in inspected.session.processes[:ROWS_MAX]],
        ports=inspected.session.ports[:ROWS_MAX],
        savepoints=_tree(inspected.session.savepoints[-ROWS_MAX:]),
        tools=inspected.session.tools[:ROWS_MAX],
        network=network,
        hosts=[] if network is None else _hosts(network),
        denials=[] if network is None else network.denials[::-1],
        approvals=[each for each in approvals if each.session_id == session.session_id],
    )


def _meters(view: admin_pb.SessionView, network: admin_pb.GetSessionNetworkResponse | None) -> Iterator[Meter]:
    session, use = view.owned.session, view.use
    end_s = view.end_time.seconds if view.HasField("end_time") else int(time.time())
    age_s = max(0, end_s - session.create_time.seconds) // AGE_STEP_S * AGE_STEP_S + AGE_STEP_S
    limits = session.limits
    yield _meter("Age", age_s, int(limits.session_time_s), formats.seconds)
    yield _meter("Memory, highest", use.peak_memory_bytes, limits.memory_bytes, formats.size)
    if limits.HasField("session_operations"):
        yield _meter("Operations", use.operations, limits.session_operations, formats.number)
    if network is not None:
        yield _meter("Bytes sent", network.usage.sent_bytes, network.rules.max_sent_bytes, formats.size)
        yield _meter("Bytes received", network.usage.received_bytes, network.rules.max_received_bytes, formats.size)
        yield _meter("Connections", len(network.connections), network.rules.max_connections, formats.number)


def _meter(name: str, used: int, limit: int, text: Callable[[int], str]) -> Meter:
    return Meter(name, used, limit, f"{text(used)} of {text(limit)}" if limit else text(used))


def _process_state(process: pb.ProcessInfo) -> str:
    if not process.HasField("result"):
        return "runs"
    result = process.result
    ended = enum_text(pb.ProcessOutcome, result.outcome, "PROCESS_OUTCOME_")
    return f"{ended}, {result.exit_code}" if result.HasField("exit_code") else ended


def _hosts(network: admin_pb.GetSessionNetworkResponse) -> list[tuple[admin_pb.HostUse, int]]:
    """Returns the hosts, the last used one first, with the number of their open connections."""
    is_open = Counter((each.host, each.port) for each in network.connections)
    return [(each, is_open[each.host, each.port]) for each in network.hosts[::-1]]


Tree = list[tuple[service_pb.Savepoint, list[service_pb.Savepoint]]]


def _tree(savepoints: Sequence[service_pb.Savepoint]) -> Tree:
    """Returns savepoints in order, each with the branches that were made after it."""
    found: Tree = []
    for each in savepoints:
        if each.is_branch and found:
            found[-1][1].append(each)
        else:
            found.append((each, []))
    return found
