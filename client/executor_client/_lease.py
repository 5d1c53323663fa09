"""The hold that a client has on its sessions: while it lives they do, and when it ends so do they.

A client makes its sessions under a lease, a random number, which a thread of its own renews. When the process is gone,
the daemon ends them after their `owner_grace_s`. In order it goes sooner: at `close`, at the interpreter's exit, when a
session that the client made is collected, and when the client is, with all of its sessions.

`ClientLease` is what the client and its sessions hold; `_Renewer` is the thread's side and knows none of them, so that
it keeps none of them alive. What is collected tells the thread, and nothing else: a finalizer runs wherever memory is
asked for, in any thread, and with any lock held, so all that it does is to put a job into a queue that was made for
that (`SimpleQueue.put` is reentrant). A child that was forked has none of it: it neither renews nor ends anything.

The thread is started with the first session, so a client that makes none costs nothing. It has a connection of its own,
made when it first has something to say, for the asyncio client too: an event loop that is busy for minutes must not
lose its sessions. Nor must an interrupt: one that strikes while gRPC begins a call leaves a lock of that channel taken.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._endpoint import Endpoint
from executor_client._limits import (
    EXIT_TIMEOUT_S,
    LEASE_CALL_TIMEOUT_S,
    LEASE_RENEW_FIRST_S,
    LEASE_RENEW_MIN_S,
    LEASE_RETRY_S,
    LEASE_TICK_S,
    LEASE_UNENDED_MAX,
)
from executor_client._transport import Transport
from executor_client._transport_base import Timeouts
from executor_client.errors import ExecutorClientError, InvalidRequest, NotFoundError, UnavailableError
from executor_client.results import SessionInfo

_log = logging.getLogger(__name__)

# Those that have a thread, in this process.
_running: set[_Renewer] = set()


def _steady_s() -> float:
    """A clock that goes on while this machine sleeps, where there is one: what was due then is due at once."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ClientLease:
    """One client's. Its sessions refer to it as the client does, so it is collected with the last of them."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self._renewer = _Renewer(endpoint, timeouts)
        self._confirmed = False  # by the daemon: a session of ours is leased
        self._unknown = False  # to a daemon of before there were leases
        finalizer = weakref.finalize(self, self._renewer.abandon)
        finalizer.atexit = False  # see _end_all

    @property
    def is_foreign(self) -> bool:
        """True when it was made by the process that this one was forked from."""
        return self._renewer.pid != os.getpid()

    @property
    def lease_id(self) -> str:
        """For a request; empty where the daemon knows no leases."""
        return "" if self._unknown else self._renewer.lease_id

    def is_refusal(self, request: pb.CreateSessionRequest | pb.GetSessionRequest, error: InvalidRequest) -> bool:
        """True when a daemon may have refused a request because it knows no leases; `request` then names none.

        A field that a daemon does not know makes the request malformed, and it does not say which field that was.
        """
        if not request.lease_id or self._confirmed or error.reason != "INVALID_FIELD":
            return False
        request.lease_id = ""
        return True

    def unknown(self) -> None:
        """The request that was refused with a lease succeeded without: this daemon knows none."""
        self._unknown = True

    def made(self, session: object, info: SessionInfo) -> None:
        """The client made a session, which ends when `session`, the object that stands for it, is collected."""
        self._hold(session, info, made=True)

    def found(self, session: object, info: SessionInfo) -> None:
        """The client found a session that was made earlier; it is not ended for being collected."""
        self._hold(session, info, made=False)

    def _hold(self, session: object, info: SessionInfo, *, made: bool) -> None:
        if info.detached:
            return
        self._confirmed = True
        self._renewer.post(_Hold(info.session_id, made, info.limits.owner_grace_s or 0.0))
        finalizer = weakref.finalize(session, self._renewer.post, _Collected(info.session_id))
        finalizer.atexit = False

    def closed(self, session_id: str) -> None:
        """The session was deleted."""
        self._renewer.post(_Closed(session_id))

    def take_back(self, request_id: str) -> Future[None]:
        """Has a session ended, in the background, whose CreateSession nobody waits for any more. Done when it is."""
        ended = _future()
        self._renewer.post(_TakeBack(request_id, ended), start=True)
        return ended

    def end(self) -> Future[None]:
        """Ends the lease, and all sessions that it alone holds. Takes no longer than a call may, whatever is wrong."""
        return self._renewer.end()


# ---------------------------------------------------------------------------------------------------------------------
# Jobs of the thread


@dataclass(frozen=True)
class _Hold:
    session_id: str
    made: bool
    grace_s: float


@dataclass(frozen=True)
class _Closed:
    session_id: str


@dataclass(frozen=True)
class _Collected:
    session_id: str


@dataclass(frozen=True)
class _TakeBack:
    request_id: str
    ended: Future[None]


@dataclass(frozen=True)
class _End:
    """The last one: what comes after it is not done."""


def _future() -> Future[None]:
    """One that is not cancelled with whoever has waited for it long enough."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


_Job = _Hold | _Closed | _Collected | _TakeBack | _End


@dataclass
class _Held:
    """A session that the lease holds: whether the client made it, and how many objects stand for it."""

    made: bool = False
    objects: int = 0


