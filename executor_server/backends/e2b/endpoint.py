"""Connections to a guest in the cloud, each through a relay command in the machine, made again when one breaks."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from executor_server.backends.e2b.failures import CloudFailure, Missing
from executor_server.backends.e2b.retry import retry_until_cancelled
from executor_server.backends.e2b.transport import CommandTransport, RelayCommand, RelayEnded
from executor_server.core import SandboxFailure
from executor_server.guest.wire.lines import NO_LISTENER
from executor_server.guest.wire.tokens import LONG_CHAIN_LENGTH

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Machine

# Seconds for a relay to start and report it. A stream that stalls before that must not use up the time of all attempts.
_OPEN_TIMEOUT_S = 15.0


class RelayConnections:
    """The machine of one sandbox, found again when necessary, and the relays in it that have not ended."""

    def __init__(self, relay: str, find: Callable[[], Awaitable[Machine]]) -> None:
        """`relay` is the command, less its last argument; `find` raises CloudFailure."""
        self._relay = relay
        self._find = find
        self._machine: Machine | None = None
        self._transports: set[CommandTransport] = set()

    def found(self, machine: Machine | None) -> None:
        """Sets the machine, with its address and valid tokens; None when it has to be found again."""
        self._machine = machine

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Tries until it succeeds or is cancelled. Raises SandboxFailure when the guest does not exist any more."""
        # Only a CloudFailure is retried; that SandboxFailure is not one.
        await retry_until_cancelled(partial(self._try, make_protocol), unless=())

    async def _try(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        if self._machine is None:
            try:
                self._machine = await self._find()
            except Missing as missing:
                raise SandboxFailure("its sandbox does not exist any more") from missing
        machine = self._machine

        async def start(nonce: str, on_output: Callable[[str], Awaitable[None]]) -> RelayCommand:
            return await machine.start(f"{self._relay} {shlex.quote(nonce)}", on_output)

        transport = CommandTransport(self._transports.discard)
        self._transports.add(transport)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await transport.open(start, make_protocol)
        except TimeoutError as late:
            self._machine = None
            raise CloudFailure(f"no relay was there within {_OPEN_TIMEOUT_S:g} s") from late
        except RelayEnded as ended:
            if ended.exit_code == NO_LISTENER:
                raise SandboxFailure("its guest has ended") from ended
            raise
        except CloudFailure:
            # Its address or its token may have changed, or it has ended: ask the cloud before the next attempt.
            self._machine = None
            raise

    async def close(self) -> None:
        """Ends every connection and waits until no relay is left; bounded by the time limit for stopping a relay."""
        self._machine = None  # a connection that is opened meanwhile has to find the machine first
        transports = list(self._transports)
        for transport in transports:
            transport.abort()
        await asyncio.gather(*(transport.finished() for transport in transports))


@dataclass(frozen=True)
class RelayEndpoint:
    """Implements `executor_server.backends.channel.GuestEndpoint`."""

    token: bytes = field(repr=False)
    reconnect_s: float
    connections: RelayConnections = field(repr=False)

    breaks_by_itself: ClassVar[bool] = True
    socket_path: ClassVar[None] = None
    reconnects_max: ClassVar[int] = 120
    connections_max: ClassVar[int] = LONG_CHAIN_LENGTH

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        await self.connections.open(make_protocol)
