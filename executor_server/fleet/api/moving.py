"""Moves sessions from a drained node to others: their variables and files, if their profiles allow an export.

The state passes through the front in pieces and is not stored. The new session is created first and the old one ended
last, so one of them has the state after any failure. Nothing holds a session still meanwhile: an agent whose model is
thinking may use it at any moment. So its node ends the old session only if it was not used since its export began; else
the new one is ended, and the move begins again. The reason of the old session names the new one.

Sessions in which something runs or waits stay, and so do sessions with environment variables, whose values only their
sandboxes have. A name moves with its session. Savepoints are copies of an interpreter, and stay behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import structlog

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api.errors import PassedOn
from executor_server.core import ExecutorError, Principal, Reason, Unavailable
from executor_server.fleet.api.fleet_news import FleetNews
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_link import FrontLink
from executor_server.fleet.api.front_sessions import SessionNames, of_node
from executor_server.fleet.api.node_calls import (
    ASK_TIME_S,
    NodeSilent,
    RefusedByNode,
    answer_of,
    ask,
    begin_stream,
    metadata_for,
    translated,
)
from executor_server.fleet.api.session_creator import SessionCreator
from executor_server.fleet.membership import Tombstone, lease_clock
from executor_server.policy import Policy

AT_A_TIME = 4
"""Sessions that are moved at one time."""
MOVE_TIME_S = 600.0
"""Seconds for one session."""
ATTEMPTS = 3
"""Attempts to move a session that is used while it is moved."""
MAX_PROBLEM_CHARS = 500

_RESTORE = "/executor_api.v1.ExecutorService/RestoreState"

_log = structlog.get_logger(__name__)


class Mover:
    """Moves the sessions of nodes that are drained."""

    def __init__(
        self,
        fleet: FrontFleet,
        creations: SessionCreator,
        names: SessionNames,
        policy: Callable[[], Policy],
        news: FleetNews,
    ) -> None:
        self._fleet = fleet
        self._creations = creations
        self._names = names
        self._policy = policy
        self._news = news
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._moving: set[str] = set()

    async def move_all(self, link: FrontLink, admin: Principal) -> list[admin_pb.MovedSession]:
        """Moves the idle sessions of a node. Returns the outcome for each of its sessions, moved or not."""
        request = admin_pb.ListAllSessionsRequest(with_requests=True)
        answer: admin_pb.ListAllSessionsResponse = await ask(link, "ListAllSessions", request, admin, ASK_TIME_S)
        own = {session.session_id for session in of_node(link.node, (each.session for each in answer.sessions))}
        owned = [each for each in answer.sessions if each.session.session_id in own]
        return list(await asyncio.gather(*(self._one(link, each, admin) for each in owned)))

    async def _one(self, link: FrontLink, owned: admin_pb.OwnedSession, admin: Principal) -> admin_pb.MovedSession:
        session_id = owned.session.session_id
        if session_id in self._moving:  # two moves of a session would share its copy
            return admin_pb.MovedSession(session_id=session_id, problem="another call moves it now")
        self._moving.add(session_id)
        try:
            async with self._places, asyncio.timeout(MOVE_TIME_S):
                new_id, problem = await self._move(link, owned, admin)
        except TimeoutError:
            new_id, problem = "", f"it took longer than {MOVE_TIME_S:g} s"
        except (ExecutorError, PassedOn) as error:
            new_id, problem = "", error.message[:MAX_PROBLEM_CHARS]
        finally:
            self._moving.discard(session_id)
        _log.info("fleet_session_moved", session_id=session_id, new_session_id=new_id, problem=problem)
        self._news.session_moved(owned.tenant, session_id, new_id, problem)
        return admin_pb.MovedSession(session_id=session_id, new_session_id=new_id, problem=problem)

    async def _move(self, link: FrontLink, owned: admin_pb.OwnedSession, admin: Principal) -> tuple[str, str]:
        """Returns the new session, and the parts of the state that were left out; or no session, and the reason.

        Raises ExecutorError, RefusedByNode.
        """
        for _ in range(ATTEMPTS):
            try:
                return await self._attempt(link, owned, admin)
            except RefusedByNode as refused:
                if refused.reason != Reason.SESSION_USED.value:
                    raise
        return "", f"it was used while it was moved, {ATTEMPTS} times; move it again when it is used less"

    async def _attempt(self, link: FrontLink, owned: admin_pb.OwnedSession, admin: Principal) -> tuple[str, str]:
        """As `_move`. Raises RefusedByNode (SESSION_USED) if the old one was used, or the new one is a stale copy."""
        session_id, owner = owned.session.session_id, Principal(owned.tenant, owned.principal)
        old = await _described(link, session_id, owner)  # the list may be some minutes old
        if reason := await _why_it_stays(link, old, owner):
            return "", reason
        savepoints = await _savepoints(link, old, owner)
        async with _exported(link, session_id, owner) as pieces:
            first = await anext(pieces, b"")  # before the new session is made: the export may be refused
            old = await _described(link, session_id, owner)  # a later change of name or imports counts as use
            new = await self._creations.create(owner, self._request(owned, old, owner))
            try:
                manifest = await self._restored(new, owner, first, pieces)
            except BaseException:
                await self._delete(new.session_id, owner)
                raise
        unnamed = await self._replace(link, old, new, owner, admin)
        return new.session_id, _joined(_left_out(manifest), savepoints, unnamed)

    async def _replace(
        self, link: FrontLink, old: pb.Session, new: pb.Session, owner: Principal, admin: Principal
    ) -> str:
        """Ends the old session, and gives its name to the new one. Returns why it has none; empty when it has.

        Ends the new one if the old one goes on. If that is not known, both stay.
        """
        request = admin_pb.KillSessionRequest(session_id=old.session_id, unless_used=True)
        may_have_ended = False
        try:
            async with self._names.giving(owner, old.name, old.session_id):
                may_have_ended = True
                try:
                    await ask(link, "KillSession", request, admin, None)
                except PassedOn:
                    may_have_ended = False
                    raise
                reason = f"it was moved to the session {new.session_id}"
                self._fleet.members.replaced(old.session_id, owner.tenant, reason, lease_clock())
                return await self._rename(new, old.name, owner) if old.name else ""
        except NodeSilent as silent:
            if may_have_ended:
                text = f"{silent.message}; if the session has ended, the session {new.session_id} has its state"
                raise Unavailable(silent.reason, text) from silent
            raise
        finally:
            if not may_have_ended:
                await self._delete(new.session_id, owner)

    async def _rename(self, session: pb.Session, name: str, owner: Principal) -> str:
        """Returns why it was not renamed."""
        link = self._fleet.link_of(session.node)
        request = service_pb.RenameSessionRequest(session_id=session.session_id, name=name)
        try:
            if link is None:
                raise NodeSilent(session.node)
            await ask(link, "RenameSession", request, owner, ASK_TIME_S)
        except (ExecutorError, PassedOn) as error:
            return f"it has lost its name {name}: {error.message}"
        return ""

    def _request(
        self, owned: admin_pb.OwnedSession, old: pb.Session, owner: Principal
    ) -> service_pb.CreateSessionRequest:
        """Returns the request for a session like the old one, without what the policy adds by itself."""
        summary = self._policy().describe(owner)
        return service_pb.CreateSessionRequest(
            # Always the same for one session: a second attempt finds what the first one made.
            request_id=f"move-{old.session_id.rpartition('-')[2]}",
            image=old.image,
            backend=old.backend,
            authorized_imports=_beside(old.authorized_imports, summary.default_imports),
            network=_beside(old.network, summary.network.default),
            packages=_beside(old.packages, ()),
            limits=old.limits,
            labels=old.labels,
            prelude=owned.prelude,
            lease_id=owned.lease_id,
        )

    async def _restored(
        self, new: pb.Session, owner: Principal, first: bytes, pieces: AsyncIterator[bytes]
    ) -> service_pb.StateManifest:
        link = self._fleet.link_of(new.node)
        if link is None:
            raise NodeSilent(new.node)
        call: Any = link.channel.stream_unary(
            _RESTORE,
            request_serializer=lambda message: cast("bytes", message.SerializeToString()),
            response_deserializer=service_pb.RestoreStateResponse.FromString,
        )(metadata=cast("Any", metadata_for(link, owner)))
        try:
            with translated(link.node):
                await call.write(service_pb.RestoreStateRequest(session_id=new.session_id))
                await call.write(service_pb.RestoreStateRequest(data=first))
                async for piece in pieces:
                    await call.write(service_pb.RestoreStateRequest(data=piece))
                await call.done_writing()
        except asyncio.InvalidStateError:
            pass  # the node has ended the call; its status says why
        answer: service_pb.RestoreStateResponse = await answer_of(call, link.node)
        return answer.manifest

    async def _delete(self, session_id: str, owner: Principal) -> None:
        """Ends the new session of a failed move; if the node does not answer, it ends by itself later."""
        try:
            link = self._fleet.find(owner, session_id)
            if isinstance(link, Tombstone):
                return
            await ask(link, "DeleteSession", service_pb.DeleteSessionRequest(session_id=session_id), owner, ASK_TIME_S)
        except (ExecutorError, PassedOn) as error:
            _log.warning("fleet_session_left", session_id=session_id, problem=str(error))


@asynccontextmanager
async def _exported(link: FrontLink, session_id: str, owner: Principal) -> AsyncIterator[AsyncIterator[bytes]]:
    """Gives the pieces of a session's state."""
    call = begin_stream(link, "ExportState", service_pb.ExportStateRequest(session_id=session_id), owner)

    async def pieces() -> AsyncIterator[bytes]:
        with translated(link.node):
            async for message in call:
                if message.WhichOneof("part") == "data":
                    yield message.data

    try:
        yield pieces()
    finally:
        call.cancel()


