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
import hashlib
import re
import secrets
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.directory import BackendDirectory, is_sandbox_id, new_sandbox_id
from executor_server.backends.e2b.cloud import Access, Cloud, Listed, Machine
from executor_server.backends.e2b.failures import CloudFailure, Final, Gone, TryLater
from executor_server.backends.e2b.guests import SANDBOX_UID, GuestFile, relay_command, start_guest
from executor_server.backends.e2b.key import read_key
from executor_server.backends.e2b.lifetime import LifetimeKeeper
from executor_server.backends.e2b.patience import patiently
from executor_server.backends.e2b.sandbox import SANDBOX_KEY, E2BSandbox, Lifetime, cloud_clock_s
from executor_server.backends.e2b.templates import Templates
from executor_server.config import E2BImage, E2BSection
from executor_server.errors import BackendFull, SandboxFailure
from executor_server.guest_archive import pack_guest
from executor_server.model import SandboxSpec

_KIND = "e2b"
_DAEMON_KEY = "executor-daemon"
_FINGERPRINT_KEY = "executor-fingerprint"
_USER_KEY = "executor-user"
_GUEST_KEY = "executor-guest"
_GUEST_VERSION = re.compile(r"[0-9a-f]{1,64}")
_FINGERPRINT_CHARS = 256
_TOKEN_BYTES = 32
_TEMPLATE_HASH_CHARS = 16
# Where nobody can say when a place will be free.
_RETRY_FULL_S = 5.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Means:
    """What `start` found and took possession of, and `close` gives back."""

    cloud: Cloud
    directory: BackendDirectory
    guest: GuestFile
    templates: Templates
    lifetime: Lifetime
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
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _KIND)
        try:
            cloud = Cloud(self._access())
            archive = await asyncio.to_thread(pack_guest, directory.path)
            guest = await asyncio.to_thread(GuestFile.of, archive)
            await patiently(lambda: cloud.list({_DAEMON_KEY: directory.daemon_id}))
        except CloudFailure as failure:
            directory.release()
            raise SandboxFailure(f"E2B can't be used: {failure}") from failure
        except BaseException:
            directory.release()
            raise
        section = self._section
        keeper = LifetimeKeeper(section.lifetime_s, self._live.values)
        lifetime = Lifetime(section.lifetime_s, section.pause_idle_s)
        self._means = _Means(cloud, directory, guest, Templates(section.images), lifetime, keeper)
        keeper.start()

    async def check_host(self) -> Sequence[HostFinding]:
        return []

    async def fingerprint(self, spec: SandboxSpec) -> str:
        means = self._started()
        return _fingerprint(spec, means.templates.of(spec.image), means.guest)

    async def close(self) -> None:
        means, self._means = self._means, None
        if means is None:
            return
        # Not under their hands: a creation ends by itself, and then its sandbox is known to be whole or gone.
        await asyncio.gather(*self._creations)
        await means.keeper.close()
        failures = await _failures(sandbox.destroy() for sandbox in self._live.values())
        means.directory.release()
        if failures:
            told = f"{len(failures)} sandboxes are left over, for the next daemon of this state directory to destroy"
            raise SandboxFailure(f"{told}: {failures[0]}") from failures[0]

    def _access(self) -> Access:
        section = self._section
        return Access(
            api_key=read_key(section.api_key_file),
            api_url=section.api_url,
            sandbox_url=section.sandbox_url,
            request_timeout_s=section.request_timeout_s,
            concurrency=section.concurrency,
        )

    def _started(self) -> _Means:
        if self._means is None:
            raise SandboxFailure("the E2B backend is not started")
        return self._means

    # -----------------------------------------------------------------------------------------------------------------
    # Creation

    async def create(self, spec: SandboxSpec) -> E2BSandbox:
        means = self._started()
        image = means.templates.of(spec.image)
        if len(self._live) >= self._section.max_sandboxes:
            raise BackendFull(f"all {self._section.max_sandboxes} E2B sandboxes are in use", _RETRY_FULL_S)
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creations.add(finished)
        sandbox = self._new_sandbox(
            means,
            new_sandbox_id(),
            image=image,
            fingerprint=_fingerprint(spec, image, means.guest),
            token=secrets.token_bytes(_TOKEN_BYTES),
            guest_version=means.guest.version,
        )
        self._live[sandbox.sandbox_id] = sandbox  # its place is taken from here on
        try:
            await self._build(means, sandbox, spec, image)
        except BaseException:
            await self._give_back(sandbox)
            raise
        finally:
            self._creations.discard(finished)
            finished.set_result(None)
        return sandbox

    async def _build(self, means: _Means, sandbox: E2BSandbox, spec: SandboxSpec, image: E2BImage) -> None:
        machine = await self._make_machine(means, sandbox, spec, image)
        try:
            prepared = await means.templates.prepared(spec.image, machine)
            await start_guest(
                machine,
                prepared,
                guest=means.guest,
                sandbox_id=sandbox.sandbox_id,
                token=sandbox.endpoint.token,
                spec=spec,
                preload=image.preload,
            )
        except Gone as gone:
            raise CloudFailure(f"the sandbox vanished while it was made: {gone}") from gone
        except SandboxFailure:
            means.templates.forget(spec.image)
            raise

    async def _make_machine(self, means: _Means, sandbox: E2BSandbox, spec: SandboxSpec, image: E2BImage) -> Machine:
        metadata = {
            _DAEMON_KEY: means.directory.daemon_id,
            SANDBOX_KEY: sandbox.sandbox_id,
            _FINGERPRINT_KEY: sandbox.fingerprint,
            _USER_KEY: str(SANDBOX_UID),
            _GUEST_KEY: means.guest.version,
        }

        async def ask() -> Machine:
            asked_at_s, existed = cloud_clock_s(), sandbox.may_exist
            sandbox.may_exist = True
            try:
                machine = await means.cloud.create(
                    image.template,
                    lifetime_s=self._section.lifetime_s,
                    metadata=metadata,
                    # Of equal ids the cloud makes one sandbox. One that does not makes more: they bear an id in whose
                    # place another one lives, and so the next sweep ends them.
                    request_id=sandbox.sandbox_id,
                )
            except TryLater as full:  # told at once: who waits for a sandbox may find one elsewhere
                sandbox.may_exist = existed
                raise BackendFull(f"E2B has no room: {full}", full.retry_after_s or _RETRY_FULL_S) from full
            except Final:
                sandbox.may_exist = existed
                raise
            sandbox.made(machine, asked_at_s)
            return machine

        try:
            return await patiently(ask)
        except Gone as gone:
            reason = f"has a template that E2B does not know: {image.template}"
            raise means.templates.refuse(spec.image, reason) from gone

    async def _give_back(self, sandbox: E2BSandbox) -> None:
        """After a failure that is the one to be told."""
        try:
            await sandbox.destroy()
        except SandboxFailure as failure:
            _log.warning("sandbox_left_over", sandbox_id=sandbox.sandbox_id, reason=str(failure))

    def _new_sandbox(
        self, means: _Means, sandbox_id: str, *, image: E2BImage, fingerprint: str, token: bytes, guest_version: str
    ) -> E2BSandbox:
        return E2BSandbox(
            sandbox_id,
            cloud=means.cloud,
            lifetime=means.lifetime,
            template=image.template,
            fingerprint=fingerprint,
            token=token,
            relay=relay_command(guest_version, sandbox_id),
            reconnect_s=self._section.reconnect_s,
            forget=self._forget,
        )

    def _forget(self, sandbox: E2BSandbox) -> None:
        self._live.pop(sandbox.sandbox_id, None)

    # -----------------------------------------------------------------------------------------------------------------
    # What an earlier daemon, or a lost answer, left

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, E2BSandbox]:
        means = self._started()
        wanted = {sandbox.sandbox_id: sandbox for sandbox in known if is_sandbox_id(sandbox.sandbox_id)}
        adopted: dict[str, E2BSandbox] = {}
        for listed in await self._listed(means):
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
        fingerprint, version = listed.metadata.get(_FINGERPRINT_KEY, ""), listed.metadata.get(_GUEST_KEY, "")
        if not _GUEST_VERSION.fullmatch(version) or len(fingerprint) > _FINGERPRINT_CHARS:
            raise SandboxFailure("its metadata are not those that it was made with")
        sandbox = self._new_sandbox(
            means,
            known.sandbox_id,
            image=self._section.images.get(known.spec.image) or E2BImage(template="unknown"),
            fingerprint=fingerprint,
            token=known.token,
            guest_version=version,
        )
        sandbox.adopt(listed.cloud_id, paused=listed.paused)
        self._live[sandbox.sandbox_id] = sandbox
        return sandbox

    async def sweep(self) -> int:
        means = self._started()
        condemned = [sandbox for sandbox in self._live.values() if sandbox.is_condemned]
        strays = [listed.cloud_id for listed in await self._listed(means) if self._is_stray(listed)]
        failures = await _failures(
            [
                *(sandbox.destroy() for sandbox in condemned),
                *(_kill(means.cloud, cloud_id) for cloud_id in strays),
            ]
        )
        count = len(condemned) + len(strays) - len(failures)
        if count:
            _log.info("sandboxes_swept", count=count)
        if failures:
            raise SandboxFailure(f"{len(failures)} sandboxes can't be ended") from failures[0]
        return count

    async def _listed(self, means: _Means) -> list[Listed]:
        return await patiently(lambda: means.cloud.list({_DAEMON_KEY: means.directory.daemon_id}))

    def _is_stray(self, listed: Listed) -> bool:
        """Asked after the list came: what has been made meanwhile is known by now, and what is being made has no id."""
        owner = self._live.get(listed.metadata.get(SANDBOX_KEY, ""))
        return owner is None or (owner.cloud_id is not None and owner.cloud_id != listed.cloud_id)


async def _kill(cloud: Cloud, cloud_id: str) -> None:
    await patiently(lambda: cloud.kill(cloud_id))


def _fingerprint(spec: SandboxSpec, image: E2BImage, guest: GuestFile) -> str:
    """Of the template its name: what it was built of, the cloud does not say of a sandbox."""
    template = hashlib.sha256(image.template.encode()).hexdigest()[:_TEMPLATE_HASH_CHARS]
    return f"{spec.fingerprint}-{template}-{guest.version}-{SANDBOX_UID}"


async def _failures(attempts: Iterable[Awaitable[None]]) -> list[SandboxFailure]:
    """Those that failed as such a thing may; anything else is raised."""
    failures = []
    for result in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(result, SandboxFailure):
            failures.append(result)
        elif isinstance(result, BaseException):
            raise result
    return failures
