"""A client's lease on its sessions: they live as long as the client does, and end with it.

A client makes its sessions under a lease, a random number, which threads renew (`renewer`). When the process is killed,
the daemon ends the sessions after their `owner_grace_s`. They end sooner at `close`, at the interpreter's exit, when a
session that the client made is garbage-collected, and when the client is, with all of its sessions.

`ClientLease` is the object that the client and its sessions refer to. A finalizer of theirs may run at any allocation,
in any thread, with any lock held: it only leaves a job to a renewer.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from concurrent.futures import Future

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core.endpoint import Endpoint
from executor_client._core.transport_base import Timeouts
from executor_client._sync.renewer import Closed, Collected, End, Hold, Renewer, TakeBack, new_future
from executor_client.errors import InvalidRequest
from executor_client.results import SessionInfo


class ClientLease:
    """The lease of one client. Its sessions refer to it too, so it is collected with the last of them.

    It is one lease for each daemon that has sessions of the client: the one that the client was given, and the nodes
    that it has named. They are renewed by themselves, so that no node that hangs delays another's renewal.
    """

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self._lease_id = secrets.token_hex(16)
        self._pid = os.getpid()
        self._timeouts = timeouts
        self._front = Renewer(self._lease_id, endpoint, timeouts)
        self._renewers = {endpoint.address: self._front}
        self._lock = threading.Lock()
        self._confirmed = False  # the daemon has leased a session of ours
        self._unknown = False  # the daemon is too old to know leases
        finalizer = weakref.finalize(self, _abandon, self._renewers)
        finalizer.atexit = False  # see _end_all

    @property
    def is_foreign(self) -> bool:
        """True when it was made by the process that this one was forked from."""
        return self._pid != os.getpid()

    @property
    def lease_id(self) -> str:
        """The id for a request; empty where the daemon knows no leases."""
        return "" if self._unknown else self._lease_id

    def is_refusal(self, request: pb.CreateSessionRequest | pb.GetSessionRequest, error: InvalidRequest) -> bool:
        """True when a daemon may have refused a request because it knows no leases; `request` then names none.

        A field that a daemon does not know makes the request malformed, and it does not say which field that was.
        """
        if not request.lease_id or self._confirmed or error.reason != "INVALID_FIELD":
            return False
        request.lease_id = ""
        return True

    def unknown(self) -> None:
        """Notes that a request succeeded without the lease and not with it: this daemon knows no leases."""
        self._unknown = True

    def hold(self, session: object, info: SessionInfo, endpoint: Endpoint, *, made: bool) -> HeldSession | None:
        """Notes a session at an endpoint; None if it is detached.

        One that the client made ends when its object `session` is collected; one that it has found does not.
        """
        if info.detached:
            return None
        self._confirmed = True
        held = HeldSession(self, info, self.at(endpoint), made=made)
        finalizer = weakref.finalize(session, held.collected)
        finalizer.atexit = False
        return held

    def at(self, endpoint: Endpoint) -> Renewer:
        """Returns the renewer for the sessions at an endpoint."""
        with self._lock:
            renewer = self._renewers.get(endpoint.address)
            if renewer is None:
                renewer = self._renewers[endpoint.address] = Renewer(self._lease_id, endpoint, self._timeouts)
            return renewer

    def take_back(self, request_id: str) -> Future[None]:
        """Ends, in the background, a session whose CreateSession was given up. The future is done when it has ended."""
        ended = new_future()
        self._front.post(TakeBack(request_id, ended), start=True)
        return ended

    def end(self) -> Future[None]:
        """Ends the lease, and all sessions that it alone holds. Takes no longer than a call may, whatever is wrong."""
        with self._lock:
            renewers = list(self._renewers.values())
        return _when_all([each.end() for each in renewers])


class HeldSession:
    """A session under the lease of its client, at the daemon that has it now."""

    def __init__(self, lease: ClientLease, info: SessionInfo, renewer: Renewer, *, made: bool) -> None:
        self._lease = lease
        self._job = Hold(info.session_id, made, info.limits.owner_grace_s or 0.0)
        self._renewer = renewer
        renewer.post(self._job)

    def moved(self, endpoint: Endpoint) -> None:
        """Notes that the daemon at another endpoint has the session."""
        renewer = self._lease.at(endpoint)
        if renewer is not self._renewer:
            self.closed()
            self._renewer = renewer
            renewer.post(self._job)

    def closed(self) -> None:
        """Notes that the session was deleted, or is lost."""
        self._renewer.post(Closed(self._job.session_id))

    def collected(self) -> None:
        """Notes, from a finalizer, that an object of the session was collected."""
        self._renewer.post(Collected(self._job.session_id))


def _abandon(renewers: dict[str, Renewer]) -> None:
    """Ends a lease from a finalizer: the client and all of its sessions were collected."""
    for each in list(renewers.values()):
        each.post(End())


def _when_all(futures: list[Future[None]]) -> Future[None]:
    """Returns a future that is done when all of these are."""
    if len(futures) == 1:
        return futures[0]
    ended, left, lock = new_future(), [len(futures)], threading.Lock()

    def one_more(_: Future[None]) -> None:
        with lock:
            left[0] -= 1
            is_last = left[0] == 0
        if is_last:
            ended.set_result(None)

    for future in futures:
        future.add_done_callback(one_more)
    return ended
