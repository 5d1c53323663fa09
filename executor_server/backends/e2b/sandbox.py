"""A sandbox of the E2B backend: owns a virtual machine in the cloud and the connections to it, and releases them.

The object exists before the machine does, and so does the id in the machine's metadata. So a creation whose answer was
lost ends by the same path as a session, and so does one that the cloud finished after we had abandoned it. The backend
keeps a sandbox until the cloud has confirmed that its machine does not exist any more.

An answer "there is no such sandbox" would cost a session its state, so it counts only if a second request, of
another kind, confirms it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import structlog

from executor_server.backends.base import PassiveSandbox
from executor_server.backends.e2b.endpoint import RelayConnections, RelayEndpoint
from executor_server.backends.e2b.failures import CannotWake, CloudFailure, Final, Missing, TryLater
from executor_server.backends.e2b.retry import retry_until_cancelled, with_retries
from executor_server.backends.teardown import Teardown
from executor_server.core import SandboxFailure

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Cloud, Machine

SANDBOX_KEY = "executor-sandbox"

_DESTROY_TIMEOUT_S = 60.0
_CAUSE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


def cloud_clock_s() -> float:
    """Seconds of a clock that runs while this host is suspended, as the cloud's does, and that can't be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Lifetime:
    """The settings that all sandboxes of one backend have in common."""

    lifetime_s: float
    pause_idle_s: float | None
    unpausable: set[str] = field(default_factory=set)  # templates whose sandboxes the cloud refused to pause


async def end_at_cloud(cloud: Cloud, cloud_id: str) -> None:
    """Ends a machine; returns once it has ended, or two answers say that it is missing. Raises CloudFailure."""
    if not await cloud.kill(cloud_id):
        try:
            await cloud.look(cloud_id)
        except Missing:
            return
        raise CloudFailure("E2B knows the sandbox, and does not end it")


