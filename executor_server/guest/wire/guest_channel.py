"""The supervisor's end of the channel to the daemon.

Theory of operation. The supervisor listens. A connection counts as the daemon's once its first frame, HELLO, has shown
the next token of the chain; only the token's hash is known here (tokens.py). The newest such connection wins: the owner
of an earlier one is dead, or about to notice. The window (sequenced.py) keeps all frames that may have to be resent. It
outlives connections and daemons; HELLO and READY synchronize the two windows. READY also says which of our frames were
acknowledged and therefore dropped here. A later daemon may not know these frames: its predecessor stored only those
that it had to.

Invariant: at most one connection is the daemon's, and what is being written (`_writing`) belongs to it alone. When it
goes, `_writing` is dropped whole: the frame in it was given by the window, which gives it again from its start.

Race: a second connection with the next token can arrive while the first one is half way through a frame. Everything
that can fail is checked first (token, version, position), so a failed greeting leaves the daemon's connection and the
window unchanged. The check of the position rewinds the window and closes files of released frames, perhaps that of the
frame in `_writing`. So the old connection is closed and `_writing` dropped in the same turn of the loop: nothing is
written in between.

Attack: agent code may connect, too, if it can see the socket. It has no token, so all it gets is one of _MAX_STRANGERS
places for at most _HELLO_TIME_S. The oldest gives up its place, so strangers cannot keep a daemon out. A token is used
up once shown, whatever else is wrong with its frame.

A sandbox whose session may have a network has a listener for the egress proxy. It is made before any other process, so
that no program can take its port. No child keeps it: such a child could accept the connections of other processes. The
daemon gets a descriptor of it over a second connection, which begins with TAKE_LISTENER and the next token and ends
with the answer; the first connection stays open. This process keeps its own descriptor for the next daemon.
"""

from __future__ import annotations

import os
import sys
import time

from . import link
from .frames import CHUNK_BYTES, PROTOCOL_VERSION, Frame, FrameDecoder, FrameError, encode_frame
from .lean import accept, socket
from .loop import READ, WRITE, Loop
from .messages import Ack, BlobChunk, Done, Hello, Listener, Ping, Pong, Ready, TakeListener
from .sequenced import Numbered, Sequenced
from .tokens import is_next

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Sequence, Union

    from .messages import Image, ToolCall
    from .schema import Message

_NEVER = float("inf")
_MAX_STRANGERS = 4
_HELLO_TIME_S = 5.0
# The rest of a larger frame is read straight into its place (frames.py).
_READ_BYTES = CHUNK_BYTES // 4
_REFUSAL_CHARS_SENT = 4000


class FileSlice:
    """A part of a sealed memory file, read when it is sent. `last`: the file is closed once this is acknowledged."""

    __slots__ = ("fd", "last", "length", "offset")

    def __init__(self, fd: int, offset: int, length: int, last: bool) -> None:
        self.fd = fd
        self.offset = offset
        self.length = length
        self.last = last


