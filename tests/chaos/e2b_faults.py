"""The faults of E2B's cloud that sessions are put through, one in the life of each: kind by place by moment.

A place is a request that a session's life makes, identified by how often the same was made before. The double
(tests/support/e2b/faults.py) lists the faults. Nothing here is drawn by chance: the same table each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.e2b import Kind

START = "/process.Process/Start"

REQUEST_TIMEOUT_S = 3.0
LATE_S = 2 * REQUEST_TIMEOUT_S
"""An answer so late comes after the end of its wait."""
ALWAYS = None
OFTEN = 3
"""As often in a row as a request that may be repeated survives."""

_ENDLESS_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Place:
    """Requests of one sort. `skip`: so many of them go unharmed."""

    name: str
    method: str
    path: str
    skip: int = 0
    rests: bool = False  # the session is to rest, and to be woken
    at_start: bool = False  # the daemon makes it while it starts
    breaks: bool = False  # every connection is to be cut once, so that it is made again


@dataclass(frozen=True)
class Case:
    place: Place
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    harmless: bool = True
    """True when the session must go on as if nothing had happened; otherwise it may also be refused or lost, and say so."""

    def __str__(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.place.name} #{self.place.skip}: {self.kind.value} {settings}".strip()


CREATE = Place("create", "POST", "/v2/sandboxes")
PROBE = Place("probe", "POST", START, 0)
UPLOAD = Place("upload", "POST", "/files")
NAMESPACES = Place("namespaces", "POST", START, 1)
RELAY = Place("relay", "POST", START, 2)
RELAY_AGAIN = Place("relay again", "POST", START, 3, breaks=True)
STDIN = tuple(Place("stdin", "POST", "/process.Process/SendInput", skip) for skip in range(4))
LIFETIME = Place("lifetime", "POST", "/sandboxes/{id}/timeout")
PAUSE = Place("pause", "POST", "/sandboxes/{id}/pause", rests=True)
CONNECT = Place("connect", "POST", "/v2/sandboxes/{id}/connect", rests=True)
STOP = Place("stop relay", "POST", "/process.Process/SendSignal")
KILL = Place("kill", "DELETE", "/sandboxes/{id}")
LIST = tuple(Place("list", "GET", "/v2/sandboxes", skip, at_start=True) for skip in range(3))


def _unary(place: Place, *, harmful: tuple[int, ...] = ()) -> Iterator[Case]:
    """Faults of a request that is answered as a whole. `harmful`: statuses that count as the cloud's answer."""
    yield Case(place, Kind.DELAY, {"seconds": 0.2})
    yield Case(place, Kind.DELAY, {"seconds": LATE_S})
    yield Case(place, Kind.CUT_BEFORE)
    yield Case(place, Kind.CUT_BEFORE, {"times": OFTEN})
    yield Case(place, Kind.CUT_AFTER)
    yield Case(place, Kind.CUT_AFTER, {"times": OFTEN})
    for status in (500, 502, 504):
        yield Case(place, Kind.STATUS, {"status": status})
    wait: dict[str, Any]
    for wait in ({"status": 429}, {"status": 429, "retry_after_s": 1}, {"status": 503}):
        yield Case(place, Kind.STATUS, wait, harmless=wait["status"] not in harmful)
    for status in (400, 401, 403, 404, 409):
        yield Case(place, Kind.STATUS, {"status": status}, harmless=status not in harmful)
    yield Case(
        place, Kind.STATUS_AFTER, {"status": 500}, harmless=place is not CREATE
    )  # the sandbox that was made takes up the quota
    yield Case(place, Kind.STATUS_AFTER, {"status": 404}, harmless=404 not in harmful)
    yield Case(place, Kind.TRUNCATED)
    yield Case(place, Kind.GARBAGE)


