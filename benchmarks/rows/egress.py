"""The network of sandboxes compared with direct connections: requests, bytes, refusals, sessions, effect on others.

Client code and servers are the same on both sides (benchmarks/egress_client.py, and the tests' own internet in a
process of its own). Our side adds the sandbox around the client, the proxy, and the daemon, which counts the
connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks import egress_client as direct
from benchmarks.bench import Bench, Served
from benchmarks.figures import (
    AtLeast,
    AtMost,
    AtMostMore,
    AtMostTimes,
    Figure,
    Measured,
    Reference,
    in_ms,
    in_turns,
    timed,
)
from benchmarks.internet import RAW, RAW_PORT, SECRET_SITE, SITE, SUFFIX, Internet, networked, running_internet
from benchmarks.rows.memory import pss_bytes
from benchmarks.rows.sessions import created
from executor_client import Session

_BATCHES = 8
_CONNECTIONS_PER_BATCH = 10
_ROUND_TRIPS_PER_BATCH = 60
_DENIALS_PER_BATCH = 30
_DOWNLOAD_BYTES = 300_000_000
_DOWNLOADS = 5
_SESSIONS = 25
# Sessions, and open connections of each. Each connection gets a byte a second at its own moment of the second, as those
# of independent programs do. Fifty that are served in the same moment cost all others five milliseconds.
_OTHER_SESSIONS = 4
_OPEN_PER_SESSION = 50
_BLOCKS = 5
_EXECUTIONS = 200
_LIMITS = {"wall_time_s": 120.0, "operations": 10**11}

_SOURCE = Path(direct.__file__).read_text()
_OPEN = f"""
import selectors, threading, time
held = [Route().tcp("{RAW}", {RAW_PORT}) for _ in range({_OPEN_PER_SESSION})]
watched = selectors.DefaultSelector()
for connection in held:
    time.sleep(1 / {_OPEN_PER_SESSION})
    connection.sendall(b"drip 1\\n")
    watched.register(connection, selectors.EVENT_READ)
def drain():
    while watched.get_map():
        for key, _ in watched.select():
            if not key.fileobj.recv(65536):
                watched.unregister(key.fileobj)