class _Stranger:
    """A connection that has not shown a token yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.decoder = FrameDecoder()
        self.deadline = time.monotonic() + _HELLO_TIME_S


class Channel:
    """Owns the listener, the connections and the frames not yet acknowledged.

    `on_frame` gets each frame of the daemon, once and in order. `describe` makes READY from two numbers: the last frame
    of the daemon that was taken here, and the last of ours that it acknowledged. `on_new_daemon` is called when a
    different daemon connects. `pong` makes each PONG. `egress_listener` is the descriptor for TAKE_LISTENER.
    """

    def __init__(
        self,
        listener: socket.socket,
        token_hash: str,
        loop: Loop,
        on_frame: Callable[[Frame], None],
        describe: Callable[[int, int], Ready],
        egress_listener: Optional[int] = None,
        on_new_daemon: Callable[[], None] = lambda: None,
        pong: Callable[[], Pong] = Pong,
    ) -> None:
        self._listener = listener
        self._token = bytes.fromhex(token_hash)
        self._loop = loop
        self._watch = loop.watch
        self._on_frame = on_frame
        self._describe = describe
        self._egress_listener = egress_listener
        self._on_new_daemon = on_new_daemon
        self._pong = pong
        self._daemon_id = ""  # the last daemon
        self._strangers: dict[int, _Stranger] = {}
        self._conn: Optional[socket.socket] = None
        self._decoder = FrameDecoder()
        self._window = Sequenced()
        self._blobs_sent = 0
        self._writing: list[Union[memoryview, FileSlice]] = []
        self._waits = False  # the daemon's socket was full
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self.last_heard = time.monotonic()
        self.broken = ""  # a message that no daemon of this version sends
        listener.setblocking(False)
        loop.watch(listener.fileno(), READ, self._accept)

    # -- sending -------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """True while the program should wait before it sends more."""
        return self._window.full

    @property
    def connected(self) -> bool:
        return self._conn is not None

    def send(self, message: Message, body: Union[bytes, FileSlice] = b"") -> None:
        """Queues a frame, keeps it until it is acknowledged, and sends as much as the socket takes now."""
        self._window.send(message.kind, message.head(), body, len(body) if isinstance(body, bytes) else body.length)
        self.flush()

    def send_memfd(self, message: Message, fd: int, size: int) -> None:
        """Queues a sealed memory file, which it then owns, as frames of one chunk each."""
        offset = 0
        while offset < size:
            length = min(CHUNK_BYTES, size - offset)
            self.send(message, FileSlice(fd, offset, length, last=offset + length == size))
            offset += length
        if size == 0:
            os.close(fd)

    def send_blob(
        self, data: Union[bytes, int], size: int, *, execution_id: Optional[str] = None, op: Optional[int] = None
    ) -> str:
        """Sends a payload in chunks, and returns the id by which a later frame names it."""
        self._blobs_sent += 1
        blob_id = f"g{self._blobs_sent}"
        self.send_memfd(BlobChunk(id=execution_id, op=op, blob=blob_id), as_memfd(data), size)
        return blob_id

    def send_payload(self, message: Union[Image, ToolCall], data: Union[bytes, int], size: int) -> None:
        """Sends a message of an execution with its payload: in its body or, if it is large, in a blob before it."""
        if not size and isinstance(data, int):  # an empty file can't be sent
            os.close(data)
            data = b""
        if size <= CHUNK_BYTES:
            self.send(message, data if isinstance(data, bytes) else FileSlice(data, 0, size, last=True))
        else:
            self.send(message.but(blob=self.send_blob(data, size, execution_id=message.id), size=size))

    def done(self, op: int, body: bytes = b"", **more: Any) -> None:
        """Answers a request. `more` are fields of Done."""
        self.send(Done(op=op, ok=True, **more), body)

    def fail(self, op: int, reason: str, message: str, body: bytes = b"") -> None:
        """Refuses a request."""
        self.send(Done(op=op, ok=False, reason=reason, message=message[:_REFUSAL_CHARS_SENT]), body)

    def flush(self) -> None:
        """Writes until the socket is full or nothing is left."""
        while self._conn is not None:
            if not self._writing:
                frame = self._window.next_frame()
                if frame is None:
                    if self._waits:
                        self._waits = False
                        self._watch(self._conn.fileno(), READ, self._readable)
                    return
                body = frame.body if isinstance(frame.body, FileSlice) else memoryview(frame.body)
                self._writing = [memoryview(frame.prefix), body]
            try:
                self._write(self._conn)
            except BlockingIOError:
                self._waits = True
                self._watch(self._conn.fileno(), READ | WRITE, self._readable)
                return
            except OSError:
                self._disconnect()
                return

    def _write(self, conn: socket.socket) -> None:
        """Writes once, and removes the written part."""
        first = self._writing[0]
        if isinstance(first, FileSlice):
            # From file to socket within the kernel: a program's payload may be large.
            try:
                sent = os.sendfile(conn.fileno(), first.fd, first.offset, first.length)
            except (BlockingIOError, ConnectionError):
                raise
            except OSError:
                # The file can't be sent this way, so its bytes are copied. If this error closed the connection, the
                # frame would be sent again on the next one, and close that, too.
                self._writing[0] = memoryview(os.pread(first.fd, first.length, first.offset))
                return
            assert sent, "a sealed file shrank"
            rest = FileSlice(first.fd, first.offset + sent, first.length - sent, first.last)
            self._writing[:1] = [rest] if rest.length else []
            return
        views = [part for part in self._writing if isinstance(part, memoryview)]
        if len(views) < len(self._writing):
            views = [first]
        sent = conn.sendmsg(views)
        for view in views:
            if sent < len(view):
                self._writing[0] = view[sent:]
                return
            sent -= len(view)
            self._writing.pop(0)

    # -- connections ---------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """Time of the next call of `expire_strangers`."""
        return min(stranger.deadline for stranger in self._strangers.values()) if self._strangers else _NEVER

    def expire_strangers(self) -> None:
        now = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.deadline <= now]:
            self._drop(stranger)

    def close_all(self) -> None:
        """Closes every descriptor of the channel."""
        for stranger in self._strangers.values():
            stranger.sock.close()
        if self._conn is not None:
            self._conn.close()
        self._listener.close()
        if self._egress_listener is not None:
            os.close(self._egress_listener)
        _close_files(self._window.kept)

    def _accept(self, _events: int) -> None:
        try:
            sock = accept(self._listener)
        except OSError:
            return  # it is gone, or no descriptor is left; the next one may succeed
        sock.setblocking(False)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(min(self._strangers.values(), key=lambda s: s.deadline))
        stranger = _Stranger(sock)
        self._strangers[sock.fileno()] = stranger
        self._watch(sock.fileno(), READ, lambda _events: self._greet(stranger))
        self._greet(stranger)

    def _greet(self, stranger: _Stranger) -> None:
        try:
            data = stranger.sock.recv(64 * 1024)
            frames = stranger.decoder.feed(data) if data else None
        except BlockingIOError:
            return
        except (OSError, FrameError):
            frames = None
        if frames is None:
            self._drop(stranger)
        elif frames:
            if not self._is_daemon(frames[0]):
                self._drop(stranger)
            elif frames[0].kind == TakeListener.kind:
                self._hand_out_listener(stranger, frames[0])
            else:
                self._adopt(stranger, frames)

    def _is_daemon(self, frame: Frame) -> bool:
        """Returns true if the token is the next one of the chain, and uses it up."""
        try:
            token = bytes.fromhex(frame.head.text("token", 256))
        except ValueError:  # FrameError is one too
            return False
        if frame.kind not in (Hello.kind, TakeListener.kind) or not is_next(token, self._token):
            return False
        self._token = token
        return True

    def _adopt(self, stranger: _Stranger, frames: list[Frame]) -> None:
        """Makes the connection the daemon's, unless its version or position does not fit."""
        try:
            hello = Hello.read(frames[0].head)
            if hello.protocol != PROTOCOL_VERSION:
                raise FrameError("a daemon of another version")
            _close_files(self._window.reconnect(hello.last_seq))
        except FrameError:
            self._drop(stranger)
            return
        self._disconnect()
        del self._strangers[stranger.sock.fileno()]
        self._conn, self._decoder = stranger.sock, stranger.decoder
        self._conn.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK_BYTES)
        if hello.daemon != self._daemon_id:
            self._daemon_id = hello.daemon
            self._on_new_daemon()
        ready = self._describe(self._window.taken, self._window.acked)
        self._writing = [memoryview(encode_frame(ready.kind, ready.head()))]
        # First in each turn: the daemon sends the notice of a refused connection before the program learns of it, and
        # the notice belongs to the log of that run, even if the run ends in the same turn.
        self._loop.first = self._conn.fileno()
        self._watch(self._conn.fileno(), READ, self._readable)
        self.last_heard = time.monotonic()
        self.flush()
        self._take(frames[1:])

    def _hand_out_listener(self, stranger: _Stranger, frame: Frame) -> None:
        """Answers with the descriptor, if there is one, and closes the connection."""
        try:
            version = TakeListener.read(frame.head).protocol
            if version == PROTOCOL_VERSION and self._egress_listener is not None:
                answer = encode_frame(Listener.kind, Listener().head())
                passed = self._egress_listener.to_bytes(4, sys.byteorder)
                stranger.sock.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        except (OSError, FrameError):
            pass  # the daemon sees the connection close, and may try again
        self._drop(stranger)

    def _readable(self, events: int) -> None:
        if events & WRITE:
            self.flush()
        if self._conn is None or not events & ~WRITE:
            return
        try:
            space = self._decoder.space(self._buffer)
            size = self._conn.recv_into(space)
            if not size:
                self._disconnect()
                return
            frames = self._decoder.filled(space, size)
        except BlockingIOError:
            return
        except OSError:
            self._disconnect()
            return
        except FrameError as error:
            self.broken = str(error)
            return
        self._take(frames)

    def _take(self, frames: list[Frame]) -> None:
        self.last_heard = time.monotonic()
        due = False
        for frame in frames:
            try:
                self._take_one(frame)
            except FrameError as error:
                self.broken = str(error)
                return
            due = self._window.note_received(len(frame.view))
        if due:
            self._reply(Ack())

    def _take_one(self, frame: Frame) -> None:
        """Raises FrameError."""
        _close_files(self._window.acknowledge(frame.ack))
        if frame.kind == Ping.kind:
            self._reply(self._pong())
        elif frame.kind != Ack.kind and self._window.accept(frame.seq):
            self._on_frame(frame)

    def _reply(self, message: Message) -> None:
        """Sends a frame without a number, after the one being written."""
        if self._conn is not None:
            self._writing.append(memoryview(self._window.unnumbered(message.kind, message.head())))
            self.flush()

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._watch(self._conn.fileno(), 0, None)
            self._loop.first = -1
            self._conn.close()
            self._conn = None
            self._writing, self._waits = [], False

    def _drop(self, stranger: _Stranger) -> None:
        self._watch(stranger.sock.fileno(), 0, None)
        del self._strangers[stranger.sock.fileno()]
        stranger.sock.close()


def as_memfd(data: Union[bytes, int]) -> int:
    """Returns a payload as a sealed memory file, which it may be already."""
    return link.sealed_memfd([data]) if isinstance(data, bytes) else data


def _close_files(frames: Sequence[Numbered]) -> None:
    """Closes the memory files of released frames."""
    for frame in frames:
        if isinstance(frame.body, FileSlice) and frame.body.last:
            os.close(frame.body.fd)
