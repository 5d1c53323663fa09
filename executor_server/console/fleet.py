"""The nodes of a fleet, as its front sees them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client.replays.timeline import enum_text
from executor_server.console.console import Console


def routes(console: Console) -> list[BaseRoute]:
    async def fleet(request: Request) -> Response:
        status, found = console.daemon.status, None
        if status is None or status.is_front:
            found = await console.daemon.admin.GetFleet(admin_pb.GetFleetRequest())
        nodes = [] if found is None else [(node, _state(node), node.lease_left_s > 0) for node in found.nodes]
        return console.page(request, "fleet.html", fleet=found, nodes=nodes, status_=status)

    return [Route("/fleet", fleet)]


def _state(node: admin_pb.FleetNode) -> str:
    return enum_text(admin_pb.NodeState, node.state, "NODE_STATE_")
