"""Gives waiting approvals of a client's own sessions to its `on_approval`, and sends the decisions.

It has two threads and a connection of its own, for the asyncio client too: one thread reads the stream of waiting
requests, and one answers, since an answer takes a person's time. They start with the first session, so a client without
sessions costs nothing. They do not refer to the client or to its sessions; the end of the lease ends them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client._core.approvals import WaitingApprovals, decision
from executor_client._core.endpoint import Endpoint
from executor_client._core.limits import APPROVAL_ENDED_CHECK_S, APPROVALS_CONNECT_S, EXIT_TIMEOUT_S
from executor_client._core.retry import Backoff
from executor_client._core.session_base import SessionBase
from executor_client._core.transport_base import Timeouts
from executor_client._sync.transport import Transport
from executor_client.approvals import Approval
from executor_client.errors import (
    AuthenticationError,
    AuthorizationError,
    DaemonError,
    ExecutorClientError,
    NotFoundError,
)

_log = logging.getLogger(__name__)

_REFUSALS = (AuthorizationError, AuthenticationError, DaemonError)

Answer = Callable[[Approval], object]
"""Returns the decision, or a future of it."""


_running: weakref.WeakSet[ApprovalWatch] = weakref.WeakSet()


class ApprovalWatch:
    """The approvals of one client. Thread-safe."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self._endpoint, self._timeouts = endpoint, timeouts
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[SessionBase[Any]] = weakref.WeakSet()
        self._creating: set[str] = set()  # ids of requests
        self._waiting: tuple[Approval, ...] = ()
        self._offered: set[str] = set()
        # None: the end. `SimpleQueue.put` is reentrant, because a finalizer calls `end`.
        self._jobs: queue.SimpleQueue[Approval | None] = queue.SimpleQueue()
        self._transport: Transport | None = None
        self._reader: threading.Thread | None = None
        self._settled = threading.Event()  # connected as an approver, or refused
        self._ended = threading.Event()
        self._pid = os.getpid()

    # Called by the client's threads

    def begin(self, answer: Answer) -> None:
        """Connects at the first call, so that requests of the session to come wait for this client.

        Returns after a few seconds if no daemon answers: the caller's own call reports that.
        """
        with self._lock:
            if self._reader is None:
                self._transport = Transport(self._endpoint, self._timeouts)
                self._reader = threading.Thread(target=self._read, name="executor-approvals", daemon=True)
                self._reader.start()
                threading.Thread(target=self._answer, args=(answer,), name="executor-on-approval", daemon=True).start()
                _running.add(self)
        self._settled.wait(APPROVALS_CONNECT_S)

    @contextmanager
    def creating(self, request_id: str) -> Iterator[None]:
        """Answers requests about a session that is being created."""
        with self._lock:
            self._creating.add(request_id)
        try:
            yield
        finally:
            with self._lock:
                self._creating.discard(request_id)

    def hold(self, session: SessionBase[Any]) -> None:
        """Answers the requests of this session from now on, while its object lives."""
        with self._lock:
            self._sessions.add(session)
            self._offer()

    def end(self) -> None:
        """Ends both threads, soon. May be called by a finalizer."""
        if self._pid == os.getpid():
            self._ended.set()
            self._jobs.put(None)

    def close(self) -> None:
        """Ends the connection now. A running `on_approval` is not waited for."""
        self.end()
        if self._transport is not None and self._reader is not None and self._pid == os.getpid():
            self._transport.close()
            self._reader.join(EXIT_TIMEOUT_S)

    def _offer(self) -> None:
        """Queues each waiting request of an own session once. Needs the lock."""
        own = {session.session_id for session in self._sessions}
        for approval in self._waiting:
            if approval.approval_id not in self._offered and (
                approval.session_id in own or approval.request_id in self._creating
            ):
                self._offered.add(approval.approval_id)
                self._jobs.put(approval)
        self._offered &= {approval.approval_id for approval in self._waiting}

    # The reading thread

    def _read(self) -> None:
        assert self._transport is not None
        waiting, backoff = WaitingApprovals(), Backoff(float("inf"))
        while not self._ended.is_set():
            error = None
            try:
                for listed in self._transport.read(admin_pb.WatchApprovalsRequest(), math.inf):
                    backoff = Backoff(float("inf"))
                    with self._lock:
                        self._waiting = waiting.update(listed)
                        self._offer()
                    self._settled.set()
            except _REFUSALS as refusal:
                if not self._ended.is_set():
                    _warn(refusal)
                break
            except ExecutorClientError as failure:
                error = failure
            delay_s = backoff.delay_s(time.monotonic(), retry_after_s=getattr(error, "retry_after_s", None) or 0.0)
            self._ended.wait(delay_s)
        self._settled.set()

    # The answering thread

    def _answer(self, answer: Answer) -> None:
        assert self._transport is not None
        while (approval := self._jobs.get()) is not None and not self._ended.is_set():
            if not approval.is_waiting:
                continue
            chosen = _answered(answer, approval)
            if chosen is None:
                continue
            try:
                self._transport.once(decision(approval.approval_id, chosen))
            except NotFoundError:
                _log.debug("approval %s ended before its answer", approval.approval_id)
            except ExecutorClientError as error:
                if not self._ended.is_set():
                    _log.warning("the answer to approval %s was not sent: %s", approval.approval_id, error)
        self._transport.close()


def _answered(answer: Answer, approval: Approval) -> object:
    """Returns the decision of the client's hook, "deny" if it fails; None if the request ends meanwhile."""
    try:
        chosen = answer(approval)
        while isinstance(chosen, Future):
            try:
                chosen = chosen.result(APPROVAL_ENDED_CHECK_S)
            except TimeoutError:
                if chosen.done():
                    raise
                if not approval.is_waiting:
                    chosen.cancel()
                    return None
        decision(approval.approval_id, chosen)
    except Exception:  # noqa: BLE001 - the hook's error: what it does not approve is denied
        _log.exception("on_approval failed, so this was denied: %s", approval)
        return "deny"
    return chosen


def _warn(refusal: ExecutorClientError) -> None:
    """Says once that this client can't decide, and how it could."""
    _log.warning(
        "on_approval is never called, because this client may not decide about approvals: %s. Others may still decide; "
        "else such requests are refused (docs/approvals.md)",
        refusal.message,
    )


def _end_all() -> None:
    """Closes all connections at exit, so that no thread is in gRPC when the interpreter ends."""
    for watch in list(_running):
        with contextlib.suppress(ExecutorClientError):
            watch.close()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_running.clear)
