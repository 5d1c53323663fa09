"""The sync client: connects to a daemon, makes sessions and finds them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import _convert, _endpoint, _missing_modules, _requests
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
from executor_client._transport import Transport
from executor_client._transport_base import Timeouts
from executor_client._watch import Awaited
from executor_client.errors import ExecutorClientError, InvalidRequest
from executor_client.results import Policy, SessionInfo
from executor_client.session import Session
from executor_client.waits import OnWait


class ExecutorClient:
    """A connection to a daemon, made on first use. Thread-safe.

    `address` is a gRPC target ("host:port", "unix:PATH"); without one, $EXECUTOR_ADDRESS, else this user's own daemon.
    `token` likewise: $EXECUTOR_TOKEN, else the local daemon's file. None is needed where the daemon knows us otherwise:
    by the certificate of a TlsConfig, or as a user at its own Unix socket.

    `connect_timeout_s` bounds the wait for a daemon that was never heard of; without it, five seconds, and none at all
    where it is certain that no daemon is there or that it can't be talked to like this. `reconnect_timeout_s` bounds
    the wait for one that went away, `busy_timeout_s` for one that has no room now and says when to ask again (0: not at
    all), `image_timeout_s` for one that fetches the image of a session (0: not at all), `call_timeout_s` each call but
    `execute`.

    `on_wait` is told of each `Wait` that lasts longer than a second, and again now and then, in a thread of the
    client's own. The call's end waits for it, so it must not block. What it raises is logged.

    The client is the owner of the sessions that it makes, unless they are detached. They end when it is closed, when
    the interpreter exits, when nothing refers to them any more, and, when the process was killed or can't reach the
    daemon, `owner_grace_s` (a limit) later. A session that another client found by `get_session` goes on with that one.

    Raises ConfigurationError.
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
        self._transport = Transport(_endpoint.resolve(address, token, tls), timeouts, on_wait)
        self._max_concurrent_tools = max_concurrent_tools
        self._lease = self._new_lease()

    @property
    def address(self) -> str:
        return self._transport.endpoint.address

    @names_arguments
    def create_session(
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
    ) -> Session:
        """Makes a session. Raises PolicyViolationError when more is asked for than the policy grants.

        What is not asked for is as the policy has it. `network` names hosts that code wants to reach, `packages` what
        it wants to have installed; no policy grants either yet.

        `state` is what `Session.export_state` gave, of a session of any backend: the new session begins with it, and
        `Session.restored` says what was restored. When nothing of it can be, there is no session. Raises InvalidRequest
        for what is no such state, AuthorizationError for one that another daemon or tenant has written.

        A `detached` session belongs to nobody: it outlives this client, and only its idle time, its age and `close` end
        it. Any other ends with the client, or when the `Session` is collected; see the class.
        """
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
            response = self._leased(lease, self._transport.stub.CreateSession, request, _requests.sandbox(request))
            session = self._session(_convert.session_from_wire(response.session))
            lease.made(session, session.info)
            _missing_modules.tell(session.info, request.authorized_imports)
        except BaseException as error:
            if _requests.may_be_made(error, heard=self._transport.answered):
                with contextlib.suppress(TimeoutError):
                    lease.take_back(request.request_id).result(TAKE_BACK_WAIT_S)
            raise
        if beginning is not None:
            try:
                session._begin_with(beginning)
            except BaseException:
                with contextlib.suppress(ExecutorClientError):
                    session.close()
                raise
        return session

    def get_session(self, session_id: str) -> Session:
        """A session made earlier, perhaps by another process. Host tools must be registered anew.

        Unless it is detached it is held by this client too, from here on: it goes on when the one that made it ends.
        """
        lease = self._own_lease()
        request = pb.GetSessionRequest(session_id=session_id, lease_id=lease.lease_id)
        response = self._leased(lease, self._transport.stub.GetSession, request)
        session = self._session(_convert.session_from_wire(response.session))
        lease.found(session, session.info)
        return session

    def list_sessions(self) -> list[SessionInfo]:
        """The caller's own sessions."""
        response = self._transport.call(self._transport.stub.ListSessions, pb.ListSessionsRequest())
        return [_convert.session_from_wire(each) for each in response.sessions]

    def get_policy(self) -> Policy:
        """What may be asked for."""
        response = self._transport.call(self._transport.stub.GetPolicy, pb.GetPolicyRequest())
        return _convert.policy_from_wire(response.policy)

    def close(self) -> None:
        """Ends the sessions that belong to this client alone, and closes the connection. Idempotent.

        A daemon that does not answer is not waited for long: it ends them by itself, after their `owner_grace_s`.
        """
        with contextlib.suppress(TimeoutError):
            self._lease.end().result(CLOSE_TIMEOUT_S)
        self._transport.close()

    def _new_lease(self) -> ClientLease:
        return ClientLease(self._transport.endpoint, self._transport.timeouts)

    def _own_lease(self) -> ClientLease:
        """This process's: what was forked does not end what is its parent's."""
        if self._lease.is_foreign:
            self._lease = self._new_lease()
        return self._lease

    def _leased(
        self, lease: ClientLease, method: Callable[..., Any], request: Any, awaited: Awaited | None = None
    ) -> Any:
        """A call that names the lease, unless the daemon is one of before there were leases."""
        try:
            response = self._transport.call(method, request, awaited)
        except InvalidRequest as error:
            if not lease.is_refusal(request, error):
                raise
            response = self._transport.call(method, request, awaited)
            lease.unknown()
        return response

    def _session(self, info: SessionInfo) -> Session:
        return Session(self._transport, info, self._lease, max_concurrent_tools=self._max_concurrent_tools)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
