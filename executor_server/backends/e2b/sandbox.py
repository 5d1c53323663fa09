"""A sandbox of the E2B backend: a virtual machine in the cloud, the ways to it, and how it is given back.

The object exists before the machine does, and so does the id in the machine's metadata: a creation whose answer was
lost ends by the same path as a session, and so does one that the cloud finished after we had given it up. Nothing is
given up before the cloud has said that it is gone; until then the backend keeps the sandbox and comes back to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import structlog

from executor_server.backends.e2b.endpoint import RelayEndpoint, Ways
from executor_server.backends.e2b.failures import CannotWake, CloudFailure, Final, Gone, TryLater
from executor_server.backends.e2b.patience import patiently, persistently
from executor_server.backends.endings import Ending
from executor_server.errors import SandboxFailure

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Cloud, Machine

SANDBOX_KEY = "executor-sandbox"

_DESTROY_TIMEOUT_S = 60.0
_CAUSE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


def cloud_clock_s() -> float:
    """Seconds that have passed out there too: it runs on while this host sleeps, and nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Lifetime:
    """What all sandboxes of one backend have in common."""

    lifetime_s: float
    pause_idle_s: float | None
    unpausable: set[str] = field(default_factory=set)  # templates that turned out to be


async def end_at_cloud(cloud: Cloud, cloud_id: str) -> None:
    """Ends it, or learns twice that there is none. Raises CloudFailure."""
    if not await cloud.kill(cloud_id):
        try:
            await cloud.look(cloud_id)
        except Gone:
            return
        raise CloudFailure("E2B knows the sandbox, and does not end it")


