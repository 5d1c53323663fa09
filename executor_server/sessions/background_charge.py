"""The CPU time that a sandbox uses between executions, charged as its guest reports it."""

from __future__ import annotations

from collections.abc import Callable


class BackgroundCharge:
    """Calls `charge` with what was added to the guest's sum. The sum never falls, so a lost report loses nothing."""

    def __init__(self, charge: Callable[[float], None]) -> None:
        self._charge = charge
        # The highest sum that was reported; None until the first report, when an earlier daemon has charged a part that
        # this one does not know.
        self._highest_s: float | None = None

    def begin(self) -> None:
        """Charges all from here on: the guest is new."""
        self._highest_s = 0.0

    def note(self, cpu_time_s: float) -> None:
        """Notes a report: CPU seconds since the session began."""
        charged_s, self._highest_s = self._highest_s, max(cpu_time_s, self._highest_s or 0.0)
        if charged_s is not None and cpu_time_s > charged_s:
            self._charge(cpu_time_s - charged_s)
