"""Reservations of sessions at a front: made once, counted exactly, moved to another node only when that is safe.

A request (tenant and request_id) has at most one creation under way, on one node at a time. Another node is tried only
after the first has refused or is lost. A node that did not answer may have created the session: its next report, or the
answer to the same request, shows whether it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from executor_server.core import TooManySessions
from executor_server.fleet.membership.ids import epoch_of, node_of
from executor_server.fleet.membership.members import KnownNode, Members, MemberState
from executor_server.fleet.membership.messages import NodeReport
from executor_server.fleet.membership.session_index import Creation, KnownSession
from executor_server.fleet.membership.store import Tombstone
from executor_server.policy import QuotasTable
from executor_server.policy.quotas import Window, check_capacity, check_number, check_window

SESSION_RETRY_S = 2.0
_WINDOW_PARTS, _PART_S = 60, 1.0
# Tenants whose creations are counted; when there are more, those without a creation within a minute are dropped.
_MAX_WINDOWS = 1024


@dataclass(frozen=True)
class Earlier:
    """The result of an earlier call with the same request; one field is set.

    `node`: it has or creates the session, and answers the repeated request. `creation`: this front has it under way.
    `tombstone`: the session is lost.
    """

    node: str = ""
    creation: Creation | None = None
    tombstone: Tombstone | None = None


class Reservations:
    """The creations that one front has under way."""

    def __init__(
        self,
        members: Members,
        quotas_of: Callable[[str], QuotasTable],
        is_shared: Callable[[], bool] = lambda: False,
    ) -> None:
        """`quotas_of` is called for each check: a new policy holds at once. `is_shared`: there are several tenants."""
        self._members = members
        self._sessions = members.sessions
        self._quotas_of = quotas_of
        self._is_shared = is_shared
        self._windows: dict[str, Window] = {}
        members.on_first_report.append(self._learn)

    def find(self, tenant: str, request_id: str) -> Earlier | None:
        """Returns what an earlier call with this request has led to, if anything."""
        request = tenant, request_id
        if (creation := self._sessions.creation(request)) is not None:
            return Earlier(creation=creation)
        if (session := self._sessions.find_request(request)) is not None:
            return Earlier(node=session.node)
        if (node := self._sessions.foreign(request)) is not None:
            return Earlier(node=node)
        if (tombstone := self._sessions.lost_request(request)) is not None:
            return Earlier(tombstone=tombstone)
        return None

    def begin(self, tenant: str, request_id: str, now_s: float) -> Creation:
        """Reserves a session. Requires that `find` returns nothing, or a tombstone. Raises ResourceExhausted."""
        quotas = self._quotas_of(tenant)
        there = self._sessions.count(tenant)
        check_number("sessions", there, quotas.sessions, SESSION_RETRY_S, TooManySessions)
        if quotas.sessions is None and there and self._is_shared():
            capacity = sum(each.report.max_sessions for each in self._members if each.is_ready and each.report)
            all_there, shared = self._sessions.count_all(), self._is_shared
            check_capacity("sessions", there, all_there, capacity, shared, SESSION_RETRY_S, TooManySessions)
        window = self._window(tenant, now_s)
        check_window("creations_per_minute", window, quotas.creations_per_minute, now_s)
        window.add(1, now_s)
        creation = Creation(tenant, request_id)
        self._sessions.begin(creation)
        return creation

    def place(self, creation: Creation, node: str) -> None:
        """Notes the next node to ask. Requires `may_move`."""
        assert self.may_move(creation)
        member = self._members.get(node)
        assert member is not None
        self._sessions.place(creation, node, member.epoch)
        member.creating.add(creation.request)
        self._members.changed(member)

    def answered(self, creation: Creation, session_id: str, now_s: float) -> bool:
        """Takes the node's answer. Returns True if the creation is over.

        False: the session was lost meanwhile, or its id is not one of the node's. Then `place` it on another node.
        """
        member = self._members.get(creation.node)
        if member is None or not self._is_current(creation) or not _is_of(member, session_id):
            self.refused(creation, is_full=False)
            return False
        known = self._sessions.find(session_id)
        if known is None and session_id not in member.closed_early:
            session = KnownSession(
                session_id,
                member.name,
                creation.tenant,
                creation.request_id,
                is_lost=False,
                is_reported=False,
                since_s=now_s,
                is_placed=True,
            )
            self._members.add_session(member, session)
        elif known is not None and known.request == creation.request:
            self._members.add_session(member, replace(known, is_placed=True))
        member.closed_early.discard(session_id)
        self.end(creation)
        return True

    def refused(self, creation: Creation, *, is_full: bool) -> None:
        """Notes that the node has certainly not created it. `is_full`: the node has no room until its next report."""
        member = self._members.get(creation.node)
        if member is not None:
            member.creating.discard(creation.request)
            member.is_full = member.is_full or is_full
            self._members.changed(member)
        creation.node = ""

    def may_move(self, creation: Creation) -> bool:
        """True if no node can have created the session. Else the same node must be asked again."""
        return not self._is_current(creation)

    def end(self, creation: Creation) -> None:
        """Ends a creation, whatever came of it. Idempotent."""
        self.refused(creation, is_full=False)
        self._sessions.end(creation)

    def _is_current(self, creation: Creation) -> bool:
        """True when the node that was asked last is neither lost nor in another epoch."""
        member = self._members.get(creation.node)
        if member is None:
            return False
        return member.state is not MemberState.LOST and member.epoch == creation.epoch

    def in_last_minute(self, tenant: str, now_s: float) -> int:
        """Returns the creations of a tenant within the last minute."""
        window = self._windows.get(tenant)
        return int(window.total(now_s)) if window is not None else 0

    def _learn(self, report: NodeReport, now_s: float) -> None:
        """Counts the creations of the last minute that an earlier front began, as if they had just happened."""
        for tenant, use in report.tenants.items():
            if use.creations:
                self._window(tenant, now_s).add(use.creations, now_s)

    def _window(self, tenant: str, now_s: float) -> Window:
        window = self._windows.get(tenant)
        if window is None:
            if len(self._windows) >= _MAX_WINDOWS:
                self._windows = {name: each for name, each in self._windows.items() if each.total(now_s)}
            window = self._windows[tenant] = Window(_WINDOW_PARTS, _PART_S)
        return window


def _is_of(member: KnownNode, session_id: str) -> bool:
    return node_of(session_id) == member.name and epoch_of(session_id) == member.epoch
