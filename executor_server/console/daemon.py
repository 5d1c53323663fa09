"""The connection to the daemon, which all viewers share: one watch of its sessions, one of approvals, one clock.

A watch that ends is started again. Pages read the results of the watches here, and wait on `Changes`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import structlog
from google.rpc import error_details_pb2, status_pb2

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2_grpc as executor_grpc
from executor_client._core.session_table import SessionTable

CALL_TIME_S = 60.0
"""Seconds for a call that is not a stream."""
SAMPLE_INTERVAL_S = 5.0
SAMPLES_MAX = 720
"""An hour."""
RETRY_S = 0.5
RETRY_MAX_S = 5.0
REFUSED_RETRY_S = 600.0
"""Seconds until a watch for which the token lacks a role is tried again. Each refusal is in the audit log."""
USAGE_AGE_S = 15.0
"""Seconds for which pages share what the tenants have used."""
ATTENDED_S = 60.0
"""Seconds for which a viewer counts as present after a page was sent, even without an open stream."""
APPROVALS_WAIT_S = 2.0
"""Seconds for a page to wait for the first list of requests, when there was no viewer for a while."""
MAX_RESPONSE_BYTES = 64 * 1024 * 1024
MAX_PEM_BYTES = 1024 * 1024
# The daemon tolerates this ping rate.
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", int(RETRY_MAX_S * 1000)),
    # One connection has at most 256 calls at a time; gRPC opens another for more viewers.
    ("grpc.service_config", '{"connectionScaling": {"maxConnectionsPerSubchannel": 8}}'),
    # A proxy named in the environment is not for the path between the console and the daemon.
    ("grpc.enable_http_proxy", 0),
]
_AWAY = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}

_log = structlog.get_logger(__name__)


class DaemonError(Exception):
    """The daemon refused a call, or could not be reached."""

    def __init__(self, status: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        """The name of the gRPC status, as "NOT_FOUND"."""
        self.reason = reason
        """The reason from the closed list in docs/protocol.md; empty if gRPC made the status."""
        self.message = message

    @property
    def is_away(self) -> bool:
        """True if the daemon did not answer."""
        return self.status in _AWAY and not self.reason


class Admin:
    """AdminService: `await admin.GetStatus(request)`, `async for message in admin.TailAudit(request)`.

    Raises DaemonError. With another stub it calls another service.
    """

    def __init__(
        self, channel: grpc.aio.Channel, address: str, token: Callable[[], str], stub: Any = admin_grpc.AdminServiceStub
    ) -> None:
        """`token` is called for each call: the file may appear later, and change. It may raise DaemonError."""
        self._stub: Any = stub(channel)
        self._address = address
        self._token = token

    def _metadata(self) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {self._token()}"),)

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._stub, method)
        if isinstance(call, grpc.aio.UnaryStreamMultiCallable):
            return lambda request: self._stream(call, request)
        return lambda request, time_s=CALL_TIME_S: self._unary(call, request, time_s)

    async def _unary(self, call: Any, request: Any, time_s: float) -> Any:
        try:
            return await call(request, metadata=self._metadata(), timeout=time_s)
        except grpc.aio.AioRpcError as error:
            raise _translated(error, self._address) from error

    async def _stream(self, call: Any, request: Any) -> AsyncIterator[Any]:
        messages = call(request, metadata=self._metadata())
        try:
            async for message in messages:
                yield message
        except grpc.aio.AioRpcError as error:
            raise _translated(error, self._address) from error
        finally:
            messages.cancel()


def _translated(error: grpc.aio.AioRpcError, address: str) -> DaemonError:
    reason = ""
    metadata: Any = error.trailing_metadata() or ()
    for name, value in metadata:
        if name == "grpc-status-details-bin":
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    reason = info.reason
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not reason:
        message = f"The daemon at {address} did not answer in time; load the page again."
    elif error.code() is grpc.StatusCode.UNAVAILABLE and not reason:  # gRPC's own text is in the log
        message = f"No daemon answers at {address}; start it, or name another address with the console's --daemon."
    else:
        message = error.details() or error.code().name
    return DaemonError(error.code().name, reason, message)


class Changes:
    """Counts the changes of something, for any number of tasks that wait for the next one."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, count: int) -> int:
        """Returns the present count, once it differs from `count`. Changes that come together are seen as one."""
        while self.count == count:
            await self._next.wait()
        return self.count