class _Renewer:
    """Renews one lease, and ends what is to be ended, in a thread of its own."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self.lease_id = secrets.token_hex(16)
        self.pid = os.getpid()
        self._endpoint, self._timeouts = endpoint, timeouts
        self._transport: Transport | None = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = _future()  # one for all who ask for the end: a collected client may be the first of them
        self._start_lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        # Requests to end sessions that failed because the daemon was away. Past the bound its own grace is relied on.
        self._unended: deque[pb.DeleteSessionRequest] = deque(maxlen=LEASE_UNENDED_MAX)
        self._renew_s = LEASE_RENEW_FIRST_S
        self._due_s = 0.0

    # From the client's threads, and from finalizers

    def post(self, job: _Job, *, start: bool = False) -> None:
        """Leaves a job to the thread; what is collected in a forked child is the parent's."""
        if self.pid != os.getpid():
            return
        self._jobs.put(job)
        if start or isinstance(job, _Hold):
            self._start()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="executor-lease", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter is ending; the daemon ends what is left after its grace
                _log.debug("no thread for lease %s: %s", self.lease_id, error)
                return
            self._thread = thread
            _running.add(self)

    def abandon(self) -> None:
        """For a finalizer: the client and all of its sessions are gone."""
        self.post(_End())

    def end(self) -> Future[None]:
        """Done when the lease has ended, at once where there is nothing to end."""
        if self.pid == os.getpid() and self._thread is not None:
            self._jobs.put(_End())
            return self._ended
        nothing = _future()
        nothing.set_result(None)
        return nothing

    # In the thread

    def _run(self) -> None:
        while not isinstance(job := self._next_job(), _End):
            self._guarded(partial(self._do, job))
        self._guarded(self._finish)
        _running.discard(self)
        self._ended.set_result(None)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ExecutorClientError as error:
            _log.debug("lease %s: %s", self.lease_id, error)
        except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not cost the client its sessions
            _log.exception("the lease of a client's sessions")

    def _next_job(self) -> _Job | None:
        """The next job, or None when the lease is due. In short waits: no queue wakes up when the machine does."""
        while True:
            left_s = self._due_s - _steady_s()
            if self._held and left_s <= 0:
                return None
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=min(left_s, LEASE_TICK_S) if self._held else None)

    def _do(self, job: _Job | None) -> None:
        match job:
            case _Hold():
                if not self._held:
                    self._renew_s = LEASE_RENEW_FIRST_S
                    self._due_s = _steady_s() + self._renew_s
                # The daemon says how often when it is told that we live; until then, a tenth of the grace will do.
                self._renew_s = max(min(self._renew_s, job.grace_s / 10), LEASE_RENEW_MIN_S)
                self._due_s = min(self._due_s, _steady_s() + self._renew_s)
                held = self._held.setdefault(job.session_id, _Held())
                held.made = held.made or job.made
                held.objects += 1
            case _Closed():
                self._held.pop(job.session_id, None)
            case _Collected():
                self._collected(job.session_id)
            case _TakeBack():
                try:
                    self._delete(pb.DeleteSessionRequest(request_id=job.request_id))
                finally:
                    job.ended.set_result(None)
            case _:
                self._renew()

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
            self._call("DeleteSession", request)
        except NotFoundError:
            pass  # it has ended; or its CreateSession has not come, and is refused when it does
        except UnavailableError:
            self._unended.append(request)  # with the next renewal; without sessions to renew, its lease ends it
            raise

    def _renew(self) -> None:
        self._due_s = _steady_s() + min(self._renew_s, LEASE_RETRY_S)  # unless it is answered
        renewed = self._call("RenewLease", pb.RenewLeaseRequest(lease_id=self.lease_id))
        self._renew_s = max(renewed.renew_after_s, LEASE_RENEW_MIN_S)
        self._due_s = _steady_s() + self._renew_s
        if renewed.sessions == 0:
            self._held.clear()  # all of them came to their ends; those made since are still in the queue
        for _ in range(len(self._unended)):
            self._delete(self._unended.popleft())

    def _finish(self) -> None:
        """The end of the lease: what it holds ends with it. A daemon that does not answer ends it by itself."""
        try:
            if self._held or self._unended:
                self._call("EndLease", pb.EndLeaseRequest(lease_id=self.lease_id))
        finally:
            if self._transport is not None:
                self._transport.close()

    def _call(self, name: str, request: object) -> Any:
        """One bounded attempt of a call. Raises ExecutorClientError."""
        if self._transport is None:
            self._transport = Transport(self._endpoint, self._timeouts)
        return self._transport.once(getattr(self._transport.stub, name), request, LEASE_CALL_TIMEOUT_S)


# ---------------------------------------------------------------------------------------------------------------------
# The end of the process


def _end_all() -> None:
    """At exit: all clients end their leases at the same time, in their threads, and none is waited for for long.

    No thread can be started any more, and none needs to be. A daemon that is gone, or hangs, costs the bound.
    """
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    for ended in [each.end() for each in list(_running)]:
        with contextlib.suppress(TimeoutError):
            ended.result(max(deadline_s - time.monotonic(), 0.0))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_running.clear)
