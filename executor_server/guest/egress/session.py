"""The listener of one session, and the connections that came through it.

The listener is the identity of the session: it was made inside the sandbox, and nothing else can connect to it. A
session that does something too often or for too long slows down only itself: its connections wait in the kernel's
backlog.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from typing import Dict, Optional, Set

from . import reasons
from .accepting import AcceptInterrupted, Acceptor
from .accounts import Bucket, ByteAccount, MinuteCount, Room, WorkShare
from .connection import Connection
from .dial import Dialer
from .host_names import Target
from .host_rules import Allowed, Refused, Rules
from .protocols import Limits, Reporter, Terminator
from .refusals import Ended, Refusal

# Seconds until the next attempt, where there is no room, or accepting failed for want of descriptors or memory.
_EXHAUSTED_PAUSE_S = 0.2
# Interruptions of an accept after which a session is not served any more. One may happen to an honest session, where
# the host stopped this process twice in one call.
_MAX_INTERRUPTIONS = 3


class _Asked:
    """An approval that connections to one target wait for."""

    def __init__(self) -> None:
        self.answer: "asyncio.Future[Optional[Refusal]]" = asyncio.get_running_loop().create_future()
        self.holds: Set[Connection] = set()
        self.task: Optional["asyncio.Task[None]"] = None

    def settle(self, refusal: Optional[Refusal]) -> None:
        if not self.answer.done():
            self.answer.set_result(refusal)


class Session:
    def __init__(
        self,
        session_id: str,
        listener: socket.socket,
        rules: Rules,
        account: ByteAccount,
        dialer: Dialer,
        reporter: Reporter,
        terminator: Optional[Terminator],
        limits: Limits,
        room: Room,
        acceptor: Acceptor,
        prefix: str,
    ) -> None:
        self.session_id = session_id
        self.rules = rules
        self.account = account
        self.dialer = dialer
        self.reporter = reporter
        self.terminator = terminator
        self.limits = limits
        self._room = room
        self._acceptor = acceptor
        self._loop = asyncio.get_running_loop()
        self._prefix = prefix
        self._listener = listener
        self._accepting = False
        self._resume: Optional[asyncio.TimerHandle] = None
        self._connections: Dict[Connection, asyncio.Task[None]] = {}
        self._waiting: Set[Connection] = set()  # their head is not complete, or they wait for their client
        self._asked: Dict[Target, _Asked] = {}
        self._places = 0  # taken: by connections that are dialled, or made
        self._numbers = itertools.count(1)  # of connections
        self.share = WorkShare()
        self._minute = MinuteCount()
        self._pace = Bucket(limits.accepts_per_s, limits.accept_burst, self._loop.time())
        self._pace.widen(rules.max_new_connections_per_minute)
        self._interruptions = 0
        self._exhausted = ""
        self._ending = False  # or given up
        listener.setblocking(False)
        self._accept_or_wait()

    # ------------------------------------------------------------------------------------------------------------------
    # Called by the proxy

    def replace_listener(self, listener: socket.socket) -> None:
        self._stop_accepting()
        self._listener.close()
        self._listener = listener
        self._ending = False
        listener.setblocking(False)
        self._accept_or_wait()

    def change(self, rules: Rules) -> None:
        """Sets new rules. Connections that they do not allow, or allow with other secrets, end at once."""
        self.rules = rules
        self.account.set_rules(rules)
        self._pace.widen(rules.max_new_connections_per_minute)
        for target, asked in self._asked.items():
            decision = rules.decide(target)
            if isinstance(decision, Refused):
                why = f"the policy was changed while it waited for an approval: {decision.message}"
                asked.settle(Refusal(decision.reason, why))
            elif not decision.asks:
                asked.settle(None)
        for connection in list(self._connections):
            if not connection.decided:
                continue
            decision = rules.decide(connection.target)
            if isinstance(decision, Refused) or decision.secrets != connection.allowed.secrets:
                connection.end(reasons.RULE_GONE)
            else:
                connection.limit_time(rules.max_connection_s)

    def set_exhausted(self, reason: str) -> None:
        """With a reason: ends the connections and refuses new ones. Empty: serves again."""
        self._exhausted = reason
        if reason:
            for connection in list(self._connections):
                if connection.decided:
                    connection.end(reason)

    async def end(self, reason: str) -> None:
        self._ending = True
        self._stop_accepting()
        self._listener.close()
        why = "the session has ended" if reason == reasons.SESSION_ENDED else "the egress proxy ends; try again"
        self.dismiss_held(reason, why)
        for connection in list(self._connections):
            connection.end(reason)
        if self._connections:
            await asyncio.wait(list(self._connections.values()), timeout=self.limits.close_s)
        self.account.report()

    # ------------------------------------------------------------------------------------------------------------------
    # Called by its connections

    def dismiss_held(self, reason: str, why: str) -> None:
        """Refuses the connections that wait for an approval, at once."""
        for target, asked in self._asked.items():
            refusal = Refusal(reason, f"{target} needs an approval, and {why}")
            for connection in asked.holds:
                connection.dismiss(refusal)

    async def hold(self, connection: Connection, target: Target) -> None:
        """Waits for an approval, if the rules ask for one. Connections to the same target share one. Raises Refusal,
        and Ended when the client has gone."""
        decision = self.rules.decide(target)
        if isinstance(decision, Refused) or not decision.asks:
            return
        limits = self.limits
        asked = self._asked.get(target)
        if sum(len(each.holds) for each in self._asked.values()) >= limits.held:
            message = f"{target} needs an approval, and {limits.held} connections of the session wait for one already"
            raise Refusal(reasons.NOT_APPROVED, message)
        if asked is None:
            if len(self._asked) >= limits.asked:
                message = f"{target} needs an approval, and {limits.asked} hosts of the session wait for one already"
                raise Refusal(reasons.NOT_APPROVED, message)
            asked = self._asked[target] = _Asked()
            asked.task = self._loop.create_task(self._ask(target, asked))
        asked.holds.add(connection)
        self._waiting.discard(connection)  # it must not keep others from being accepted
        self._accept_or_wait()
        try:
            while not asked.answer.done():
                await asyncio.wait([asked.answer], timeout=limits.held_check_s)
                connection.check_client()
            refusal = asked.answer.result()
        finally:
            asked.holds.discard(connection)
            self._waiting.add(connection)
            if not asked.holds and asked.task is not None:
                self._forget(target, asked)
                asked.task.cancel()  # where it still waits
        if refusal is not None:
            raise Refusal(refusal.reason, refusal.message)

    async def _ask(self, target: Target, asked: _Asked) -> None:
        why = "the proxy could not ask for it"
        try:
            why = await self.reporter.ask(self.session_id, target)
        finally:
            asked.settle(Refusal(reasons.NOT_APPROVED, f"{target} is not reached: {why}") if why else None)
            self._forget(target, asked)  # the next connection asks again

    def _forget(self, target: Target, asked: _Asked) -> None:
        if self._asked.get(target) is asked:
            del self._asked[target]

    def admit(self, connection: Connection, target: Target) -> Allowed:
        """Decides whether a connection to `target` may be made. It no longer counts as waiting: one that waits for the
        addresses of a name must not keep others from being accepted. Raises Refusal."""
        decision = self.rules.decide(target)
        if isinstance(decision, Refused):
            raise Refusal(decision.reason, decision.message)
        if self._exhausted:
            raise Refusal(self._exhausted, f"{target} can't be reached now: the tenant has used up its network quota")
        self._check_bytes(target)
        self._check_places()
        held = sum(len(each.holds) for each in self._asked.values())
        resolving = len(self._connections) - len(self._waiting) - self._places - held
        if resolving >= self.limits.resolving:
            message = f"{resolving} connections of the session wait for the addresses of their names"
            raise Refusal(reasons.TOO_MANY_CONNECTIONS, message)
        self.count_new()
        self._waiting.discard(connection)
        self._accept_or_wait()
        return decision

    def count_new(self) -> None:
        """Counts a connection that begins now. Raises Refusal."""
        limit = self.rules.max_new_connections_per_minute
        if not self._minute.take(self._loop.time(), limit):
            raise Refusal(reasons.TOO_MANY_NEW, f"the session may make {limit} connections a minute, and has")

    def take_place(self, connection: Connection) -> None:
        """Takes one of the session's places, until `leave`. Raises Refusal."""
        self._check_places()
        self._places += 1
        connection.has_place = True

    def leave(self, connection: Connection) -> None:
        """Gives a place back. A connection that only waits for its client to read the answer counts as waiting."""
        if connection.has_place:
            connection.has_place = False
            self._places -= 1
        self._waiting.add(connection)
        self._accept_or_wait()

    def _check_places(self) -> None:
        if self._places >= self.rules.max_connections:
            most = self.rules.max_connections
            message = f"the session has {self._places} connections at one time, and may have {most}"
            raise Refusal(reasons.TOO_MANY_CONNECTIONS, message)

    def _check_bytes(self, target: Target) -> None:
        try:
            self.account.send_room()
            self.account.receive_room()
        except Ended as ended:
            moved = (
                f"sent its {self.rules.max_sent_bytes}"
                if ended.reason == reasons.SENT_BYTES
                else f"received its {self.rules.max_received_bytes}"
            )
            message = f"{target} can't be reached: the session has {moved} bytes"
            raise Refusal(ended.reason, message) from None

    def finished(self, connection: Connection) -> None:
        self.leave(connection)
        self._waiting.discard(connection)
        self._accept_or_wait()

    def next_number(self) -> int:
        return next(self._numbers)

    def connection_id(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    # ------------------------------------------------------------------------------------------------------------------
    # Accepting

    def _accept_or_wait(self) -> None:
        if self._ending or self._resume is not None or len(self._waiting) >= self.limits.waiting:
            self._stop_accepting(forget_pause=False)
        elif not self._accepting:
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self, *, forget_pause: bool = True) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())
        if forget_pause and self._resume is not None:
            self._resume.cancel()
            self._resume = None

    def _accept(self) -> None:
        """Accepts one connection: the loop serves all listeners in turn."""
        if self.share.is_spent:
            return  # the loop calls again in its next turn
        since = time.perf_counter()
        try:
            self._accept_one()
        finally:
            self.share.charge(since)

    def _accept_one(self) -> None:
        if not self._room.has_place(len(self._connections)):
            self._pause(_EXHAUSTED_PAUSE_S)
            return
        if pause_s := self._pace.wait_s(self._loop.time()):
            self._pause(pause_s)
            return
        self._pace.take()
        if os.get_blocking(self._listener.fileno()):  # only its other holder does that, and only for harm
            self._give_up()
            return
        try:
            sock = self._acceptor.accept(self._listener)
        except AcceptInterrupted:
            self._interruptions += 1
            if self._interruptions >= _MAX_INTERRUPTIONS:
                self._give_up()
            return
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors, no memory: the connection stays in the backlog
            self._pause(_EXHAUSTED_PAUSE_S)
            return
        try:
            connection = Connection(self, sock, self.next_number())
        except OSError:  # it is gone already
            sock.close()
            return
        task = connection.start()
        self._connections[connection] = task
        self._room.taken += 1
        self._waiting.add(connection)
        task.add_done_callback(lambda task: self._done(connection, task))
        self._accept_or_wait()

    def _give_up(self) -> None:
        """Stops serving the session: the other holder of its listener would use it to stop all sessions."""
        self._ending = True
        self._stop_accepting()
        self._listener.close()
        for connection in list(self._connections):
            connection.end(reasons.SESSION_ENDED)
        self.reporter.misused(self.session_id)

    def _pause(self, seconds: float) -> None:
        self._resume = self._loop.call_later(seconds, self._end_pause)
        self._accept_or_wait()

    def _end_pause(self) -> None:
        self._resume = None
        self._accept_or_wait()

    def _done(self, connection: Connection, task: "asyncio.Task[None]") -> None:
        del self._connections[connection]
        self._room.taken -= 1
        connection.close(reasons.BROKEN)  # where the task was cancelled before it ran
        if not task.cancelled() and (error := task.exception()) is not None:
            # Our bug. It costs this connection, and is reported.
            self._loop.call_exception_handler({"message": "a connection of the proxy failed", "exception": error})
