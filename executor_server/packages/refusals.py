"""The answers to requests for environments that are not ready, for a waiting person or model.

They name packages, but no hosts or paths of the daemon.
"""

from __future__ import annotations

from collections.abc import Sequence

from executor_server.core import EnvironmentFailed, ImageNotReady, Progress

RETRY_S = 1.0
"""Seconds until a request for an environment that is being built should be repeated."""
QUEUE_RETRY_S = 5.0

SEE_THE_LOG = "the daemon's log has the reason"
NO_SPACE = (
    "the daemon's disk is full; its administrator can make room, or remove unused environments "
    "(`executor-server env gc`)"
)

_NAMED = 3
_MAX_NAME_CHARS = 80


def name_of(requirements: Sequence[str]) -> str:
    """Returns "the environment of numpy, pandas>=2 and 3 more"."""
    named = [requirement[:_MAX_NAME_CHARS] for requirement in requirements[:_NAMED]] or ["the policy's lock"]
    more = len(requirements) - len(named)
    if more > 0:
        named.append(f"{more} more")
    return "the environment of " + (" and ".join([", ".join(named[:-1]), named[-1]]) if named[1:] else named[0])


def being_made(requirements: Sequence[str], progress: Progress) -> ImageNotReady:
    return ImageNotReady(f"{name_of(requirements)} is being made: {progress}", retry_after_s=RETRY_S, progress=progress)


def queue_full(requirements: Sequence[str], queued: str) -> ImageNotReady:
    text = f"{name_of(requirements)} can't be made yet: {queued} wait to be made"
    return ImageNotReady(text, retry_after_s=QUEUE_RETRY_S)


def not_made(requirements: Sequence[str], why: str) -> str:
    return f"{name_of(requirements)} could not be made: {why}"


def too_slow(step: Progress, timeout_s: float) -> str:
    return f"it took longer than {timeout_s:g} s, and had come to this: {step}"


def too_large(requirements: Sequence[str], size_bytes: int, max_bytes: int) -> EnvironmentFailed:
    text = f"{name_of(requirements)} has {size_bytes:,} bytes, and the policy allows {max_bytes:,}"
    return EnvironmentFailed(text)
