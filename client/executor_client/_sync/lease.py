"""A client's lease on its sessions: they live as long as the client does, and end with it.

A client makes its sessions under a lease, a random number, which a thread renews (`renewer`). When the process is
killed, the daemon ends the sessions after their `owner_grace_s`. They end sooner at `close`, at the interpreter's exit,
when a session that the client made is garbage-collected, and when the client is, with all of its sessions.

`ClientLease` is the object that the client and its sessions refer to. A finalizer of theirs may run at any allocation,
in any thread, with any lock held: it only leaves a job to the renewer.
"""

from __future__ import annotations

import os
import secrets
import weakref
from concurrent.futures import Future

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core.endpoint import Endpoint
from executor_client._core.transport_base import Timeouts
from executor_client._sync.renewer import Closed, Collected, End, Hold, Renewer, TakeBack, new_future
from executor_client.errors import InvalidRequest
from executor_client.results import SessionInfo


class ClientLease:
    """The lease of one client. Its sessions refer to it too, so it is collected with the last of them."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self._lease_id = secrets.token_hex(16)
        self._pid = os.getpid()
        self._renewer = Renewer(self._lease_id, endpoint, timeouts)
        self._confirmed = False  # the daemon has leased a session of ours
        self._unknown = False  # the daemon is too old to know leases
        finalizer = weakref.finalize(self, self._renewer.post, End())
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

    def hold(self, session: object, info: SessionInfo, *, made: bool) -> None:
        """Notes a session, unless it is detached.

        One that the client made ends when its object `session` is collected; one that it has found does not.
        """
        if info.detached:
            return
        self._confirmed = True
        self._renewer.post(Hold(info.session_id, made, info.limits.owner_grace_s or 0.0))
        finalizer = weakref.finalize(session, self._renewer.post, Collected(info.session_id))
        finalizer.atexit = False

    def closed(self, session_id: str) -> None:
        """Notes that a session was deleted."""
        if self._confirmed:
            self._renewer.post(Closed(session_id))

    def take_back(self, request_id: str) -> Future[None]:
        """Ends, in the background, a session whose CreateSession was given up. The future is done when it has ended."""
        ended = new_future()
        self._renewer.post(TakeBack(request_id, ended), start=True)
        return ended

    def end(self) -> Future[None]:
        """Ends the lease, and all sessions that it alone holds. Takes no longer than a call may, whatever is wrong."""
        return self._renewer.end()
