"""Messages between the supervisor and its children, over a SOCK_SEQPACKET pair.

The kernel keeps message boundaries, so threads and stray forks of the interpreter cannot garble each other's messages.
A message is a JSON head and a body. A body too large for one packet is sent as a sealed memory file. Its writer can no
longer shrink or change it, so the reader needs neither a copy nor trust. Only memory files can be sealed, so reading
never blocks on a FIFO or a device sent in its place.
"""

from __future__ import annotations

import fcntl
import os
import struct

from .frames import Fields, FrameError, decode_head, encode_head
from .lean import passed_descriptors, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from executor_api.values.packing import Parts

    from .link_messages import LinkMessage

INLINE_BYTES = 64 * 1024
_PACKET_BYTES = 4 + 64 * 1024 + INLINE_BYTES
_MAX_FDS = 5  # a payload, a run's stdout and stderr, and those for the time between runs
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS * 4)

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008  # SEAL, SHRINK, GROW, WRITE


class LinkClosed(Exception):
    """The other end is gone."""


class Packet:
    """A received message. It owns its descriptors, until `take_memfd` hands the payload's over."""

    __slots__ = ("body", "fds", "head", "memfd", "message", "size")

    def __init__(self, head: Fields, body: bytes, memfd: Optional[int], size: int, fds: list[int]) -> None:
        self.head = head
        self.body = body  # empty when `memfd` holds it
        self.memfd = memfd
        self.size = size  # bytes of the body, inline or in `memfd`
        self.fds = fds  # others that came along
        self.message: Optional[LinkMessage] = None  # the head, once it was read (link_messages.py)

    def take_memfd(self) -> Optional[int]:
        """Returns the memory file, which the caller then owns; None if the body came in the packet."""
        memfd, self.memfd = self.memfd, None
        return memfd

    def close_fds(self) -> None:
        """Closes all descriptors except the payload's."""
        while self.fds:
            os.close(self.fds.pop())

    def close(self) -> None:
        """Closes all descriptors that were not taken."""
        self.close_fds()
        memfd = self.take_memfd()
        if memfd is not None:
            os.close(memfd)


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected ends, with room for full packets in flight."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PACKET_BYTES)
    return ends


def sealed_memfd(pieces: list[Any]) -> int:
    """Returns a sealed memory file with these bytes."""
    fd = os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                view = view[os.write(fd, view) :]
        seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Makes a memory file unchangeable."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)


def checked_memfd(fd: int, max_bytes: int) -> int:
    """Returns the size of a sealed memory file. Raises FrameError for anything else.

    That includes files of huge pages: they can be sealed, but sendfile(2) can't send them.
    """
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise FrameError("a descriptor that is not a memory file") from error
    if seals & _SEALS != _SEALS:
        raise FrameError("a memory file that is not sealed")
    status = os.fstat(fd)
    if status.st_dev != _memory_device():
        raise FrameError("a memory file of another kind")
    if status.st_size > max_bytes:
        raise FrameError(f"a payload of {status.st_size} bytes")
    return status.st_size


_device: Optional[int] = None


def _memory_device() -> int:
    """Returns the file system of all ordinary memory files."""
    global _device
    if _device is None:
        fd = os.memfd_create("device", os.MFD_CLOEXEC)
        _device = os.fstat(fd).st_dev
        os.close(fd)
    return _device


def read_memfd(fd: int, size: int) -> bytes:
    """Returns the contents of a sealed memory file, and closes it."""
    try:
        pieces = []
        offset = 0
        while offset < size:
            piece = os.pread(fd, size - offset, offset)
            if not piece:
                raise FrameError("a memory file shorter than it said")
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        os.close(fd)


def read_body(packet: Packet, max_bytes: Optional[int] = None) -> bytes:
    """Returns the body of a message; closes its memory file. Raises FrameError, without reading, if it is larger."""
    if max_bytes is not None and packet.size > max_bytes:
        raise FrameError(f"a body of {packet.size} bytes, at most {max_bytes} are expected")
    memfd = packet.take_memfd()
    return packet.body if memfd is None else read_memfd(memfd, packet.size)


def size_of(parts: Parts) -> int:
    """Returns the bytes of all parts."""
    return sum(memoryview(part).nbytes for part in parts)


def send(sock: socket.socket, message: LinkMessage, body: Union[bytes, Parts] = b"", fds: tuple[int, ...] = ()) -> None:
    """Sends one message. `fds` stay the caller's.

    Raises LinkClosed, and BlockingIOError if a non-blocking link is full.
    """
    if isinstance(body, bytes) and len(body) <= INLINE_BYTES:  # nearly all are
        _send_packet(sock, encode_head(message.head()), body, fds)
        return
    parts: Parts = body if isinstance(body, list) else [body]
    if size_of(parts) <= INLINE_BYTES:
        _send_packet(sock, encode_head(message.head()), b"".join(parts), fds)
        return
    memfd = sealed_memfd(parts)
    try:
        _send_packet(sock, encode_head({**message.head(), "memfd": True}), b"", (memfd, *fds))
    finally:
        os.close(memfd)


def forward(sock: socket.socket, message: LinkMessage, memfd: int) -> None:
    """Sends one message whose body is a sealed memory file, which the caller keeps."""
    _send_packet(sock, encode_head({**message.head(), "memfd": True}), b"", (memfd,))


def _send_packet(sock: socket.socket, head: bytes, body: bytes, fds: tuple[int, ...]) -> None:
    assert len(head) <= INLINE_BYTES, f"a head of {len(head)} bytes"
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    try:
        sock.sendmsg([len(head).to_bytes(4, "big"), head, body], ancillary)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise LinkClosed("the other end is gone") from error


def await_size(sock: socket.socket) -> int:
    """Returns the size of the next message, without reading it; 0 if the other end is gone.

    Raises BlockingIOError if no message waits on a non-blocking link.
    """
    try:
        return sock.recv_into(bytearray(1), 1, socket.MSG_PEEK | socket.MSG_TRUNC)
    except ConnectionResetError:
        return 0


def receive(sock: socket.socket, max_bytes: int, size: Optional[int] = None) -> Packet:
    """Returns the next message. Raises LinkClosed, FrameError, and BlockingIOError if a non-blocking link has none.

    `size` is the result of `await_size`, if that was called.
    """
    if size is None:
        size = await_size(sock)  # a buffer for the largest message would be mapped and unmapped each time
    try:
        data, ancillary, flags, _ = sock.recvmsg(min(size, _PACKET_BYTES), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as error:
        raise LinkClosed("the other end is gone") from error
    owned = passed_descriptors(ancillary) if ancillary else []
    try:
        if not data:
            raise LinkClosed("the other end is gone")
        if flags & socket.MSG_CTRUNC:
            raise FrameError("a truncated message: too many descriptors came along, or none is free for them")
        if flags & socket.MSG_TRUNC or len(data) < 4:
            raise FrameError("a truncated message")
        head_length = int.from_bytes(data[:4], "big")
        if 4 + head_length > len(data):
            raise FrameError(f"a head of {head_length} bytes")
        head = decode_head(data[4 : 4 + head_length])
        if "memfd" not in head.values:
            body = data[4 + head_length :]
            return Packet(head, body, None, len(body), owned)
        if not owned:
            raise FrameError("a payload without its memory file")
        size = checked_memfd(owned[0], max_bytes)
        return Packet(head, b"", owned[0], size, owned[1:])
    except BaseException:
        for fd in owned:
            os.close(fd)
        raise
