"""The Unix socket at which a user of this host is identified by its uid, without any secret.

The kernel reports who connected (SO_PEERCRED), but gRPC doesn't pass that on. So this listener accepts, asks the
kernel, and relays bytes to a socket of the gRPC server, over a connection that has a random name. The server sees the
name of each connection's other end, and `uid_of` returns its user.

No user can take another's name. Only the daemon's own user can connect to the inner socket (mode 0600, in the state
directory); a name is used for one connection, which holds it as long as it is known here. The kernel shows names in
/proc/net/unix, but knowing one is of no use.

Every user may connect to the outer socket, so the resources that a user can hold are bounded: connections per user,
fewer for all unknown users together, and the bytes in transit (while one side doesn't read, nothing is read from the
other). An unknown user is connected so that the gRPC server refuses it, as everywhere; that server also closes
connections that are idle, silent or dead. The overflow uid, which stands for users of other user namespaces, identifies
no user.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import structlog

from executor_server.core import AddressError, UnixAddress, addresses, umask

# Connections; each takes three file descriptors of the daemon.
MAX_CONNECTIONS_PER_USER = 128
MAX_CONNECTIONS_OF_UNKNOWN = 16
MAX_CONNECTIONS = 512
BACKLOG = 128
# Bytes held for a side that doesn't read, before the other side is paused.
MAX_HELD_BYTES = 256 * 1024
CONNECT_TIMEOUT_S = 5.0
# Seconds to deliver the held bytes when the other side has closed.
FLUSH_TIMEOUT_S = 5.0

_NAME_PREFIX = "remote-executor-peer-"
_PEER_PREFIX = f"unix-abstract:{_NAME_PREFIX}"  # as grpc shows it
_UCRED = struct.Struct("iII")
_OVERFLOW_UID_PATH = Path("/proc/sys/kernel/overflowuid")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PeerSocket:
    """The address that users connect to, and the address behind it at which the gRPC server listens."""

    outer: UnixAddress
    inner: UnixAddress


class PeerRelay:
    """Owns the outer socket and the connections through it. `is_known` is true for the uid of a configured user."""

    def __init__(self, sockets: PeerSocket, is_known: Callable[[int], bool]) -> None:
        self._sockets = sockets
        self._is_known = is_known
        self._overflow_uid = int(_OVERFLOW_UID_PATH.read_text())
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._uids: dict[str, int] = {}  # by the name of the connection
        self._counts: Counter[int | None] = Counter()  # connections by uid; None for all unknown users
        self._links: set[asyncio.Task[None]] = set()

    def uid_of(self, peer: str) -> int | None:
        """Returns the uid behind a connection that grpc shows as `peer`; None when it came another way."""
        return self._uids.get(peer.removeprefix(_PEER_PREFIX)) if peer.startswith(_PEER_PREFIX) else None

    def bind(self) -> None:
        """Opens the outer socket; connections wait for `start`. Raises AddressError."""
        address = self._sockets.outer
        addresses.clear_stale_socket(address)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Open to every user: the directory's mode limits access, and each user is identified.
            with umask(0o111):
                listener.bind(str(address.path))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise AddressError(f"Can't listen on {address}: {error.strerror}.") from error
        self._listener = listener

    async def start(self) -> None:
        """Accepts connections; the gRPC server must listen by now."""
        assert self._listener is not None, "bind comes first"
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Outside(self), sock=self._listener)

    async def close(self) -> None:
        """Closes every connection and the outer socket."""
        if self._listener is None:
            return
        if self._server is not None:
            self._server.close()
        self._listener.close()
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        self._sockets.outer.path.unlink(missing_ok=True)

    # -- for connections

    def admit(self, uid: int, outside: _Side) -> bool:
        """Begins to relay for a new connection of that user; False when there are too many already."""
        known = uid != self._overflow_uid and self._is_known(uid)
        counted_as = uid if known else None
        most = MAX_CONNECTIONS_PER_USER if known else MAX_CONNECTIONS_OF_UNKNOWN
        if self._counts[counted_as] >= most or len(self._links) >= MAX_CONNECTIONS:
            _log.warning("peer_refused", uid=uid, known=known, connections=self._counts[counted_as])
            return False
        name = secrets.token_hex(16)
        if uid != self._overflow_uid:
            self._uids[name] = uid
        self._counts[counted_as] += 1
        link = asyncio.create_task(self._link(name, outside))
        self._links.add(link)

        def forget(_link: asyncio.Task[None]) -> None:
            outside.transport.abort()
            self._links.discard(link)
            self._counts[counted_as] -= 1
            self._uids.pop(name, None)

        # In a callback: a task that is cancelled before it begins runs no `finally` of its own.
        link.add_done_callback(forget)
        return True

    async def _link(self, name: str, outside: _Side) -> None:
        """Relays one connection, whose inner half has that name, until either side closes."""
        try:
            inside = await self._connected(name)
        except (OSError, TimeoutError) as error:
            _log.warning("peer_not_relayed", error=str(error))
            return
        try:
            outside.link_to(inside)
            inside.link_to(outside)
            await asyncio.wait((outside.lost, inside.lost), return_when=asyncio.FIRST_COMPLETED)
            # Bytes that one side sent before it closed are still delivered to the other.
            outside.transport.close()
            inside.transport.close()
            await asyncio.wait((outside.lost, inside.lost), timeout=FLUSH_TIMEOUT_S)
        finally:
            inside.transport.abort()

    async def _connected(self, name: str) -> _Side:
        """Connects to the gRPC server under that name. Raises OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            inner.bind(f"\0{_NAME_PREFIX}{name}")
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(inner, str(self._sockets.inner.path))
                _transport, side = await loop.create_unix_connection(_Side, sock=inner)
        except BaseException:
            inner.close()
            raise
        return side


class _Side(asyncio.Protocol):
    """One end of a link; bytes that it receives are sent by the other end."""

    transport: asyncio.Transport  # from connection_made on

    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self._other: _Side | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=MAX_HELD_BYTES)

    def link_to(self, other: _Side) -> None:
        """Sends to `other` from now on, beginning with the bytes that came early."""
        self._other = other
        if self._early:
            other.transport.write(self._early)
            self._early = b""
            self.set_reading(True)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            # Not paused from the beginning: uvloop reads after connection_made even when that paused reading.
            self._early += data
            self.set_reading(False)
        elif not self._other.transport.is_closing():
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.set_reading(False)

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.set_reading(True)

    def set_reading(self, reads: bool) -> None:
        if self.transport.is_closing():
            return
        if reads:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost.set_result(None)


class _Outside(_Side):
    """The end at which a user connects."""

    def __init__(self, relay: PeerRelay) -> None:
        super().__init__()
        self._relay = relay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        credentials = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _pid, uid, _gid = _UCRED.unpack(credentials)
        if not self._relay.admit(uid, self):
            self.transport.abort()