threading.Thread(target=drain, daemon=True).start()
"""


# The next byte ends a connection whose client has shut it down.
_CLOSE = "for connection in held:\n    connection.shutdown(socket.SHUT_RDWR)\ntime.sleep(1.5)"


def local(bench: Bench) -> Iterator[Figure]:
    """All figures, on the local backend. Raises Unmeasurable."""
    with running_internet() as internet, networked(internet) as served:
        with _session(served) as session:
            yield from _connections(internet, session)
            yield from _bytes(internet, session)
            yield from _proxy_memory(served)
        yield from _creation(served)
        yield from _others(served)


def _session(served: Served) -> Session:
    made = served.client.create_session(
        network=[f"*.{SUFFIX}", f"*.{SUFFIX}:{RAW_PORT}"], authorized_imports=["*"], limits=_LIMITS
    )
    made.execute(f"{_SOURCE}\nroute = Route()")
    return made


def _inside(session: Session, call: str) -> list[float]:
    """Runs a function of the client in the sandbox."""
    result = session.execute(call)
    assert isinstance(result.output, list), f"{result.error}\n{result.logs}"
    return result.output


def _batches(*work: Callable[[], list[float]]) -> list[tuple[float, ...]]:
    """Returns the seconds of all rounds of each; the batches take turns."""
    taken: list[list[float]] = [[] for _ in work]

    def once(samples: list[float], batch: Callable[[], list[float]]) -> Measured:
        def measured() -> float:
            samples.extend(batch())
            return 0.0

        return measured

    in_turns(_BATCHES, *(once(samples, batch) for samples, batch in zip(taken, work, strict=True)), warm_up=0)
    return [tuple(samples) for samples in taken]


def _connections(internet: Internet, session: Session) -> Iterator[Figure]:
    straight = direct.Route(internet.address, internet.ca_file)
    ours, theirs = _batches(
        lambda: _inside(session, f"new_plain_connections(route, '{RAW}', {RAW_PORT}, {_CONNECTIONS_PER_BATCH})"),
        lambda: direct.new_plain_connections(straight, RAW, RAW_PORT, _CONNECTIONS_PER_BATCH),
    )
    yield Figure("new connection + request", "ms", in_ms(ours), Reference("direct", in_ms(theirs)), AtMostMore(1))
    ours, theirs, terminated = _batches(
        lambda: _inside(session, f"new_connections(route, '{SITE}', {_CONNECTIONS_PER_BATCH})"),
        lambda: direct.new_connections(straight, SITE, _CONNECTIONS_PER_BATCH),
        lambda: _inside(session, f"new_connections(route, '{SECRET_SITE}', {_CONNECTIONS_PER_BATCH})"),
    )
    reference = Reference("direct", in_ms(theirs))
    yield Figure("https, new connection + request", "ms", in_ms(ours), reference)
    yield Figure("the same with a secret", "ms", in_ms(terminated), reference)
    ours, theirs, terminated = _batches(
        lambda: _inside(session, f"round_trips(route, '{SITE}', {_ROUND_TRIPS_PER_BATCH})"),
        lambda: direct.round_trips(straight, SITE, _ROUND_TRIPS_PER_BATCH),
        lambda: _inside(session, f"round_trips(route, '{SECRET_SITE}', {_ROUND_TRIPS_PER_BATCH})"),
    )
    reference = Reference("direct", in_ms(theirs))
    yield Figure("https, request on a kept connection", "ms", in_ms(ours), reference, AtMostMore(0.15))
    yield Figure("the same with a secret", "ms", in_ms(terminated), reference)
    (refused,) = _batches(lambda: _inside(session, f"denials(route, 'denied.example', {_DENIALS_PER_BATCH})"))
    yield Figure("a connection that is refused", "ms", in_ms(refused), aim=AtMost(1))


def _bytes(internet: Internet, session: Session) -> Iterator[Figure]:
    straight = direct.Route(internet.address, internet.ca_file)

    def inside() -> float:
        (took_s,) = _inside(session, f"downloads(route, '{RAW}', {RAW_PORT}, {_DOWNLOAD_BYTES}, 1)")
        return _DOWNLOAD_BYTES / took_s / 1e6

    def beside() -> float:
        (took_s,) = direct.downloads(straight, RAW, RAW_PORT, _DOWNLOAD_BYTES, 1)
        return _DOWNLOAD_BYTES / took_s / 1e6

    ours, theirs = in_turns(_DOWNLOADS, inside, beside, warm_up=1)
    yield Figure("download through the proxy", "MB/s", ours, Reference("direct", theirs), AtLeast(300))


def _proxy_memory(served: Served) -> Iterator[Figure]:
    """Of a proxy with secrets and a resolver: its proportional set size, as for sessions, since it shares the
    interpreter and OpenSSL with the daemon; and its resident size."""
    children = psutil.Process(served.daemon.pid).children()
    proxies = [child for child in children if "executor_server.network.proxy" in child.cmdline()]
    assert len(proxies) == 1, proxies
    yield Figure("egress proxy, after all that", "MB", (pss_bytes(proxies) / 1e6,), aim=AtMost(40))
    yield Figure("the same, resident", "MB", (proxies[0].memory_info().rss / 1e6,), aim=AtMost(40))


def _creation(served: Served) -> Iterator[Figure]:
    """Sandboxes that are made on the spot, with a network and without."""

    def life(*network: str) -> float:
        return created(lambda: served.cold_session(network=network))[0]

    with_ms, without_ms = in_turns(_SESSIONS, lambda: life(SITE), life)
    yield Figure("session with a network, cold", "ms", with_ms, Reference("without", without_ms), AtMostMore(2))


def _others(served: Served) -> Iterator[Figure]:
    """Executions of one session while connections of others are open, compared with the same while there are none.

    In blocks that take turns: a 99th percentile rests on few samples, and the host's other load comes and goes.
    """
    alone: list[float] = []
    busy: list[float] = []
    with served.client.create_session() as quiet, ExitStack() as stack:
        others = [stack.enter_context(_session(served)) for _ in range(_OTHER_SESSIONS)]
        for _ in range(_BLOCKS):
            alone += _executions(quiet)
            for other in others:
                assert other.execute(_OPEN).error is None
            busy += _executions(quiet)
            busy += _executions(quiet)
            for other in others:
                assert other.execute(_CLOSE).error is None
            alone += _executions(quiet)
    name = f"execute 1+1, {_OTHER_SESSIONS * _OPEN_PER_SESSION} connections open"
    yield Figure(name, "ms", tuple(busy), Reference("none open", tuple(alone)), AtMostTimes(1.1), by_p99=True)


def _executions(session: Session) -> list[float]:
    session.execute("1+1")
    return [timed(lambda: session.execute("1+1")) for _ in range(_EXECUTIONS)]
