"""The requests of all sessions that wait for a person.

A request waits until someone decides it; after `wait_s` it is denied. It is denied at once when nobody who may decide
is connected, so an unattended run loses no time. Equal requests of a session are one. Sandboxes cause these
requests, so their number and the length of their texts are bounded, and no two different ones look alike.

Everything happens in the event loop and in memory: after a restart of the daemon the requests are made again.

The front of a fleet has the requests of its nodes here, too (`relay`). They also wait at their node, which remembers
the decisions.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from executor_server.core import NotFound, PolicyViolation, Principal, Reason, Violation, ViolationKind
from executor_server.policy.identity import may_decide

MAX_WAITING_OF_SESSION = 16
MAX_OF_TENANT = 256
MAX_WAITING = 1024
MAX_WHAT_CHARS = 512
MAX_REMEMBERED = 1024
"""Decisions that are remembered for one session; each later one holds for its own request only."""
KEPT_S = 60.0
"""Seconds for which a decision also answers equal requests: those of a caller that polls, or any after a denial."""
WATCH_INTERVAL_S = 0.2
"""Seconds between two lists that one watcher gets."""

_ID_BYTES = 8


class ApprovalKind(enum.StrEnum):
    HOST = "host"
    PACKAGE = "package"
    TOOL = "tool"
    IMPORT = "import"


class Decision(enum.StrEnum):
    ONCE = "once"
    SESSION = "session"  # also for equal requests of the session
    DENIED = "denied"


@dataclass(frozen=True)
class Approval:
    """A request that waits."""

    approval_id: str
    tenant: str
    session_id: str  # empty while the session is not made yet
    request_id: str  # of the request that makes the session; else empty
    execution_id: str  # empty when no execution caused it
    kind: ApprovalKind
    what: str  # a host and its port, a requirement, the name of a tool, a pattern of imports; printable ASCII
    detail: str  # the arguments of a tool, shortened; printable ASCII
    rule: str  # path of the deciding key in the policy file
    create_time_s: float  # since the epoch
    wait_s: float  # until it is denied


@dataclass(frozen=True)
class Ruling:
    """How a request was decided. `reason`: why it was denied, as a clause for the agent; else empty."""

    decision: Decision
    reason: str = ""
    by: Principal | None = field(default=None, compare=False)  # None: it timed out, was withdrawn, or could not wait

    @property
    def approved(self) -> bool:
        return self.decision is not Decision.DENIED


class ApprovalObserver:
    """Notified of every request and decision, before it takes effect."""

    def approval_requested(self, approval: Approval) -> None:
        """A request begins to wait."""

    def approval_decided(self, approval: Approval, ruling: Ruling) -> None:
        """A request that waited was decided."""

    def approval_refused(self, approval: Approval, ruling: Ruling) -> None:
        """A request could not wait and was denied at once."""


@dataclass(frozen=True)
class Wanted:
    """Something that the policy grants only after an approval."""

    kind: ApprovalKind
    what: str
    rule: str  # path of the deciding key in the policy file

    def violation(self, why: str) -> Violation:
        """The violation of a request that has no approval for it."""
        field = {ApprovalKind.PACKAGE: "packages", ApprovalKind.IMPORT: "authorized_imports"}.get(self.kind, self.kind)
        return Violation(field, ViolationKind.NOT_ALLOWED, self.what, f"after an approval only: {why}", self.rule)


class ApprovalRequired(PolicyViolation):
    """The policy would grant the request if all of `wanted` were approved."""

    def __init__(self, wanted: tuple[Wanted, ...], wait_s: float) -> None:
        super().__init__(tuple(each.violation("it has none") for each in wanted))
        self.wanted = wanted
        self.wait_s = wait_s


# Tenant, session, and the request that makes the session.
_Scope = tuple[str, str, str]
_Key = tuple[_Scope, ApprovalKind, str, str]


@dataclass(eq=False)
class _Request:
    approval: Approval
    key: _Key
    ruling: asyncio.Future[Ruling]
    end: asyncio.TimerHandle | None = None
    waiters: int = 0
    repeats: bool = False  # its caller polls instead of waiting
    is_relayed: bool = False  # another daemon remembers the decision

    @property
    def waits(self) -> bool:
        return not self.ruling.done()


@dataclass(eq=False)
class _Watch:
    principal: Principal
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Approvals:
    """Owns the waiting requests, and knows who may decide them."""

    def __init__(self, observer: ApprovalObserver | None = None, now: Callable[[], float] = time.time) -> None:
        self._observer = observer or ApprovalObserver()
        self._now = now
        self._requests: dict[_Key, _Request] = {}  # those that wait, and those whose decision is kept for a while
        self._by_id: dict[str, _Request] = {}  # those that wait
        self._remembered: dict[_Scope, set[tuple[ApprovalKind, str]]] = {}
        self._watches: set[_Watch] = set()

    # -- requests --------------------------------------------------------------------------------------------------

    async def ask(
        self,
        tenant: str,
        session_id: str,
        execution_id: str,
        wanted: Wanted,
        wait_s: float,
        *,
        call_id: str = "",
        detail: str = "",
        patient: bool = False,
    ) -> Ruling:
        """Waits until a request of a session is decided. When all its callers are cancelled, it is withdrawn.

        `detail`: printable ASCII for the person who decides. `call_id` sets this request apart from equal ones: it is
        decided by itself. `patient`: also waits if nobody who may decide is connected yet.
        """
        scope = (tenant, session_id, "")
        found = self._entered(scope, execution_id, wanted, wait_s, call_id=call_id, detail=detail, patient=patient)
        return await self._decided(found, "the request was withdrawn")

    async def relay(self, approval: Approval, *, patient: bool) -> Ruling:
        """Waits until a request that waits at another daemon is decided here. When cancelled, it is withdrawn.

        Its texts must be printable ASCII already. It gets another id. `patient` is as in `ask`.
        """
        key = ((approval.tenant, approval.session_id, ""), approval.kind, approval.what, approval.approval_id)
        own = replace(approval, approval_id=secrets.token_hex(_ID_BYTES), create_time_s=self._now())
        found = self._enter(key, own, approval.what, patient=patient)
        if isinstance(found, _Request):
            found.is_relayed = True
        return await self._decided(found, "it ended at its node, or the link to the node did")

    async def _decided(self, found: _Request | Ruling, withdrawn: str) -> Ruling:
        if isinstance(found, Ruling):
            return found
        found.waiters += 1
        try:
            return await asyncio.shield(found.ruling)
        finally:
            found.waiters -= 1
            if found.waits and not found.waiters and not found.repeats:
                self._end(found, withdrawn)

    def check(self, tenant: str, session_id: str, request_id: str, wanted: Wanted, wait_s: float) -> Ruling | None:
        """Returns the decision on a request whose caller repeats it; None while it waits.

        `request_id` names a session that is not made yet; else it is empty.
        """
        found = self._entered((tenant, session_id, request_id), "", wanted, wait_s)
        if isinstance(found, Ruling):
            return found
        found.repeats = True
        if found.waits:
            return None
        self._keep(found)
        return found.ruling.result()

    def used(self, tenant: str, session_id: str, request_id: str) -> None:
        """Drops decisions that were kept for a caller of `check`: its request has been done."""
        scope = (tenant, session_id, request_id)
        for request in self._of_scope(scope):
            if request.repeats and not request.waits:
                self._drop(request)

    def end_session(self, tenant: str, session_id: str, request_id: str = "") -> None:
        """Forgets everything about a session that has ended, or about a request for one that was given up."""
        scope = (tenant, session_id, request_id)
        self._remembered.pop(scope, None)
        for request in self._of_scope(scope):
            self._end(request, "the session has ended" if session_id else "the request was given up")

    def end_execution(self, tenant: str, session_id: str, execution_id: str) -> None:
        """Denies all that an ended execution still waits for."""
        for request in self._of_scope((tenant, session_id, "")):
            if request.approval.execution_id == execution_id and request.waits:
                self._end(request, "the execution has ended")

    def _end(self, request: _Request, reason: str) -> None:
        if request.waits:
            self._decide(request, Ruling(Decision.DENIED, reason))
        self._drop(request)

    def _of_scope(self, scope: _Scope) -> list[_Request]:
        return [request for key, request in self._requests.items() if key[0] == scope]

    def _entered(
        self,
        scope: _Scope,
        execution_id: str,
        wanted: Wanted,
        wait_s: float,
        *,
        call_id: str = "",
        detail: str = "",
        patient: bool = False,
    ) -> _Request | Ruling:
        """Returns the request, which may be known already; or a ruling when it need not wait, or can't."""
        shown = _shown(wanted.what[: MAX_WHAT_CHARS + 1])
        if (wanted.kind, shown) in self._remembered.get(scope, ()):
            return Ruling(Decision.SESSION)
        key = (scope, wanted.kind, shown, call_id)
        if (known := self._requests.get(key)) is not None:
            return known
        tenant, session_id, request_id = scope
        approval = Approval(
            approval_id=secrets.token_hex(_ID_BYTES),
            tenant=tenant,
            session_id=session_id,
            request_id=request_id,
            execution_id=execution_id,
            kind=wanted.kind,
            what=shown[:MAX_WHAT_CHARS],
            detail=detail,
            rule=wanted.rule,
            create_time_s=self._now(),
            wait_s=wait_s,
        )
        return self._enter(key, approval, shown, patient=patient)

    def _enter(self, key: _Key, approval: Approval, shown: str, *, patient: bool) -> _Request | Ruling:
        problem = self._problem(key[0], shown, patient=patient)
        if problem:
            ruling = Ruling(Decision.DENIED, problem)
            self._observer.approval_refused(approval, ruling)
            return ruling
        self._observer.approval_requested(approval)
        loop = asyncio.get_running_loop()
        request = _Request(approval, key, loop.create_future())
        request.end = loop.call_later(approval.wait_s, self._time_out, request)
        self._requests[key] = self._by_id[approval.approval_id] = request
        self._notify(approval.tenant)
        return request

    def _problem(self, scope: _Scope, shown: str, *, patient: bool) -> str:
        """Returns why a request can't wait; empty if it can."""
        tenant = scope[0]
        if not patient and not any(may_decide(watch.principal, tenant) for watch in self._watches):
            return "it needs an approval, and nobody who may approve is connected"
        if len(shown) > MAX_WHAT_CHARS:
            return f"it needs an approval, and is too long to be shown (over {MAX_WHAT_CHARS} characters)"
        waiting = [request.key[0] for request in self._by_id.values()]
        if waiting.count(scope) >= MAX_WAITING_OF_SESSION:
            return f"it needs an approval, and {MAX_WAITING_OF_SESSION} requests of this session wait for one already"
        if sum(key[0][0] == tenant for key in self._requests) >= MAX_OF_TENANT or len(waiting) >= MAX_WAITING:
            return "it needs an approval, and too many requests wait for one already; try again later"
        return ""

    # -- decisions -------------------------------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """The number of requests that wait."""
        return len(self._by_id)

    def has_waiting(self, session_id: str, execution_id: str) -> bool:
        """Returns True while an execution waits for an approval."""
        waiting = (request.approval for request in self._by_id.values())
        return any((each.session_id, each.execution_id) == (session_id, execution_id) for each in waiting)

    def waiting(self, principal: Principal) -> tuple[Approval, ...]:
        """Returns the waiting requests that this principal may decide, the oldest first."""
        listed = (request.approval for request in self._by_id.values())
        return tuple(each for each in listed if may_decide(principal, each.tenant))

    async def watch(self, principal: Principal) -> AsyncGenerator[tuple[Approval, ...]]:
        """Yields the waiting requests that this principal may decide, now and after changes.

        Until the iterator is closed, the principal counts as connected: requests wait for it.
        """
        watch = _Watch(principal)
        self._watches.add(watch)
        try:
            while True:
                watch.changed.clear()
                yield self.waiting(principal)
                await asyncio.sleep(WATCH_INTERVAL_S)
                await watch.changed.wait()
        finally:
            self._watches.discard(watch)

    def decide(self, principal: Principal, approval_id: str, decision: Decision, reason: str = "") -> Approval:
        """Decides a waiting request, and returns it; the first decision counts. `reason`: why it is denied.

        Raises NotFound for a request that is unknown, decided, timed out, withdrawn, or another tenant's.
        """
        request = self._by_id.get(approval_id)
        if request is None or not may_decide(principal, request.approval.tenant):
            text = "no request with this id waits for an approval: it may have been decided, withdrawn, or timed out"
            raise NotFound(Reason.APPROVAL_NOT_FOUND, text)
        reason = (reason or "the approver refused it") if decision is Decision.DENIED else ""
        self._decide(request, Ruling(decision, reason, principal))
        return request.approval

    def _time_out(self, request: _Request) -> None:
        if request.waits:
            reason = f"it needs an approval, and nobody decided within {request.approval.wait_s:g} s"
            self._decide(request, Ruling(Decision.DENIED, reason))

    def _decide(self, request: _Request, ruling: Ruling) -> None:
        approval, (scope, kind, shown, call_id) = request.approval, request.key
        self._observer.approval_decided(approval, ruling)
        if ruling.decision is Decision.SESSION and not (request.is_relayed or request.repeats):
            remembered = self._remembered.setdefault(scope, set())
            if len(remembered) < MAX_REMEMBERED:
                remembered.add((kind, shown))
        request.ruling.set_result(ruling)
        self._by_id.pop(approval.approval_id, None)
        if request.repeats or (not ruling.approved and not call_id):
            self._keep(request)
        else:
            self._drop(request)
        self._notify(approval.tenant)

    def _keep(self, request: _Request) -> None:
        if request.end is not None:
            request.end.cancel()
        request.end = asyncio.get_running_loop().call_later(KEPT_S, self._drop, request)

    def _drop(self, request: _Request) -> None:
        if request.end is not None:
            request.end.cancel()
        if self._requests.get(request.key) is request:
            del self._requests[request.key]

    def _notify(self, tenant: str) -> None:
        for watch in self._watches:
            if may_decide(watch.principal, tenant):
                watch.changed.set()

    def close(self) -> None:
        """Denies all that waits: the daemon stops."""
        for request in list(self._requests.values()):
            self._end(request, "the daemon stops")


def _shown(what: str) -> str:
    """Escapes all but printable ASCII: nothing steers a terminal, and no two texts look alike."""
    escaped = what.replace("\\", "\\\\").encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in escaped)
