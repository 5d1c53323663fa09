"""The asyncio client; `client.py` on the event loop, promise by promise."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import _convert, _endpoint, _missing_modules, _requests
from executor_client._aio_transport import AioTransport
from executor_client._endpoint import TlsConfig
from executor_client._lease import ClientLease
from executor_client._limits import (
    BUSY_TIMEOUT_S,
    CALL_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    IMAGE_TIMEOUT_S,
    MAX_CONCURRENT_TOOLS,
    RECONNECT_TIMEOUT_S,
    TAKE_BACK_WAIT_S,
)
from executor_client._requests import LimitsLike
from executor_client._suggest import names_arguments
from executor_client._transport_base import Timeouts
from executor_client._watch import Awaited
from executor_client.aio_session import AsyncSession
from executor_client.errors import ExecutorClientError, InvalidRequest
from executor_client.results import Policy, SessionInfo
from executor_client.waits import OnWait


class AsyncExecutorClient:
    """`ExecutorClient` for asyncio: the same arguments, defaults and errors. To be made where an event loop runs.

    It belongs to that loop, with its sessions. `on_wait`, no coroutine function, is called on it.
    """

    @names_arguments
    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        connect_timeout_s: float | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        image_timeout_s: float = IMAGE_TIMEOUT_S,
        max_concurrent_tools: int = MAX_CONCURRENT_TOOLS,
        on_wait: OnWait | None = None,
    ) -> None:
        timeouts = Timeouts(
            connect_s=connect_timeout_s,
            call_s=call_timeout_s,
            reconnect_s=reconnect_timeout_s,
            busy_s=busy_timeout_s,
            image_s=image_timeout_s,
        )
        self._transport = AioTransport(_endpoint.resolve(address, token, tls), timeouts, on_wait)
        self._max_concurrent_tools = max_concurrent_tools
        self._lease = self._new_lease()

    @property
    def address(self) -> str:
        return self._transport.endpoint.address

    @names_arguments
    async def create_session(
        self,
        image: str | None = None,
        authorized_imports: Iterable[str] = (),
        limits: LimitsLike = None,
        labels: Mapping[str, str] | None = None,
        prelude: str = "",
        *,
        backend: str | None = None,
        network: Iterable[str] = (),
        packages: Iterable[str] = (),
        state: bytes | None = None,
        detached: bool = False,
    ) -> AsyncSession:
        """Makes a session; see `ExecutorClient.create_session`. A task that is cancelled meanwhile leaves none."""
        lease = self._own_lease()
        request = _requests.create_session(
            image=image,
            authorized_imports=authorized_imports,
            limits=limits,
            labels=labels,
            prelude=prelude,
            backend=backend,
            network=network,
            packages=packages,
            lease_id="" if detached else lease.lease_id,
        )
        beginning = _requests.state_of(state)
        try:
            awaited = _requests.sandbox(request)
            response = await self._leased(lease, self._transport.stub.CreateSession, request, awaited)
            session = self._session(_convert.session_from_wire(response.session))
            lease.made(session, session.info)
            _missing_modules.tell(session.info, request.authorized_imports)
        except BaseException as error:
            if _requests.may_be_made(error, heard=self._transport.answered):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TAKE_BACK_WAIT_S):
                        await asyncio.wrap_future(lease.take_back(request.request_id))
            raise
        if beginning is not None:
            try:
                await session._begin_with(beginning)
            except BaseException:
                with contextlib.suppress(ExecutorClientError):
                    await session.close()
                raise
        return session

    async def get_session(self, session_id: str) -> AsyncSession:
        """A session made earlier, perhaps by another process; see `ExecutorClient.get_session`."""
        lease = self._own_lease()
        request = pb.GetSessionRequest(session_id=session_id, lease_id=lease.lease_id)
        response = await self._leased(lease, self._transport.stub.GetSession, request)
        session = self._session(_convert.session_from_wire(response.session))
        lease.found(session, session.info)
        return session

    async def list_sessions(self) -> list[SessionInfo]:
        """The caller's own sessions."""
        response = await self._transport.call(self._transport.stub.ListSessions, pb.ListSessionsRequest())
        return [_convert.session_from_wire(each) for each in response.sessions]

    async def get_policy(self) -> Policy:
        """What may be asked for."""
        response = await self._transport.call(self._transport.stub.GetPolicy, pb.GetPolicyRequest())
        return _convert.policy_from_wire(response.policy)

    async def close(self) -> None:
        """Ends the sessions that belong to this client alone, and closes the connection; see `ExecutorClient.close`."""
        self._transport.check_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.wrap_future(self._lease.end())
        await self._transport.close()

    def _new_lease(self) -> ClientLease:
        return ClientLease(self._transport.endpoint, self._transport.timeouts)

    def _own_lease(self) -> ClientLease:
        if self._lease.is_foreign:
            self._lease = self._new_lease()
        return self._lease

    async def _leased(
        self, lease: ClientLease, method: Callable[..., Any], request: Any, awaited: Awaited | None = None
    ) -> Any:
        try:
            response = await self._transport.call(method, request, awaited)
        except InvalidRequest as error:
            if not lease.is_refusal(request, error):
                raise
            response = await self._transport.call(method, request, awaited)
            lease.unknown()
        return response

    def _session(self, info: SessionInfo) -> AsyncSession:
        return AsyncSession(self._transport, info, self._lease, max_concurrent_tools=self._max_concurrent_tools)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
