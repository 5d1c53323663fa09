"""The nodes of a fleet, as its front sees them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.console import Console
from executor_server.console.daemon import DaemonError


def routes(console: Console) -> list[BaseRoute]:
    async def fleet(request: Request) -> Response:
        found = None
        try:
            found = await console.daemon.admin.GetFleet(admin_pb.GetFleetRequest())
        except DaemonError as error:
            if error.status != "FAILED_PRECONDITION":  # this daemon is no front; that is no mistake
                raise
        nodes = [] if found is None else [(node, _state(node), node.lease_left_s > 0) for node in found.nodes]
        status = console.daemon.status
        return console.page(request, "fleet.html", fleet=found, nodes=nodes, status_=status)

    return [Route("/fleet", fleet)]


def _state(node: admin_pb.FleetNode) -> str:
    """Returns the word for a node's state; a newer front may have others."""
    try:
        return admin_pb.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()
    except ValueError:
        return "unknown"
