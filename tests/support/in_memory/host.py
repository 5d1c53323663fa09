"""The host of in-memory sandboxes: the part of the world that outlives a daemon."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from executor_server.core.model import SandboxSpec
from tests.support.in_memory.guest import MemoryGuest


@dataclass
class Place:
    """One sandbox, as its host knows it; `guest` is None when it was left half-made."""

    daemon: Path  # state directory of the daemon that it belongs to
    spec: SandboxSpec
    fingerprint: str
    directory: Path
    guest: MemoryGuest | None = None
    cause_of_death: str | None = None
    paused: bool = False

    def died(self, why: str) -> None:
        self.cause_of_death = self.cause_of_death or why


@dataclass
class MemoryHost:
    """A host, or a cloud: it may be down, or full; `images` are those that it has, with the version of their content."""

    directory: Path
    images: dict[str, int] = field(default_factory=lambda: {"base": 1})
    places_max: int | None = None
    down: bool = False
    places: dict[str, Place] = field(default_factory=dict)  # by the id of the sandbox
    daemons: set[Path] = field(default_factory=set)  # state directories in use

    def of(self, daemon: Path) -> dict[str, Place]:
        return {sandbox_id: place for sandbox_id, place in self.places.items() if place.daemon == daemon}

    def crash(self, sandbox_ids: Collection[str] | None = None) -> None:
        """Ends what runs on it, or these of it, as a power cut does."""
        for sandbox_id, place in self.places.items():
            if place.guest is not None and (sandbox_ids is None or sandbox_id in sandbox_ids):
                place.guest.end("its guest was killed")
