"""Requests that wait for a place on some node, fair among tenants, bounded in number.

Places are offered to the tenants in rotation, one request each, so that a tenant with a hundred waiting requests gets
no more places than one with a few. Requests of a tenant for the same kind of place are served in order; a request that
can't be placed does not delay those of another kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from executor_server.core import Reason, ResourceExhausted

MAX_WAITING = 1024
MAX_WAITING_OF_TENANT = 128
DEFAULT_RETRY_S = 2.0
MIN_RETRY_S = 0.5
MAX_RETRY_S = 60.0

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Parked(Generic[T]):
    """A request that waits. `kind`: when one request of a kind finds no place, no other of that kind does."""

    tenant: str
    kind: Hashable
    request: T
    is_waiting: bool = field(default=True, init=False)


class Parking(Generic[T]):
    """The waiting requests of one front, and when it makes sense to come back."""

    def __init__(self) -> None:
        # The tenant that is served next comes first; of each, the requests by kind, oldest first.
        self._tenants: OrderedDict[str, dict[Hashable, OrderedDict[Parked[T], None]]] = OrderedDict()
        self._counts: dict[str, int] = {}
        self._retry_at_s: dict[str, float] = {}  # by node, as full nodes have said

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, tenant: str, kind: Hashable, request: T, now_s: float) -> Parked[T]:
        """Parks a request. Raises ResourceExhausted when too many wait."""
        of_tenant = self._counts.get(tenant, 0)
        if len(self) >= MAX_WAITING or of_tenant >= MAX_WAITING_OF_TENANT:
            raise ResourceExhausted(
                Reason.BACKEND_FULL,
                "all nodes are full, and too many requests wait for a place already",
                retry_after_s=self.retry_after_s(now_s),
            )
        parked = Parked(tenant, kind, request)
        self._tenants.setdefault(tenant, {}).setdefault(kind, OrderedDict())[parked] = None
        self._counts[tenant] = of_tenant + 1
        return parked

    def remove(self, parked: Parked[T]) -> None:
        """Removes a request whose caller has gone. Idempotent."""
        if not parked.is_waiting:
            return
        parked.is_waiting = False
        kinds = self._tenants[parked.tenant]
        del kinds[parked.kind][parked]
        if not kinds[parked.kind]:
            del kinds[parked.kind]
        if not kinds:
            del self._tenants[parked.tenant]
        self._counts[parked.tenant] -= 1
        if not self._counts[parked.tenant]:
            del self._counts[parked.tenant]

    def serve(self, place: Callable[[Parked[T]], bool]) -> list[Parked[T]]:
        """Offers places: `place` takes one for a request, or returns False. Returns the requests that have one.

        It goes round the tenants until a round places none. A kind that finds no place is not tried again in this call.
        """
        served: list[Parked[T]] = []
        hopeless: set[Hashable] = set()
        without = 0  # tenants in a row that got nothing
        while self._tenants and without < len(self._tenants):
            tenant = next(iter(self._tenants))
            self._tenants.move_to_end(tenant)
            parked = self._serve_one(self._tenants[tenant], hopeless, place)
            if parked is None:
                without += 1
            else:
                without = 0
                served.append(parked)
        return served

    def _serve_one(
        self,
        kinds: dict[Hashable, OrderedDict[Parked[T], None]],
        hopeless: set[Hashable],
        place: Callable[[Parked[T]], bool],
    ) -> Parked[T] | None:
        for kind, waiting in list(kinds.items()):
            if kind in hopeless:
                continue
            parked = next(iter(waiting))
            if place(parked):
                self.remove(parked)
                return parked
            hopeless.add(kind)
        return None

    # -- waits -----------------------------------------------------------------------------------------------------

    def note_full(self, node: str, retry_after_s: float | None, now_s: float) -> None:
        """Notes the wait that a full node has named."""
        wait_s = DEFAULT_RETRY_S if retry_after_s is None else retry_after_s
        # A node may name any number; NaN fails each comparison.
        self._retry_at_s[node] = now_s + (wait_s if MIN_RETRY_S <= wait_s <= MAX_RETRY_S else DEFAULT_RETRY_S)

    def retry_after_s(self, now_s: float) -> float:
        """Returns the shortest wait that a full node has named, as far as it is still ahead."""
        self._retry_at_s = {node: at_s for node, at_s in self._retry_at_s.items() if at_s > now_s}
        return max(MIN_RETRY_S, min(self._retry_at_s.values(), default=now_s + DEFAULT_RETRY_S) - now_s)
