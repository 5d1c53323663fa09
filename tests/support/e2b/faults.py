"""Faults that the double commits, and which requests they befall.

A rule says which request (method, path, how often it is to be passed over first, how many times it strikes) and what
happens to it. Rules are asked in the order in which they were given, and a request suffers the first that matches: so
what happens is decided by the requests alone, not by chance.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    DELAY = "delay"  # for `seconds`, then as usual
    CUT_BEFORE = "cut before"  # the connection is cut and nothing is done
    CUT_AFTER = "cut after"  # it is done, and then the connection is cut without an answer
    STATUS = "status"  # `status` with an error's body; nothing is done
    STATUS_AFTER = "status after"  # it is done, but the answer is `status`
    TRUNCATED = "truncated"  # of the answer's body, half; then the connection is cut
    GARBAGE = "garbage"  # bytes that are no answer, under a good status
    WRONG_ID = "wrong id"  # each id of a sandbox in the answer is another's
    VANISH = "vanish"  # the sandbox ends before the request is looked at
    # Of streams: answers that come in events.
    STREAM_CUT = "stream cut"  # after `at_byte` bytes
    STREAM_REORDERED = "stream reordered"  # each two events swapped, but the first
    STREAM_DUPLICATED = "stream duplicated"  # each event twice, but the first
    STREAM_BLANK_LINES = "stream blank lines"  # between events
    STREAM_LINE_SEPARATOR = "stream line separator"  # U+2028, between and in events
    STREAM_NO_END = "stream no end"  # it ends as if all was well, without its last event
    STREAM_GARBAGE = "stream garbage"  # bytes that are no event, after the first
    STREAM_ENDLESS_LINE = "stream endless line"  # `at_byte` bytes without an end, made as they are read


@dataclass
class Fault:
    """One rule. `path` is a pattern as of a shell, over the path without a sandbox's id: see `plain_path`."""

    kind: Kind
    path: str = "*"
    method: str = "*"
    skip: int = 0  # so many that match go unharmed first
    times: int | None = 1  # None: always
    status: int = 500
    retry_after_s: int | None = None
    seconds: float = 0.0
    at_byte: int = 0
    when: Callable[[], bool] = field(default=lambda: True)
    struck: int = field(default=0, init=False)

    def take(self, method: str, path: str) -> bool:
        """Whether it strikes this request; counts."""
        if self.times is not None and self.struck >= self.times:
            return False
        if not (fnmatch.fnmatchcase(method, self.method) and fnmatch.fnmatchcase(path, self.path)):
            return False
        if not self.when():
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.struck += 1
        return True


@dataclass(frozen=True)
class Request:
    """One line of the double's log."""

    method: str
    path: str  # with {id} in place of a sandbox's
    sandbox_id: str | None
    status: int | None  # None: no answer, the connection was cut
    fault: Kind | None
