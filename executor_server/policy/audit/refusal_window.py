"""Bounds the records of refusals, since clients and programs can cause any number of refusals.

The first ones of a tenant in every minute are recorded one by one; the others are counted by their kind, and the counts
are recorded when the minute is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 60.0
OTHERS = "(others)"
"""Stands for the tenants, and the kinds of refusals, that are too many to be counted individually."""

# Tenants, and kinds of refusals of each, that are counted individually in a window; the others are counted together.
_MAX_TENANTS = 1024
_MAX_KINDS = 64


@dataclass
class _Tenant:
    """The refusals of one tenant in the current window."""

    recorded: int = 0
    counted: Counter[tuple[str, ...]] = field(default_factory=Counter)


class RefusalWindow:
    """The refusals of the current minute. `write_counted` records how many of a kind were only counted."""

    def __init__(
        self,
        in_full: int,
        clock: Callable[[], float],
        write_counted: Callable[[str, tuple[str, ...], int], None],
    ) -> None:
        """`in_full` refusals of a tenant are recorded one by one."""
        self._in_full = in_full
        self._clock = clock
        self._write_counted = write_counted
        self._tenants: dict[str, _Tenant] = {}
        self._ends_s = 0.0

    def records(self, tenant: str, *kind: str) -> bool:
        """Returns True if a refusal is to be recorded individually; otherwise counts it."""
        found = self._of(tenant)
        if found.recorded < self._in_full:
            found.recorded += 1
            return True
        self.count(tenant, *kind)
        return False

    def count(self, tenant: str, *kind: str, number: int = 1) -> None:
        """Counts refusals that are not recorded individually."""
        counted = self._of(tenant).counted
        if kind not in counted and len(counted) >= _MAX_KINDS:
            kind = (OTHERS,) * len(kind)
        counted[kind] += number

    def end(self) -> None:
        """Records the counts when the minute is over; must be called regularly."""
        now_s = self._clock()
        if now_s < self._ends_s:
            return
        tenants, self._tenants = self._tenants, {}
        self._ends_s = now_s + WINDOW_S
        for tenant, found in tenants.items():
            for kind, number in found.counted.items():
                self._write_counted(tenant, kind, number)

    def _of(self, tenant: str) -> _Tenant:
        self.end()
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            tenant = OTHERS
        return self._tenants.setdefault(tenant, _Tenant())