async def _described(link: FrontLink, session_id: str, owner: Principal) -> pb.Session:
    """Returns the session as it is now. Raises ExecutorError, RefusedByNode."""
    request = service_pb.GetSessionRequest(session_id=session_id)
    answer: service_pb.GetSessionResponse = await ask(link, "GetSession", request, owner, ASK_TIME_S)
    return answer.session


async def _why_it_stays(link: FrontLink, old: pb.Session, owner: Principal) -> str:
    """Returns why a session can't be moved now; empty when it can. Raises ExecutorError, RefusedByNode."""
    if old.state == pb.SESSION_STATE_LOST:
        return "it is lost"
    if old.state not in (pb.SESSION_STATE_IDLE, pb.SESSION_STATE_PAUSED):
        return "an execution runs or waits in it"
    if old.env_names:
        return f"only its sandbox has the values of its environment variables ({', '.join(old.env_names)})"
    request = service_pb.ListProcessesRequest(session_id=old.session_id)
    answer: service_pb.ListProcessesResponse = await ask(link, "ListProcesses", request, owner, ASK_TIME_S)
    running = [each.process_id for each in answer.processes if not each.HasField("result")]
    return f"processes run in it: {', '.join(running)}"[:MAX_PROBLEM_CHARS] if running else ""


async def _savepoints(link: FrontLink, old: pb.Session, owner: Principal) -> str:
    """Returns a text for people with the number left behind; empty if none. Raises ExecutorError, RefusedByNode."""
    request = service_pb.ListSavepointsRequest(session_id=old.session_id)
    answer: service_pb.ListSavepointsResponse = await ask(link, "ListSavepoints", request, owner, ASK_TIME_S)
    return f"not moved: its savepoints ({len(answer.savepoints)})" if answer.savepoints else ""


def _joined(*problems: str) -> str:
    return "; ".join(filter(None, problems))[:MAX_PROBLEM_CHARS]


def _beside(has: Sequence[str], default: Collection[str]) -> list[str]:
    return [each for each in has if each not in default]


def _left_out(manifest: service_pb.StateManifest) -> str:
    omitted = [*manifest.omitted_variables, *manifest.omitted_files]
    listed = "; ".join(f"{each.name}: {each.reason}" for each in omitted)
    return f"not restored: {listed}"[:MAX_PROBLEM_CHARS] if omitted else ""