def _stream(place: Place, *, at_bytes: tuple[int, ...], harmful: tuple[int, ...] = ()) -> Iterator[Case]:
    """Faults of a request that is answered by a stream of events."""
    yield Case(place, Kind.DELAY, {"seconds": 0.2})
    yield Case(place, Kind.DELAY, {"seconds": LATE_S})
    yield Case(place, Kind.CUT_BEFORE)
    yield Case(place, Kind.CUT_AFTER)
    for status in (429, 500, 502, 503):
        yield Case(place, Kind.STATUS, {"status": status})
    for status in (401, 404):
        yield Case(place, Kind.STATUS, {"status": status}, harmless=status not in harmful)
    yield Case(place, Kind.STATUS_AFTER, {"status": 500})
    yield Case(place, Kind.WRONG_ID)
    for at_byte in at_bytes:
        yield Case(place, Kind.STREAM_CUT, {"at_byte": at_byte})
    yield Case(place, Kind.STREAM_STALL, {"at_byte": 0})
    yield Case(place, Kind.STREAM_STALL, {"at_byte": at_bytes[-1]})
    yield Case(place, Kind.STREAM_REORDERED)
    yield Case(place, Kind.STREAM_DUPLICATED)
    yield Case(place, Kind.STREAM_BLANK_LINES)
    yield Case(place, Kind.STREAM_LINE_SEPARATOR)
    yield Case(place, Kind.STREAM_NO_END)
    yield Case(place, Kind.STREAM_GARBAGE)
    yield Case(place, Kind.STREAM_ENDLESS_LINE, {"at_byte": _ENDLESS_BYTES})


def _vanishing(*places: Place) -> Iterator[Case]:
    for place in places:
        yield Case(place, Kind.VANISH, harmless=False)


def matrix() -> dict[str, list[Case]]:
    """All cases, by the name of their test."""
    return {
        "start": [
            *_unary(LIST[0], harmful=(400, 401, 403, 404)),
            *(Case(place, kind) for place in LIST[1:] for kind in (Kind.CUT_BEFORE, Kind.TRUNCATED, Kind.GARBAGE)),
            Case(LIST[1], Kind.STATUS, {"status": 401}, harmless=False),
            Case(LIST[0], Kind.STATUS, {"status": 503, "times": ALWAYS}, harmless=False),
        ],
        "create": [
            *_unary(CREATE, harmful=(400, 401, 403, 404, 429, 503)),
            Case(CREATE, Kind.WRONG_ID, harmless=False),
            Case(CREATE, Kind.STATUS, {"status": 503, "times": ALWAYS}, harmless=False),
            Case(CREATE, Kind.CUT_AFTER, {"times": ALWAYS}, harmless=False),
        ],
        "probe": [*_stream(PROBE, harmful=(401, 404), at_bytes=(0, 4, 60, 150)), *_vanishing(PROBE)],
        "upload": [*_unary(UPLOAD, harmful=(400, 401, 404)), *_vanishing(UPLOAD)],
        "namespaces": [*_stream(NAMESPACES, harmful=(401, 404), at_bytes=(0, 4, 60)), *_vanishing(NAMESPACES)],
        "relay": [
            *_stream(RELAY, at_bytes=(0, 4, 60, 200, 700, 1_500, 3_000, 6_000, 12_000)),
            *_vanishing(RELAY),
        ],
        "relay again": [
            *_stream(RELAY_AGAIN, at_bytes=(0, 4, 60, 200, 700, 1_500, 3_000, 6_000, 12_000)),
            *_vanishing(RELAY_AGAIN),
        ],
        "stdin": [case for place in STDIN[:2] for case in _unary(place)],
        "stdin later": [
            *(case for place in STDIN[2:] for case in _unary(place)),
            *_vanishing(*STDIN),
        ],
        "lifetime": [*_unary(LIFETIME), *_vanishing(LIFETIME)],
        "pause": [*_unary(PAUSE), *_vanishing(PAUSE)],
        "connect": [
            *_unary(CONNECT),
            Case(CONNECT, Kind.WRONG_ID),
            *_vanishing(CONNECT),
        ],
        "end": [
            *_unary(KILL),
            *_vanishing(KILL),
            Case(KILL, Kind.STATUS, {"status": 500, "times": ALWAYS}),
            Case(KILL, Kind.CUT_BEFORE, {"times": ALWAYS}),
            *_unary(STOP),
        ],
    }
