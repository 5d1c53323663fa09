"""The way to a guest in the cloud: a relay command, and another one whenever it breaks."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from executor_server.backends.e2b.failures import CloudFailure, Gone
from executor_server.backends.e2b.patience import persistently
from executor_server.backends.e2b.transport import CommandTransport, RelayCommand, RelayEnded
from executor_server.errors import SandboxFailure
from executor_server.guest.relay import NOBODY_LISTENS
from executor_server.guest.tokens import LONG_CHAIN_LENGTH

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Machine

# For a relay to start and to say so. A stream that stands still before that would else use up the time of all attempts.
_OPEN_TIMEOUT_S = 15.0


class Ways:
    """The machine of one sandbox, found again where need be, and the relays in it that are not quite gone."""

    def __init__(self, sandbox_id: str, relay: str, find: Callable[[], Awaitable[Machine]]) -> None:
        """`relay` is the command, less its last argument; `find` raises CloudFailure."""
        self._sandbox_id = sandbox_id
        self._relay = relay
        self._find = find
        self._machine: Machine | None = None
        self._transports: set[CommandTransport] = set()

    def found(self, machine: Machine | None) -> None:
        """Where it is now, with tokens that are good; None: not known any more."""
        self._machine = machine

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Tries until it is there or the caller has had enough. Raises SandboxFailure when the guest is gone."""
        # Its own words for a guest that is gone are no CloudFailure; tokens are renewed with each attempt.
        await persistently(partial(self._try, make_protocol), unless=())

    async def _try(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        if self._machine is None:
            try:
                self._machine = await self._find()
            except Gone as gone:
                raise SandboxFailure("its sandbox does not exist any more") from gone
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
            if ended.exit_code == NOBODY_LISTENS:
                raise SandboxFailure("its guest has ended") from ended
            raise
        except CloudFailure:
            # Its address or its token may have changed, or it is no more: ask the cloud before the next attempt.
            self._machine = None
            raise

    async def close(self) -> None:
        """Ends every connection, and waits until nothing of them is left: bounded by what stopping a relay may take."""
        self._machine = None  # whoever opens another one meanwhile has to find it first
        transports = list(self._transports)
        for transport in transports:
            transport.abort()
        await asyncio.gather(*(transport.finished() for transport in transports))


@dataclass(frozen=True)
class RelayEndpoint:
    """Implements `executor_server.backends.base.GuestEndpoint`."""

    token: bytes = field(repr=False)
    reconnect_s: float
    ways: Ways = field(repr=False)

    breaks_by_itself: ClassVar[bool] = True
    reconnects_max: ClassVar[int] = 120
    connections_max: ClassVar[int] = LONG_CHAIN_LENGTH

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        await self.ways.open(make_protocol)