class E2BSandbox(PassiveSandbox):
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
        egress: str | None,
        reconnect_s: float,
        forget: Callable[[E2BSandbox], None],
    ) -> None:
        """A sandbox whose machine is not made, or not adopted, yet. `forget` is called when nothing of it is left."""
        self.sandbox_id = sandbox_id
        self.fingerprint = fingerprint
        self.cloud_id: str | None = None
        self.may_exist = False  # in the cloud; True without an id: a request to make it has no answer, perhaps for good
        self.is_complete = False  # its guest has been started in it
        self.is_paused = False
        self.is_missing = False  # by the cloud's last answer; its guest may still answer
        self._cloud = cloud
        self._lifetime = lifetime
        self._template = template
        self._forget = forget
        self._ends_at_s = 0.0
        self._lock = asyncio.Lock()  # held by requests that pause it, wake it or renew its lifetime
        self._connections = RelayConnections(relay, self._find)
        self._egress = RelayConnections(egress, self._find) if egress is not None else None
        self._endpoint = RelayEndpoint(token, reconnect_s, self._connections)
        self.teardown = Teardown(sandbox_id, self._destroy)

    @property
    def endpoint(self) -> RelayEndpoint:
        return self._endpoint

    # -- life in the cloud ---------------------------------------------------------------------------------------

    def made(self, machine: Machine, asked_at_s: float) -> None:
        """Notes the machine, which the cloud ends a lifetime after the request at `asked_at_s`."""
        self.cloud_id, self.may_exist, self.is_paused = machine.cloud_id, True, False
        self._found(machine)
        self._ends_at_s = asked_at_s + self._lifetime.lifetime_s

    def _found(self, machine: Machine | None) -> None:
        self._connections.found(machine)
        if self._egress is not None:
            self._egress.found(machine)

    def adopt(self, cloud_id: str, *, paused: bool) -> None:
        """Notes a machine that an earlier daemon made."""
        self.cloud_id, self.may_exist, self.is_complete, self.is_paused = cloud_id, True, True, paused
        self._ends_at_s = cloud_clock_s() + self._lifetime.lifetime_s  # a guess, until the first renewal

    async def prolong(self) -> None:
        """Renews its lifetime, unless it is paused or to be destroyed. Raises CloudFailure."""
        async with self._lock:
            if self.cloud_id is None or self.is_paused or self.teardown.has_begun:
                return
            asked_at_s, was_missing = cloud_clock_s(), self.is_missing
            try:
                await self._prolong(self.cloud_id)
            except Missing:
                self.is_missing = True
                if not was_missing:
                    _log.warning("sandbox_vanished", sandbox_id=self.sandbox_id, cause=self._end())
            else:
                self.is_missing = False
                self._ends_at_s = asked_at_s + self._lifetime.lifetime_s

    async def _prolong(self, cloud_id: str) -> None:
        try:
            await self._cloud.prolong(cloud_id, lifetime_s=self._lifetime.lifetime_s)
        except Missing:
            await self._cloud.look(cloud_id)  # raises Missing when it is true
            raise CloudFailure("E2B knows the sandbox, and does not put off its end") from None

    async def _find(self) -> Machine:
        if self.cloud_id is None or self.teardown.has_begun:
            raise Missing("there is no such sandbox")
        asked_at_s = cloud_clock_s()
        try:
            machine = await self._cloud.connect(self.cloud_id, lifetime_s=self._lifetime.lifetime_s)
        except Missing:
            await self._cloud.look(self.cloud_id)  # raises Missing when it is true
            raise CloudFailure("E2B knows the sandbox, and does not connect to it") from None
        self.made(machine, asked_at_s)
        return machine

    async def cause_of_death(self) -> str | None:
        if self.cloud_id is None:
            return None
        try:
            async with asyncio.timeout(_CAUSE_TIMEOUT_S):
                paused = (await self._cloud.look(self.cloud_id)).paused
        except Missing:
            return self._end()
        except (CloudFailure, TimeoutError):
            return "its guest can't be reached, and E2B does not answer"
        return "its sandbox was paused at E2B" if paused else "its guest can't be reached, though its sandbox runs"

    def _end(self) -> str:
        return "its lifetime at E2B ended" if cloud_clock_s() >= self._ends_at_s else "its sandbox was killed at E2B"

    # -- the way out ---------------------------------------------------------------------------------------------

    async def open_egress(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        if self._egress is None:
            raise SandboxFailure("this sandbox has no way out")
        await self._egress.open(make_protocol)

    async def allow_hosts(self, hosts: Sequence[str]) -> None:
        if self.cloud_id is None:
            raise SandboxFailure("there is no sandbox to give a network")
        await with_retries(partial(self._cloud.allow_hosts, self.cloud_id, hosts))

    # -- rest ----------------------------------------------------------------------------------------------------

    @property
    def pause_idle_s(self) -> float | None:
        if self._egress is not None:  # a program may be waiting for an answer from outside
            return None
        return None if self._template in self._lifetime.unpausable else self._lifetime.pause_idle_s

    async def pause(self) -> bool:
        async with self._lock:
            if self.cloud_id is None:
                raise SandboxFailure("there is no sandbox to pause")
            await self._connections.close()
            try:
                self.is_paused = await self._pause(self.cloud_id)
            except TryLater:  # the cloud did nothing
                return False
            if self.is_paused:
                self._found(None)
            return self.is_paused

    async def _pause(self, cloud_id: str) -> bool:
        """Pauses the machine; a refusal is remembered for its template. Raises CloudFailure."""
        refusal = "it is still running"
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
        async with self._lock:
            await retry_until_cancelled(self._find, unless=(Missing, CannotWake))

    # -- the end -------------------------------------------------------------------------------------------------

    async def destroy(self) -> None:
        await self.teardown.run()

    async def _destroy(self) -> None:
        try:
            async with asyncio.timeout(_DESTROY_TIMEOUT_S):
                await asyncio.gather(self._kill(), self._connections.close(), self._close_egress())
        except TimeoutError as error:
            raise SandboxFailure(f"sandbox {self.sandbox_id} can't be destroyed: E2B does not answer") from error
        self._forget(self)
        _log.debug("sandbox_destroyed", sandbox_id=self.sandbox_id)

    async def _close_egress(self) -> None:
        if self._egress is not None:
            await self._egress.close()

    async def _kill(self) -> None:
        """Ends the machine; after a failed creation, every machine that carries the sandbox's id.

        Answers may have been lost, so there may be several. And the cloud may have answered with the id of another
        sandbox's machine, so the known machine is ended only if its metadata name this sandbox.
        """
        if self.is_complete and self.cloud_id is not None:
            await with_retries(partial(end_at_cloud, self._cloud, self.cloud_id))
        elif self.may_exist:
            await self.end_duplicates()
            if self.cloud_id is not None and await self._is_ours(self.cloud_id):
                await with_retries(partial(end_at_cloud, self._cloud, self.cloud_id))

    async def end_duplicates(self) -> None:
        """Ends other machines that requests to make this sandbox have made. Raises CloudFailure."""
        listed = await with_retries(partial(self._cloud.list, {SANDBOX_KEY: self.sandbox_id}))
        for cloud_id in {one.cloud_id for one in listed} - {self.cloud_id}:
            await with_retries(partial(end_at_cloud, self._cloud, cloud_id))

    async def _is_ours(self, cloud_id: str) -> bool:
        try:
            seen = await with_retries(partial(self._cloud.look, cloud_id))
        except Missing:
            return False
        return seen.metadata.get(SANDBOX_KEY) == self.sandbox_id
