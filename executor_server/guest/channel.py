"""The supervisor's end of the channel to the daemon.

It listens; a connection counts as the daemon's once its first frame held the token, of which only the hash is known
here. The newest such connection wins (an earlier daemon that held one is dead or about to be told so). Frames with a
sequence number are kept until the daemon has acknowledged them, so that one that lost its connection, or its life,
gets from the next connection on what it has not taken yet. READY says which numbers were let go: a later daemon's
memory may end before them, with frames that it had no need to write down.

Agent code may connect too where it can see the socket: it has no token, so all it gets is a bounded wait.
"""

from __future__ import annotations

import os
import time

from . import link
from .frames import CHUNK_BYTES, PROTOCOL_VERSION, Frame, FrameDecoder, FrameError, Kind, encode_frame, encode_prefix
from .lean import accept, deque, socket
from .loop import READ, WRITE, Loop
from .tokens import is_next

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

_MAX_STRANGERS = 4
_HELLO_TIME_S = 5.0
_READ_BYTES = 256 * 1024
# Bytes taken after which an acknowledgement goes out by itself.
_ACK_BYTES = 1024 * 1024
# Past so many bytes not yet acknowledged, the supervisor stops reading what the program writes.
OUTBOX_BYTES = 8 * 1024 * 1024


class FileSlice:
    """A part of a sealed memory file, read only when it is sent. `last` closes the file once it was acknowledged."""

    __slots__ = ("fd", "last", "length", "offset")

    def __init__(self, fd: int, offset: int, length: int, last: bool) -> None:
        self.fd = fd
        self.offset = offset
        self.length = length
        self.last = last


class _Kept:
    __slots__ = ("body", "prefix", "seq")

    def __init__(self, seq: int, prefix: bytes, body: Union[bytes, FileSlice]) -> None:
        self.seq = seq
        self.prefix = prefix
        self.body = body

    @property
    def cost(self) -> int:
        return len(self.prefix) + (len(self.body) if isinstance(self.body, bytes) else self.body.length)


