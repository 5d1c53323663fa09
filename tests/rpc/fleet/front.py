"""A front in the process of the test, with its real listeners and links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_server.core.config import load
from executor_server.fleet.daemons.front import start_up
from executor_server.fleet.membership import issue_front
from executor_server.policy.identity import TokenFile
from tests.support.polling import eventually_awaited

# A loaded machine may take seconds for what a node has to say.
PATIENT = {"report_interval_s": 0.05, "lease_s": 30.0, "fence_s": 60.0, "park_s": 0.0}
LOSES_QUICKLY = {"lease_s": 0.4, "fence_s": 1.0}
"""Settings of a test that loses a node."""


@dataclass
class TestedFront:
    """A running front, a client's stubs for it, and the metadata of its callers."""

    __test__ = False

    address: str
    service: Any
    admin: Any
    channel: grpc.aio.Channel
    auth: tuple[tuple[str, str], ...]
    """The front's own token, which is an administrator's of the tenant `local`."""
    tenants: dict[str, tuple[tuple[str, str], ...]]
    refuse_nodes: Callable[[tuple[str, ...]], None]
    is_superseded: asyncio.Event

    def refuse(self, *nodes: str) -> None:
        """Writes the names into the configuration in place of those before, and has the front read it, as SIGHUP does."""
        self.refuse_nodes(nodes)

    async def create(self, request_id: str = "r1", *, tenant: str = "local", **fields: Any) -> Any:
        request = service_pb.CreateSessionRequest(request_id=request_id, **fields)
        answer = await self.service.CreateSession(request, metadata=self.metadata(tenant))
        return answer.session

    async def get(self, session_id: str, *, tenant: str = "local") -> Any:
        request = service_pb.GetSessionRequest(session_id=session_id)
        return (await self.service.GetSession(request, metadata=self.metadata(tenant))).session

    def metadata(self, tenant: str = "local") -> tuple[tuple[str, str], ...]:
        return self.auth if tenant == "local" else self.tenants[tenant]

    async def fleet(self) -> Any:
        return await self.admin.GetFleet(admin_pb.GetFleetRequest(), metadata=self.auth)

    async def states(self) -> dict[str, str]:
        nodes = (await self.fleet()).nodes
        return {each.node: admin_pb.NodeState.Name(each.state).removeprefix("NODE_STATE_").lower() for each in nodes}

    async def until(self, **states: str) -> None:
        """Returns when the nodes have these states."""

        async def has_them() -> bool:
            return await self.states() == states

        assert await eventually_awaited(has_them), await self.states()


@asynccontextmanager
async def fronting(
    directory: Path, nodes: Sequence[str], *, tenants: Sequence[str] = (), policy: str = "", **fleet: Any
) -> AsyncIterator[TestedFront]:
    """Runs a front for nodes at these addresses; `directory` has the certificates and the front's state."""
    folder = issue_front(directory / "certificates").folder
    state = directory / "front"
    state.mkdir(mode=0o700, exist_ok=True)
    tokens = {tenant: TokenFile(state / "tokens.json").new(tenant, "test")[1] for tenant in tenants}
    section = {"role": "front", "certificates": folder, "nodes": list(nodes), **PATIENT, **fleet}
    overrides: dict[str, Any] = {
        "server": {"state_dir": state, "listen": ["127.0.0.1:0"]},
        "fleet": {key: value for key, value in section.items() if value is not None},
    }
    if policy:
        (directory / "policy.toml").write_text(policy)
        overrides["policy"] = {"file": directory / "policy.toml"}
    async with AsyncExitStack() as stack:
        front = await start_up(load(None, overrides), stack, lambda: load(None, overrides))

        def refuse(nodes: tuple[str, ...]) -> None:
            overrides["fleet"]["refused_nodes"] = nodes
            front.reload_soon()

        address = (await front.server.start())[-1]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield TestedFront(
            address,
            service_grpc.ExecutorServiceStub(channel),
            admin_grpc.AdminServiceStub(channel),
            channel,
            _bearer((state / "token").read_text().strip()),
            {tenant: _bearer(token) for tenant, token in tokens.items()},
            refuse,
            front.is_superseded,
        )


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)
