"""A client's lease on its sessions: they live as long as the client does, and end with it.

A client creates its sessions under a lease, a random number, which a thread renews (`renewer`). If the process is
killed, the daemon ends the sessions after their `owner_grace_s`. They end sooner at `close`, at the interpreter's exit,
when a session that the client created is garbage-collected, and when the client is collected with all its sessions.

The client and its sessions refer to `ClientLease`. Their finalizers may run at any allocation, in any thread, with any
lock held, so they only queue a job for the renewer.
"""

from __future__ import annotations

import os
import secrets
import weakref
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from executor_client._core.endpoint import Endpoint
from executor_client._core.session_base import SessionBase
from executor_client._core.transport_base import Timeouts
from executor_client._sync.approvals import ApprovalWatch
from executor_client._sync.renewer import Renewer
from executor_client.results import SessionInfo


class ClientLease:
    """The lease of one client. Its sessions also refer to it, so it is collected with the last of them."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, *, answers: bool = False) -> None:
        """`answers`: whether the client answers the approvals of its sessions."""
        self.lease_id = secrets.token_hex(16)
        self._pid = os.getpid()
        self._renewer = Renewer(self.lease_id, endpoint, timeouts)
        self.approvals = ApprovalWatch(endpoint, timeouts) if answers else None
        weakref.finalize(self, self._renewer.end).atexit = False  # see _end_all
        if self.approvals is not None:
            weakref.finalize(self, self.approvals.end).atexit = False

    @property
    def is_foreign(self) -> bool:
        """True if the parent process created it before a fork."""
        return self._pid != os.getpid()

    def hold(self, session: SessionBase[Any], info: SessionInfo, *, made: bool) -> None:
        """Records a session; its lease only if it is not detached.

        A session that the client created ends when its object `session` is collected; one that it found does not.
        """
        if self.approvals is not None:
            self.approvals.hold(session)
        if info.detached:
            return
        self._renewer.hold(info.session_id, made=made, grace_s=info.limits.owner_grace_s or 0.0)
        weakref.finalize(session, self._renewer.collected, info.session_id).atexit = False

    def creating(self, request_id: str) -> AbstractContextManager[None]:
        """Answers approvals about a session while it is being created."""
        return nullcontext() if self.approvals is None else self.approvals.creating(request_id)

    def closed(self, session_id: str) -> None:
        """Records that a session was deleted."""
        self._renewer.closed(session_id)

    def take_back(self, request_id: str) -> Future[None]:
        """Ends a session in the background after its CreateSession was given up. The future is done after that."""
        return self._renewer.take_back(request_id)

    def end(self) -> Future[None]:
        """Ends the lease, and all sessions that only it holds. Takes at most the timeout of a call."""
        return self._renewer.end()