class _Stranger:
    """A connection that has not shown the token yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.decoder = FrameDecoder()
        self.deadline = time.monotonic() + _HELLO_TIME_S


class Channel:
    """Owns the listener, the connections and the frames not yet acknowledged.

    `on_frame` takes each frame of the daemon; `describe` gives the head of READY; `on_new_daemon` is called when the
    one that connects is not the one that did before.
    """

    def __init__(
        self,
        listener: socket.socket,
        token_hash: str,
        loop: Loop,
        on_frame: Callable[[Frame], None],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._listener = listener
        self._token = bytes.fromhex(token_hash)
        self._watch = loop.watch
        self._on_frame = on_frame
        self._describe = describe
        self.on_new_daemon: Callable[[], None] = lambda: None
        self.pong: Callable[[], dict[str, Any]] = dict  # what each PONG is to say
        self._daemon_id = ""  # of the last one
        self._strangers: dict[int, _Stranger] = {}
        self._conn: Optional[socket.socket] = None
        self._decoder = FrameDecoder()
        self._seq = 0
        self._taken = 0  # the last number of the daemon's
        self._unacknowledged_bytes = 0
        self._blobs_sent = 0
        self._unsent: deque[_Kept] = deque()
        self._unacked: deque[_Kept] = deque()
        self._acked = 0  # the last number of ours that was acknowledged, and is kept no more
        self._kept_bytes = 0
        self._writing: list[Union[memoryview, FileSlice]] = []
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self.last_heard = time.monotonic()
        self.broken = ""  # what the daemon said that no daemon of this version says
        listener.setblocking(False)
        loop.watch(listener.fileno(), READ, self._accept)

    # -- sending -------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the program should wait before it says more."""
        return self._kept_bytes > OUTBOX_BYTES

    @property
    def connected(self) -> bool:
        return self._conn is not None

    def send(self, kind: int, head: dict[str, Any], body: Union[bytes, FileSlice] = b"") -> None:
        """Queues a frame, keeps it until it is acknowledged, and sends what can be sent now."""
        self._seq += 1
        length = len(body) if isinstance(body, bytes) else body.length
        kept = _Kept(self._seq, encode_prefix(kind, head, length, seq=self._seq, ack=self._taken), body)
        self._unsent.append(kept)
        self._kept_bytes += kept.cost
        self.flush()

    def send_memfd(self, kind: int, head: dict[str, Any], fd: int, size: int) -> None:
        """Queues a sealed memory file as frames of one chunk each, and takes it over."""
        offset = 0
        while offset < size:
            length = min(CHUNK_BYTES, size - offset)
            self.send(kind, head, FileSlice(fd, offset, length, last=offset + length == size))
            offset += length
        if size == 0:
            os.close(fd)

    def send_blob(self, head: dict[str, Any], data: Union[bytes, int], size: int) -> str:
        """Sends a payload in chunks, ahead of the frame that will name it by what is returned."""
        self._blobs_sent += 1
        blob_id = f"g{self._blobs_sent}"
        self.send_memfd(Kind.BLOB_CHUNK, {**head, "blob": blob_id}, as_memfd(data), size)
        return blob_id

    def send_payload(self, kind: int, head: dict[str, Any], data: Union[bytes, int], size: int) -> None:
        """Sends a frame of an execution whose payload is its body or, when large, a blob ahead of it."""
        if not size and isinstance(data, int):  # there is nothing to send from an empty file
            os.close(data)
            data = b""
        if size <= CHUNK_BYTES:
            self.send(kind, head, data if isinstance(data, bytes) else FileSlice(data, 0, size, last=True))
        else:
            blob_id = self.send_blob({"id": head["id"]}, data, size)
            self.send(kind, {**head, "blob": blob_id, "size": size})

    def done(self, op: int, body: bytes = b"", **more: Any) -> None:
        """Answers an operation."""
        self.send(Kind.DONE, {"op": op, "ok": True, **more}, body)

    def fail(self, op: int, reason: str, message: str, body: bytes = b"") -> None:
        """Answers an operation that cannot be done."""
        self.send(Kind.DONE, {"op": op, "ok": False, "reason": reason, "message": message[:4000]}, body)

    def flush(self) -> None:
        """Writes until the socket is full or there is nothing left."""
        while self._conn is not None:
            if not self._writing:
                if not self._unsent:
                    self._watch(self._conn.fileno(), READ, self._readable)
                    return
                kept = self._unsent.popleft()
                self._unacked.append(kept)
                body = kept.body if isinstance(kept.body, FileSlice) else memoryview(kept.body)
                self._writing = [memoryview(kept.prefix), body]
            try:
                self._write(self._conn)
            except BlockingIOError:
                self._watch(self._conn.fileno(), READ | WRITE, self._readable)
                return
            except OSError:
                self._disconnect()
                return

    def _write(self, conn: socket.socket) -> None:
        """Writes once, and takes note of how far it came."""
        first = self._writing[0]
        if isinstance(first, FileSlice):
            # From file to socket within the kernel: what a program gives may be large.
            try:
                sent = os.sendfile(conn.fileno(), first.fd, first.offset, first.length)
            except (BlockingIOError, ConnectionError):
                raise
            except OSError:
                # The file's fault, not the connection's: taken for one that is broken, each next one would break, too.
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

    def _acknowledge(self, seq: int) -> None:
        while self._unacked and self._unacked[0].seq <= seq:
            kept = self._unacked.popleft()
            self._acked = kept.seq
            self._kept_bytes -= kept.cost
            if isinstance(kept.body, FileSlice) and kept.body.last:
                os.close(kept.body.fd)

    # -- connections ---------------------------------------------------------------------------------------------

    def expire_strangers(self) -> None:
        now = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.deadline <= now]:
            self._drop(stranger)

    def close_all(self) -> None:
        """Closes every descriptor of the channel, in a forked child that must not have them."""
        for stranger in self._strangers.values():
            stranger.sock.close()
        if self._conn is not None:
            self._conn.close()
        self._listener.close()
        for kept in (*self._unsent, *self._unacked):
            if isinstance(kept.body, FileSlice) and kept.body.last:
                os.close(kept.body.fd)

    def _accept(self, _events: int) -> None:
        try:
            sock = accept(self._listener)
        except OSError:
            return  # gone again, or no descriptor left: the next one may fare better
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
            if self._is_daemon(frames[0]):
                self._adopt(stranger, frames)
            else:
                self._drop(stranger)

    def _is_daemon(self, frame: Frame) -> bool:
        try:
            token = bytes.fromhex(frame.head.text("token", 256))
        except ValueError:  # FrameError is one too
            return False
        if frame.kind != Kind.HELLO or not is_next(token, self._token):
            return False
        self._token = token
        return True

    def _adopt(self, stranger: _Stranger, frames: list[Frame]) -> None:
        hello = frames[0]
        try:
            version = hello.head.integer("protocol")
            last_seq = hello.head.integer("last_seq")
            daemon_id = hello.head.text("daemon", 64)
        except FrameError:
            version, last_seq, daemon_id = -1, 0, ""
        if version != PROTOCOL_VERSION or last_seq > self._seq:
            self._drop(stranger)
            return
        self._disconnect()
        del self._strangers[stranger.sock.fileno()]
        self._conn, self._decoder = stranger.sock, stranger.decoder
        self._conn.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK_BYTES)
        self._acknowledge(last_seq)
        # What the last connection took but this daemon has not: again, before anything new.
        self._unsent = deque((*self._unacked, *self._unsent))
        self._unacked = deque()
        if daemon_id != self._daemon_id:
            self._daemon_id = daemon_id
            self.on_new_daemon()
        ready = {**self._describe(), "last_seq": self._taken, "acked": self._acked}
        self._writing = [memoryview(encode_frame(Kind.READY, ready))]
        self._watch(self._conn.fileno(), READ, self._readable)
        self.last_heard = time.monotonic()
        self.flush()
        self._take(frames[1:])

    def _readable(self, events: int) -> None:
        if events & WRITE:
            self.flush()
        if self._conn is None or not events & ~WRITE:
            return
        try:
            size = self._conn.recv_into(self._buffer)
            if not size:
                self._disconnect()
                return
            frames = self._decoder.feed(self._buffer[:size])
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
        for frame in frames:
            self._acknowledge(frame.ack)
            if frame.kind == Kind.PING:
                self._reply(Kind.PONG, self.pong())
            elif frame.kind != Kind.ACK and frame.seq > self._taken:  # else it was sent again, and taken before
                try:
                    if frame.seq != self._taken + 1:
                        raise FrameError(f"frame {frame.seq} came after frame {self._taken}")
                    self._taken = frame.seq
                    self._on_frame(frame)
                except FrameError as error:
                    self.broken = str(error)
                    return
            self._unacknowledged_bytes += len(frame.view)
        if self._unacknowledged_bytes > _ACK_BYTES:
            self._reply(Kind.ACK)

    def _reply(self, kind: int, head: Optional[dict[str, Any]] = None) -> None:
        """A frame without a number, behind what is being written now."""
        if self._conn is not None:
            self._unacknowledged_bytes = 0
            self._writing.append(memoryview(encode_frame(kind, head or {}, ack=self._taken)))
            self.flush()

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._watch(self._conn.fileno(), 0, None)
            self._conn.close()
            self._conn = None
            self._writing = []

    def _drop(self, stranger: _Stranger) -> None:
        self._watch(stranger.sock.fileno(), 0, None)
        del self._strangers[stranger.sock.fileno()]
        stranger.sock.close()


def as_memfd(data: Union[bytes, int]) -> int:
    """A payload as a sealed memory file, which it may be already."""
    return link.sealed_memfd([data]) if isinstance(data, bytes) else data
