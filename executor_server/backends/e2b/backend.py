"""The E2B backend: a virtual machine in E2B's cloud for each sandbox.

The machine is the wall to everybody else, and the cloud's business. What confines agent code within it is ours: the
guest's own namespaces, limits and filter (guests.py). The daemon and a guest talk over the streams of a command
(endpoint.py, transport.py), and the cloud is asked to end each machine soon after the last daemon stopped asking it not
to (lifetime.py).

Machines outlive the daemon. Their metadata bear the id of its state directory, and so the next daemon finds them: those
that the registry knows go on, the others are ended, and so is whatever a lost answer left behind.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from executor_server.backend_config import E2BImage, E2BSection
from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.directory import BackendDirectory, is_sandbox_id, new_sandbox_id
from executor_server.backends.e2b.access import open_cloud
from executor_server.backends.e2b.check import check_sdk, examine
from executor_server.backends.e2b.failures import CloudFailure, Unanswered
from executor_server.backends.e2b.guests import GuestFile
from executor_server.backends.e2b.lifetime import LifetimeKeeper
from executor_server.backends.e2b.maker import DAEMON_KEY, FINGERPRINT_KEY, GUEST_KEY, RETRY_FULL_S, Maker
from executor_server.backends.e2b.patience import patiently
from executor_server.backends.e2b.sandbox import SANDBOX_KEY, E2BSandbox, Lifetime, end_at_cloud
from executor_server.backends.e2b.templates import Templates
from executor_server.backends.endings import check_none_left, failures_of
from executor_server.errors import BackendFull, BackendSilent, SandboxFailure
from executor_server.guest_archive import pack_guest
from executor_server.model import SandboxSpec

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Listed

_KIND = "e2b"
_GUEST_VERSION = re.compile(r"[0-9a-f]{1,64}")
_FINGERPRINT_CHARS = 256
_TOKEN_BYTES = 32
# Between the two lists of a start, where the first one lacks a sandbox.
_LIST_AGAIN_S = 1.0
# So many times as long as one request may take, a creation may: it makes some six, and may repeat each that fails.
_CREATION_REQUESTS = 6

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Means:
    """What `start` found and took possession of, and `close` gives back."""

    directory: BackendDirectory
    maker: Maker
    keeper: LifetimeKeeper


class E2BBackend:
    """Implements `executor_server.backends.base.Backend`."""

    def __init__(self, state_dir: Path, section: E2BSection) -> None:
        self._state_dir = state_dir.absolute()
        self._section = section
        self._means: _Means | None = None
        self._live: dict[str, E2BSandbox] = {}  # by id; also those whose destruction failed so far
        self._creations: set[asyncio.Future[None]] = set()

    @property
    def name(self) -> str:
        return "e2b"

    async def start(self) -> None:
        section = self._section
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _KIND)
        try:
            cloud = await asyncio.to_thread(open_cloud, section)
            guest = await asyncio.to_thread(lambda: GuestFile.of(pack_guest(directory.path)))
            await patiently(lambda: cloud.list({DAEMON_KEY: directory.daemon_id}))
        except BaseException as error:
            directory.release()
            if isinstance(error, CloudFailure):
                raise SandboxFailure(f"E2B can't be used: {error}") from error
            raise
        lifetime = Lifetime(section.lifetime_s, section.pause_idle_s)
        templates = Templates(section.images)
        maker = Maker(cloud, directory.daemon_id, guest, templates, lifetime, section.reconnect_s, self._is_taken)
        self._means = _Means(directory, maker, LifetimeKeeper(section.lifetime_s, self._live.values))
        self._means.keeper.start()
        sdk = check_sdk()
        if not sdk.ok:
            _log.warning("e2b_sdk_not_tried", detail=sdk.detail, remedy=sdk.remedy)

    async def check_host(self) -> Sequence[HostFinding]:
        return await examine(self._section)

    async def fingerprint(self, spec: SandboxSpec) -> str:
        return self._started().maker.fingerprint(spec)

    async def close(self) -> None:
        means, self._means = self._means, None
        if means is None:
            return
        # Not under their hands: a creation ends by itself, and then its sandbox is known to be whole or gone.
        await asyncio.gather(*self._creations)
        await means.keeper.close()
        failures = await failures_of(sandbox.destroy() for sandbox in self._live.values())
        means.directory.release()
        check_none_left(failures)

    def _started(self) -> _Means:
        if self._means is None:
            raise SandboxFailure("the E2B backend is not started")
        return self._means

    # -----------------------------------------------------------------------------------------------------------------
    # Creation

    async def create(self, spec: SandboxSpec) -> E2BSandbox:
        maker = self._started().maker
        if len(self._live) >= self._section.max_sandboxes:
            raise BackendFull(f"all {self._section.max_sandboxes} E2B sandboxes are in use", RETRY_FULL_S)
        sandbox = maker.new_sandbox(
            new_sandbox_id(),
            image=maker.templates.of(spec.image),
            fingerprint=maker.fingerprint(spec),
            token=secrets.token_bytes(_TOKEN_BYTES),
            forget=self._forget,
        )
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creations.add(finished)
        self._live[sandbox.sandbox_id] = sandbox  # its place is taken from here on
        limit_s = _CREATION_REQUESTS * self._section.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await maker.build(sandbox, spec)
        except (TimeoutError, Unanswered) as failure:
            # Where there is a machine, what was asked of it may be why it does not answer.
            kind = BackendSilent if sandbox.cloud_id is None else SandboxFailure
            await self._give_back(sandbox)
            raise kind(str(failure) or f"a sandbox was not made within {limit_s:g} s") from failure
        except BaseException:
            await self._give_back(sandbox)
            raise
        finally:
            self._creations.discard(finished)
            finished.set_result(None)
        return sandbox

    async def _give_back(self, sandbox: E2BSandbox) -> None:
        """After a failure that is the one to be told."""
        try:
            await sandbox.destroy()
        except SandboxFailure as failure:
            _log.warning("sandbox_left_over", sandbox_id=sandbox.sandbox_id, reason=str(failure))

    def _forget(self, sandbox: E2BSandbox) -> None:
        self._live.pop(sandbox.sandbox_id, None)

    # -----------------------------------------------------------------------------------------------------------------
    # What an earlier daemon, or a lost answer, left

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, E2BSandbox]:
        means = self._started()
        wanted = {sandbox.sandbox_id: sandbox for sandbox in known if is_sandbox_id(sandbox.sandbox_id)}
        adopted: dict[str, E2BSandbox] = {}
        seen = await self._listed(means)
        if wanted.keys() - {listed.metadata.get(SANDBOX_KEY) for listed in seen}:
            await asyncio.sleep(_LIST_AGAIN_S)  # one list is not enough to give a session up for
            seen += await self._listed(means)
        for listed in seen:
            one = wanted.get(listed.metadata.get(SANDBOX_KEY, ""))
            if one is None or one.sandbox_id in adopted:
                continue
            try:
                adopted[one.sandbox_id] = self._adopted(means, listed, one)
            except SandboxFailure as failure:
                _log.warning("sandbox_not_adopted", sandbox_id=one.sandbox_id, reason=str(failure))
        await means.keeper.keep()
        swept = await self.sweep()
        if adopted or swept:
            _log.info("sandboxes_adopted", count=len(adopted), swept=swept)
        return adopted

    def _adopted(self, means: _Means, listed: Listed, known: KnownSandbox) -> E2BSandbox:
        fingerprint, version = listed.metadata.get(FINGERPRINT_KEY, ""), listed.metadata.get(GUEST_KEY, "")
        if not _GUEST_VERSION.fullmatch(version) or len(fingerprint) > _FINGERPRINT_CHARS:
            raise SandboxFailure("its metadata are not those that it was made with")
        sandbox = means.maker.new_sandbox(
            known.sandbox_id,
            image=self._section.images.get(known.spec.image) or E2BImage(template="unknown"),
            fingerprint=fingerprint,
            token=known.token,
            forget=self._forget,
            guest_version=version,
        )
        sandbox.adopt(listed.cloud_id, paused=listed.paused)
        self._live[sandbox.sandbox_id] = sandbox
        return sandbox

    async def sweep(self) -> int:
        means = self._started()
        condemned = [sandbox for sandbox in self._live.values() if sandbox.ending.has_failed]
        strays = [listed.cloud_id for listed in await self._listed(means) if self._is_stray(listed)]
        failures = await failures_of(
            [
                *(sandbox.destroy() for sandbox in condemned),
                *(patiently(partial(end_at_cloud, means.maker.cloud, cloud_id)) for cloud_id in strays),
            ]
        )
        count = len(condemned) + len(strays) - len(failures)
        if count:
            _log.info("sandboxes_swept", count=count)
        if failures:
            raise SandboxFailure(f"{len(failures)} sandboxes can't be ended") from failures[0]
        return count

    async def _listed(self, means: _Means) -> list[Listed]:
        return await patiently(lambda: means.maker.cloud.list({DAEMON_KEY: means.directory.daemon_id}))

    def _is_taken(self, cloud_id: str) -> bool:
        return any(sandbox.cloud_id == cloud_id for sandbox in self._live.values())

    def _is_stray(self, listed: Listed) -> bool:
        """Asked after the list came: what has been made meanwhile is known by now, and what is being made has no id."""
        if self._is_taken(listed.cloud_id):
            return False  # whatever the cloud says of it
        owner = self._live.get(listed.metadata.get(SANDBOX_KEY, ""))
        return owner is None or (owner.cloud_id is not None and owner.cloud_id != listed.cloud_id)
