"""From a name to a connected socket: resolves once, classifies each address, connects to a classified one.

Connections that wait for the same name share one look-up, so that a name whose servers hang takes one of the session's
permits, however many connections ask for it.

The name is never handed to `connect`: between two resolutions it may change (DNS rebinding), so the address that was
classified is the address that is connected to. A cache makes the second connection to a name as quick as a literal
address; it is short, bounded, and each session's own, so that no session learns what another one asked for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import OrderedDict
from typing import Dict, Optional, Sequence, Tuple

from . import reasons
from .accounts import WorkShare
from .endpoint import DeadlinePassed, Endpoint
from .host_names import Target
from .protocols import (
    AddressClassifier,
    Connector,
    Dialled,
    Limits,
    Resolver,
    Unresolved,
)
from .refusals import Refusal

# Addresses of one name that are classified.
_MAX_ADDRESSES = 16


class DirectConnector:
    """Connects to the address itself."""

    async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
        # Only a literal passes: anything else `connect` would resolve again, here and now.
        literal = ipaddress.ip_address(address)
        family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            await Endpoint(sock).connect((str(literal), target.port), deadline)
        except BaseException:
            sock.close()
            raise
        return sock


class _Lookup:
    def __init__(self, task: "asyncio.Task[Sequence[str]]") -> None:
        self.task = task
        self.waiters = 0


class Dialer:
    """Dials for one session. Without a resolver the connector is trusted with the name."""

    def __init__(
        self, resolver: Optional[Resolver], classifier: AddressClassifier, connector: Connector, limits: Limits
    ) -> None:
        self._resolver = resolver
        self._classifier = classifier
        self._connector = connector
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._permits = asyncio.Semaphore(limits.resolutions)
        self._share = WorkShare()
        self._lookups: Dict[str, _Lookup] = {}
        self._cache: "OrderedDict[str, Tuple[float, Sequence[str]]]" = OrderedDict()

    async def find(self, target: Target) -> Sequence[str]:
        """Returns the addresses that may be connected to. Raises Refusal."""
        if target.is_address:
            return self._classify(target, (target.host,))
        if self._resolver is None:
            return ("",)
        return self._classify(target, await self._resolve(self._resolver, target))

    async def connect(self, target: Target, addresses: Sequence[str]) -> Dialled:
        """Connects to the first address that answers, of those that `find` gave. Raises Refusal."""
        deadline = self._loop.time() + self._limits.dial_s
        failure = "its addresses could not be tried in time"
        for address in addresses[: self._limits.addresses]:
            until = min(deadline, self._loop.time() + self._limits.connect_s)
            try:
                return Dialled(await self._connector.connect(target, address, until), address)
            except DeadlinePassed:
                failure = "it did not answer in time"
            except OSError as error:
                failure = error.strerror or type(error).__name__
        raise Refusal(reasons.UNREACHED, f"{target} could not be reached: {failure}")

    def _classify(self, target: Target, addresses: Sequence[str]) -> Sequence[str]:
        usable, refused, clause = [], "", ""
        for address in addresses:
            why = self._classifier.why_refused(address)
            if why is None:
                usable.append(address)
            elif not refused:
                refused, clause = address, why
        if not usable:
            # The sentence contains no address: it goes to the sandbox, which must not map the network this way.
            raise Refusal(reasons.REFUSED_ADDRESS, f"{target} is refused: its address {clause}", address=refused)
        return usable

    async def _resolve(self, resolver: Resolver, target: Target) -> Sequence[str]:
        cached = self._cache.get(target.host)
        if cached is not None and cached[0] > self._loop.time():
            return cached[1]
        try:
            addresses = await self._look_up(resolver, target.host)
        except asyncio.TimeoutError:
            message = f"{target} could not be reached: its name could not be resolved in time"
            raise Refusal(reasons.RESOLVER_TIMEOUT, message) from None
        except (Unresolved, OSError) as error:
            clause = str(error) if isinstance(error, Unresolved) else "can't be resolved now"
            raise Refusal(reasons.UNRESOLVED, f"{target} could not be reached: {target.host} {clause}") from error
        if not addresses:
            raise Refusal(reasons.UNRESOLVED, f"{target} could not be reached: {target.host} has no addresses")
        addresses = tuple(addresses[:_MAX_ADDRESSES])
        self._cache[target.host] = (self._loop.time() + self._limits.cache_s, addresses)
        self._cache.move_to_end(target.host)
        while len(self._cache) > self._limits.cached_names:
            self._cache.popitem(last=False)
        return addresses

    async def _look_up(self, resolver: Resolver, host: str) -> Sequence[str]:
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = _Lookup(self._share.create_task(self._ask(resolver, host)))
        lookup.waiters += 1
        try:
            return await asyncio.shield(lookup.task)
        finally:
            lookup.waiters -= 1
            if not lookup.waiters:
                lookup.task.cancel()
                del self._lookups[host]

    async def _ask(self, resolver: Resolver, host: str) -> Sequence[str]:
        return await asyncio.wait_for(self._ask_in_turn(resolver, host), self._limits.resolve_s)

    async def _ask_in_turn(self, resolver: Resolver, host: str) -> Sequence[str]:
        async with self._permits:
            return await resolver.resolve(host)
