"""Chooses the node for a session, quickly: it compares three nodes and not all of them.

A node is a candidate for a (backend, image) when it is linked, has reported, does not drain, has the fleet's policy
in force, can make such sandboxes now, and has a free place; creations under way take places. Candidates are kept
in sets from which one is drawn in constant time, and each report of a node updates its own entries only.

Candidates with a warm sandbox of the wanted kind come first. Three are drawn at random, and the one with the lowest
score is taken. Reports are always a little old: if the best of all nodes were taken, all creations of half a second
would go to it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from executor_server.fleet.membership.members import KnownNode, Members
from executor_server.fleet.membership.messages import NodeBackend, WarmKind

DRAWN = 3
"""Candidates that are compared."""
LOAD_WEIGHT = 0.5
"""Weight of the machine's load relative to its share of used places."""
CREATION_WEIGHT = 1 / 16
"""Weight of a creation under way. It is work, and the node's load, an average of a minute, does not show it yet."""
MAX_LOAD = 4.0
"""A higher load counts as this one, so that a machine that computes a lot is not worse than one that is full."""
# Draws before all candidates are compared. A draw misses if the candidate was tried already or lacks a label.
_MAX_DRAWS = 12


@dataclass(frozen=True)
class Wanted:
    """Properties that a session needs of its node. `kind`: the warm sandbox that fits; None: no warm one does."""

    backends: tuple[str, ...] = ()  # in order of preference; empty: any
    image: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: WarmKind | None = None


@dataclass(frozen=True)
class Nowhere:
    """Why there is no node: all nodes that have what is wanted are full (`is_full`), or none has it. The lists name
    what is available."""

    is_full: bool
    nodes: int  # all that are linked
    backends: tuple[str, ...]
    images: tuple[str, ...]
    labels: tuple[str, ...]


class Drawable:
    """A set from which a random element is drawn in constant time."""

    def __init__(self) -> None:
        self._items: list[KnownNode] = []
        self._places: dict[KnownNode, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: KnownNode) -> bool:
        return item in self._places

    def add(self, item: KnownNode) -> None:
        if item not in self._places:
            self._places[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: KnownNode) -> None:
        index = self._places.pop(item, None)
        if index is None:
            return
        last = self._items.pop()
        if last is not item:
            self._items[index] = last
            self._places[last] = index

    def draw(self, draws: random.Random) -> KnownNode:
        return self._items[int(draws.random() * len(self._items))]

    def all(self) -> list[KnownNode]:
        return self._items


Key = tuple[str, str]
K = TypeVar("K", Key, WarmKind)


