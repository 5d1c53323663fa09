"""The ports of a session, `session.ports`, of the blocking client: servers in the sandbox, reached from here.

The asyncio client's code forwards the connections, in an event loop in a thread: one thread for each forwarded port.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from executor_client._aio import AsyncTransport
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client._sync import Transport
from executor_client.aio_ports import AsyncPortForward, AsyncSessionPorts, OnError
from executor_client.errors import ExecutorClientError

T = TypeVar("T")

_START_TIMEOUT_S = 60.0


class PortForward(ShortRepr):
    """A local listener that forwards connections to a port of the sandbox. A context manager; or call `close`."""

    _shows = ("port", "url", "connections", "last_error")

    def __init__(self, loop: _Loop, forward: AsyncPortForward, session: object) -> None:
        self._loop: _Loop | None = loop
        self._forward = forward
        self._session = session

    @property
    def port(self) -> int:
        """The port in the sandbox."""
        return self._forward.port

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listener."""
        return self._forward.address

    @property
    def local_port(self) -> int:
        return self._forward.local_port

    @property
    def url(self) -> str:
        """The address for a browser."""
        return self._forward.url

    @property
    def last_error(self) -> ExecutorClientError | None:
        """The error of the last connection that failed or broke; None if none did."""
        return self._forward.last_error

    @property
    def connections(self) -> int:
        """Number of connections accepted so far."""
        return self._forward.connections

    def close(self) -> None:
        """Ends the listener and its connections. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run(self._forward.close())
            loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class SessionPorts(ShortRepr):
    """The ports of one session. Thread-safe."""

    _shows = ("_session.session_id",)

    def __init__(self, session: SessionBase[Transport]) -> None:
        self._session = session

    def forward(
        self, port: int, *, local_port: int = 0, host: str = "127.0.0.1", on_error: OnError | None = None
    ) -> PortForward:
        """Listens on this machine and forwards each connection to a port of the sandbox. Returns once it listens.

        `local_port` 0 chooses a free port. While nothing listens on the sandbox's port, connections end at once, and
        `last_error` has the reason. `on_error` is called, in another thread, with the error of each connection that
        fails or breaks. Raises OSError if this machine can't listen there.
        """
        loop = _Loop(self._session)
        try:
            forward = loop.run(loop.forward(port, local_port, host, on_error))
        except BaseException:
            loop.close()
            raise
        return PortForward(loop, forward, self._session)

    def connect(self, port: int) -> socket.socket:
        """Connects to a port of the sandbox. Raises PreconditionError (PORT_CLOSED) if nothing listens there.

        Returns a local socket whose data is forwarded. Close it like any other socket.
        """
        loop = _Loop(self._session)
        try:
            return loop.run(loop.connect(port))
        except BaseException:
            loop.close()
            raise


class _Loop:
    """An event loop in a thread, with its own transport to the session."""

    def __init__(self, session: SessionBase[Transport]) -> None:
        # Not the session: this thread must not keep it from being collected.
        self._blocking, self._info = session._transport, session.info
        self._transport: AsyncTransport | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="executor-ports", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the thread, and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_TIMEOUT_S)

    async def forward(self, port: int, local_port: int, host: str, on_error: OnError | None) -> AsyncPortForward:
        return await self._ports().forward(port, local_port=local_port, host=host, on_error=on_error)

    async def connect(self, port: int) -> socket.socket:
        """Connects; the thread ends with the connection."""
        theirs, passing = await self._ports().connected_socket(port)
        passing.add_done_callback(lambda _: self._loop.stop())
        return theirs

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_TIMEOUT_S)

    def _ports(self) -> AsyncSessionPorts:
        """Returns the ports. Their channel must be created in the loop that uses it."""
        if self._transport is None:
            self._transport = AsyncTransport(self._blocking.endpoint, self._blocking.timeouts)
        return AsyncSessionPorts(SessionBase(self._transport, self._info))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        if self._transport is not None:
            self._loop.run_until_complete(self._transport.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
