"""The HTTP endpoint that Prometheus reads, in the daemon's own event loop.

It serves `GET /metrics` and nothing else. It runs in the loop because what it reads belongs there. In return it is
limited: few connections, little time for each, and a page that is rendered at most twice a second, in small steps. It
requires no token, so it listens on the loopback unless the configuration names another address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from executor_server.core import AddressError, TcpAddress, addresses
from executor_server.telemetry.metrics import Metrics

MAX_CONNECTIONS = 16
MAX_REQUEST_BYTES = 16 * 1024
REQUEST_TIME_S = 5.0
RESPONSE_TIME_S = 10.0
PAGE_AGE_S = 0.5
"""Seconds for which a page is served again, so that a second scraper costs no second rendering."""
PIECE_SAMPLES = 64
"""Samples that are formatted without yielding to the event loop; each takes about ten microseconds."""
LAG_INTERVAL_S = 0.5

_CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
_REFUSALS = {
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
}

_log = structlog.get_logger(__name__)


async def page(registry: CollectorRegistry) -> bytes:
    """Returns all families in Prometheus' text format. Yields to the event loop after every PIECE_SAMPLES samples."""
    parts = []
    for family in registry.collect():
        for text in _texts(family):
            parts.append(text)
            await asyncio.sleep(0)
    return b"".join(parts)


def _texts(family: Metric) -> Iterator[bytes]:
    """Yields the text of a family, in pieces."""
    for start in range(0, max(len(family.samples), 1), PIECE_SAMPLES):
        piece = Metric(family.name, family.documentation, family.type)
        piece.samples = family.samples[start : start + PIECE_SAMPLES]
        text = generate_latest(_Registry(piece))
        # Only the first piece carries the two header lines.
        yield text if start == 0 else text.split(b"\n", 2)[2]


class _Registry:
    """Wraps one family as the registry that the formatter wants."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


class MetricsEndpoint:
    """Serves metrics from `start` to `close`, and measures the loop's lag meanwhile."""

    def __init__(self, metrics: Metrics, listen: str) -> None:
        """Raises AddressError when `listen` is no HOST:PORT."""
        address = addresses.parse(listen)
        if not isinstance(address, TcpAddress):
            raise AddressError(f"{listen!r} is not an address for metrics; write HOST:PORT.")
        self._address = address
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._lag: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._page = b""
        self._made_s = float("-inf")
        self._making: asyncio.Task[bytes] | None = None

    async def start(self) -> str:
        """Listens. Returns the address, with the port that was found for port 0. Raises AddressError."""
        host, port = self._address.host, self._address.port
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise AddressError(
                f"Can't listen on {self._address} for metrics: it is in use, or not an address of this machine."
            ) from error
        found = TcpAddress(host, self._server.sockets[0].getsockname()[1])
        if not found.is_loopback:
            _log.warning("metrics_exposed", address=str(found), detail="other machines can read them without a token")
        _log.info("metrics_listening", address=str(found))
        self._lag = asyncio.create_task(self._measure_lag())
        return str(found)

    async def close(self) -> None:
        """Ends listening, and every connection."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._connections, *(task for task in (self._lag, self._making) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._metrics.note_lag(max(0.0, loop.time() - due_s))

    # -- connections ---------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request; drops a connection that is too slow."""
        try:
            async with asyncio.timeout(REQUEST_TIME_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status = _checked_status(head)
        except asyncio.LimitOverrunError:
            status = 400
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        try:
            answer = _answer(await self._current_page()) if status == 200 else _refusal(status)
            async with asyncio.timeout(RESPONSE_TIME_S):
                writer.write(answer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError):
            pass  # a scraper that does not read its answer loses it
        except Exception:  # noqa: BLE001 - the border: a bug in a collector must be seen, and cost one scrape
            _log.exception("metrics_broke")
        finally:
            writer.transport.abort()

    async def _current_page(self) -> bytes:
        """Returns the page; scrapes that arrive while it is rendered, or soon after, share it."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._made_s < PAGE_AGE_S:
            return self._page
        if self._making is None:
            self._making = asyncio.create_task(page(self._metrics.registry))
            self._making.add_done_callback(self._made)
        return await asyncio.shield(self._making)

    def _made(self, making: asyncio.Task[bytes]) -> None:
        self._making = None
        if not making.cancelled() and making.exception() is None:
            self._page, self._made_s = making.result(), asyncio.get_running_loop().time()


def _checked_status(head: bytes) -> int:
    """Returns the HTTP status for a request."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return 400
    if words[1].split(b"?", 1)[0] != b"/metrics":
        return 404
    return 200 if words[0] == b"GET" else 405


def _answer(body: bytes) -> bytes:
    return _response(b"200 OK", _CONTENT_TYPE, body)


def _refusal(status: int) -> bytes:
    phrase = _REFUSALS[status]
    return _response(b"%d %s" % (status, phrase), b"text/plain", phrase + b"\n")


def _response(status: bytes, content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status,
        content_type,
        len(body),
        body,
    )
