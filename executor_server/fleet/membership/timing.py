"""The times of a fleet, and the refusal of a link."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from executor_server.core import PreconditionFailed, Reason

MARGIN_S = 1.0
"""Seconds between the end of a node's lease by its own clock and the front's word that its sessions are lost. It is for
clocks that run at different rates: with a lease of 3 s they may differ by 14 %, with one of 60 s by 0.8 %."""
MAX_TIME_S = 600.0
MAX_DRIFT = 0.005
"""The difference of the rates of two clocks that leases allow for; that of real clocks is below 0.0005."""


class NodeRefused(PreconditionFailed):
    """A link, or what came over it, is refused; the link ends. The message says why, for people.

    `is_stale`: what the node had was reported lost; a link whose hello says so ends that. `is_superseded`: the node
    obeys another process with this front's identity.
    """

    def __init__(self, message: str, *, is_stale: bool = False, is_superseded: bool = False) -> None:
        super().__init__(Reason.FRONT_SUPERSEDED if is_superseded else Reason.NODE_REFUSED, message)
        self.is_stale = is_stale


@dataclass(frozen=True)
class Timing:
    """Seconds between reports, of a lease, and without a lease until a node ends its sandboxes."""

    report_interval_s: float = 0.5
    lease_s: float = 3.0
    fence_s: float = 10.0

    def check(self) -> None:
        """Raises ValueError for times with which leases would not be safe, or never be renewed in time."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and 0 < value <= MAX_TIME_S):
                raise ValueError(f"{name} = {value:g}: it must be above 0 and at most {MAX_TIME_S:g} s")
        if 2 * self.report_interval_s > self.lease_s:
            raise ValueError(f"lease_s = {self.lease_s:g}: it must be at least two report intervals")
        if 2 * MAX_DRIFT * self.lease_s > MARGIN_S:
            raise ValueError(f"lease_s = {self.lease_s:g}: the clocks of front and node may differ too much within it")


def lease_clock() -> float:
    """Returns seconds that no change of the date affects, and that go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
