"""The sessions of all nodes as operators watch them.

While someone watches, the front watches each node that is linked, once for all watchers, and keeps what it received. A
lost node's sessions are shown as ended, with the reason. When nobody watches, nothing is watched and nothing is kept.

A node may be hostile: it can describe only sessions whose ids name it, the front compares their tenants with those it
knows, and the memory for one node is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api.ended_sessions import MAX_ENDED
from executor_server.api.errors import PassedOn
from executor_server.api.session_views import INTERVAL_S, Watcher, messages_of
from executor_server.core import ExecutorError, Principal, Reason, ResourceExhausted
from executor_server.fleet.api.front_fleet import FRONT_PRINCIPAL, FrontFleet
from executor_server.fleet.api.front_link import FrontLink
from executor_server.fleet.api.front_sessions import lost_session
from executor_server.fleet.api.node_calls import ASK_TIME_S, begin_stream, keep_following, translated
from executor_server.fleet.membership import Lost, Tombstone, node_of

MAX_NODE_BYTES = 128 * 1024 * 1024
"""Bytes of the descriptions kept for one node."""


@dataclass(eq=False)
class _Watch(Watcher):
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, session_id: str, tenant: str, view: admin_pb.SessionView | None) -> None:
        super().note(session_id, tenant, view)
        if self.unsent:
            self.changed.set()


@dataclass
class _Node:
    """What a node has described. `is_listed`: its first list is complete."""

    views: dict[str, admin_pb.SessionView] = field(default_factory=dict)
    size_bytes: int = 0
    is_listed: bool = False

    def put(self, session_id: str, view: admin_pb.SessionView | None) -> admin_pb.SessionView | None:
        """Replaces a description, or removes it. Returns the previous one. Raises ResourceExhausted for too many."""
        before = self.views.pop(session_id, None)
        self.size_bytes -= 0 if before is None else before.ByteSize()
        if view is not None:
            self.views[session_id] = view
            self.size_bytes += view.ByteSize()
        if self.size_bytes > MAX_NODE_BYTES:
            self.views.clear()
            self.size_bytes = 0
            text = f"the node describes its sessions with more than {MAX_NODE_BYTES:,} bytes"
            raise ResourceExhausted(Reason.TOO_LARGE, text)
        return before


class FrontViews:
    """Owns the sessions' descriptions, and the watchers."""

    def __init__(self, fleet: FrontFleet) -> None:
        self._fleet = fleet
        self._watches: set[_Watch] = set()
        self._watched = asyncio.Event()
        self._nodes: dict[str, _Node] = {}
        self._calls: set[Any] = set()
        self._listed = asyncio.Event()  # replaced when a node's list is complete

    # -- watchers --------------------------------------------------------------------------------------------------

    async def watch(self, principal: Principal, tenant: str) -> AsyncGenerator[admin_pb.WatchSessionsResponse]:
        """Yields the sessions that this principal may see, then those that change; `tenant`: empty for all."""
        watch = _Watch(principal, tenant)
        for tombstone in islice(self._fleet.members.sessions.tombstones(), MAX_ENDED):
            watch.note(tombstone.session_id, tombstone.tenant, _lost_view(tombstone, None))
        for node in self._nodes.values():
            for session_id, view in node.views.items():
                watch.note(session_id, view.owned.tenant, view)
        self._watches.add(watch)
        self._watched.set()
        try:
            await self._all_listed()
            while True:
                watch.changed.clear()
                for message in messages_of(watch.take()):
                    yield message
                await asyncio.sleep(INTERVAL_S)
                await watch.changed.wait()
        finally:
            self._watches.discard(watch)
            if not self._watches:
                self._watched.clear()
                self._nodes.clear()
                for call in self._calls:
                    call.cancel()

    async def _all_listed(self) -> None:
        """Returns when all nodes that are linked have sent their lists, or had enough time to."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_TIME_S):
                while not all(self._is_listed(link.node) for link in self._fleet.links()):
                    await self._listed.wait()

    def _is_listed(self, node: str) -> bool:
        return node in self._nodes and self._nodes[node].is_listed

    # -- nodes -----------------------------------------------------------------------------------------------------

    async def follow(self, link: FrontLink) -> None:
        """Watches a node while somebody watches here. The end of its link cancels this."""
        await keep_following(link.node, partial(self._follow_watched, link), "fleet_sessions_not_watched")

    async def _follow_watched(self, link: FrontLink) -> None:
        """Follows a node whenever somebody watches. Raises as `_follow`."""
        while True:
            await self._watched.wait()
            try:
                await self._follow(link)
            except (ExecutorError, PassedOn):
                if self._watched.is_set():
                    raise
                continue  # nobody watches any more, so the call was ended
            return

    async def _follow(self, link: FrontLink) -> None:
        """Raises ExecutorError, RefusedByNode when the node's call ends, or is ended because it sends too much."""
        call = begin_stream(link, "WatchSessions", admin_pb.WatchSessionsRequest(), FRONT_PRINCIPAL)
        self._calls.add(call)
        listed: set[str] = set()
        node = self._nodes.setdefault(link.node, _Node())
        node.is_listed = False
        try:
            with translated(link.node):
                async for message in call:
                    listed |= self._taken(link.node, node, message)
                    if message.complete and not node.is_listed:
                        for session_id in node.views.keys() - listed:
                            self._put(node, session_id, None)
                        node.is_listed = True
                        listed_before, self._listed = self._listed, asyncio.Event()
                        listed_before.set()
                    if node.is_listed:
                        listed.clear()
        finally:
            self._calls.discard(call)
            call.cancel()

    def _taken(self, name: str, node: _Node, message: admin_pb.WatchSessionsResponse) -> set[str]:
        """Takes a message of a node. Returns the sessions that it describes."""
        described = set()
        for view in message.sessions:
            session_id = view.owned.session.session_id
            known = self._fleet.members.sessions.find(session_id)
            if node_of(session_id) != name or (known is not None and known.tenant != view.owned.tenant):
                continue
            described.add(session_id)
            self._put(node, session_id, view)
        for session_id in message.forgotten_ids:
            self._put(node, session_id, None)
        return described

    def _put(self, node: _Node, session_id: str, view: admin_pb.SessionView | None) -> None:
        before = node.put(session_id, view)
        shown = view or before
        if shown is None:
            return
        tombstone = self._fleet.members.sessions.tombstone(session_id)
        if view is None and tombstone is not None:  # the node has begun another epoch
            view = _lost_view(tombstone, before)
        self._note(session_id, shown.owned.tenant, view)

    def node_lost(self, lost: Lost) -> None:
        """Shows the sessions of a lost node as ended."""
        node = self._nodes.pop(lost.node, _Node())
        if self._watches:
            for tombstone in lost.tombstones:
                view = _lost_view(tombstone, node.views.get(tombstone.session_id))
                self._note(tombstone.session_id, tombstone.tenant, view)

    def _note(self, session_id: str, tenant: str, view: admin_pb.SessionView | None) -> None:
        for watch in self._watches:
            watch.note(session_id, tenant, view)


def _lost_view(tombstone: Tombstone, before: admin_pb.SessionView | None) -> admin_pb.SessionView:
    view = admin_pb.SessionView()
    if before is not None:
        view.CopyFrom(before)
    view.owned.tenant = tombstone.tenant
    view.owned.session.MergeFrom(lost_session(tombstone))
    view.end_time.FromMilliseconds(round(tombstone.lost_unix_s * 1000))
    view.end_reason = tombstone.reason
    return view
