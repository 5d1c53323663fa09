"""The attempts of the corpus against the egress process itself: its resolver, its rules over the link, real servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from executor_server.core import NetworkRules
from executor_server.guest.egress import reasons
from tests.support.egress_attempts import NAMES, RULES, SERVER, Attempt, attempts, connect, get
from tests.support.egress_service import SOON_S, BoundSession, bind, egress_service, settings_for
from tests.support.internet.world import Internet

# A session's refusals are reported one by one up to a rate, and only counted past it.
SESSION_ATTEMPTS = 50


def _own(internet: Internet) -> Iterator[Attempt]:
    """Names of addresses of this host that nothing lists, at which servers of the world wait."""
    for name, address in (("own", internet.trap.own), ("trap", internet.trap.loopback)):
        host = f"{name}.lies.example"
        internet.names.address(host, address)
        yield Attempt(f"CONNECT to a name of {name}", connect(f"{host}:443"), reasons.REFUSED_ADDRESS)
        yield Attempt(f"GET of a name of {name}", get(f"http://{host}/", host=host), reasons.REFUSED_ADDRESS)
        yield Attempt(f"CONNECT to {address}", connect(f"{address}:443"), reasons.ADDRESS_LITERAL)


async def _send(session: BoundSession, data: bytes) -> bytes:
    """Sends over a connection of its own, and returns what came back until the proxy ended it."""
    reader, writer = await session.connect()
    answer = b""
    try:
        # A client that is refused in the middle of a megabyte is cut off.
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            async with asyncio.timeout(SOON_S):
                while piece := await reader.read(65536):
                    answer += piece
    finally:
        writer.transport.abort()
    return answer


async def test_egress_process_refuses_the_corpus_and_no_server_hears_of_it(internet: Internet) -> None:
    for name, addresses in NAMES.items():
        with contextlib.suppress(ValueError):  # answers that no DNS server can give
            internet.names.address(name, *(internet.address if each == SERVER else each for each in addresses))
    tried = [each for each in attempts() if not each.unfinished and not each.needs_own_resolver]
    tried += _own(internet)
    handshakes, trapped = len(internet.handshakes), len(internet.trap.connections)
    requests, conversations = len(internet.sites.requests), len(internet.raw.conversations)
    rules = NetworkRules(
        allowed=tuple(RULES["allowed"]), denied=tuple(RULES["denied"]), max_new_connections_per_minute=100_000
    )
    async with egress_service(settings_for(internet)) as service:
        for start in range(0, len(tried), SESSION_ATTEMPTS):
            session = await bind(service, rules, f"session-{start}")
            sink = session.sink
            for count, attempt in enumerate(tried[start : start + SESSION_ATTEMPTS], 1):
                await _send(session, attempt.sent)
                await sink.until(lambda sink=sink, count=count: len(sink.denied) >= count)
                assert [denial.reason for denial in sink.denied[count - 1 :]] == [attempt.reason], attempt.name
            made = [attempt for attempt in tried[start : start + SESSION_ATTEMPTS] if attempt.tunnelled]
            assert len(sink.opened) == len(made)
            assert {connection.address for connection in sink.opened} <= {internet.address}
            await service.release(session.session_id)
        assert len(internet.handshakes) == handshakes
        assert len(internet.trap.connections) == trapped
        assert len(internet.sites.requests) == requests
        assert sum(each.received_bytes for each in internet.raw.conversations[conversations:]) == 0
        session = await bind(service, rules, "last")
        answer = await _send(session, get("http://allowed.example/"))
        assert answer.startswith(b"HTTP/1.1 ")
        assert b"X-Egress-Reason" not in answer
        assert len(internet.sites.requests) == requests + 1
