"""Sockets of packets to the processes of a fork server, with the sender's process id from the kernel."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from executor_server.backends.local.descriptors import wait_readable
from executor_server.guest.wire.fork_server_messages import PACKET_BYTES

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_CONTROL_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)


@dataclass(frozen=True)
class Packet:
    data: bytes  # empty: the other end was closed
    pid: int  # the sender's, as this process numbers it; 0 when it is not visible here


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Returns our end, which does not block, and theirs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return ours, theirs


def receive_now(sock: socket.socket) -> Packet:
    """Reads one packet. Raises BlockingIOError when there is none, and OSError."""
    data, control, flags, _ = sock.recvmsg(PACKET_BYTES, _CONTROL_BYTES)
    pid = 0
    for level, kind, value in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) >= _CREDENTIALS.size:
            pid = _CREDENTIALS.unpack_from(value)[0]
    if flags & socket.MSG_TRUNC:
        raise OSError(f"a packet above {PACKET_BYTES} bytes")
    return Packet(data, pid)


async def receive(sock: socket.socket, deadline: float) -> Packet | None:
    """Waits for a packet; None when the deadline came first. Raises OSError."""
    while True:
        try:
            return receive_now(sock)
        except BlockingIOError:
            if not await wait_readable(sock.fileno(), deadline):
                return None


def send_with(sock: socket.socket, data: bytes, fds: Iterable[int]) -> None:
    """Sends a packet with descriptors. Raises OSError; BlockingIOError when the other end does not read."""
    rights = struct.pack(f"{len(list(fds))}i", *fds)
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def now() -> float:
    return asyncio.get_running_loop().time()
