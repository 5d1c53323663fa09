"""The way from a session to its guest: made, made again when it breaks, given up while the sandbox rests.

There is one way at a time, and one of five states it is in; whoever changes the state owns the next step:

    UP ── it broke, or fell silent ──▶ BROKEN ── connected again ──▶ UP
    UP ── nobody used it for long ──▶ PAUSING ── stopped ──▶ PAUSED ── a frame is sent ──▶ WAKING ──▶ UP
                                         └── could not be stopped, or a frame was sent ──▶ WAKING

What is sent in any of them goes out once it is up: the channel keeps each frame until the guest has acknowledged it.
So nobody who asks the guest for something has to know of this, nor to wait for it to wake. Where the way can't be made
again within its time, the session is given up, with the reason. The way knows nothing of executions and of clients.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from executor_server.backends.base import Sandbox
from executor_server.errors import SandboxFailure
from executor_server.guest_channel import READY_TIME_S, GuestChannel, RefusedError, UnreachedError
from executor_server.registry import Registry

# For a backend to stop a sandbox and to let it go on: a cloud writes its memory out, gigabytes at times.
_PAUSE_TIME_S = 120.0
_WAKE_TIME_S = 120.0
# When a sandbox that could not be paused may be paused again.
_PAUSE_AGAIN_S = 3600.0
# Of a way that breaks by itself: for the guest to answer once it is open, and the waits between two attempts.
_ANSWER_TIME_S = 10.0
_FIRST_RETRY_S = 0.25
_MAX_RETRY_S = 8.0
# Tokens that an earlier daemon may have shown and not written down: so many later ones are tried where one is refused.
# Fewer than a guest skips (guest/tokens.py), by several daemons.
_MAX_LATER_TOKENS = 32
# Within which the breaks of such a way are counted.
_BREAKS_WINDOW_S = 3600.0
# So many pings of such a way may go by without a sign of life until it counts as broken.
_SILENT_PINGS = 2

_log = structlog.get_logger(__name__)


class WayState(enum.Enum):
    UP = "up"
    BROKEN = "broken"
    PAUSING = "pausing"
    PAUSED = "paused"
    WAKING = "waking"


@dataclass(frozen=True)
class WayControl:
    """What a way asks of its session."""

    spawn: Callable[[Coroutine[Any, Any, None]], None]
    is_idle: Callable[[], bool]  # nothing runs, waits or is transferred
    on_connected: Callable[[], None]
    give_up: Callable[[str], Coroutine[Any, Any, None]]  # the guest is gone


class GuestWay:
    """Owns the connecting of one session's channel, and the rest of its sandbox."""

    def __init__(
        self, session_id: str, sandbox: Sandbox, channel: GuestChannel, registry: Registry, control: WayControl
    ) -> None:
        self.state = WayState.UP
        self._session_id = session_id
        self._sandbox = sandbox
        self._endpoint = sandbox.endpoint
        self._channel = channel
        self._registry = registry
        self._control = control
        self._breaks: deque[float] = deque()
        self._fruitless = 0  # connections in a row that brought nothing either way before they broke
        self._position = channel.position  # when the last one broke
        self._wanted = False  # while it was being paused
        self._pause_after_s = 0.0  # not before
        self._log = _log.bind(session_id=session_id, sandbox_id=sandbox.sandbox_id)
        channel.on_waiting = self._on_waiting

    # -- connecting ----------------------------------------------------------------------------------------------

    async def connect(self, within_s: float) -> None:
        """Connects; where the way breaks by itself, in as many attempts as the time allows. Raises SandboxFailure.

        A guest that refuses a token may have been shown it before: by a daemon that could not write that down, its disk
        being full. So later ones are tried.
        """
        give_up_s = time.monotonic() + within_s
        refused = 0
        for attempt in itertools.count(1):
            wait_s = _wait_s(attempt)
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
            # Each attempt may show a token that the guest will not have seen; the waits keep these few.
            await asyncio.sleep(wait_s)

    async def _connect_once(self, within_s: float) -> None:
        # First, so that a later daemon does not show a token that has been used.
        self._registry.note_connections(self._session_id, self._channel.connections + 1)
        answer_s = _ANSWER_TIME_S if self._endpoint.breaks_by_itself else READY_TIME_S
        await self._channel.connect(within_s, answer_s=answer_s)
        if self._channel.connected:  # else it broke in the same moment, and is being made anew
            self.state = WayState.UP
            self._control.on_connected()

    def on_lost(self, reason: str) -> None:
        """The channel broke. It may be made again, a number of times; a supervisor that died, or lied, may not."""
        self.state = WayState.BROKEN
        self._control.spawn(self._renew(reason))

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
            await self._control.give_up(reason)
        except SandboxFailure as failure:
            self._log.debug("way_given_up", error=str(failure))
            await self._control.give_up(reason)

    def _count_break(self) -> None:
        """Raises SandboxFailure when there were too many."""
        now_s = time.monotonic()
        self._breaks.append(now_s)
        if self._endpoint.breaks_by_itself:
            while self._breaks[0] < now_s - _BREAKS_WINDOW_S:
                self._breaks.popleft()
        if len(self._breaks) > self._endpoint.reconnects_max:
            raise SandboxFailure(f"the channel broke {len(self._breaks)} times")

    async def _hold_off(self) -> None:
        """Waits where one connection after the other is of no use: a network in trouble would soon have used up all."""
        position, self._position = self._position, self._channel.position
        self._fruitless = self._fruitless + 1 if position == self._position else 0
        if self._fruitless:
            await asyncio.sleep(_wait_s(self._fruitless))

    def silence_max_s(self, ping_interval_s: float, silence_s: float) -> float:
        """How long after a ping the guest may be silent. A way that breaks by itself is the first to be suspected."""
        return min(silence_s, _SILENT_PINGS * ping_interval_s) if self._endpoint.breaks_by_itself else silence_s

    def renew_if_it_can_break(self, reason: str) -> bool:
        """The guest is silent: takes its way for broken where that may be the cause. False: it is the guest's fault."""
        if not self._endpoint.breaks_by_itself:
            return False
        self._channel.break_off(reason)
        return True

    # -- resting -------------------------------------------------------------------------------------------------

    def rest_if_unused(self) -> None:
        """Begins to pause the sandbox when its time has come."""
        idle_s, now_s = self._sandbox.pause_idle_s, time.monotonic()
        if (
            idle_s is not None
            and self.state is WayState.UP
            and now_s >= max(self._channel.last_used_s + idle_s, self._pause_after_s)
            and self._channel.settled
            and self._control.is_idle()
        ):
            self.state, self._wanted = WayState.PAUSING, False
            self._control.spawn(self._rest())

    async def _rest(self) -> None:
        await self._channel.hang_up()
        paused: bool | None = False
        if not self._wanted:
            paused = await self._pause()
        if self._channel.closed:
            return
        if paused is not True and not self._wanted:
            self._pause_after_s = time.monotonic() + _PAUSE_AGAIN_S
        if paused and not self._wanted:
            self.state = WayState.PAUSED
            self._log.info("session_paused")
        else:
            self.state = WayState.WAKING
            await self._go_on(paused)

    async def _pause(self) -> bool | None:
        """Whether it stands still now; None when nobody knows."""
        try:
            async with asyncio.timeout(_PAUSE_TIME_S):
                return await self._sandbox.pause()
        except (SandboxFailure, TimeoutError) as failure:
            self._log.warning("sandbox_not_paused", error=str(failure) or f"not within {_PAUSE_TIME_S:g} s")
            return None

    def _on_waiting(self) -> None:
        """A frame waits for the way. Those of many callers find it waking already."""
        if self.state is WayState.PAUSING:
            self._wanted = True
        elif self.state is WayState.PAUSED:
            self.state = WayState.WAKING
            self._control.spawn(self._go_on(True))

    async def _go_on(self, paused: bool | None) -> None:
        """Up again, from standing still (`paused`), from running on, or from nobody knows."""
        started_s = time.monotonic()
        try:
            if paused is not False:
                await self._wake(required=bool(paused))
            await self.connect(max(self._endpoint.reconnect_s, READY_TIME_S))
        except SandboxFailure as failure:
            self._log.warning("session_not_woken", error=str(failure))
            if not self._channel.closed:
                what = "woken" if paused else "reached again"
                await self._control.give_up(f"it was to rest unused, and could not be {what}")
            return
        self._log.info("session_woken", took_ms=round((time.monotonic() - started_s) * 1000, 1))

    async def _wake(self, *, required: bool) -> None:
        """Raises SandboxFailure when it can't be, and that is `required`; else connecting tells whether it runs."""
        try:
            async with asyncio.timeout(_WAKE_TIME_S):
                await self._sandbox.wake()
        except TimeoutError as error:
            if required:
                raise SandboxFailure(f"it did not wake within {_WAKE_TIME_S:g} s") from error
        except SandboxFailure as failure:
            if required:
                raise
            self._log.warning("sandbox_not_woken", error=str(failure))

    async def wake_again(self) -> None:
        """Before the first connection: an earlier daemon may have paused its sandbox. Raises SandboxFailure."""
        if self._sandbox.pause_idle_s is not None:
            try:
                await self._wake(required=True)
            except SandboxFailure as failure:
                self._log.warning("sandbox_not_woken", error=str(failure))
                raise SandboxFailure("its sandbox could not be woken") from failure


def _wait_s(attempt: int) -> float:
    """How long to wait after so many attempts in a row: longer each time, and not as long as everybody else."""
    return float(min(_FIRST_RETRY_S * 2 ** min(attempt - 1, 16), _MAX_RETRY_S) * random.uniform(0.5, 1.0))
