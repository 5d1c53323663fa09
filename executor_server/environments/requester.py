"""The tenant who asks for an environment: known to sessions, recorded with a build, and no part of the approved spec.

Backends and pools pass a spec on, and equal specs share a sandbox whichever tenant asked. So the tenant travels beside
it, in a context variable, which the tasks that make a sandbox inherit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_requester: ContextVar[str] = ContextVar("environment_requester", default="")


def current_requester() -> str:
    """Returns the tenant for whom this task runs; empty where it is the daemon itself."""
    return _requester.get()


@contextmanager
def requested_by(tenant: str) -> Iterator[None]:
    """Lets everything in the block, and in tasks that it starts, ask for environments on behalf of a tenant."""
    token = _requester.set(tenant)
    try:
        yield
    finally:
        _requester.reset(token)
