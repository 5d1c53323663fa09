# Made of _aio/session_transport.py by tools/unasync.py: change that, and run `make unasync`.
"""The blocking client's transport of one session, over the client's own to its daemon."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core.channel import EventsRequest
from executor_client._core.execution import Execution
from executor_client._core.process import FollowedProcess
from executor_client._core.tracing import Metadata
from executor_client._core.transport_base import Timeouts
from executor_client._core.waiting import Awaited, Waits
from executor_client._sync.channel import EventStream
from executor_client._sync.transport import Transport
from executor_client.errors import ExecutorClientError, NotFoundError
from executor_client.results import SessionInfo

T = TypeVar("T")


class SessionTransport:
    """Makes the calls of one session, and none after its end."""

    def __init__(self, daemon: Transport, info: SessionInfo) -> None:
        self.daemon = daemon
        self._session_id = info.session_id
        self._is_of_fleet = bool(info.node)
        self._is_closed = False

    @property
    def stub(self) -> Any:
        return self.daemon.stub

    @property
    def timeouts(self) -> Timeouts:
        return self.daemon.timeouts

    # Calls

    def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with one answer."""
        return self.daemon.once(method, request, timeout_s)

    def upload(self, method: Callable[..., Any], requests: Any, timeout_s: float | None = None) -> Any:
        """Makes one attempt of a call with a stream of requests."""
        return self.daemon.upload(method, requests, timeout_s)

    def read(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Generator[Any, None]:
        """Makes one attempt of a call with a stream of answers. A reader that stops early cancels the call."""
        return self.daemon.read(method, request, timeout_s)

    def call(self, method: Callable[..., Any], request: Any, awaited: Awaited | None = None) -> Any:
        """Makes a call with one answer, repeated where that may help. `awaited` names the wait in reports."""
        self.check()
        return self.daemon.call(method, request, awaited)

    def repeat(self, attempt: Callable[[], T], *, within_s: float = math.inf, awaited: Awaited | None = None) -> T:
        """Repeats an attempt as `Transport.repeat` does."""
        self.check()
        return self.daemon.repeat(attempt, within_s=within_s, awaited=awaited)

    # Executions

    def waits(self) -> Waits:
        return self.daemon.waits()

    def execution(self, request: pb.ExecuteRequest, trace: Metadata, waits: Waits) -> Execution:
        """Returns the client's state of an execution."""
        self.check()
        return self.daemon.execution(request, trace, waits)

    def process(
        self, request: pb.StartProcessRequest | None, process_id: str, trace: Metadata, waits: Waits
    ) -> FollowedProcess:
        """Returns the client's state of a process."""
        self.check()
        return self.daemon.process(self._session_id, process_id, request, trace, waits)

    def open(self, request: EventsRequest, trace: Metadata, timeout_s: float | None = None) -> EventStream:
        """Starts a stream of the events of an execution or a process, which all belong to the trace of the first."""
        return self.daemon.open(request, trace, timeout_s)

    # The end

    def is_lost(self, error: ExecutorClientError) -> bool:
        """True when the front of a fleet says by this error that the session is lost with its node."""
        return self._is_of_fleet and error.reason == "SESSION_LOST"

    def closed(self) -> None:
        """Lets no call begin from here on: the session was deleted by this client."""
        self._is_closed = True

    def check(self) -> None:
        """Raises NotFoundError when the session was closed here."""
        if self._is_closed:
            raise NotFoundError(
                "this session was closed, by its close() or at the end of its `with` block; make another one "
                "(create_session)",
                reason="SESSION_CLOSED",
            )
