"""Creates sessions on nodes: decides, reserves a place, chooses a node, and tries the next one where that is safe.

Each request has a task of its own, which a repeated request joins. Later the repeated request finds the session, or the
node that creates it. When a node refuses, the next one is tried. A node that does not answer may have created the
session, so no other node is tried until it answers or is lost (membership/reservations.py). If it refuses after it had
not answered, the request is withdrawn from it first: the first call may still be on its way, and then creates nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api import checks, from_wire
from executor_server.api.asking import Asking
from executor_server.core import NotFound, Principal, Reason, SessionSpec
from executor_server.fleet.api import wire
from executor_server.fleet.api.fleet_news import FleetNews
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_sessions import SessionNames, lost_session
from executor_server.fleet.api.node_calls import NodeSilent, RefusedByNode, ask
from executor_server.fleet.api.node_choice import NodeChoice, refuses_for_now, wanted_of
from executor_server.fleet.membership import Creation, Earlier, Reservations, Wanted, lease_clock
from executor_server.policy import Policy
from executor_server.policy.quotas import Admission

AGAIN_S = 0.2
"""Seconds between two calls to a node that did not answer."""
SILENCE_S = 60.0
"""Seconds after which a repeated request is refused; by then its node is lost or has answered."""
# Remembered ids of requests that were withdrawn before they arrived.
_MAX_WITHDRAWN = 4096

RequestKey = tuple[str, str]
"""Tenant and request id."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Making:
    """A request in progress."""

    principal: Principal
    request: service_pb.CreateSessionRequest
    creation: Creation
    began_s: float = field(default_factory=time.monotonic)
    callers: int = 0
    is_sent: bool = False
    is_withdrawn: bool = False
    task: asyncio.Task[pb.Session] | None = None

    @property
    def key(self) -> RequestKey:
        return self.creation.request