class E2BSandbox:
    """Implements `executor_server.backends.base.Sandbox`."""

    backend_name: ClassVar[str] = "e2b"

    def __init__(
        self,
        sandbox_id: str,
        *,
        cloud: Cloud,
        lifetime: Lifetime,
        template: str,
        fingerprint: str,
        token: bytes,
        relay: str,
        reconnect_s: float,
        forget: Callable[[E2BSandbox], None],
    ) -> None:
        """One that does not exist yet, or that is not yet known to. `forget` is told when nothing of it is left."""
        self.sandbox_id = sandbox_id
        self.fingerprint = fingerprint
        self.cloud_id: str | None = None
        self.may_exist = False  # in the cloud; while that is so and there is no id, a request to make it was lost
        self.is_whole = False  # what was made is what was asked for: its guest has been started in it
        self.is_paused = False
        self.is_gone = False  # as far as the cloud has said last; whether its guest answers is another question
        self._cloud = cloud
        self._lifetime = lifetime
        self._template = template
        self._forget = forget
        self._ends_at_s = 0.0
        self._turn = asyncio.Lock()  # of what changes whether it runs, and until when
        self._ways = Ways(sandbox_id, relay, self._find)
        self._endpoint = RelayEndpoint(token, reconnect_s, self._ways)
        self.ending = Ending(sandbox_id, self._destroy)

    @property
    def endpoint(self) -> RelayEndpoint:
        return self._endpoint

    # -- life in the cloud ---------------------------------------------------------------------------------------

    def made(self, machine: Machine, asked_at_s: float) -> None:
        """It is there, and was to live for a lifetime from then on."""
        self.cloud_id, self.may_exist, self.is_paused = machine.cloud_id, True, False
        self._ways.found(machine)
        self._ends_at_s = asked_at_s + self._lifetime.lifetime_s

    def adopt(self, cloud_id: str, *, paused: bool) -> None:
        """It is there already, and was made by an earlier daemon."""
        self.cloud_id, self.may_exist, self.is_whole, self.is_paused = cloud_id, True, True, paused
        self._ends_at_s = cloud_clock_s() + self._lifetime.lifetime_s  # not known; the keeper comes soon

    async def prolong(self) -> None:
        """Puts its end off, unless it is paused or to be destroyed. Raises CloudFailure."""
        async with self._turn:
            if self.cloud_id is None or self.is_paused or self.ending.has_begun:
                return
            asked_at_s, was_gone = cloud_clock_s(), self.is_gone
            try:
                await self._prolong(self.cloud_id)
            except Gone:
                self.is_gone = True
                if not was_gone:
                    _log.warning("sandbox_vanished", sandbox_id=self.sandbox_id, cause=self._end())
            else:
                self.is_gone = False
                self._ends_at_s = asked_at_s + self._lifetime.lifetime_s

    async def _prolong(self, cloud_id: str) -> None:
        try:
            await self._cloud.prolong(cloud_id, lifetime_s=self._lifetime.lifetime_s)
        except Gone:
            # One word is not enough to give a session up for. If it is true, this raises Gone as well.
            await self._cloud.look(cloud_id)
            raise CloudFailure("E2B knows the sandbox, and does not put off its end") from None

    async def _find(self) -> Machine:
        if self.cloud_id is None or self.ending.has_begun:
            raise Gone("there is no such sandbox")
        asked_at_s = cloud_clock_s()
        try:
            machine = await self._cloud.connect(self.cloud_id, lifetime_s=self._lifetime.lifetime_s)
        except Gone:
            await self._cloud.look(self.cloud_id)  # as in `_prolong`: one word is not enough
            raise CloudFailure("E2B knows the sandbox, and does not connect to it") from None
        self.made(machine, asked_at_s)
        return machine

    async def cause_of_death(self) -> str | None:
        if self.cloud_id is None:
            return None
        try:
            async with asyncio.timeout(_CAUSE_TIMEOUT_S):
                paused = (await self._cloud.look(self.cloud_id)).paused
        except Gone:
            return self._end()
        except (CloudFailure, TimeoutError):
            return "its guest can't be reached, and E2B does not answer"
        return "its sandbox was paused at E2B" if paused else "its guest can't be reached, though its sandbox runs"

    def _end(self) -> str:
        return "its lifetime at E2B ended" if cloud_clock_s() >= self._ends_at_s else "its sandbox was killed at E2B"

    # -- rest ----------------------------------------------------------------------------------------------------

    @property
    def pause_idle_s(self) -> float | None:
        return None if self._template in self._lifetime.unpausable else self._lifetime.pause_idle_s

    async def pause(self) -> bool:
        async with self._turn:
            if self.cloud_id is None:
                raise SandboxFailure("there is no sandbox to pause")
            await self._ways.close()
            try:
                self.is_paused = await self._pause(self.cloud_id)
            except TryLater:  # nothing was done
                return False
            if self.is_paused:
                self._ways.found(None)
            return self.is_paused

    async def _pause(self, cloud_id: str) -> bool:
        """Where it is refused, it is remembered that it can't be done. Raises CloudFailure."""
        refusal = "it goes on running"
        try:
            if await self._cloud.pause(cloud_id):
                return True
        except Final as failure:
            refusal = str(failure)
        if (await self._cloud.look(cloud_id)).paused:
            return True
        self._lifetime.unpausable.add(self._template)
        _log.warning("sandbox_not_pausable", sandbox_id=self.sandbox_id, reason=refusal)
        return False

    async def wake(self) -> None:
        async with self._turn:
            await persistently(self._find, unless=(Gone, CannotWake))

    # -- the end -------------------------------------------------------------------------------------------------

    async def destroy(self) -> None:
        await self.ending.run()

    async def _destroy(self) -> None:
        try:
            async with asyncio.timeout(_DESTROY_TIMEOUT_S):
                await asyncio.gather(self._kill(), self._ways.close())
        except TimeoutError as error:
            raise SandboxFailure(f"sandbox {self.sandbox_id} can't be destroyed: E2B does not answer") from error
        self._forget(self)
        _log.debug("sandbox_destroyed", sandbox_id=self.sandbox_id)

    async def _kill(self) -> None:
        """Where its creation failed: whatever bears its id, since answers were lost, or told of another's sandbox."""
        if self.is_whole and self.cloud_id is not None:
            await patiently(partial(end_at_cloud, self._cloud, self.cloud_id))
        elif self.may_exist:
            await self.end_twins()
            if self.cloud_id is not None and await self._is_ours(self.cloud_id):
                await patiently(partial(end_at_cloud, self._cloud, self.cloud_id))

    async def end_twins(self) -> None:
        """Ends what else came of requests to make this one. Raises CloudFailure."""
        listed = await patiently(partial(self._cloud.list, {SANDBOX_KEY: self.sandbox_id}))
        for cloud_id in {one.cloud_id for one in listed} - {self.cloud_id}:
            await patiently(partial(end_at_cloud, self._cloud, cloud_id))

    async def _is_ours(self, cloud_id: str) -> bool:
        try:
            seen = await patiently(partial(self._cloud.look, cloud_id))
        except Gone:
            return False
        return seen.metadata.get(SANDBOX_KEY) == self.sandbox_id

    # -- what there is no way to do ------------------------------------------------------------------------------

    async def oom_kills(self) -> int | None:
        return None

    async def label(self, session_id: str) -> None:
        return  # the cloud keeps the metadata of a sandbox as it was made

    def set_cpu_share(self, share: float) -> None:
        return