class Placement:
    """Keeps the candidates up to date with `Members`."""

    def __init__(self, members: Members, draws: random.Random | None = None) -> None:
        self._members = members
        self._draws = draws or random.Random()
        self._fingerprint: str | None = None
        self._candidates: dict[Key, Drawable] = {}  # by backend and image; image "": nodes that report none
        self._warm: dict[WarmKind, Drawable] = {}
        self._keys: dict[KnownNode, tuple[tuple[Key, ...], tuple[WarmKind, ...]]] = {}
        members.on_change.append(self.update)

    def set_fingerprint(self, fingerprint: str) -> None:
        """Sets the control that the front distributes: nodes with another one get no sessions."""
        self._fingerprint = fingerprint
        for member in self._members:
            self.update(member)

    def update(self, member: KnownNode) -> None:
        """Updates the entries of a node that has changed."""
        keys, kinds = self._entries(member)
        old_keys, old_kinds = self._keys.pop(member, ((), ()))
        if keys != old_keys:
            _move(self._candidates, member, old_keys, keys)
        if kinds != old_kinds:
            _move(self._warm, member, old_kinds, kinds)
        if keys or kinds:
            self._keys[member] = keys, kinds

    def choose(self, wanted: Wanted, tried: Collection[str] = ()) -> KnownNode | None:
        """Returns the next untried node to ask; None if there is none (`explain`)."""
        for backend in wanted.backends or self._backends():
            if wanted.kind is not None and wanted.kind.backend == backend:
                found = self._best([self._warm.get(wanted.kind)], wanted, tried)
                if found is not None:
                    return found
            found = self._best([self._candidates.get(key) for key in self._keys_for(backend, wanted)], wanted, tried)
            if found is not None:
                return found
        return None

    def has_room(self, member: KnownNode, wanted: Wanted) -> bool:
        """Returns True for a candidate that has all that is wanted."""
        keys, _ = self._keys.get(member, ((), ()))
        return bool(keys) and _fits(member, wanted)

    def explain(self, wanted: Wanted) -> Nowhere:
        """Returns why `choose` finds none. It looks at all nodes."""
        linked = [each for each in self._members if each.is_ready and each.report is not None]
        fitting = [each for each in linked if _fits(each, wanted)]
        reports = [each.report for each in linked if each.report is not None]
        return Nowhere(
            is_full=bool(fitting),
            nodes=len(linked),
            backends=_sorted(backend.name for report in reports for backend in report.backends),
            images=_sorted(image for report in reports for backend in report.backends for image in backend.images),
            labels=_sorted(
                f"{key}={value}" for each in linked if each.hello for key, value in each.hello.labels.items()
            ),
        )

    def _entries(self, member: KnownNode) -> tuple[tuple[Key, ...], tuple[WarmKind, ...]]:
        report = member.report
        if report is None or not member.is_ready or report.draining or member.is_full:
            return (), ()
        if self._fingerprint is not None and report.control_fingerprint != self._fingerprint:
            return (), ()
        if member.used >= report.max_sessions:
            return (), ()
        ready = [backend for backend in report.backends if backend.ready]
        keys = tuple((backend.name, image) for backend in ready for image in backend.images or ("",))
        names = {backend.name for backend in ready}
        under_way = len(member.creating)  # each may take a warm sandbox
        return keys, tuple(kind for kind, count in report.warm.items() if count > under_way and kind.backend in names)

    def _backends(self) -> list[str]:
        return sorted({backend for backend, _ in self._candidates})

    def _keys_for(self, backend: str, wanted: Wanted) -> list[Key]:
        if wanted.image:
            return [(backend, wanted.image), (backend, "")]
        return [key for key in self._candidates if key[0] == backend]

    def _best(self, sets: Iterable[Drawable | None], wanted: Wanted, tried: Collection[str]) -> KnownNode | None:
        candidates = [each for each in sets if each is not None]
        total = sum(len(each) for each in candidates)
        if not total:
            return None
        drawn: list[KnownNode] = []
        if total > _MAX_DRAWS:
            for _ in range(_MAX_DRAWS):
                chosen = self._one_of(candidates, total)
                member = chosen.draw(self._draws)
                if member not in drawn and member.name not in tried and _has_labels(member, wanted.labels):
                    drawn.append(member)
                    if len(drawn) == DRAWN:
                        return min(drawn, key=score)
        every = {
            member.name: member
            for each in candidates
            for member in each.all()
            if member.name not in tried and _has_labels(member, wanted.labels)
        }
        few = list(every.values())
        if len(few) > DRAWN:
            few = self._draws.sample(few, DRAWN)
        return min(few, key=score, default=None)

    def _one_of(self, candidates: list[Drawable], total: int) -> Drawable:
        """Draws one of the sets, in proportion to their sizes."""
        index = int(self._draws.random() * total)
        for each in candidates:
            index -= len(each)
            if index < 0:
                return each
        return candidates[-1]


def score(member: KnownNode) -> float:
    """Returns how busy a node is: the share of its places in use, the creations under way, and its load."""
    report = member.report
    assert report is not None
    taken = member.used / max(1, report.max_sessions)
    return taken + CREATION_WEIGHT * len(member.creating) + LOAD_WEIGHT * min(report.load, MAX_LOAD) / MAX_LOAD


def _move(sets: dict[K, Drawable], member: KnownNode, old: Iterable[K], new: Iterable[K]) -> None:
    for key in set(old).difference(new):
        sets[key].discard(member)
        if not sets[key]:
            del sets[key]
    for key in new:
        sets.setdefault(key, Drawable()).add(member)


def _has_labels(member: KnownNode, labels: Mapping[str, str]) -> bool:
    has = member.hello.labels if member.hello is not None else {}
    return all(has.get(key) == value for key, value in labels.items())


def _fits(member: KnownNode, wanted: Wanted) -> bool:
    report = member.report
    assert report is not None
    return _has_labels(member, wanted.labels) and any(_makes(backend, wanted) for backend in report.backends)


def _makes(backend: NodeBackend, wanted: Wanted) -> bool:
    named = not wanted.backends or backend.name in wanted.backends
    return named and (not wanted.image or not backend.images or wanted.image in backend.images)


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))
