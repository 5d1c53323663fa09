"""The environments as an administrator reads of them: values only."""

from __future__ import annotations

from dataclasses import dataclass

from executor_server.core import Progress
from executor_server.packages.lock import Lock


@dataclass(frozen=True)
class EnvironmentInfo:
    """One environment that there is."""

    environment_id: str
    size_bytes: int
    created_s: float  # seconds since the epoch
    used_s: float  # the last use, in seconds since the epoch
    sandboxes: int  # so many have it
    requesters: tuple[str, ...]  # tenants that used it, the last one first
    requests: tuple[tuple[str, ...], ...]  # requirements that it answers
    images: tuple[str, ...]  # the ones that it answers for, as "backend/image"
    pins: tuple[str, ...]
    modules: tuple[str, ...]
    lock: Lock


@dataclass(frozen=True)
class BuildInfo:
    """One environment that is being made, or waits for its turn."""

    requirements: tuple[str, ...]
    backend: str
    image: str
    requester: str
    progress: Progress
    is_refresh: bool
    begun_s_ago: float


@dataclass(frozen=True)
class Statistics:
    """Numbers of the moment."""

    environments: int = 0
    in_use: int = 0
    building: int = 0
    queued: int = 0
    total_bytes: int = 0  # on disk, of everything, as last measured
    max_bytes: int = 0


@dataclass(frozen=True)
class Evicted:
    environment_id: str
    freed_bytes: int


@dataclass(frozen=True)
class Collected:
    """The result of making room."""

    evicted: tuple[Evicted, ...]
    freed_bytes: int  # on disk, wheels included
    total_bytes: int  # on disk, afterwards
