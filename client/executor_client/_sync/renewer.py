"""The threads that renew the leases of clients, and end sessions in the background: one for each lease.

A `Renewer` does not refer to the client or its sessions, so it does not keep them alive. They put jobs in its queue,
whose `put` is reentrant (`SimpleQueue`), because finalizers use it too. A forked child does not renew or end its
parent's lease.

The thread starts with the first session, so a client without sessions costs nothing. It has its own connection, even
for the asyncio client: an event loop that is busy for minutes must not lose its sessions. Nor must an interrupt: if it
arrives while gRPC starts a call, a lock of that channel stays taken.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import Message

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core.endpoint import Endpoint
from executor_client._core.limits import (
    EXIT_TIMEOUT_S,
    LEASE_CALL_TIMEOUT_S,
    LEASE_RENEW_FIRST_S,
    LEASE_RENEW_MIN_S,
    LEASE_RETRY_S,
    LEASE_TICK_S,
    LEASE_UNENDED_MAX,
)
from executor_client._core.transport_base import Timeouts
from executor_client._sync.transport import Transport
from executor_client.errors import ExecutorClientError, NotFoundError, UnavailableError

_log = logging.getLogger(__name__)

# The renewers of this process that have a thread.
_running: set[Renewer] = set()


def _steady_s() -> float:
    """Returns a clock that also runs while the machine sleeps, if there is one, so a lease is due right after sleep."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _new_future() -> Future[None]:
    """Returns a future that its waiters can't cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass
class _Held:
    """A session under the lease: whether the client created it, and its number of objects."""

    made: bool = False
    objects: int = 0


class Renewer:
    """Renews a lease, and ends sessions, in a thread of its own."""

    def __init__(self, lease_id: str, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self.lease_id = lease_id
        self.pid = os.getpid()
        self._endpoint, self._timeouts = endpoint, timeouts
        self._transport: Transport | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # None: the end
        self._thread: threading.Thread | None = None
        self._ended = _new_future()  # shared by all callers of `end`: the finalizer of the client may be the first
        self._start_lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        # Unanswered requests to end sessions. Beyond the bound, the grace time ends those sessions.
        self._unended: deque[pb.DeleteSessionRequest] = deque(maxlen=LEASE_UNENDED_MAX)
        self._renew_s = LEASE_RENEW_FIRST_S
        self._due_s = 0.0

    # Called by the client's threads and by finalizers

    def hold(self, session_id: str, *, made: bool, grace_s: float) -> None:
        """Renews the lease for this session too. `made`: the client created it."""
        self._post(partial(self._hold, session_id, made, grace_s), start=True)

    def closed(self, session_id: str) -> None:
        """Records that a session was deleted."""
        self._post(partial(self._held.pop, session_id, None))

    def collected(self, session_id: str) -> None:
        """Records that an object of the session was collected. With the last one, a session that was created ends."""
        self._post(partial(self._collected, session_id))

    def take_back(self, request_id: str) -> Future[None]:
        """Ends a session in the background after its CreateSession was given up. The future is done after that."""
        ended = _new_future()
        self._post(partial(self._take_back, request_id, ended), start=True)
        return ended

    def _post(self, job: Callable[[], object], *, start: bool = False) -> None:
        """Queues a job for the thread, and starts that if need be. Without a thread there is no session to end.

        Does nothing in a forked child, whose objects are copies of the parent's.
        """
        if self.pid != os.getpid() or (self._thread is None and not start):
            return
        self._jobs.put(job)
        if start:
            self._start()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="executor-lease", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter is ending; the daemon ends the sessions after their grace
                _log.debug("no thread for lease %s: %s", self.lease_id, error)
                return
            self._thread = thread
            _running.add(self)

    def end(self) -> Future[None]:
        """Ends the lease. The future is done when it has ended, at once if there is nothing to end."""
        if self.pid == os.getpid() and self._thread is not None:
            self._jobs.put(None)
            return self._ended
        nothing = _new_future()
        nothing.set_result(None)
        return nothing

    # Called in the thread

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            self._guarded(job)
        self._guarded(self._finish)
        _running.discard(self)
        self._ended.set_result(None)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except ExecutorClientError as error:
            _log.debug("lease %s: %s", self.lease_id, error)
        except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not cost the client its sessions
            _log.exception("the lease of a client's sessions")

    def _next_job(self) -> Callable[[], object] | None:
        """Waits for the next job, which may be a renewal. In short steps, because the clock may jump after sleep."""
        while True:
            left_s = self._due_s - _steady_s()
            if self._held and left_s <= 0:
                return self._renew
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=min(left_s, LEASE_TICK_S) if self._held else None)

    def _hold(self, session_id: str, made: bool, grace_s: float) -> None:
        if not self._held:
            self._renew_s = LEASE_RENEW_FIRST_S
            self._due_s = _steady_s() + self._renew_s
        # The first renewal sets the interval; until then it is a tenth of the grace time.
        self._renew_s = max(min(self._renew_s, grace_s / 10), LEASE_RENEW_MIN_S)
        self._due_s = min(self._due_s, _steady_s() + self._renew_s)
        held = self._held.setdefault(session_id, _Held())
        held.made = held.made or made
        held.objects += 1

    def _take_back(self, request_id: str, ended: Future[None]) -> None:
        try:
            self._delete(pb.DeleteSessionRequest(request_id=request_id))
        finally:
            ended.set_result(None)

    def _collected(self, session_id: str) -> None:
        held = self._held.get(session_id)
        if held is None:
            return
        held.objects -= 1
        if held.objects == 0 and held.made:
            del self._held[session_id]
            self._delete(pb.DeleteSessionRequest(session_id=session_id))

    def _delete(self, request: pb.DeleteSessionRequest) -> None:
        try:
            self._call(request)
        except NotFoundError:
            pass  # it has ended, or its CreateSession has not arrived and will be refused
        except UnavailableError:
            self._unended.append(request)  # repeated with the next renewal; without one, the end of the lease ends it
            raise

    def _renew(self) -> None:
        self._due_s = _steady_s() + min(self._renew_s, LEASE_RETRY_S)  # unless it is answered first
        renewed = self._call(pb.RenewLeaseRequest(lease_id=self.lease_id))
        self._renew_s = max(renewed.renew_after_s, LEASE_RENEW_MIN_S)
        self._due_s = _steady_s() + self._renew_s
        if renewed.sessions == 0:
            self._held.clear()  # all of them have ended; later ones are still in the queue
        for _ in range(len(self._unended)):
            self._delete(self._unended.popleft())

    def _finish(self) -> None:
        """Ends the lease with the sessions that only it holds. If no daemon answers, the grace time ends them."""
        try:
            if self._held or self._unended:
                self._call(pb.EndLeaseRequest(lease_id=self.lease_id))
        finally:
            if self._transport is not None:
                self._transport.close()

    def _call(self, request: Message) -> Any:
        """Makes one bounded attempt of a call. Raises ExecutorClientError."""
        if self._transport is None:
            self._transport = Transport(self._endpoint, self._timeouts)
        return self._transport.once(request, LEASE_CALL_TIMEOUT_S)


# ---------------------------------------------------------------------------------------------------------------------
# The end of the process


def _end_all() -> None:
    """Ends the leases of all clients at exit, concurrently in their threads, within a time limit.

    No thread can start any more, and none needs to.
    """
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    for ended in [each.end() for each in list(_running)]:
        with contextlib.suppress(TimeoutError):
            ended.result(max(deadline_s - time.monotonic(), 0.0))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_running.clear)
