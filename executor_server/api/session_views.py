"""Sessions as operators watch them, those that ended included.

Sessions don't report their changes. While someone watches, all sessions are compared with what was sent before, five
times a second, and those that changed are described once for all watchers together. A watcher that reads slowly gets
the latest state of each session, not each state. When nobody watches, nothing is compared; only the use of each session
is counted, and the last description of each ended one is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api import to_wire
from executor_server.api.ended_sessions import EndedSessions
from executor_server.core import Outcome, Principal, Result, SessionFacts
from executor_server.core.lifecycle import Observer
from executor_server.policy.identity import may_view
from executor_server.sessions import Session

INTERVAL_S = 0.2
"""Seconds between two comparisons of all sessions."""
MESSAGE_SESSIONS = 200
MESSAGE_BYTES = 1024 * 1024

# Sessions that are compared in one turn of the event loop, and how many comparisons one description counts as.
_WORK_AT_A_TIME = 50
_DESCRIPTION_WORK = 10
# While a session is busy, the time of its end moves; the time that was sent may be out of date by this.
_EXPIRY_STEP_S = 10.0


@dataclass
class SessionUse:
    """The use of a session's executions that have ended."""

    executions: int = 0
    cpu_time_s: float = 0.0
    operations: int = 0
    output_bytes: int = 0
    peak_memory_bytes: int = 0
    last_outcome: Outcome | None = None

    def add(self, result: Result) -> None:
        usage = result.usage
        self.executions += 1
        self.cpu_time_s += usage.cpu_time_s
        self.operations += usage.operations
        self.output_bytes += usage.output_bytes
        self.peak_memory_bytes = max(self.peak_memory_bytes, usage.peak_memory_bytes)
        self.last_outcome = result.outcome


@dataclass(eq=False)
class Watcher:
    """Keeps what one watcher has not been sent: at most one description for each session, even if it never reads."""

    principal: Principal
    tenant: str  # empty: all
    unsent: dict[str, admin_pb.SessionView | None] = field(default_factory=dict)  # None: no longer kept
    _sent: set[str] = field(default_factory=set)

    def note(self, session_id: str, tenant: str, view: admin_pb.SessionView | None) -> None:
        if view is None and session_id not in self._sent:
            self.unsent.pop(session_id, None)
        elif self.tenant in ("", tenant) and may_view(self.principal, tenant):
            self.unsent[session_id] = view

    def take(self) -> Mapping[str, admin_pb.SessionView | None]:
        """Returns what is to be sent now."""
        unsent, self.unsent = self.unsent, {}
        self._sent.update(unsent)
        self._sent.difference_update(session_id for session_id, view in unsent.items() if view is None)
        return unsent


