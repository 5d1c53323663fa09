"""The network of a sandbox on another machine: the proxy runs there, and is driven over a stream.

Theory of operation. The listener of such a sandbox can't be passed to this host, so a command on the machine takes it
and serves it (guest/cloud/egress.py). The stream of that command carries the control protocol. When the stream breaks,
the command is started again with the next token of the guest's chain, and ends its predecessor. Programs that connect
meanwhile wait in the kernel's queue, as during a restart of this host's proxy.

The machine belongs to one session, so the proxy's reports concern no other session. The proxy is as untrusted as a
sandbox, because hostile bytes reach it: each report is checked, and a stream that breaks the protocol is closed.

The machine's own network is the outer wall: it allows only the hosts of the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, cast

import structlog

from executor_server.core import NetworkRules, SandboxFailure
from executor_server.guest.egress.control_protocol import MAX_REPORT_BYTES, ControlError, LineReader, encode
from executor_server.guest.egress.host_names import HostPattern
from executor_server.network.egress.bound import BoundSession
from executor_server.network.egress.commands import Commands
from executor_server.network.egress.interface import EgressError, RemoteListener

_START_S = 30.0
_ANSWER_S = 15.0
_SETTLE_S = 3.0
_RELEASE_S = 7.0
_PING_INTERVAL_S = 10.0
_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 10.0

_log = structlog.get_logger(__name__)


class MachineProxy:
    """The proxy of one session, on the machine of its sandbox. `open` it; `close` it in every case."""

    def __init__(self, session: BoundSession, listener: RemoteListener, internal: Sequence[str]) -> None:
        self.session = session
        self._listener = listener
        self._internal = list(internal)
        self._stream: _Stream | None = None  # the stream of the proxy that serves the session
        self._supervisor: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Starts to serve the listener. Raises EgressError."""
        try:
            async with asyncio.timeout(_START_S):
                await self._allow(self.session.rules)
                stream = await self._begin()
        except TimeoutError:
            raise EgressError(f"The egress proxy on the machine did not start within {_START_S:g} seconds.") from None
        self._supervisor = asyncio.create_task(self._supervise(stream))

    def send(self, message: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.commands.send(message)

    async def allow(self, rules: NetworkRules) -> None:
        """Lets the machine's own network reach the hosts of new rules, which the proxy has already."""
        try:
            await self._allow(rules)
        except EgressError as error:
            _log.error("machine_network_not_changed", session_id=self.session.session_id, reason=str(error))

    async def settle(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(EgressError):
                await self._stream.commands.ask({"type": "settle", "session": self.session.session_id}, _SETTLE_S)

    async def close(self) -> None:
        """Ends the session's connections, and the proxy. Idempotent."""
        if self._stream is not None and not self._closed:
            self._closed = True
            with contextlib.suppress(EgressError):
                await self._stream.commands.ask({"type": "end", "session": self.session.session_id}, _RELEASE_S)
        self._closed = True
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervisor
        self.session.close()

    # ------------------------------------------------------------------------------------------------------------------

    async def _allow(self, rules: NetworkRules) -> None:
        try:
            await self._listener.allow_hosts(hosts_of(rules))
        except SandboxFailure as failure:
            raise EgressError(f"The machine's own network can't be opened: {failure}.") from failure

    async def _begin(self) -> _Stream:
        """Starts a proxy on the machine and binds the session to it. Raises EgressError."""
        stream = _Stream(self.session)
        try:
            await self._listener.open(lambda: stream)
            message = {"type": "listen", "token": self._listener.next_token(), "internal": self._internal}
            await stream.commands.ask(message, _ANSWER_S)
            await stream.commands.ask(self.session.bind_message(), _ANSWER_S)
        except SandboxFailure as failure:
            stream.abort()
            raise EgressError(f"The egress proxy on the machine can't be started: {failure}.") from failure
        except BaseException:
            stream.abort()
            raise
        if self.session.exhausted is not None:
            stream.commands.send(self.session.exhaust_message())
        self._stream = stream
        return stream

    async def _supervise(self, stream: _Stream | None) -> None:
        """Keeps a proxy running until `close`."""
        pause_s = 0.0
        while True:
            if stream is not None:
                try:
                    pause_s = 0.0
                    why = await _watch(stream)
                finally:
                    self._stream = None
                    self.session.abandon()
                    stream.abort()
                _log.warning("machine_proxy_restarts", session_id=self.session.session_id, reason=why)
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_BACKOFF_S, max(_BACKOFF_S, 2 * pause_s))
            stream = await self._begin_again()

    async def _begin_again(self) -> _Stream | None:
        try:
            async with asyncio.timeout(_START_S):
                return await self._begin()
        except (EgressError, TimeoutError) as error:
            _log.warning("machine_proxy_not_started", session_id=self.session.session_id, reason=str(error))
            return None


async def _watch(stream: _Stream) -> str:
    """Returns the reason of the stream's end. Sends regular requests, since an idle proxy ends itself."""
    while True:
        done, _ = await asyncio.wait({stream.ended}, timeout=_PING_INTERVAL_S)
        if done:
            return stream.ended.result()
        try:
            await stream.commands.ask({"type": "settle", "session": ""}, _ANSWER_S)
        except EgressError as error:
            return str(error)


class _Stream(asyncio.Protocol):
    """The daemon's end of the control protocol over one command's streams."""

    def __init__(self, session: BoundSession) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.commands = Commands(self._write, lambda name: session if name == session.session_id else None, self._end)
        self._lines = LineReader(MAX_REPORT_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                self.commands.take(message)
        except ControlError as error:
            self._end(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("its stream ended" if exc is None else f"its stream broke: {type(exc).__name__}")

    def abort(self) -> None:
        self._end("it was given up")
        if self._transport is not None:
            self._transport.abort()

    def _write(self, message: dict[str, Any], _descriptor: int | None) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)
            self.commands.fail_all()


def hosts_of(rules: NetworkRules) -> list[str]:
    """Returns the hosts in the cloud's form: names, and `*.` before a domain. The proxy checks the ports."""
    patterns = [HostPattern.parse(text) for text in rules.allowed]
    return sorted({f"*.{pattern.host}" if pattern.wildcard else pattern.host for pattern in patterns})
