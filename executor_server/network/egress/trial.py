"""Tries one connection through a temporary proxy, for `check-host`."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from executor_server.core import NO_NETWORK_USE, EgressConnection, EgressDenial, NetworkRules
from executor_server.guest.egress.addresses import AddressRules
from executor_server.guest.egress.own_addresses import OwnAddresses
from executor_server.network.egress.interface import EgressError, EgressSettings
from executor_server.network.egress.proxy_process import PROXY_COMMAND
from executor_server.network.egress.service import EgressService

_TRIAL_S = 10.0
_GREETING = b"from outside"


async def try_connection(settings: EgressSettings, *, command: Sequence[str] = PROXY_COMMAND) -> str | None:
    """Connects to a server at an address of this host, which only the trial's proxy may reach; returns the address.

    None: the host has no suitable address, so nothing was tried. Raises EgressError.
    """
    own = OwnAddresses()
    open_ones = (text for text in sorted(map(str, own())) if AddressRules((text,), own).why_refused(text) is None)
    if (address := next(open_ones, None)) is None:
        return None
    settings = replace(settings, internal=(*settings.internal, address), upstream_proxy=None, upstream_resolves=False)
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="check-egress-"))
        service = EgressService(settings, Path(directory) / "egress", command=command)
        stack.push_async_callback(service.close)
        await service.prepare()
        server = await stack.enter_async_context(await asyncio.start_server(_greet, address, 0))
        host = f"[{address}]" if ":" in address else address
        target = f"{host}:{server.sockets[0].getsockname()[1]}"
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = listener.getsockname()
        await service.bind("check-host", NetworkRules(allowed=(target,)), listener, _NoSink(), NO_NETWORK_USE)
        try:
            async with asyncio.timeout(_TRIAL_S):
                answer = await _ask(proxy, target)
        except (OSError, EOFError) as error:
            raise EgressError(f"The egress proxy gave no answer ({type(error).__name__}); its log has more.") from error
    if not answer.endswith(_GREETING):
        said = answer.decode("ascii", "replace").strip().rpartition("\n")[2]
        raise EgressError(f"The egress proxy answered: {said}.")
    return address


async def _greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_GREETING)
    writer.close()


async def _ask(proxy: tuple[str, int], target: str) -> bytes:
    reader, writer = await asyncio.open_connection(*proxy)
    try:
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        writer.write_eof()
        return await reader.read(-1)
    finally:
        writer.close()


class _NoSink:
    """The trial needs no reports."""

    def connection_opened(self, connection: EgressConnection) -> None: ...
    def connection_closed(self, connection: EgressConnection) -> None: ...
    def connection_denied(self, denial: EgressDenial) -> None: ...
    def denials_uncounted(self, count: int) -> None: ...
    async def host_asked(self, host: str, port: int) -> str:
        raise AssertionError("the rules ask for nothing")

    def listener_misused(self) -> None: ...
    def moved(self, sent_bytes: int, received_bytes: int) -> None: ...