class SessionViews(Observer):
    """Describes the sessions that `sessions` returns, and those that ended."""

    def __init__(self, sessions: Callable[[], Sequence[Session]], ended: EndedSessions) -> None:
        self._sessions = sessions
        self._ended = ended
        self._uses: dict[str, SessionUse] = {}
        self._watchers: set[Watcher] = set()
        self._comparing = asyncio.Lock()
        self._compared_tick = -1
        # Existing sessions, as they were sent, and the values that show a change.
        self._views: dict[str, admin_pb.SessionView] = {}
        self._marks: dict[str, object] = {}

    # -- what happens ------------------------------------------------------------------------------------------------

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        use = self._uses.get(session.session_id)
        if use is None:
            use = self._uses[session.session_id] = SessionUse()
        use.add(result)

    def session_closed(self, session: Session, reason: str) -> None:
        """Keeps the description of a session that has ended."""
        view = self.view_of(session)
        # Closing a session makes it lost for the same reason, unless it was lost before.
        was_lost = session.lost_reason != reason
        view.end_reason = session.lost_reason if was_lost else reason
        if not was_lost:
            view.owned.session.ClearField("state")
            view.owned.session.ClearField("lost_reason")
        self._uses.pop(session.session_id, None)
        self._ended.add(view)
        self._note(session.session_id, session.owner.tenant, view)
        self._forget_ended()

    def _forget_ended(self) -> None:
        for view in self._ended.forget():
            self._note(view.owned.session.session_id, view.owned.tenant, None)

    # -- descriptions ------------------------------------------------------------------------------------------------

    def view_of(self, session: Session) -> admin_pb.SessionView:
        """Describes a session that exists."""
        use = self._uses.get(session.session_id) or SessionUse()
        network = to_wire.network_usage_to(session.network.usage)
        return write(
            admin_pb.SessionView,
            owned=to_wire.owned_session_to(session),
            use=write(admin_pb.SessionUse, use, network=network),
            end_time=None,
            end_reason="",
            last_outcome=use.last_outcome,
        )

    def inspect(self, session: Session, *, with_commands: bool) -> admin_pb.InspectSessionResponse:
        """Describes a session that exists with what is in it; the commands of processes are contents."""
        processes = [to_wire.process_info_to(log) for log in session.processes.started]
        if not with_commands:
            for process in processes:
                process.ClearField("argv")
                process.ClearField("cwd")
        return write(
            admin_pb.InspectSessionResponse,
            session=self.view_of(session),
            processes=processes,
            ports=session.ports.connections,
            savepoints=session.savepoints.known,
            tools=session.requests.tool_names,
        )

    def ended(self, session_id: str) -> admin_pb.SessionView | None:
        """Returns the description of a session that ended; None if it is not kept."""
        self._forget_ended()
        return self._ended.get(session_id)

    def why_ended(self, owner: Principal, session_id: str) -> str:
        """Returns why a session of this tenant has ended; empty if that is not known."""
        view = self.ended(session_id)
        return view.end_reason if view is not None and view.owned.tenant == owner.tenant else ""

    # -- watchers ----------------------------------------------------------------------------------------------------

    async def watch(self, principal: Principal, tenant: str) -> AsyncGenerator[admin_pb.WatchSessionsResponse]:
        """Yields the sessions that this principal may see, then those that change; `tenant`: empty for all."""
        watcher = Watcher(principal, tenant)
        for view in (*self._views.values(), *self._ended):
            watcher.note(view.owned.session.session_id, view.owned.tenant, view)
        self._watchers.add(watcher)
        is_first = True
        try:
            while True:
                await self._compare()
                unsent = watcher.take()
                if unsent or is_first:
                    for message in messages_of(unsent):
                        yield message
                is_first = False
                # All watchers wake at the same time, and the first one compares for all.
                await asyncio.sleep(INTERVAL_S - asyncio.get_running_loop().time() % INTERVAL_S)
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._views, self._marks, self._compared_tick = {}, {}, -1

    async def _compare(self) -> None:
        """Notes what has changed for all watchers, unless that was done since they were last due."""
        async with self._comparing:
            tick = int(asyncio.get_running_loop().time() / INTERVAL_S)
            if tick == self._compared_tick:
                return
            sessions = self._sessions()
            work = 0
            for session in sessions:
                work += 1
                if session.closed:  # it ended after the list was made, and must not look lost
                    continue
                mark = self._mark_of(session)
                if self._marks.get(session.session_id) != mark:
                    view = self.view_of(session)
                    self._marks[session.session_id], self._views[session.session_id] = mark, view
                    self._note(session.session_id, session.owner.tenant, view)
                    work += _DESCRIPTION_WORK
                if work >= _WORK_AT_A_TIME:
                    work = 0
                    await asyncio.sleep(0)
            # Those that are ending are in neither list until their sandboxes are gone.
            for session_id in self._views.keys() - {session.session_id for session in sessions}:
                del self._views[session_id], self._marks[session_id]
            self._forget_ended()
            self._compared_tick = tick

    def _mark_of(self, session: Session) -> object:
        use = self._uses.get(session.session_id)
        return (
            session.state,
            session.spec,
            session.leased,
            session.generation,
            session.network.usage,
            session.expire_time_s // _EXPIRY_STEP_S,
            use and use.executions,
        )

    def _note(self, session_id: str, tenant: str, view: admin_pb.SessionView | None) -> None:
        for watcher in self._watchers:
            watcher.note(session_id, tenant, view)


def messages_of(unsent: Mapping[str, admin_pb.SessionView | None]) -> Iterator[admin_pb.WatchSessionsResponse]:
    """Yields messages of a bounded size; the last one is complete, and may be empty."""
    message, size_bytes = admin_pb.WatchSessionsResponse(), 0
    for session_id, view in unsent.items():
        if view is None:
            message.forgotten_ids.append(session_id)
            continue
        view_bytes = view.ByteSize()
        if message.sessions and (len(message.sessions) == MESSAGE_SESSIONS or size_bytes + view_bytes > MESSAGE_BYTES):
            yield message
            message, size_bytes = admin_pb.WatchSessionsResponse(), 0
        message.sessions.append(view)
        size_bytes += view_bytes
    message.complete = True
    yield message
