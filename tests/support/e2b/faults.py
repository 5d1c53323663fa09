"""Faults of the double, and the rules that select the requests that have them.

A rule selects requests (method, path, how many are skipped first, how many are hit) and names the fault.
Rules are tried in the order in which they were given, and the first that matches a request applies: so
the requests alone decide, not chance. A `Storm` is many rules in one, drawn from a seed.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Kind(Enum):
    DELAY = "delay"  # for `seconds`, then as usual
    CUT_BEFORE = "cut before"  # the connection is cut and nothing is done
    CUT_AFTER = "cut after"  # it is done, and then the connection is cut without an answer
    STATUS = "status"  # `status` with an error's body; nothing is done
    STATUS_AFTER = "status after"  # it is done, but the answer is `status`
    TRUNCATED = "truncated"  # half of the answer's body (one event of a stream); then the connection is cut
    GARBAGE = "garbage"  # bytes that are no answer, under a good status
    WRONG_ID = "wrong id"  # each id of a sandbox, or of a command, in the answer is another's
    VANISH = "vanish"  # the sandbox ends before the request is looked at
    # Faults of streams, which are answers that come in events.
    STREAM_CUT = "stream cut"  # after `at_byte` bytes
    STREAM_STALL = "stream stall"  # the same, but the connection stays, and nothing more comes
    STREAM_REORDERED = "stream reordered"  # each two events swapped, but the first
    STREAM_DUPLICATED = "stream duplicated"  # each event twice, but the first
    STREAM_BLANK_LINES = "stream blank lines"  # between events
    STREAM_LINE_SEPARATOR = "stream line separator"  # U+2028, between and in events
    STREAM_NO_END = "stream no end"  # an orderly end, without the last event
    STREAM_GARBAGE = "stream garbage"  # bytes that are no event, after the first
    STREAM_ENDLESS_LINE = "stream endless line"  # `at_byte` bytes without an end, made as they are read


STREAMS = (("POST", "/process.Process/Start"),)
"""The requests whose answers are streams."""

HARMLESS = tuple(kind for kind in Kind if kind is not Kind.VANISH)
"""Those after which the sandbox is still there."""

_WITH_IDS = ("/sandboxes*", "/v2/sandboxes*", "/process.Process/Start")


def can_strike(kind: Kind, method: str, path: str) -> bool:
    """True when this kind makes a difference to such a request."""
    is_stream = (method, path) in STREAMS
    if kind is Kind.WRONG_ID:
        return method != "DELETE" and any(fnmatch.fnmatchcase(path, pattern) for pattern in _WITH_IDS)
    if kind is Kind.VANISH:
        return not path.endswith("/sandboxes")
    return is_stream or not kind.value.startswith("stream")


class Rule(Protocol):
    """Decides for each request which fault it has."""

    def take(self, method: str, path: str) -> Fault | None:
        """Returns the fault of this request, if any, and counts it."""
        ...


@dataclass
class Fault:
    """One kind for some requests. `path` is a pattern as of a shell, over the path with {id} in place of a sandbox's."""

    kind: Kind
    path: str = "*"
    method: str = "*"
    skip: int = 0  # so many matching requests have no fault first
    times: int | None = 1  # None: always
    status: int = 500
    retry_after_s: int | None = None
    seconds: float = 0.0
    at_byte: int = 0
    when: Callable[[], bool] = field(default=lambda: True)
    struck: int = field(default=0, init=False)
    cuts: int = field(default=0, init=False)  # streams that came as far as `at_byte`

    def take(self, method: str, path: str) -> Fault | None:
        """Implements `Rule`."""
        if self.times is not None and self.struck >= self.times:
            return None
        if not (fnmatch.fnmatchcase(method, self.method) and fnmatch.fnmatchcase(path, self.path)):
            return None
        if not (can_strike(self.kind, method, path) and self.when()):
            return None
        if self.skip > 0:
            self.skip -= 1
            return None
        self.struck += 1
        return self


class Storm:
    """Gives a part of all requests one of `kinds` each; the same requests and seed have the same faults.

    `most` limits the number of faults.
    """

    def __init__(
        self, seed: int, *, rate: float, kinds: Sequence[Kind] = HARMLESS, path: str = "*", most: int = 1_000
    ) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._kinds = kinds
        self._path = path
        self._most = most
        self.struck: list[Fault] = []

    def take(self, method: str, path: str) -> Fault | None:
        """Implements `Rule`."""
        if len(self.struck) >= self._most or not fnmatch.fnmatchcase(path, self._path):
            return None
        if self._random.random() >= self._rate:
            return None
        fault = Fault(
            self._random.choice(self._kinds),
            status=self._random.choice((429, 500, 502, 503, 504)),
            retry_after_s=self._random.choice((None, 0, 1)),
            seconds=self._random.uniform(0.0, 0.3),
            at_byte=self._random.randrange(4_096),
        )
        if not can_strike(fault.kind, method, path):
            return None
        self.struck.append(fault)
        return fault


@dataclass(frozen=True)
class Request:
    """One line of the double's log."""

    method: str
    path: str  # with {id} in place of a sandbox's
    sandbox_id: str | None
    status: int | None  # None: no answer, the connection was cut
    fault: Kind | None