async def again(work: Callable[[], Awaitable[None]], failed: Callable[[DaemonError], float]) -> None:
    """Repeats work that the daemon refused or did not answer, until it ends by itself.

    The waits grow while it fails at once. `failed` gets each error, and returns the minimum of seconds to wait.
    """
    wait_s = RETRY_S
    while True:
        began = time.monotonic()
        try:
            return await work()
        except DaemonError as error:
            least_s = failed(error)
        if time.monotonic() - began > RETRY_MAX_S:
            wait_s = RETRY_S
        await asyncio.sleep(max(least_s, wait_s))
        wait_s = min(2 * wait_s, RETRY_MAX_S)


@dataclass(frozen=True)
class Sample:
    """The daemon's status at a time (seconds since the epoch)."""

    time: float
    status: admin_pb.GetStatusResponse


class Daemon:
    """The console's knowledge of the daemon. Use as an async context manager, which runs the watches."""

    def __init__(self, channel: grpc.aio.Channel, address: str, token: Callable[[], str], *, approves: bool) -> None:
        self._channel = channel
        self._address = address
        self._approves = approves
        self.admin = Admin(channel, address, token)
        self.executor = Admin(channel, address, token, executor_grpc.ExecutorServiceStub)
        """ExecutorService, for the calls about recordings."""
        self._table = SessionTable()
        self.sessions_changes = Changes()
        self.approvals: list[admin_pb.Approval] = []
        """Requests that wait, the oldest first. Watched while there are viewers, if the console may decide."""
        self._approvals_known = False
        self.approvals_changes = Changes()
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        """The last hour, the oldest first."""
        self.samples_changes = Changes()
        self.away_since: float | None = None
        """When the daemon stopped answering (seconds since the epoch). The data here is from before that time."""
        self.away_changes = Changes()
        self.errors: dict[str, DaemonError] = {}
        """The watches that fail now ("sessions", "approvals", "status"), with the daemon's reason."""
        self._usage: tuple[float, asyncio.Task[Any]] | None = None
        self._attended_until = 0.0
        self._attended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def sessions(self) -> Mapping[str, admin_pb.SessionView]:
        """Sessions by id, ended ones too."""
        return self._table.views

    @property
    def status(self) -> admin_pb.GetStatusResponse | None:
        """The last sample's; None before the first one."""
        return self.samples[-1].status if self.samples else None

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an approval; without a watch, when the last sample was taken."""
        return len(self.approvals) if self._approvals_known or self.status is None else self.status.approvals

    async def known_approvals(self) -> list[admin_pb.Approval]:
        """Notes a viewer. Returns the requests once they are known, or after `APPROVALS_WAIT_S`."""
        self.attend()
        if self._approves:
            with suppress(TimeoutError):
                async with asyncio.timeout(APPROVALS_WAIT_S):
                    while not self._approvals_known and "approvals" not in self.errors:
                        await self.approvals_changes.after(self.approvals_changes.count)
        return self.approvals

    async def __aenter__(self) -> Daemon:
        watches: dict[str, Callable[[], Awaitable[None]]] = {"sessions": self._watch_sessions, "status": self._sample}
        if self._approves:
            watches["approvals"] = self._attended_approvals
        self._tasks = [asyncio.create_task(self._keep(name, watch)) for name, watch in watches.items()]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks, *([self._usage[1]] if self._usage is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close(None)

    def attend(self) -> None:
        """Notes a viewer. Requests wait for an approver only while there is one."""
        self._attended_until = time.monotonic() + ATTENDED_S
        self._attended.set()

    async def usage(self) -> Sequence[admin_pb.TenantUsage]:
        """Returns what each tenant has used, at most USAGE_AGE_S old. Raises DaemonError."""
        if self._usage is None or time.monotonic() - self._usage[0] > USAGE_AGE_S:
            call = self.admin.GetUsage(admin_pb.GetUsageRequest(), USAGE_AGE_S)
            self._usage = time.monotonic(), asyncio.create_task(call)
        response = await asyncio.shield(self._usage[1])
        return cast("Sequence[admin_pb.TenantUsage]", response.tenants)

    async def _keep(self, name: str, watch: Callable[[], Awaitable[None]]) -> None:
        """Runs a watch again and again."""
        while True:
            try:
                await again(watch, partial(self._failed, name))
            except Exception:  # noqa: BLE001 - the owner of the watch: it goes on
                _log.exception("watch_failed", watch=name)
                await asyncio.sleep(RETRY_MAX_S)

    def _failed(self, name: str, error: DaemonError) -> float:
        if name not in self.errors and not error.is_away:
            _log.warning("watch_failed", watch=name, status=error.status, reason=error.reason)
        if name == "sessions" and name not in self.errors:
            self.sessions_changes.notify()
        self.errors[name] = error
        if error.is_away and self.away_since is None:
            cause = error.__cause__
            detail = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else error.message
            _log.warning("daemon_does_not_answer", address=self._address, detail=detail)
            self.away_since = time.time()
            self.away_changes.notify()
        return REFUSED_RETRY_S if error.status == "PERMISSION_DENIED" else 0.0

    def _works(self, name: str) -> None:
        self.errors.pop(name, None)
        if self.away_since is not None:
            _log.info("daemon_answers", address=self._address)
            self.away_since = None
            self.away_changes.notify()

    async def _watch_sessions(self) -> None:
        self._table.begin()
        async for message in self.admin.WatchSessions(admin_pb.WatchSessionsRequest()):
            if self._table.take(message):
                self._works("sessions")
                self.sessions_changes.notify()
        raise DaemonError("UNAVAILABLE", "", "The daemon ended the stream.")

    async def _sample(self) -> None:
        status = await self.admin.GetStatus(admin_pb.GetStatusRequest(), SAMPLE_INTERVAL_S)
        self._works("status")
        self.samples.append(Sample(time.time(), status))
        self.samples_changes.notify()
        await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def _attended_approvals(self) -> None:
        """Watches while there are viewers: the daemon counts the watch as an approver, for whom executions wait."""
        await self._attended.wait()
        watch = asyncio.ensure_future(self._watch_approvals())
        try:
            while (left_s := self._attended_until - time.monotonic()) > 0:
                done, _ = await asyncio.wait({watch}, timeout=left_s)
                if done:
                    return await watch
            self._attended.clear()
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError, DaemonError):
                await watch
            self.approvals, self._approvals_known = [], False
            self.approvals_changes.notify()

    async def _watch_approvals(self) -> None:
        async for message in self.admin.WatchApprovals(admin_pb.WatchApprovalsRequest()):
            self._works("approvals")
            self.approvals, self._approvals_known = list(message.approvals), True
            self.approvals_changes.notify()
        raise DaemonError("UNAVAILABLE", "", "The daemon ended the stream.")


def channel_to(address: str, tls_ca: Path | None, *, tls: bool) -> grpc.aio.Channel:
    """Opens a channel, with TLS if `tls`; `tls_ca` (PEM) replaces the system's CAs. Raises OSError."""
    if not tls:
        return grpc.aio.insecure_channel(address, _OPTIONS)
    roots = None
    if tls_ca is not None:
        with tls_ca.open("rb") as file:
            roots = file.read(MAX_PEM_BYTES)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root_certificates=roots), _OPTIONS)
