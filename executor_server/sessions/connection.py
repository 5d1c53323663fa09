"""The connection from a session to its guest: renewed when it breaks, closed while the sandbox is paused.

There is one connection at a time, in one of five states:

    UP ── it broke, or fell silent ──▶ BROKEN ── connected again ──▶ UP
    UP ── unused for pause_idle_s ──▶ PAUSING ── stopped ──▶ PAUSED ── a frame is sent ──▶ WAKING ──▶ UP
                                         └── could not be stopped, or a frame was sent ──▶ WAKING

Invariant: exactly one task works on a state other than UP and PAUSED, and only that task leaves the state. Every
transition out of UP and PAUSED happens in one step of the event loop (test and assignment without an await between) and
spawns that task. So two callers that send a frame to a paused session wake it once, and a ping that finds the guest
silent cannot start a second renewal while the first one runs.

Nothing is lost in any state. The channel keeps each frame until the guest has acknowledged it and sends it when the
connection is UP again; the guest does the same. So callers need not know the state or wait for UP.

Races:

- A frame is sent while the sandbox is being paused. Pausing can't be interrupted (a cloud writes the memory out), so
  `_wanted` notes the frame, and the sandbox is woken when the pause has ended. Meanwhile the channel does not connect
  to a sandbox that is about to stop.
- The sandbox may be paused only while nothing is under way. `rest_if_unused` checks this and hangs up in order. A frame
  that crosses the hang-up is delayed, not lost, since the guest repeats it.
- A pause fails, and it is unknown whether the sandbox stopped. `_pause` returns None then; waking is attempted but not
  required, since a sandbox that never stopped accepts a connection.
- The connection breaks as soon as it is made. `_connect_once` sets UP only if the channel is still connected;
  otherwise `on_lost` has set BROKEN already, and UP would hide that.
- The session is closed during a pause or a wake. The channel is closed then, and the task stops without giving up.

Attack. A guest that hangs up repeatedly would keep the daemon connecting, and each connection spends a token of a
finite chain (guest/wire/tokens.py). So breaks are counted: over the last hour if the network itself may break, over the
session's whole life otherwise. While connections break without having moved a frame, the waits between them grow. Each
token is noted in the registry before it is sent. If the daemon is killed in between, the next one skips that token
instead of repeating it; the guest would refuse a repeated token.

A connection that can't be renewed in time costs the session: `give_up_guest`, with the reason.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from executor_server.backends import MachineSandbox, Sandbox
from executor_server.backends.channel import READY_TIME_S, GuestChannel, RefusedError, UnreachedError
from executor_server.core import SandboxFailure
from executor_server.network.egress import RemoteListener
from executor_server.sessions.journal import Registry

if TYPE_CHECKING:
    from executor_server.sessions.session import Session

# Seconds after a failure to pause a sandbox until pausing is tried again.
_PAUSE_AGAIN_S = 3600.0
# How many later tokens are tried when one is refused: an earlier daemon may have sent tokens that it could not note.
# Fewer than a guest is willing to skip (guest/wire/tokens.py), even over several daemons.
_MAX_LATER_TOKENS = 32
# Attempts to get the listener for the egress proxy out of a sandbox.
_LISTENER_ATTEMPTS = 3
# Unanswered pings after which a connection over an unreliable network counts as broken.
_SILENT_PINGS = 2

_log = structlog.get_logger(__name__)


class ConnectionState(enum.Enum):
    UP = "up"
    BROKEN = "broken"
    PAUSING = "pausing"
    PAUSED = "paused"
    WAKING = "waking"


@dataclass(frozen=True)
class ConnectionTimes:
    """The time limits of a connection, in seconds."""

    # For a backend to pause a sandbox, and to wake it; a cloud may have to write out gigabytes of memory.
    pause_s: float = 120.0
    wake_s: float = 120.0
    # For the guest to answer over an unreliable network, and the bounds of the waits between attempts. Shorter than
    # READY_TIME_S, so that several attempts fit into reconnect_s.
    answer_s: float = 10.0
    first_retry_s: float = 0.25
    max_retry_s: float = 8.0
    # Over an unreliable network, only the breaks within this time count.
    breaks_window_s: float = 3600.0

    def wait_s(self, attempt: int) -> float:
        """Returns the wait after this many attempts in a row; it doubles, with jitter so that sessions spread out."""
        doubled_s = min(self.first_retry_s * 2 ** min(attempt - 1, 16), self.max_retry_s)
        return float(doubled_s * random.uniform(0.5, 1.0))


class GuestConnection:
    """Connects one session's channel, and pauses and wakes its sandbox."""

    def __init__(
        self, session: Session, sandbox: Sandbox, channel: GuestChannel, registry: Registry, times: ConnectionTimes
    ) -> None:
        self.state = ConnectionState.UP
        self._times = times
        self._session = session
        self._sandbox = sandbox
        self._endpoint = sandbox.endpoint
        self._channel = channel
        self._registry = registry
        self._breaks: deque[float] = deque()
        self._fruitless = 0  # connections in a row that broke before they moved a frame
        self._position = channel.position  # when the last connection broke
        self._wanted = False  # True when a frame was sent while the sandbox was being paused
        self._pause_after_s = 0.0  # monotonic time before which it is not paused
        self._log = _log.bind(session_id=session.session_id, sandbox_id=sandbox.sandbox_id)
        channel.on_waiting = self._on_waiting

    # -- connecting ----------------------------------------------------------------------------------------------

    async def connect(self, within_s: float) -> None:
        """Connects; over an unreliable network, in as many attempts as the time allows.

        A guest refuses a token that it has seen. An earlier daemon with a full disk may have sent it without a note, so
        later tokens are tried. Raises SandboxFailure.
        """
        give_up_s = time.monotonic() + within_s
        refused = 0
        for attempt in itertools.count(1):
            wait_s = self._times.wait_s(attempt)
            try:
                await self._connect_once(max(give_up_s - time.monotonic(), 0.0))
                if refused:
                    self._log.warning("later_token_taken", refused=refused)
                return
            except UnreachedError as failure:
                refused += isinstance(failure, RefusedError)
                if isinstance(failure, RefusedError) and refused <= _MAX_LATER_TOKENS:
                    continue
                if not self._endpoint.breaks_by_itself or time.monotonic() + wait_s >= give_up_s:
                    raise
            # Each attempt may spend a token that never reached the guest; the waits keep these few.
            await asyncio.sleep(wait_s)

    async def _connect_once(self, within_s: float) -> None:
        self._note_token()
        answer_s = self._times.answer_s if self._endpoint.breaks_by_itself else READY_TIME_S
        await self._channel.connect(within_s, answer_s=answer_s)
        if self._channel.connected:  # else it broke in the same moment, and `on_lost` has begun to renew it
            self.state = ConnectionState.UP

    async def take_listener(self) -> socket.socket | RemoteListener:
        """Returns the listener of the sandbox for the egress proxy. Raises SandboxFailure.

        On another machine, the listener is served there. The guest refuses a token if the connection was renewed with a
        later one meanwhile, so this retries.
        """
        if isinstance(self._sandbox, MachineSandbox):
            return _MachineListener(self, self._sandbox)
        for retries in reversed(range(_LISTENER_ATTEMPTS)):
            self._note_token()
            try:
                return await self._channel.take_listener()
            except UnreachedError:
                if not retries:
                    raise
        raise AssertionError("no attempt was made")

    def next_token(self) -> str:
        """Returns a token for another process that connects to the guest; noted first. Raises SandboxFailure."""
        self._note_token()
        return self._channel.tokens.next()

    def _note_token(self) -> None:
        # Before the token is sent: after a kill in between, the next daemon skips a token and repeats none.
        self._registry.note_connections(self._session.session_id, self._channel.connections + 1)

    def on_lost(self, reason: str) -> None:
        """Renews a broken connection, a limited number of times; a dead or lying supervisor fails to reconnect."""
        if self.state is ConnectionState.PAUSING and not self._channel.closed:
            return  # it broke before `_rest` could hang up; that goes on to pause, and waking connects again
        self.state = ConnectionState.BROKEN
        self._session.spawn(self._renew(reason))

    async def _renew(self, reason: str) -> None:
        endpoint = self._endpoint
        try:
            self._count_break()
            if endpoint.breaks_by_itself:
                await self._hold_off()
            await self.connect(endpoint.reconnect_s)
        except UnreachedError:
            if endpoint.breaks_by_itself:
                reason = f"{reason}, and it could not be reached again within {endpoint.reconnect_s:g} s"
            await self._session.give_up_guest(reason)
        except SandboxFailure as failure:
            self._log.debug("connection_given_up", error=str(failure))
            await self._session.give_up_guest(reason)

    def _count_break(self) -> None:
        """Counts a break. Raises SandboxFailure when there were too many."""
        now_s = time.monotonic()
        self._breaks.append(now_s)
        if self._endpoint.breaks_by_itself:
            while self._breaks[0] < now_s - self._times.breaks_window_s:
                self._breaks.popleft()
        if len(self._breaks) > self._endpoint.reconnects_max:
            raise SandboxFailure(f"the channel broke {len(self._breaks)} times")

    async def _hold_off(self) -> None:
        """Waits if the last connections moved no frame; otherwise a bad network would soon use up all reconnections."""
        position, self._position = self._position, self._channel.position
        self._fruitless = self._fruitless + 1 if position == self._position else 0
        if self._fruitless:
            await asyncio.sleep(self._times.wait_s(self._fruitless))

    def silence_max_s(self, ping_interval_s: float, silence_s: float) -> float:
        """Returns the seconds that a guest may be silent after a ping; fewer over an unreliable network."""
        return min(silence_s, _SILENT_PINGS * ping_interval_s) if self._endpoint.breaks_by_itself else silence_s

    def renew_if_it_can_break(self, reason: str) -> bool:
        """Drops a silent connection over an unreliable network. Returns False where silence means a dead guest."""
        if not self._endpoint.breaks_by_itself:
            return False
        self._channel.break_off(reason)
        return True

    # -- resting -------------------------------------------------------------------------------------------------

    @property
    def rest_due_s(self) -> float:
        """The monotonic time at which an unused sandbox may be paused."""
        idle_s = self._sandbox.pause_idle_s
        return float("inf") if idle_s is None else max(self._channel.last_used_s + idle_s, self._pause_after_s)

    def rest_if_unused(self) -> None:
        """Begins to pause the sandbox when it has been unused for long enough."""
        if (
            time.monotonic() >= self.rest_due_s
            and self.state is ConnectionState.UP
            and self._channel.settled
            and self._session.is_idle()
        ):
            self.state = ConnectionState.PAUSING
            self._session.spawn(self._rest())

    async def _rest(self) -> None:
        # Checked again in the step that hangs up: `on_waiting` is called only after the hang-up, so it does not report
        # a frame that was sent after the check in `rest_if_unused`.
        self._wanted = not (self._channel.settled and self._session.is_idle())
        await self._channel.hang_up()
        paused: bool | None = False
        if not self._wanted:
            paused = await self._pause()
        if self._channel.closed:
            return
        if paused is not True and not self._wanted:
            self._pause_after_s = time.monotonic() + _PAUSE_AGAIN_S
        if paused and not self._wanted:
            self.state = ConnectionState.PAUSED
            self._log.info("session_paused")
        else:
            self.state = ConnectionState.WAKING
            await self._go_on(paused)

    async def _pause(self) -> bool | None:
        """Pauses the sandbox. Returns True when it is paused, False when it still runs, None when that is unknown."""
        try:
            async with asyncio.timeout(self._times.pause_s):
                return await self._sandbox.pause()
        except (SandboxFailure, TimeoutError) as failure:
            self._log.warning("sandbox_not_paused", error=str(failure) or f"not within {self._times.pause_s:g} s")
            return None

    def _on_waiting(self) -> None:
        """Wakes the sandbox for a frame that waits to be sent; further frames find it waking already."""
        if self.state is ConnectionState.PAUSING:
            self._wanted = True
        elif self.state is ConnectionState.PAUSED:
            self.state = ConnectionState.WAKING
            self._session.spawn(self._go_on(True))

    async def _go_on(self, paused: bool | None) -> None:
        """Wakes and connects. `paused` as `_pause` returned it: a sandbox that still runs is only connected to."""
        started_s = time.monotonic()
        try:
            if paused is not False:
                await self._wake(required=bool(paused))
            await self.connect(max(self._endpoint.reconnect_s, READY_TIME_S))
        except SandboxFailure as failure:
            self._log.warning("session_not_woken", error=str(failure))
            if not self._channel.closed:
                what = "woken" if paused else "reached again"
                await self._session.give_up_guest(f"its sandbox was paused while unused, and could not be {what}")
            return
        self._log.info("session_woken", took_ms=round((time.monotonic() - started_s) * 1000, 1))

    async def _wake(self, *, required: bool) -> None:
        """Wakes the sandbox. Raises SandboxFailure when that fails and is `required`; else connecting decides."""
        try:
            async with asyncio.timeout(self._times.wake_s):
                await self._sandbox.wake()
        except TimeoutError as error:
            if required:
                raise SandboxFailure(f"it did not wake within {self._times.wake_s:g} s") from error
        except SandboxFailure as failure:
            if required:
                raise
            self._log.warning("sandbox_not_woken", error=str(failure))

    async def wake_again(self) -> None:
        """Wakes a sandbox that an earlier daemon may have paused. Raises SandboxFailure."""
        if self._sandbox.pause_idle_s is not None:
            try:
                await self._wake(required=True)
            except SandboxFailure as failure:
                self._log.warning("sandbox_not_woken", error=str(failure))
                raise SandboxFailure("its sandbox could not be woken") from failure


@dataclass(frozen=True)
class _MachineListener:
    """The listener of a sandbox on another machine. Implements `executor_server.network.egress.RemoteListener`."""

    connection: GuestConnection
    sandbox: MachineSandbox

    def next_token(self) -> str:
        return self.connection.next_token()

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        await self.sandbox.open_egress(make_protocol)

    async def allow_hosts(self, hosts: Sequence[str]) -> None:
        await self.sandbox.allow_hosts(hosts)
