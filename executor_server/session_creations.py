"""The requests that make sessions: each is carried out once, can be found by its id, and can be taken back.

A request's id names its session from the moment that it is asked for. So a caller that never heard the answer can end
what it asked for, whether it is there, being made, or has not even arrived: an id that was taken back is refused for
as long as it is remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine

from executor_server.errors import NotFound, Reason
from executor_server.session import Session

# Ids that were taken back before they came. A request overtakes another by moments, not by thousands of others.
_MAX_TAKEN_BACK = 4096

RequestKey = tuple[str, str]
"""Tenant and request id."""


class Creations:
    """Owns the tasks that make sessions, and remembers which request made which."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, asyncio.Future[Session]] = {}
        self._leases: dict[RequestKey, str] = {}  # that name what is being made
        self._taken_back: OrderedDict[RequestKey, None] = OrderedDict()
        self.under_way = 0

    def find(self, key: RequestKey) -> asyncio.Future[Session] | None:
        """The making of a session, or what came of it. Raises NotFound when the request was taken back."""
        if key in self._taken_back:
            raise taken_back()
        return self._requests.get(key)

    def begin(
        self, key: RequestKey, making: Coroutine[None, None, Session], lease_id: str | None
    ) -> asyncio.Future[Session]:
        """Makes a session in a task of its own. It counts from here on, and not when the task first runs."""
        self.under_way += 1
        creation = self._requests[key] = asyncio.create_task(making)
        if lease_id is not None:
            self._leases[key] = lease_id
        creation.add_done_callback(lambda done: self._settle(key, done))
        return creation

    def _settle(self, key: RequestKey, creation: asyncio.Future[Session]) -> None:
        self.under_way -= 1
        self._leases.pop(key, None)
        if creation.cancelled() or creation.exception() is not None:
            del self._requests[key]

    def remember(self, key: RequestKey, session: Session) -> None:
        """A request of an earlier daemon's time made this session."""
        request = self._requests[key] = asyncio.get_running_loop().create_future()
        request.set_result(session)

    def forget(self, session: Session) -> None:
        """The session is no more: its request is a new one if it comes again."""
        for key, creation in list(self._requests.items()):
            if (
                creation.done()
                and not creation.cancelled()
                and creation.exception() is None
                and creation.result() is session
            ):
                del self._requests[key]

    async def take_back(self, key: RequestKey) -> Session | None:
        """Ends the making of a session, and returns it when it is there already. Raises NotFound for no such request.

        What has not come yet is remembered, and refused when it does.
        """
        creation = self._requests.get(key)
        if creation is None:
            self._taken_back[key] = None
            while len(self._taken_back) > _MAX_TAKEN_BACK:
                self._taken_back.popitem(last=False)
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session of the request {key[1]!r}")
        creation.cancel()  # of no effect on what is done
        await asyncio.wait({creation})
        if creation.cancelled() or creation.exception() is not None:
            return None
        return creation.result()

    def end_of_lease(self, tenant: str, lease_id: str) -> int:
        """Ends the making of whatever names a lease that has ended; how many that were."""
        named = [key for key, each in self._leases.items() if key[0] == tenant and each == lease_id]
        return sum(self._requests[key].cancel() for key in named)

    async def close(self) -> None:
        """Ends all of them."""
        for creation in self._requests.values():
            creation.cancel()
        await asyncio.gather(*self._requests.values(), return_exceptions=True)


def taken_back() -> NotFound:
    """For whoever asks for what has been deleted by its request meanwhile."""
    return NotFound(Reason.SESSION_NOT_FOUND, "the session was deleted before it was made")
