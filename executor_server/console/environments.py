"""Environments of packages, and the images that sandboxes are made of."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.console import Console


def routes(console: Console) -> list[BaseRoute]:
    async def environments(request: Request) -> Response:
        listed = await console.daemon.admin.ListEnvironments(admin_pb.ListEnvironmentsRequest())
        return console.page(request, "environments.html", listed=listed, status_=console.daemon.status)

    async def environment(request: Request) -> Response:
        asked = admin_pb.GetEnvironmentRequest(environment_id=request.path_params["environment_id"])
        found = await console.daemon.admin.GetEnvironment(asked)
        return console.page(request, "environment.html", found=found)

    return [Route("/environments", environments), Route("/environments/{environment_id}", environment)]
