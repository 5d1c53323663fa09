"""The forwarded connections of one sandbox, in the supervisor's loop.

Each direction has a window. The program's data is read as far as the daemon has granted, so a client that reads nothing
blocks the program and not the supervisor. The daemon's data waits here, at most PORT_WINDOW_BYTES, until the program
reads it. A connection belongs to the daemon that opened it. The next daemon knows none of them, and all are reset.
"""

from __future__ import annotations

from ..wire.frames import CHUNK_BYTES, FrameError
from ..wire.lean import deque, socket
from ..wire.loop import READ, WRITE, Loop
from ..wire.process_messages import PORT_WINDOW_BYTES, ClosePort, GrantPort, OpenPort, PortInput, PortOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Union

    from ..wire.guest_channel import Channel

    PortRequest = Union[OpenPort, PortInput, GrantPort, ClosePort]

REQUESTS = (OpenPort, PortInput, GrantPort, ClosePort)
# Connections at one time; the daemon allows at most as many.
_MAX_CONNECTIONS = 1024
# Both loopback addresses: servers listen on either.
_ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_EINPROGRESS = 115
# Reads of one connection in a turn of the loop, so that one can't starve the others.
_READS_PER_EVENT = 4
# struct sockaddr of the family AF_UNSPEC.
_NO_ADDRESS = bytes(16)


class Connections:
    """Owns the connections, by the `op` that opened each."""

    def __init__(self, channel: Channel, loop: Loop) -> None:
        self._channel = channel
        self._loop = loop
        self._open: dict[int, _Connection] = {}
        self._paused = False

    def take(self, request: PortRequest, body: bytes) -> None:
        """Handles a request of the daemon. One about an ended connection is ignored."""
        if isinstance(request, OpenPort):
            self._begin(request)
            return
        connection = self._open.get(request.op)
        if connection is None:
            return
        if isinstance(request, PortInput):
            connection.write(body, eof=request.eof)
        elif isinstance(request, GrantPort):
            connection.grant(request.granted)
        else:
            connection.close(reset=True)

    def _begin(self, request: OpenPort) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            self._channel.fail(request.op, "queue_full", f"{_MAX_CONNECTIONS} connections to ports are open")
            return
        connection = _Connection(request, self._channel, self._loop, self._open)
        self._open[request.op] = connection
        connection.begin()

    def pause(self, paused: bool) -> None:
        """Stops reading while the daemon takes nothing, or starts again."""
        if paused != self._paused:
            self._paused = paused
            for connection in tuple(self._open.values()):
                connection.pause(paused)

    def reset_all(self) -> None:
        """Resets all connections: another daemon has connected, which does not know them."""
        for connection in tuple(self._open.values()):
            connection.close(reset=True)


