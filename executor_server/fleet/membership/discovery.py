"""The addresses at which a front finds its nodes: a fixed list, the addresses of a DNS name, the lines of a file.

When a source can't be read, its last addresses stay in use. An address that disappears does not end a link; the front
only stops looking for a node there. The lease decides when a node is lost.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from executor_server.core import AddressError, TcpAddress, addresses
from executor_server.core.config import ConfigError, FleetSection, read_bytes

DNS_INTERVAL_S = 5.0
"""Seconds between two DNS queries."""
FILE_INTERVAL_S = 0.5
"""Seconds between two readings of the file of addresses."""
RESOLVE_TIME_S = 5.0
"""Seconds that a DNS query may take."""
MAX_ADDRESSES = 4096
"""Addresses of one source. A file with more is refused; of a DNS answer the first ones are taken."""

_log = structlog.get_logger(__name__)

Resolve = Callable[[str, int], Awaitable[list[str]]]


class Discovery:
    """Keeps the addresses of all sources together, and reports each change to `changed`. In the event loop."""

    def __init__(
        self, section: FleetSection, changed: Callable[[frozenset[str]], None], resolve: Resolve | None = None
    ) -> None:
        """`resolve` returns the addresses of a host, the event loop's resolver by default. Raises AddressError."""
        self._section = section
        self._changed = changed
        self._resolve = resolve or _resolve
        self._found: dict[str, frozenset[str]] = {"nodes": frozenset(str(node_address(text)) for text in section.nodes)}
        self._dns = node_address(section.dns) if section.dns is not None else None
        self.problems: dict[str, str] = {}
        """The problem of each source that can't be read now."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset().union(*self._found.values())

    async def start(self) -> None:
        """Reports the addresses that are known already, and begins to look for others."""
        if self._section.nodes_file is not None:
            self._read(self._section.nodes_file)
            self._tasks.append(asyncio.create_task(self._watch_file(self._section.nodes_file)))
        if self._dns is not None:
            self._tasks.append(asyncio.create_task(self._watch_dns(self._dns)))
        self._changed(self.addresses)

    async def close(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- sources

    async def _watch_file(self, path: Path) -> None:
        while True:
            await asyncio.sleep(FILE_INTERVAL_S)
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            self._take("nodes_file", _listed(read_bytes(path, "file of nodes", is_trusted=True)))
        except (ConfigError, AddressError) as error:
            self._report("nodes_file", str(error))

    async def _watch_dns(self, name: TcpAddress) -> None:
        while True:
            try:
                async with asyncio.timeout(RESOLVE_TIME_S):
                    found = await self._resolve(name.host, name.port)
                hosts = sorted(set(found))[:MAX_ADDRESSES]
                self._take("dns", frozenset(str(TcpAddress(host, name.port)) for host in hosts))
            except (OSError, TimeoutError) as error:
                self._report("dns", f"{name.host} can't be resolved: {error or 'no answer in time'}")
            await asyncio.sleep(DNS_INTERVAL_S)

    def _take(self, source: str, found: frozenset[str]) -> None:
        self.problems.pop(source, None)
        before = self.addresses
        self._found[source] = found
        if self.addresses != before:
            added, removed = sorted(self.addresses - before), sorted(before - self.addresses)
            _log.info("fleet_addresses_changed", source=source, added=added, removed=removed)
            self._changed(self.addresses)

    def _report(self, source: str, problem: str) -> None:
        """Logs a problem once, until the source works again."""
        if self.problems.get(source) != problem:
            self.problems[source] = problem
            _log.warning("fleet_addresses_unknown", source=source, problem=problem, kept=len(self.addresses))


def node_address(text: str) -> TcpAddress:
    """Returns the address of a node, `HOST:PORT`. Raises AddressError."""
    address = addresses.parse(text)
    if not isinstance(address, TcpAddress) or not address.port:
        raise AddressError(f"{text!r} is not an address of a node; write HOST:PORT.")
    return address


def _listed(data: bytes) -> frozenset[str]:
    """Returns the addresses in a file: one a line; empty lines and those that begin with # don't count."""
    lines = [line.strip() for line in data.decode("ascii", "replace").splitlines()]
    texts = [line for line in lines if line and not line.startswith("#")]
    if len(texts) > MAX_ADDRESSES:
        raise AddressError(f"The file of nodes has {len(texts):,} addresses; at most {MAX_ADDRESSES:,} are allowed.")
    return frozenset(str(node_address(text)) for text in texts)


async def _resolve(host: str, port: int) -> list[str]:
    """Asks the system's resolver, which knows /etc/hosts and the search domains of a cluster."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]
