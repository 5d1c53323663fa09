"""Savepoints of a session, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Savepoint:
    """A point of a session to go back to. `left_out` says in words what a rollback does not restore."""

    number: int
    made_s: float  # Unix time
    files: int
    file_bytes: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Savepoints:
    """The savepoints of a session, the oldest first, as the answer to a request about them."""

    savepoints: tuple[Savepoint, ...]
    dropped: int  # number of those that were dropped for the request, or have ended since the last
    generation: int
    taken: int = 0  # the number of the one that was asked for; 0: none was
    left_out: tuple[str, ...] = ()  # things that a rollback did not restore, in words
