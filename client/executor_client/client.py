"""The sync client: connects to a daemon, makes sessions and finds them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import _convert, _endpoint, _missing_modules, _requests
from executor_client._endpoint import TlsConfig
from executor_client._limits import (
    BUSY_TIMEOUT_S,
    CALL_TIMEOUT_S,
    IMAGE_TIMEOUT_S,
    MAX_CONCURRENT_TOOLS,
    RECONNECT_TIMEOUT_S,
)
from executor_client._requests import LimitsLike
from executor_client._transport import Transport
from executor_client._transport_base import Timeouts
from executor_client.errors import ExecutorClientError
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

    Raises ConfigurationError. Closing the client leaves its sessions: `get_session` finds them again until they expire.
    """

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

    @property
    def address(self) -> str:
        return self._transport.endpoint.address

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
    ) -> Session:
        """Makes a session. Raises PolicyViolationError when more is asked for than the policy grants.

        What is not asked for is as the policy has it. `network` names hosts that code wants to reach, `packages` what
        it wants to have installed; no policy grants either yet.

        `state` is what `Session.export_state` gave, of a session of any backend: the new session begins with it, and
        `Session.restored` says what was restored. When nothing of it can be, there is no session. Raises InvalidRequest
        for what is no such state, AuthorizationError for one that another daemon or tenant has written.
        """
        request = _requests.create_session(
            image=image,
            authorized_imports=authorized_imports,
            limits=limits,
            labels=labels,
            prelude=prelude,
            backend=backend,
            network=network,
            packages=packages,
        )
        beginning = _requests.state_of(state)
        awaited = _requests.sandbox(request)
        response = self._transport.call(self._transport.stub.CreateSession, request, awaited)
        session = self._session(_convert.session_from_wire(response.session))
        _missing_modules.tell(session.info, request.authorized_imports)
        if beginning is not None:
            try:
                session._begin_with(beginning)
            except BaseException:
                with contextlib.suppress(ExecutorClientError):
                    session.close()
                raise
        return session

    def get_session(self, session_id: str) -> Session:
        """A session made earlier, perhaps by another process. Host tools must be registered anew."""
        request = pb.GetSessionRequest(session_id=session_id)
        response = self._transport.call(self._transport.stub.GetSession, request)
        return self._session(_convert.session_from_wire(response.session))

    def list_sessions(self) -> list[SessionInfo]:
        """The caller's own sessions."""
        response = self._transport.call(self._transport.stub.ListSessions, pb.ListSessionsRequest())
        return [_convert.session_from_wire(each) for each in response.sessions]

    def get_policy(self) -> Policy:
        """What may be asked for."""
        response = self._transport.call(self._transport.stub.GetPolicy, pb.GetPolicyRequest())
        return _convert.policy_from_wire(response.policy)

    def close(self) -> None:
        """Closes the connection. Sessions go on; see the class."""
        self._transport.close()

    def _session(self, info: SessionInfo) -> Session:
        return Session(self._transport, info, max_concurrent_tools=self._max_concurrent_tools)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
