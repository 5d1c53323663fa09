"""Counts the sandboxes of each kind that are wanted, and says when a fork server is worth its cost.

A fork server with four libraries takes 0.8 s of processor time once, and 85 MiB while it is there. A sandbox that it
makes takes 30 ms less of a processor, and where agent code imports the libraries, half a second and some 60 MiB less.
So it is worth it from the second session on that lives beside it. It is not for a daemon with one session, of which the
warm pool makes two sandboxes when it starts and a third when the session takes one: so the fourth counts. Nor is it for
a daemon that lives for seconds, as a program's own one and most of those in tests do, whatever it makes meanwhile.

This module reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

# Sandboxes of a kind, counted from one of them on for some seconds; and the age of that one, in seconds, from which on
# they count.
_WANTED, _WITHIN_S, _AFTER_S = 4, 600.0, 10.0
# Kinds that are counted, each tenant's its own; the one that was wanted longest ago is forgotten for a new one.
_MAX_KINDS = 64

Kind = TypeVar("Kind")


@dataclass
class _Count:
    since_s: float
    wanted: int = 0


class Demand(Generic[Kind]):
    """Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Kind, _Count] = OrderedDict()  # the kind that was wanted longest ago first

    def note(self, kind: Kind, now_s: float) -> bool:
        """Notes that a sandbox is wanted; true when this kind is worth a fork server."""
        count = self._counts.setdefault(kind, _Count(now_s))
        if now_s - count.since_s > _WITHIN_S:
            count = self._counts[kind] = _Count(now_s)
        count.wanted += 1
        self._counts.move_to_end(kind)
        if len(self._counts) > _MAX_KINDS:
            self._counts.popitem(last=False)
        return count.wanted >= _WANTED and now_s - count.since_s >= _AFTER_S
