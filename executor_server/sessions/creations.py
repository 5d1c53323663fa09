"""The requests that make sessions: each is carried out once, is found by its id, and can be withdrawn.

A request's id names its session from the moment of the request. A caller that never got the answer can so end what it
asked for, whether it exists, is being made, or has not even arrived: the id of a withdrawn request is refused for as
long as it is remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine

from executor_server.core import NotFound, Reason
from executor_server.sessions.session import Session

# Ids remembered of requests that were withdrawn before they came; one overtakes another by moments only.
_MAX_WITHDRAWN = 4096

RequestKey = tuple[str, str]
"""Tenant and request id."""


class Creations:
    """Owns the tasks that make sessions, and remembers which request made which."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, asyncio.Future[Session]] = {}
        self._leases: dict[RequestKey, str] = {}  # leases that will hold the sessions being made
        self._names: dict[RequestKey, str] = {}  # names that the sessions being made will have
        self._withdrawn: OrderedDict[RequestKey, None] = OrderedDict()
        self.count = 0

    def find(self, key: RequestKey) -> asyncio.Future[Session] | None:
        """Returns the making of a session, done or not. Raises NotFound when the request was withdrawn."""
        if key in self._withdrawn:
            raise withdrawn()
        return self._requests.get(key)

    def begin(
        self, key: RequestKey, making: Coroutine[None, None, Session], lease_id: str | None, name: str = ""
    ) -> asyncio.Future[Session]:
        """Makes a session in a task; it counts as under way from here on, and not only when the task first runs."""
        self.count += 1
        creation = self._requests[key] = asyncio.create_task(making)
        if lease_id is not None:
            self._leases[key] = lease_id
        if name:
            self._names[key] = name
        creation.add_done_callback(lambda done: self._settle(key, done))
        return creation

    def _settle(self, key: RequestKey, creation: asyncio.Future[Session]) -> None:
        self.count -= 1
        self._leases.pop(key, None)
        self._names.pop(key, None)
        if creation.cancelled() or creation.exception() is not None:
            del self._requests[key]

    def names(self, tenant: str, name: str) -> bool:
        """True when a session of this name is being made."""
        return any(key[0] == tenant and each == name for key, each in self._names.items())

    def under_way(self) -> list[RequestKey]:
        """Returns the requests whose sessions are being made."""
        return [key for key, creation in self._requests.items() if not creation.done()]

    def remember(self, key: RequestKey, session: Session) -> None:
        """Notes a session that this request made under an earlier daemon."""
        request = self._requests[key] = asyncio.get_running_loop().create_future()
        request.set_result(session)

    def forget(self, session: Session) -> None:
        """Forgets the request of an ended session: if it comes again, it is a new one."""
        key = (session.owner.tenant, session.record.request_id)
        creation = self._requests.get(key)
        if creation is None or not creation.done() or creation.cancelled() or creation.exception() is not None:
            return
        if creation.result() is session:
            del self._requests[key]

    async def withdraw(self, key: RequestKey) -> Session | None:
        """Cancels the making of a session. Returns the session when it is made already.

        Raises NotFound for a request that has not come; it is remembered, and refused when it does come.
        """
        creation = self._requests.get(key)
        if creation is None:
            self._withdrawn[key] = None
            while len(self._withdrawn) > _MAX_WITHDRAWN:
                self._withdrawn.popitem(last=False)
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session of the request {key[1]!r}")
        creation.cancel()  # has no effect when it is done
        await asyncio.wait({creation})
        if creation.cancelled() or creation.exception() is not None:
            return None
        return creation.result()

    def end_of_lease(self, tenant: str, lease_id: str) -> int:
        """Cancels what is being made for a lease that has ended. Returns how many."""
        named = [key for key, each in self._leases.items() if key[0] == tenant and each == lease_id]
        return sum(self._requests[key].cancel() for key in named)

    async def close(self) -> None:
        """Cancels all of them."""
        for creation in self._requests.values():
            creation.cancel()
        await asyncio.gather(*self._requests.values(), return_exceptions=True)


def withdrawn() -> NotFound:
    """Returns the error of a caller that waits for a session which its request has deleted meanwhile."""
    return NotFound(Reason.SESSION_NOT_FOUND, "the session was deleted before it was made")
