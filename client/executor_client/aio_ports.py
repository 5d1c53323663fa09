"""The ports of a session, `session.ports`, of the asyncio client: servers in the sandbox, reached from here.

A connection goes through the daemon to a TCP port on the sandbox's loopback; the sandbox needs no network. Each
connection is one call. It ends with either side, with the session, or with the daemon, and is never resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio import AsyncChannel, AsyncTransport, shielded
from executor_client._core.arguments import checks_calls
from executor_client._core.quiet_grpc import grpc
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client.errors import ExecutorClientError, InvalidRequest, ProtocolError

OnError = Callable[[ExecutorClientError], object]

_PIECE_BYTES = 256 * 1024
_PORT_MAX = 65_535
_NO_LINGER = struct.pack("ii", 1, 0)


class AsyncPortForward(ShortRepr):
    """A local listener that forwards connections to a port of the sandbox. A context manager; or call `close`."""

    _shows = ("port", "url", "connections", "last_error")

    def __init__(self, session: SessionBase[AsyncTransport], port: int, on_error: OnError | None = None) -> None:
        self._session = session
        self._on_error = on_error
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = port
        """The port in the sandbox."""
        self.address: tuple[str, int] = ("", 0)
        """Host and port of the listener."""
        self.last_error: ExecutorClientError | None = None
        """The error of the last connection that failed or broke; None if none did."""
        self.connections = 0
        """Number of connections accepted so far."""

    @property
    def local_port(self) -> int:
        return self.address[1]

    @property
    def url(self) -> str:
        """The address for a browser."""
        host, port = self.address
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    async def _listen(self, host: str, local_port: int) -> None:
        self._server = await asyncio.start_server(self._accept, host, local_port)
        self.address = self._server.sockets[0].getsockname()[:2]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.connections += 1
        try:
            await _open_and_pass_on(self._session, self.port, reader, writer)
        except ExecutorClientError as error:
            self.last_error = error
            if self._on_error is not None:
                self._on_error(error)
        except asyncio.CancelledError:
            pass  # `close` cancelled this task, which only serves this connection
        finally:
            self._connections.discard(task)

    async def close(self) -> None:
        """Ends the listener and its connections. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in (running := list(self._connections)):
            task.cancel()

        async def end() -> None:
            await asyncio.gather(*running, return_exceptions=True)
            await server.wait_closed()

        await shielded(end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


@checks_calls
class AsyncSessionPorts(ShortRepr):
    """The ports of one session."""

    _shows = ("_session.session_id",)

    def __init__(self, session: SessionBase[AsyncTransport]) -> None:
        self._session = session
        self._passing: set[asyncio.Task[None]] = set()

    async def forward(
        self, port: int, *, local_port: int = 0, host: str = "127.0.0.1", on_error: OnError | None = None
    ) -> AsyncPortForward:
        """Listens on this machine and forwards each connection to a port of the sandbox. Returns once it listens.

        `local_port` 0 chooses a free port. While nothing listens on the sandbox's port, connections end at once, and
        `last_error` has the reason. `on_error` is called with the error of each connection that fails or breaks. Raises
        OSError if this machine can't listen there.
        """
        forward = AsyncPortForward(self._session, _checked(port), on_error)
        await forward._listen(host, local_port)  # a constructor can't await
        return forward

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to a port of the sandbox. Raises PreconditionError (PORT_CLOSED) if nothing listens there."""
        theirs, _ = await self.connected_socket(port)
        return await _streams(theirs)

    async def connected_socket(self, port: int) -> tuple[socket.socket, asyncio.Task[None]]:
        """Connects to a port of the sandbox. Returns a local socket, and the task that forwards its data."""
        call = await _opened(self._session, _checked(port))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(call.call.cancel)
            ours, theirs = _connected_pair()
            on_failure.callback(theirs.close)
            reader, writer = await _streams(ours)
            on_failure.pop_all()
        passing = asyncio.create_task(_pass_on(call, reader, writer))
        self._passing.add(passing)
        passing.add_done_callback(self._note_end)
        return theirs, passing

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._passing.discard(task)
        if not task.cancelled():
            task.exception()  # marked as seen: the reader of the connection notices its end


def _connected_pair() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a loopback connection. Unlike with socketpair(), one end can reset the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, peer = listener.accept()
        while peer != theirs.getsockname():  # another process connected first
            ours.close()
            ours, peer = listener.accept()
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


async def _streams(connected: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns the streams of a socket. Closes it if it fails."""
    try:
        return await asyncio.open_connection(sock=connected)
    except BaseException:
        connected.close()
        raise


def _reset(writer: asyncio.StreamWriter) -> None:
    """Resets a local connection, so that its reader does not take a truncated stream for a complete one."""
    with contextlib.suppress(OSError):  # it is closed already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()


def _checked(port: int) -> int:
    if not 1 <= int(port) <= _PORT_MAX:
        raise InvalidRequest(f"port {port} is out of range: use 1 to {_PORT_MAX}")
    return port


async def _open_and_pass_on(
    session: SessionBase[AsyncTransport], port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Opens a connection to a port and forwards data until both directions have ended. Closes the writer."""
    try:
        call = await _opened(session, port)
    except BaseException:
        _reset(writer)
        raise
    await _pass_on(call, reader, writer)


@dataclass(frozen=True)
class _Call:
    """An open call: gRPC's object to write to, and the messages that come from it."""

    channel: AsyncChannel
    call: Any
    messages: AsyncIterator[Any]


async def _opened(session: SessionBase[AsyncTransport], port: int) -> _Call:
    """Makes the call and waits until the connection is open. Raises ExecutorClientError."""
    channel = session._open().channel
    async with channel.calling():
        call = channel.stub.ForwardPort(metadata=channel.metadata())
        messages = aiter(call)
        try:
            await call.write(pb.ForwardPortRequest(open=pb.OpenPort(session_id=session.session_id, port=port)))
            await anext(messages)
        except (StopAsyncIteration, asyncio.InvalidStateError) as error:
            # The call has ended already. Reading raises its error, if there is one.
            call.cancel()
            async for _ in messages:
                pass
            raise ProtocolError("a connection to a port ended before it was open") from error
        except BaseException:
            call.cancel()
            raise
    return _Call(channel, call, messages)


async def _pass_on(opened: _Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sending = asyncio.create_task(_send(opened.call, reader))
    try:
        async with opened.channel.calling():
            async for message in opened.messages:
                if message.WhichOneof("part") == "data":
                    writer.write(message.data)
                    await writer.drain()
                elif writer.can_write_eof():
                    writer.write_eof()
    except BaseException:
        _reset(writer)
        raise
    finally:
        opened.call.cancel()
        sending.cancel()
        writer.close()
        await shielded(lambda: _ended(sending, writer))


async def _ended(sending: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
    await asyncio.gather(sending, return_exceptions=True)
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _send(call: Any, reader: asyncio.StreamReader) -> None:
    """Forwards local data until its end. The other direction notices when the call breaks.

    A local reset ends the call; otherwise the program could wait for its client for ever.
    """
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        try:
            while data := await reader.read(_PIECE_BYTES):
                await call.write(pb.ForwardPortRequest(data=data))
        except ConnectionError:
            call.cancel()
            return
        await call.write(pb.ForwardPortRequest(shutdown=pb.Shutdown()))
        await call.done_writing()
