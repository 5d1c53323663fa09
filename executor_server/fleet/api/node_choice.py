"""Finds a node for a request: the best one, the next one after a refusal, or the first one that has room again.

A request that finds all nodes full is parked for at most `park_s`. New requests join the parked ones and don't overtake
them. When nodes report, places are offered fairly among tenants (membership/parking.py).

Sessions with packages need an environment, which takes a node about a minute to make. So they go to a node that has or
makes it, as long as there is room; otherwise each repeated request would start a build on another node.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from executor_server.core import (
    ExecutorError,
    PackagesSpec,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SessionSpec,
    Unavailable,
)
from executor_server.fleet.api.node_calls import RETRY_S, RefusedByNode
from executor_server.fleet.membership import (
    KnownNode,
    Members,
    Nowhere,
    Parked,
    Parking,
    Placement,
    Wanted,
    WarmKind,
    lease_clock,
    score,
)

MAX_ATTEMPTS = 64
"""Nodes that are tried for one session."""
# Environments whose nodes are remembered.
_MAX_ENVIRONMENTS = 1024
_MAX_LISTED = 20

_FULL = {Reason.BACKEND_FULL.value, Reason.TOO_MANY_SESSIONS.value}
# Refusals that another node may not share.
_OF_ONE_NODE = {
    Reason.BACKEND_UNAVAILABLE.value,
    Reason.IMAGE_NOT_READY.value,
    Reason.UNKNOWN_IMAGE.value,
    Reason.DRAINING.value,
    Reason.NODE_FENCED.value,
    Reason.AUDIT_UNAVAILABLE.value,
    Reason.QUOTA_EXCEEDED.value,
}


def wanted_of(spec: SessionSpec, labels: Mapping[str, str]) -> Wanted:
    """Returns what the session needs of its node."""
    sandbox = spec.sandbox
    backend = sandbox.backends[0] if sandbox.backends else ""
    plain = sandbox.packages is None and bool(backend)
    kind = WarmKind(backend, sandbox.image, network=sandbox.egress) if plain else None
    return Wanted(sandbox.backends, sandbox.image, labels, kind)


def refuses_for_now(refused: RefusedByNode) -> bool:
    """True when the node has no room until it reports again."""
    return refused.reason in _FULL


@dataclass(eq=False)
class _Waiting:
    """A parked request. `reserve` takes the place on a node at once, before it is offered to the next request."""

    wanted: Wanted
    skipped: frozenset[str]
    reserve: Callable[[str], None]
    node: asyncio.Future[str]


class NodeChoice:
    """Chooses nodes for the requests of one front."""

    def __init__(self, members: Members, placement: Placement, park_s: float) -> None:
        self._placement = placement
        self._members = members
        self._park_s = park_s
        self._parking: Parking[_Waiting] = Parking()
        self._environments: OrderedDict[Hashable, set[str]] = OrderedDict()  # nodes that have it or make it
        self._serving: asyncio.Handle | None = None
        members.on_change.append(self._changed)

    @property
    def parked(self) -> int:
        return len(self._parking)

    @asynccontextmanager
    async def attempt(
        self, tenant: str, wanted: Wanted, packages: PackagesSpec | None, reserve: Callable[[str], None]
    ) -> AsyncIterator[Attempt]:
        """Gives the attempt to find a node for one request; `reserve` takes a place on a node."""
        attempt = Attempt(self, tenant, wanted, packages, reserve)
        try:
            yield attempt
        finally:
            attempt.close()

    # -- choosing ------------------------------------------------------------------------------------------------------

    def choose(self, wanted: Wanted, packages: PackagesSpec | None, skipped: frozenset[str]) -> KnownNode | None:
        if packages is not None:
            known = self._environments.get(_environment(wanted, packages), set())
            found = (self._members.get(name) for name in sorted(known - skipped))
            having = [each for each in found if each is not None and self._placement.has_room(each, wanted)]
            if having:
                return min(having, key=score)
        return self._placement.choose(wanted, skipped)

    def note_environment(self, wanted: Wanted, packages: PackagesSpec, node: str) -> None:
        """Notes that a node has the environment of these packages, or makes it."""
        key = _environment(wanted, packages)
        self._environments.setdefault(key, set()).add(node)
        self._environments.move_to_end(key)
        while len(self._environments) > _MAX_ENVIRONMENTS:
            self._environments.popitem(last=False)

    def note_full(self, node: str, retry_after_s: float | None) -> None:
        self._parking.note_full(node, retry_after_s, lease_clock())

    def explain(self, wanted: Wanted) -> Nowhere:
        return self._placement.explain(wanted)

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def park(self, tenant: str, waiting: _Waiting, refusal: Callable[[], Exception]) -> str:
        """Returns the node on which a place was reserved. Raises `refusal` when there was none in time."""
        if not self._park_s:
            raise refusal()
        parked = self._parking.add(tenant, _kind(waiting), waiting, lease_clock())
        try:
            self._serve()
            await asyncio.wait({waiting.node}, timeout=self._park_s)
            if waiting.node.done():
                return waiting.node.result()
            raise refusal()
        finally:
            self._parking.remove(parked)

    def full(self, wanted: Wanted) -> ExecutorError:
        """Returns the refusal of a request for which there is no node now."""
        nowhere = self.explain(wanted)
        if not nowhere.nodes:
            return Unavailable(Reason.NO_NODE, "no node of the fleet is there now", retry_after_s=RETRY_S)
        if not nowhere.is_full:
            return PreconditionFailed(Reason.NO_NODE, _what_there_is(wanted, nowhere))
        message = f"none of {nowhere.nodes} nodes has room for another session now; end one, or try again later"
        return ResourceExhausted(Reason.BACKEND_FULL, message, self._parking.retry_after_s(lease_clock()))

    def _changed(self, _member: KnownNode) -> None:
        if self._serving is None and len(self._parking):
            self._serving = asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            self._serving = None
        self._parking.serve(self._place)

    def _place(self, parked: Parked[_Waiting]) -> bool:
        waiting = parked.request
        member = self._placement.choose(waiting.wanted, waiting.skipped)
        if member is None:
            return False
        waiting.reserve(member.name)
        waiting.node.set_result(member.name)
        return True


class Attempt:
    """The search for a node for one request."""

    def __init__(
        self,
        choice: NodeChoice,
        tenant: str,
        wanted: Wanted,
        packages: PackagesSpec | None,
        reserve: Callable[[str], None],
    ) -> None:
        self._choice = choice
        self._tenant = tenant
        self._wanted = wanted
        self._packages = packages
        self._reserve = reserve
        self._asked = 0
        self._skipped: set[str] = set()
        self._refusal: RefusedByNode | None = None  # the last one that was not for lack of room
        self._node: asyncio.Future[str] | None = None

    def close(self) -> None:
        if self._node is not None:
            self._node.cancel()

    async def next_node(self) -> str:
        """Returns the node to ask next, where a place is reserved. Raises ExecutorError, RefusedByNode."""
        self._asked += 1
        if self._asked > MAX_ATTEMPTS:
            raise self._why_not()
        skipped = frozenset(self._skipped)
        if not self._choice.parked:
            member = self._choice.choose(self._wanted, self._packages, skipped)
            if member is not None:
                self._reserve(member.name)
                return member.name
        refusal = self._why_not()
        if isinstance(refusal, (PreconditionFailed, RefusedByNode)):
            raise refusal
        self._node = asyncio.get_running_loop().create_future()
        waiting = _Waiting(self._wanted, skipped, self._reserve, self._node)
        return await self._choice.park(self._tenant, waiting, self._why_not)

    def refused(self, node: str, refused: RefusedByNode) -> None:
        """Takes a node's refusal. Raises it if every other node would refuse too."""
        if refuses_for_now(refused):
            self._choice.note_full(node, refused.retry_after_s)
            return
        builds = refused.reason == Reason.IMAGE_NOT_READY.value and self._packages is not None
        if builds:
            self.made_at(node)
        if builds or refused.reason not in _OF_ONE_NODE:
            raise refused
        self._skipped.add(node)
        self._refusal = refused

    def unanswered(self, node: str) -> None:
        """Takes note of a node that did not answer."""
        self._skipped.add(node)

    def made_at(self, node: str) -> None:
        """Notes that a node has made the environment of the request, or is making it."""
        if self._packages is not None:
            self._choice.note_environment(self._wanted, self._packages, node)

    def _why_not(self) -> ExecutorError | RefusedByNode:
        full = self._choice.full(self._wanted)
        is_of_room = isinstance(full, ResourceExhausted) and not self._skipped
        return full if self._refusal is None or is_of_room else self._refusal


def _environment(wanted: Wanted, packages: PackagesSpec) -> Hashable:
    return wanted.backends, wanted.image, packages


def _kind(waiting: _Waiting) -> Hashable:
    wanted = waiting.wanted
    return wanted.backends, wanted.image, tuple(sorted(wanted.labels.items())), wanted.kind, waiting.skipped


def _what_there_is(wanted: Wanted, nowhere: Nowhere) -> str:
    asked = [f"the backend {' or '.join(wanted.backends)}"] if wanted.backends else []
    asked += [f"the image {wanted.image!r}"] if wanted.image else []
    asked += [f"the label {key}={value}" for key, value in wanted.labels.items()]
    there = {"backends": nowhere.backends, "images": nowhere.images, "labels": nowhere.labels}
    listed = "; ".join(f"{name}: {', '.join(values[:_MAX_LISTED]) or 'none'}" for name, values in there.items())
    return f"no node has {', '.join(asked) or 'the requested properties'} together; available: {listed}"
