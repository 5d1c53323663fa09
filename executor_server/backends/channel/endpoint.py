"""The address of one sandbox's guest, and the tokens that the daemon shows it, each only once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Protocol

from executor_server.backends.channel.connection import directly
from executor_server.core import SandboxFailure
from executor_server.guest.wire.tokens import CHAIN_LENGTH, chained

_CONNECT_STEP_S = 0.005
# A new sandbox needs its chain twice: for the hash that its guest knows, and at the first connection.
_CHAINS_KNOWN = 32


class UnreachedError(SandboxFailure):
    """The guest did not answer this time; another attempt may succeed."""


class RefusedError(UnreachedError):
    """The listener closed the connection at once: it does not know the token, or has seen it before."""


class GuestEndpoint(Protocol):
    """The means to open a connection to the guest's supervisor, and the secret whose hash it knows."""

    @property
    def token(self) -> bytes: ...

    @property
    def reconnect_s(self) -> float:
        """Seconds in which a broken connection may be opened again, before the guest counts as lost."""
        ...

    @property
    def breaks_by_itself(self) -> bool:
        """True when a connection may break or fall silent though the guest is well: a network is in between."""
        ...

    @property
    def reconnects_max(self) -> int:
        """Number of broken connections after which the guest is blamed: in a session's life, or within an hour if it
        `breaks_by_itself`."""
        ...

    @property
    def connections_max(self) -> int:
        """Connections that the guest accepts in its life: the length of its chain of tokens."""
        ...

    @property
    def socket_path(self) -> Path | None:
        """The guest's own socket on this host; None if the connection uses something else."""
        ...

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Opens a connection: calls `make_protocol` and the protocol's `connection_made` before it returns.

        Waits for a guest that does not listen yet, until it is cancelled. Raises OSError or SandboxFailure.
        """
        ...


@dataclass(frozen=True)
class SocketEndpoint:
    """A guest on this host that listens at a Unix socket. Implements `GuestEndpoint`."""

    socket_path: Path
    token: bytes
    reconnect_s: ClassVar[float] = 2.0
    # A local socket does not break by itself, so a guest that hangs up repeatedly is hostile.
    breaks_by_itself: ClassVar[bool] = False
    reconnects_max: ClassVar[int] = 8
    connections_max: ClassVar[int] = CHAIN_LENGTH

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Waits for a socket that the guest itself makes."""
        while True:
            try:
                await asyncio.get_running_loop().create_unix_connection(
                    lambda: directly(make_protocol()), str(self.socket_path)
                )
                return
            except FileNotFoundError:
                await asyncio.sleep(_CONNECT_STEP_S)


@lru_cache(maxsize=_CHAINS_KNOWN)
def first_token(secret: bytes, chain_length: int) -> bytes:
    """Returns the token that is shown first; the guest knows its hash."""
    return chained(secret, chain_length - 1)


class Tokens:
    """The chain of one guest, and the position in it."""

    def __init__(self, endpoint: GuestEndpoint, shown: int) -> None:
        """`shown` is the number of tokens that earlier daemons may have shown."""
        self._endpoint = endpoint
        self.shown = shown

    def next(self) -> str:
        """Returns the next token, and counts it as shown. Raises SandboxFailure when none is left."""
        chain_length = self._endpoint.connections_max
        self.shown += 1
        if self.shown >= chain_length:
            raise SandboxFailure("the guest has been connected to too often")
        if self.shown == 1:
            return first_token(self._endpoint.token, chain_length).hex()
        return chained(self._endpoint.token, chain_length - self.shown).hex()
