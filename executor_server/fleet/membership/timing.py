"""The times of a fleet, and the refusal of a link."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from executor_server.core import PreconditionFailed, Reason

MARGIN_S = 1.0
"""Seconds beyond a lease before a front reports sessions lost: a busy front may read a report that late."""
MAX_TIME_S = 600.0


class NodeRefused(PreconditionFailed):
    """A link or a message on it is refused, and the link ends. The message gives the reason, for people.

    `is_stale`: the node's sessions were reported lost; it ends them when the hello of the next link says so.
    `is_superseded`: the node obeys another process with this front's identity.
    """

    def __init__(self, message: str, *, is_stale: bool = False, is_superseded: bool = False) -> None:
        super().__init__(Reason.FRONT_SUPERSEDED if is_superseded else Reason.NODE_REFUSED, message)
        self.is_stale = is_stale


@dataclass(frozen=True)
class Timing:
    """Seconds between reports, of silence until sessions are lost, and from then until a node ends its sandboxes."""

    report_interval_s: float = 0.5
    lease_s: float = 3.0
    fence_s: float = 10.0

    def check(self) -> None:
        """Raises ValueError for times with which leases would never be renewed in time."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and 0 < value <= MAX_TIME_S):
                raise ValueError(f"{name} = {value:g}: it must be above 0 and at most {MAX_TIME_S:g} s")
        if 2 * self.report_interval_s > self.lease_s:
            raise ValueError(f"lease_s = {self.lease_s:g}: it must be at least two report intervals")


def lease_clock() -> float:
    """Returns the seconds of a clock that ignores changes of the date and runs on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
