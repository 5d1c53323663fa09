"""The requests that create sessions: each is carried out once, is found by its id, and can be withdrawn.

A request's id names its session from the start. So a caller that got no answer can end the session, whether it exists,
is being made, or the request has not arrived yet: a withdrawn id is refused as long as it is remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass

from executor_server.core import NotFound, Reason
from executor_server.sessions.session import Session

# How many ids of requests are remembered that were withdrawn before they arrived. A withdrawal overtakes its request by
# moments only.
_MAX_WITHDRAWN = 4096

RequestKey = tuple[str, str]
"""Tenant and request id."""


@dataclass(frozen=True)
class _Creation:
    session: asyncio.Future[Session]
    lease_id: str | None = None  # the lease that will hold the session
    name: str = ""  # of the future session

    @property
    def made(self) -> Session | None:
        """The session; None while it is being made, or if that failed."""
        done = self.session
        is_made = done.done() and not done.cancelled() and done.exception() is None
        return done.result() if is_made else None


class Creations:
    """Owns the tasks that make sessions, and remembers which request made which."""

    def __init__(self) -> None:
        self._creations: dict[RequestKey, _Creation] = {}
        self._withdrawn: OrderedDict[RequestKey, None] = OrderedDict()

    def find(self, key: RequestKey) -> asyncio.Future[Session] | None:
        """Returns the session of a request, made or being made. Raises NotFound when the request was withdrawn."""
        if key in self._withdrawn:
            raise withdrawn()
        creation = self._creations.get(key)
        return None if creation is None else creation.session

    def begin(
        self, key: RequestKey, making: Coroutine[None, None, Session], lease_id: str | None, name: str = ""
    ) -> asyncio.Future[Session]:
        """Makes a session in a task."""
        creation = self._creations[key] = _Creation(asyncio.create_task(making), lease_id, name)
        creation.session.add_done_callback(lambda _: self._forget_failed(key, creation))
        return creation.session

    def _forget_failed(self, key: RequestKey, creation: _Creation) -> None:
        if creation.made is None:
            del self._creations[key]

    def names(self, tenant: str, name: str) -> bool:
        """True when a session of this name is being made."""
        return any(key[0] == tenant and self._creations[key].name == name for key in self.under_way())

    def under_way(self) -> list[RequestKey]:
        """Returns the requests whose sessions are being made."""
        return [key for key, creation in self._creations.items() if not creation.session.done()]

    def remember(self, key: RequestKey, session: Session) -> None:
        """Notes a session that this request made under an earlier daemon."""
        made = asyncio.get_running_loop().create_future()
        made.set_result(session)
        self._creations[key] = _Creation(made)

    def forget(self, session: Session) -> None:
        """Forgets the request of an ended session; the same id is a new request then."""
        key = (session.owner.tenant, session.record.request_id)
        creation = self._creations.get(key)
        if creation is not None and creation.made is session:
            del self._creations[key]

    async def withdraw(self, key: RequestKey) -> Session | None:
        """Cancels the making of a session. Returns the session if it is already made.

        Raises NotFound for a request that has not arrived; it is remembered, and refused when it arrives.
        """
        creation = self._creations.get(key)
        if creation is None:
            self._withdrawn[key] = None
            while len(self._withdrawn) > _MAX_WITHDRAWN:
                self._withdrawn.popitem(last=False)
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session of the request {key[1]!r}")
        creation.session.cancel()  # has no effect when it is done
        await asyncio.wait({creation.session})
        return creation.made

    def end_of_lease(self, tenant: str, lease_id: str) -> int:
        """Cancels the creations for a lease that has ended. Returns how many."""
        waiting = [self._creations[key] for key in self.under_way() if key[0] == tenant]
        return sum(creation.session.cancel() for creation in waiting if creation.lease_id == lease_id)

    async def close(self) -> None:
        """Cancels all creations that are under way."""
        pending = [creation.session for creation in self._creations.values()]
        for session in pending:
            session.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def withdrawn() -> NotFound:
    """Returns the error of a caller whose session was deleted, by its request id, while it waited."""
    return NotFound(Reason.SESSION_NOT_FOUND, "the session was deleted before it was made")