class SessionCreator:
    """Owns the tasks that make sessions on nodes."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        fleet: FrontFleet,
        names: SessionNames,
        reservations: Reservations,
        choice: NodeChoice,
        admission: Admission,
        asking: Asking,
        news: FleetNews,
    ) -> None:
        """`policy` returns the one in force."""
        self._policy = policy
        self._fleet = fleet
        self._names = names
        self._reservations = reservations
        self._choice = choice
        self._admission = admission
        self._asking = asking
        self._news = news
        self._making: dict[RequestKey, _Making] = {}
        self._withdrawn: OrderedDict[RequestKey, None] = OrderedDict()
        self._undoing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends the tasks. What their nodes make meanwhile stays, and the next front finds it."""
        tasks = [making.task for making in self._making.values() if making.task is not None]
        for task in (*tasks, *self._undoing):
            task.cancel()
        await asyncio.gather(*tasks, *self._undoing, return_exceptions=True)

    # -- asking for a session ------------------------------------------------------------------------------------------

    async def create(self, principal: Principal, request: service_pb.CreateSessionRequest) -> pb.Session:
        """Returns the session of this request, made now or earlier. Raises ExecutorError, RefusedByNode."""
        request_id = checks.identifier(request.request_id, "request_id")
        if request.lease_id:
            checks.lease_id(request.lease_id)
        key = (principal.tenant, request_id)
        until_s = time.monotonic() + SILENCE_S
        await self._fleet.settled()
        while True:
            if key in self._withdrawn:
                raise _withdrawn()
            making = self._making.get(key)
            if making is not None:
                session = await self._joined(making)
                # The node attaches the caller's lease, if that is another one than the first caller's.
                repeats = request.lease_id and request.lease_id != making.request.lease_id
                if not repeats:
                    return session
            earlier = self._reservations.find(*key)
            if earlier is None:
                return await self._joined(self._begin(principal, request))
            if earlier.tombstone is not None:
                return lost_session(earlier.tombstone)
            # A withdrawn request is a creation until its node has answered.
            node = earlier.node if earlier.creation is None else earlier.creation.node
            found = await self._repeated(principal, request, earlier)
            if found is not None:
                return found
            if time.monotonic() >= until_s:
                raise NodeSilent(node)

    async def _repeated(
        self, principal: Principal, request: service_pb.CreateSessionRequest, earlier: Earlier
    ) -> pb.Session | None:
        """Asks the node that has or makes the session; None when it can't answer now."""
        link = self._fleet.link_of(earlier.node)
        if link is not None:
            try:
                answer: service_pb.CreateSessionResponse = await ask(link, "CreateSession", request, principal, None)
                return answer.session
            except NodeSilent:
                pass
            except RefusedByNode as refused:
                if refused.reason != Reason.NODE_FENCED.value:
                    raise
        await asyncio.sleep(AGAIN_S)
        return None

    async def _joined(self, making: _Making) -> pb.Session:
        """Waits for a session. Once a node was asked, the creation continues even if the caller leaves."""
        assert making.task is not None
        making.callers += 1
        try:
            return await asyncio.shield(making.task)
        except asyncio.CancelledError:
            if making.is_withdrawn:
                raise _withdrawn() from None
            raise
        finally:
            making.callers -= 1
            if not making.callers and not making.is_sent:
                making.task.cancel()

    def _begin(self, principal: Principal, request: service_pb.CreateSessionRequest) -> _Making:
        """Begins to make a session. Raises ExecutorError when it may not be made."""
        wanted_labels = wire.labels_from(request.node_labels.items(), "node_labels")
        from_wire.needed_modules_from(request)
        asked = from_wire.requested_session_from(request)
        spec = self._asking.decided(
            principal, "", request.request_id, lambda approved: self._policy().decide(principal, asked, approved)
        )
        if spec.prelude:
            self._fleet.usage.check_use(principal.tenant)
        creation = self._reservations.begin(principal.tenant, request.request_id, lease_clock())
        making = _Making(principal, request, creation)
        self._making[making.key] = making
        making.task = asyncio.create_task(self._make(making, spec, wanted_of(spec, wanted_labels)))
        making.task.add_done_callback(lambda task: self._settle(making, task))
        return making

    def _settle(self, making: _Making, task: asyncio.Task[pb.Session]) -> None:
        if self._making.get(making.key) is making:
            del self._making[making.key]
        if not making.creation.node:  # a task that was cancelled before its first step has not ended it
            self._reservations.end(making.creation)
        if task.cancelled() or task.exception() is not None:
            self._news.session_refused(withdrawn=task.cancelled())

    # -- making it ---------------------------------------------------------------------------------------------------

    async def _make(self, making: _Making, spec: SessionSpec, wanted: Wanted) -> pb.Session:
        creation = making.creation
        try:
            await self._admission.request(making.principal, creation.request_id, spec)
            packages, reserve = spec.sandbox.packages, partial(self._reservations.place, creation)
            async with (
                # Here, and not around `create`: a repeated request must find its session, which has the name.
                self._names.giving(making.principal, spec.name),
                self._choice.attempt(creation.tenant, wanted, packages, reserve) as attempt,
            ):
                while True:
                    node = await attempt.next_node()
                    making.is_sent = True
                    outcome = await self._ask(making, node)
                    making.is_sent = False
                    if isinstance(outcome, RefusedByNode):
                        attempt.refused(node, outcome)
                    elif outcome is not None:
                        attempt.made_at(node)
                        self._asking.done(making.principal, "", creation.request_id)
                        took_s = time.monotonic() - making.began_s
                        request_id, session_id = creation.request_id, outcome.session_id
                        self._news.session_placed(making.principal, request_id, session_id, node, took_s)
                        return outcome
        except asyncio.CancelledError:
            if making.is_withdrawn and creation.node:
                self._undo_later(making)
            raise
        finally:
            if not making.is_withdrawn or not creation.node:
                self._reservations.end(creation)

    async def _ask(self, making: _Making, node: str) -> pb.Session | RefusedByNode | None:
        """Asks until the node has answered; None when it is lost, or could not be asked at all."""
        creation, unanswered = making.creation, False
        while not self._reservations.may_move(creation):
            link = self._fleet.link_of(node)
            if link is None and not unanswered:
                self._reservations.refused(creation, is_full=False)
                return None
            if link is not None:
                try:
                    answer = await ask(link, "CreateSession", making.request, making.principal, None)
                    session: pb.Session = answer.session
                    self._news.node_asked("made")
                    is_there = self._reservations.answered(creation, session.session_id, lease_clock())
                    return session if is_there else None
                except RefusedByNode as refused:
                    self._news.node_asked("refused")
                    if await self._is_final(making, node, refused, unanswered=unanswered):
                        self._reservations.refused(creation, is_full=refuses_for_now(refused))
                        return refused
                except NodeSilent as silent:
                    unanswered = True
                    self._news.node_asked("unanswered")
                    _log.warning("fleet_creation_unanswered", node=node, problem=silent.problem)
            await asyncio.sleep(AGAIN_S)
        return None

    async def _is_final(self, making: _Making, node: str, refused: RefusedByNode, *, unanswered: bool) -> bool:
        """True when the node has made nothing, and never will. A fenced node says nothing about an earlier call."""
        if not unanswered:
            return True
        return refused.reason != Reason.NODE_FENCED.value and await self._withdraw_at(making, node)

    async def _withdraw_at(self, making: _Making, node: str) -> bool:
        """Ends the session of this request at a node, which then refuses the request for good; False if unanswered."""
        link = self._fleet.link_of(node)
        if link is None:
            return False
        request = service_pb.DeleteSessionRequest(request_id=making.creation.request_id)
        try:
            await ask(link, "DeleteSession", request, making.principal, None)
        except RefusedByNode as refused:
            return refused.reason != Reason.NODE_FENCED.value  # it is not found, usually
        except NodeSilent:
            return False
        return True

    # -- withdrawing -----------------------------------------------------------------------------------------------

    async def withdraw(self, principal: Principal, request_id: str) -> None:
        """Ends the session that a request made or is making; refuses the request if it comes later. Raises NotFound."""
        key = (principal.tenant, request_id)
        self._asking.give_up(principal, request_id)
        await self._fleet.settled()
        making = self._making.get(key)
        if making is not None and making.task is not None:
            making.is_withdrawn = True
            making.task.cancel()
            await asyncio.wait({making.task})
            if making.task.cancelled() or making.task.exception() is not None:
                return
        earlier = self._reservations.find(*key)
        if earlier is None or earlier.creation is not None:
            self._withdrawn[key] = None
            while len(self._withdrawn) > _MAX_WITHDRAWN:
                self._withdrawn.popitem(last=False)
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session of the request {request_id!r}")
        if earlier.tombstone is not None:
            self._fleet.members.forget_lost(earlier.tombstone.session_id)
            return
        link = self._fleet.link_of(earlier.node)
        if link is None:
            raise NodeSilent(earlier.node)
        await ask(link, "DeleteSession", service_pb.DeleteSessionRequest(request_id=request_id), principal, None)

    def end_of_lease(self, tenant: str, lease_id: str) -> int:
        """Withdraws the creations under way for a lease that has ended. Returns their number."""
        named = [
            making
            for making in self._making.values()
            if making.creation.tenant == tenant and making.request.lease_id == lease_id and making.task is not None
        ]
        for making in named:
            making.is_withdrawn = True
            if making.task is not None:
                making.task.cancel()
        return len(named)

    def _undo_later(self, making: _Making) -> None:
        task = asyncio.create_task(self._undo(making))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _undo(self, making: _Making) -> None:
        """Withdraws a request from its node. Tries until the node answers or is lost, and holds the place meanwhile."""
        creation = making.creation
        try:
            while not self._reservations.may_move(creation):
                if await self._withdraw_at(making, creation.node):
                    return
                await asyncio.sleep(AGAIN_S)
        finally:
            self._reservations.end(creation)

    # -- environments ----------------------------------------------------------------------------------------------

    async def prepare(
        self, principal: Principal, request: service_pb.PrepareEnvironmentRequest, time_s: float | None
    ) -> service_pb.PrepareEnvironmentResponse:
        """Makes an environment on a node, which then gets the sessions with it. Raises ExecutorError."""
        asked = from_wire.requested_environment_from(request)
        spec = self._asking.decided_environment(
            principal, request, lambda given: self._policy().decide(principal, asked, given)
        )
        wanted, packages = wanted_of(spec, {}), spec.sandbox.packages
        async with self._choice.attempt(principal.tenant, wanted, packages, _take_no_place) as attempt:
            while True:
                node = await attempt.next_node()
                link = self._fleet.link_of(node)
                try:
                    if link is None:
                        raise NodeSilent(node)
                    answer: service_pb.PrepareEnvironmentResponse = await ask(
                        link, "PrepareEnvironment", request, principal, time_s
                    )
                    attempt.made_at(node)
                    self._asking.done(principal, "", request.request_id)
                    return answer
                except RefusedByNode as refused:
                    attempt.refused(node, refused)
                except NodeSilent:
                    attempt.unanswered(node)


def _take_no_place(_node: str) -> None:
    """Reserves nothing: an environment is not a session."""


def _withdrawn() -> NotFound:
    return NotFound(Reason.SESSION_NOT_FOUND, "the session was deleted before it was made")
