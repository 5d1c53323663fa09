"""A front for the tests of a node: it links over mutual TLS, answers reports while `renews` is set, and keeps them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_server.core import Principal
from executor_server.fleet.api import wire
from executor_server.fleet.api.wire import PRINCIPAL_KEY, principal_bytes
from executor_server.fleet.membership import (
    Control,
    FrontHello,
    NodeHello,
    NodeReport,
    NodeSession,
    Renewal,
    fingerprint_of,
    read_credentials,
)
from tests.support.polling import eventually_async

INTERVAL_S = 0.1
LOCAL = Principal("local", "test", is_admin=True)


INSTANCE = "i1"


def metadata_of(principal: Principal, instance: str = INSTANCE) -> Sequence[tuple[str, bytes]]:
    return ((PRINCIPAL_KEY, principal_bytes(principal, instance)),)


def control_of(policy: bytes = b"", state_key: bytes = b"") -> Control:
    return Control(policy, fingerprint_of(policy, state_key), state_key)


class FakeFront:
    """One front, with the certificate of a folder; `hello` says what it is."""

    def __init__(self, folder: Path, address: str, node: str, hello: FrontHello | None = None) -> None:
        self.hello = hello or hello_of()
        self.node = node
        self.node_hello: NodeHello | None = None
        self.reports: list[NodeReport] = []
        self.egress_bytes: Mapping[str, int] = {}
        self.renews = True
        credentials = read_credentials(folder, "front")
        self.channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate),
            options=(
                ("grpc.ssl_target_name_override", f"{node}.node.fleet.internal"),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )
        self.service: Any = service_grpc.ExecutorServiceStub(self.channel)
        self.admin: Any = admin_grpc.AdminServiceStub(self.channel)
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()  # gRPC refuses a write while another one is under way

    async def link(self) -> NodeHello:
        """Links, and begins to answer reports. Raises AioRpcError when the node refuses it."""
        call: Any = fleet_grpc.FleetServiceStub(self.channel).Link()
        self._call = call
        await call.write(wire.request_to(self.hello))
        response = await call.read()
        if response is grpc.aio.EOF:  # type: ignore[attr-defined]
            await call.wait_for_connection()  # raises the status that ended the call
            raise AssertionError("the node ended the link without a status")
        hello = wire.response_from(response, self.node)
        assert isinstance(hello, NodeHello)
        self.node_hello = hello
        self._reading = asyncio.create_task(self._read(call))
        return hello

    async def _read(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            report = wire.response_from(response, self.node)
            assert isinstance(report, NodeReport)
            self.reports.append(report)
            if self.renews:
                await self.send(Renewal(report.sequence, self.egress_bytes))

    async def send(self, message: Control | Renewal | FrontHello) -> None:
        async with self._sending:
            await self._call.write(wire.request_to(message))

    async def end_of_link(self) -> tuple[grpc.StatusCode, str]:
        """Waits for the status that ends the link."""
        async with asyncio.timeout(30):
            return await self._call.code(), await self._call.details()

    async def unlink(self) -> None:
        """Ends the link; the connection stays."""
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def close(self) -> None:
        await self.unlink()
        await self.channel.close(None)

    # -- what it knows

    async def reported(self, holds: Callable[[NodeReport], Any], *, earlier: bool = False) -> NodeReport:
        """Returns the first report from now on for which `holds` returns something true; with `earlier`, of all.

        What only one report says may have been reported before a test looks for it.
        """
        seen = 0 if earlier else len(self.reports)

        def found() -> NodeReport | None:
            return next((each for each in self.reports[seen:] if holds(each)), None)

        report = await eventually_async(found)
        assert report is not None, self.reports[-1:]
        return report

    @property
    def epoch(self) -> int:
        """The epoch in which the node linked last."""
        assert self.node_hello is not None
        return self.node_hello.epoch

    @property
    def sessions(self) -> dict[str, NodeSession]:
        """The sessions of the node, put together from its reports."""
        known: dict[str, NodeSession] = {}
        for report in self.reports:
            known = {} if report.full else known
            known |= {session.session_id: session for session in report.opened}
            for session_id in report.closed:
                known.pop(session_id, None)
        return known

    async def control(self, control: Control) -> NodeReport:
        """Sends a control; returns the report that says that it is in force."""
        await self.send(control)
        return await self.reported(lambda report: report.control_fingerprint == control.fingerprint)

    # -- calls for clients

    async def delete(self, session: Any, principal: Principal = LOCAL) -> None:
        request = service_pb.DeleteSessionRequest(session_id=session.session_id)
        await self.service.DeleteSession(request, metadata=metadata_of(principal), timeout=60)

    async def create(self, principal: Principal = LOCAL, **fields: Any) -> Any:
        request = service_pb.CreateSessionRequest(**{"request_id": secrets.token_hex(8), **fields})
        answer = await self.service.CreateSession(request, metadata=metadata_of(principal), timeout=60)
        return answer.session


def hello_of(**fields: Any) -> FrontHello:
    values = {
        "front_id": "front",
        "term": 1,
        "report_interval_s": INTERVAL_S,
        "lease_s": 3.0,
        "fence_s": 10.0,
        "instance": INSTANCE,
    }
    return FrontHello(**{**values, **fields})


@asynccontextmanager
async def front_of(folder: Path, address: str, node: str, **hello: Any) -> AsyncIterator[FakeFront]:
    """A front that is linked already."""
    front = FakeFront(folder, address, node, hello_of(**hello))
    try:
        await front.link()
        yield front
    finally:
        await front.close()