class _Connection:
    """One connection. At its end it removes itself from `opened`, the dictionary of all connections."""

    def __init__(self, request: OpenPort, channel: Channel, loop: Loop, opened: dict[int, _Connection]) -> None:
        self._op = request.op
        self._port = request.port
        self._granted = request.granted  # bytes that may be sent to the daemon
        self._channel = channel
        self._loop = loop
        self._opened = opened
        self._addresses = list(_ADDRESSES)
        self._sock: Optional[socket.socket] = None
        self._connected = False
        self._paused = False
        self._sent_bytes = 0
        self._input: deque[memoryview] = deque()
        self._taken_bytes = 0  # bytes of the daemon's data that were passed on to the program
        self._window_bytes = PORT_WINDOW_BYTES  # bytes that the daemon was granted
        self._received_bytes = 0
        self._input_ends = False
        self._input_ended = False
        self._output_ended = False

    # -- opening -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tries the next address; refuses if none is left."""
        while self._addresses:
            family, host = self._addresses.pop(0)
            try:
                self._sock = socket.socket(family, socket.SOCK_STREAM)
                self._sock.setblocking(False)
                problem = self._sock.connect_ex((host, self._port))
            except OSError as error:
                problem = error.errno or 1
            if problem == 0:
                self._established()
                return
            if problem == _EINPROGRESS and self._sock is not None:
                self._loop.watch(self._sock.fileno(), WRITE, self._on_connected)
                return
            self._drop_socket()
        self._end("port_closed", f"nothing listens on port {self._port} in the sandbox")

    def _on_connected(self, _events: int) -> None:
        assert self._sock is not None
        if self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._drop_socket()
            self.begin()
        else:
            self._established()

    def _established(self) -> None:
        assert self._sock is not None
        self._connected = True
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel.send(PortOutput(op=self._op, granted=self._window_bytes))
        self._flush()

    # -- passing on ----------------------------------------------------------------------------------------------

    def grant(self, granted: int) -> None:
        self._granted = max(self._granted, granted)
        self._watch()

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._watch()

    def write(self, data: bytes, *, eof: bool) -> None:
        """Passes the daemon's data on. Raises FrameError for more than was granted, or after its end."""
        self._received_bytes += len(data)
        if self._received_bytes > self._window_bytes or self._input_ends:
            raise FrameError("more for a port than was granted")
        if data:
            self._input.append(memoryview(data))
        self._input_ends = eof
        if self._connected:
            self._flush()

    def _flush(self) -> None:
        assert self._sock is not None
        while self._input:
            try:
                sent = self._sock.send(self._input[0])
            except BlockingIOError:
                break
            except OSError:
                self._break()
                return
            self._taken_bytes += sent
            if sent == len(self._input[0]):
                self._input.popleft()
            else:
                self._input[0] = self._input[0][sent:]
        if self._taken_bytes + PORT_WINDOW_BYTES * 3 // 4 > self._window_bytes and not self._input_ends:
            self._window_bytes = self._taken_bytes + PORT_WINDOW_BYTES
            self._channel.send(PortOutput(op=self._op, granted=self._window_bytes))
        if self._input_ends and not self._input and not self._input_ended:
            self._input_ended = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the program has closed its end already; reading will show that
        self._end_if_done()
        self._watch()

    def _read(self) -> None:
        assert self._sock is not None
        for _ in range(_READS_PER_EVENT):
            room = min(CHUNK_BYTES, self._granted - self._sent_bytes)
            if room <= 0:
                return
            try:
                data = self._sock.recv(room)
            except BlockingIOError:
                return
            except OSError:
                self._break()
                return
            self._sent_bytes += len(data)
            if not data:
                self._output_ended = True
                self._channel.send(PortOutput(op=self._op, eof=True))
                self._end_if_done()
                return
            self._channel.send(PortOutput(op=self._op), data)
            if len(data) < room:
                return

    def _watch(self) -> None:
        if self._sock is None or not self._connected:
            return
        reads = not (self._output_ended or self._paused) and self._sent_bytes < self._granted
        events = (READ if reads else 0) | (WRITE if self._input else 0)
        self._loop.watch(self._sock.fileno(), events, self._on_event if events else None)

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if self._sock is not None and events & ~WRITE:
            self._read()
        self._watch()

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self, *, reset: bool) -> None:
        """Ends it without an answer. `reset`: the program sees a reset."""
        if reset and self._connected:
            self._reset()
        self._drop_socket()
        self._opened.pop(self._op, None)

    def _reset(self) -> None:
        """Resets the connection. After a normal end, the program would take the partial data for complete.

        Linux resets a connection that is connected to no address. The usual way, a linger time of 0, is forbidden in a
        sandbox, even for its supervisor.
        """
        from ..wire.libc import checked_function

        assert self._sock is not None
        try:
            checked_function("connect")(self._sock.fileno(), _NO_ADDRESS, len(_NO_ADDRESS))
        except OSError:
            pass  # the program has ended it meanwhile

    def _end_if_done(self) -> None:
        if self._input_ended and self._output_ended:
            self._drop_socket()
            self._opened.pop(self._op, None)
            self._channel.done(self._op)

    def _break(self) -> None:
        self._end("port_reset", f"the program has cut the connection to port {self._port} off")

    def _end(self, reason: str, message: str) -> None:
        self._drop_socket()
        self._opened.pop(self._op, None)
        self._channel.fail(self._op, reason, message)

    def _drop_socket(self) -> None:
        if self._sock is not None:
            self._loop.watch(self._sock.fileno(), 0, None)
            self._sock.close()
            self._sock = None
        self._connected = False
