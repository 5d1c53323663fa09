"""The E2B backend: a virtual machine in E2B's cloud for each sandbox.

The cloud isolates the machine from its other tenants. Within the machine, the guest's own namespaces, limits and filter
confine the code of agents (guests.py). The daemon and a guest talk over the streams of a command (endpoint.py,
transport.py). The cloud ends each machine at the end of a lifetime that the daemon renews (lifetime.py), so a machine
outlives the last daemon by one lifetime at most.

Machines outlive the daemon. Their metadata carry the id of its state directory, and so the next daemon finds them:
those that the registry knows go on, the others are ended, and so is whatever a lost answer left behind.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.directory import BackendDirectory, is_sandbox_id, new_sandbox_id
from executor_server.backends.e2b.access import open_cloud
from executor_server.backends.e2b.archives import Archives, unpack_s, upload_s
from executor_server.backends.e2b.check import check_sdk, examine
from executor_server.backends.e2b.failures import CloudFailure, Unanswered
from executor_server.backends.e2b.guests import Additions, GuestFile
from executor_server.backends.e2b.lifetime import LifetimeRenewer
from executor_server.backends.e2b.retry import with_retries
from executor_server.backends.e2b.sandbox import SANDBOX_KEY, E2BSandbox, Lifetime, end_at_cloud
from executor_server.backends.e2b.sandbox_factory import (
    DAEMON_KEY,
    FINGERPRINT_KEY,
    GUEST_KEY,
    RETRY_FULL_S,
    SandboxFactory,
)
from executor_server.backends.e2b.templates import Templates
from executor_server.backends.environments import Environment, Environments, Interpreter, SandboxEnvironments, Target
from executor_server.backends.guest_archive import pack_guest
from executor_server.backends.settings import TOKEN_BYTES, ca_bundle_of
from executor_server.backends.teardown import Creations, check_none_left, destroy_failed, failures_of, swept
from executor_server.core import BackendFull, BackendSilent, SandboxFailure, SandboxSpec
from executor_server.core.config import E2BImage, E2BSection

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Listed

_KIND = "e2b"
_GUEST_VERSION = re.compile(r"[0-9a-f]{1,64}")
_FINGERPRINT_CHARS = 256
# Seconds between the two lists of a start, when the first one lacks a sandbox.
_LIST_AGAIN_S = 1.0
# A creation may take the time of this number of requests: it makes about six, and may repeat one.
_CREATION_REQUESTS = 6

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _HostCapabilities:
    """The parts that `start` found and took possession of, and `close` releases."""

    directory: BackendDirectory
    factory: SandboxFactory
    renewer: LifetimeRenewer


class E2BBackend:
    """Implements `executor_server.backends.base.Backend`."""

    def __init__(
        self,
        state_dir: Path,
        section: E2BSection,
        *,
        egress_bundle: Callable[[], Path] | None = None,
        environments: Callable[[], Environments] | None = None,
        max_archive_bytes: int = 256 * 2**20,
    ) -> None:
        """`egress_bundle` and `environments` are as the local backend's; an environment travels to its machine as an
        archive of `max_archive_bytes` at most. Without a bundle programs trust the authorities of their template.
        """
        self._environments = SandboxEnvironments(E2BSandbox.backend_name, environments)
        self._archives = Archives(state_dir.absolute() / _KIND / "archives", max_archive_bytes)
        self._examining = asyncio.Lock()
        self._egress_bundle = egress_bundle
        self._state_dir = state_dir.absolute()
        self._section = section
        self._capabilities: _HostCapabilities | None = None
        self._live: dict[str, E2BSandbox] = {}  # by id; also those whose destruction failed so far
        self._creations = Creations()

    @property
    def name(self) -> str:
        return "e2b"

    async def start(self) -> None:
        section = self._section
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _KIND)
        try:
            cloud = await asyncio.to_thread(open_cloud, section)
            guest = await asyncio.to_thread(lambda: GuestFile.of(pack_guest(directory.path, with_proxy=True)))
            await with_retries(lambda: cloud.list({DAEMON_KEY: directory.daemon_id}))
        except BaseException as error:
            directory.release()
            if isinstance(error, CloudFailure):
                raise SandboxFailure(f"E2B can't be used: {error}") from error
            raise
        lifetime = Lifetime(section.lifetime_s, section.pause_idle_s)
        templates = Templates(section.images)
        factory = SandboxFactory(
            cloud, directory.daemon_id, guest, templates, lifetime, section.reconnect_s, self._is_taken
        )
        self._capabilities = _HostCapabilities(
            directory, factory, LifetimeRenewer(section.lifetime_s, self._live.values)
        )
        self._capabilities.renewer.start()
        sdk = check_sdk()
        if not sdk.ok:
            _log.warning("e2b_sdk_not_tried", detail=sdk.detail, remedy=sdk.remedy)

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        environment = await self._environments.ready(spec, await self._target(spec))
        if environment is not None:
            with await self._archives.packed(environment):
                pass  # made now, so that one that is too large is refused now
        return environment

    async def _target(self, spec: SandboxSpec) -> Target:
        """Describes the image for builders of environments. The first call makes a sandbox to find out."""
        templates = self._started().factory.templates
        image, prepared = templates.of(spec.image), None
        if spec.packages is not None and self._environments.are_made:
            async with self._examining:
                if templates.known(spec.image) is None:
                    trial = await self.create(replace(spec, packages=None, egress=False))
                    await trial.destroy()
                prepared = templates.known(spec.image)
        if prepared is None:
            return Target(E2BSandbox.backend_name, spec.image, image.template)
        interpreter = Interpreter(prepared.version, prepared.machine, prepared.libc, prepared.libc_version)
        return Target(E2BSandbox.backend_name, spec.image, image.template, interpreter)

    async def check_host(self) -> Sequence[HostFinding]:
        return await examine(self._section)

    async def fingerprint(self, spec: SandboxSpec) -> str:
        environment = await self._environments.ready(spec, await self._target(spec))
        return self._started().factory.fingerprint(spec, await self._ca_bundle(spec), environment)

    async def close(self) -> None:
        capabilities, self._capabilities = self._capabilities, None
        if capabilities is None:
            return
        await self._creations.finished()
        await self._archives.close()
        await capabilities.renewer.close()
        failures = await failures_of(sandbox.destroy() for sandbox in self._live.values())
        capabilities.directory.release()
        check_none_left(failures)

    def _started(self) -> _HostCapabilities:
        if self._capabilities is None:
            raise SandboxFailure("the E2B backend is not started")
        return self._capabilities

    # -----------------------------------------------------------------------------------------------------------------
    # Creation

    async def create(self, spec: SandboxSpec) -> E2BSandbox:
        factory = self._started().factory
        ca_bundle, target = await self._ca_bundle(spec), await self._target(spec)
        if len(self._live) >= self._section.max_sandboxes:
            raise BackendFull(f"all {self._section.max_sandboxes} E2B sandboxes are in use", RETRY_FULL_S)
        sandbox = factory.new_sandbox(
            new_sandbox_id(),
            image=factory.templates.of(spec.image),
            fingerprint="",
            token=secrets.token_bytes(TOKEN_BYTES),
            forget=self._forget,
            has_egress=spec.egress,
        )
        self._live[sandbox.sandbox_id] = sandbox  # now it counts towards max_sandboxes
        limit_s = _CREATION_REQUESTS * factory.cloud.access.request_timeout_s
        with self._creations.one(), ExitStack() as stack:
            try:
                environment = await self._environments.held(spec, target, sandbox.sandbox_id)
                sandbox.fingerprint = factory.fingerprint(spec, ca_bundle, environment)
                packed = None if environment is None else stack.enter_context(await self._archives.packed(environment))
                limit_s += 0.0 if packed is None else upload_s(packed.size_bytes) + unpack_s(packed.size_bytes)
                async with asyncio.timeout(limit_s):
                    await factory.build(sandbox, spec, Additions(ca_bundle, packed))
            except (TimeoutError, Unanswered) as failure:
                # When there is a machine, the content of a request may be the reason for its silence.
                kind = BackendSilent if sandbox.cloud_id is None else SandboxFailure
                await destroy_failed(sandbox)
                raise kind(str(failure) or f"a sandbox was not made within {limit_s:g} s") from failure
            except BaseException:
                await destroy_failed(sandbox)
                raise
        return sandbox

    async def _ca_bundle(self, spec: SandboxSpec) -> Path | None:
        """Returns the file of certificate authorities that the sandbox gets. Raises SandboxFailure."""
        if not spec.egress or self._egress_bundle is None:
            return None
        return await ca_bundle_of(self._egress_bundle)

    def _forget(self, sandbox: E2BSandbox) -> None:
        self._live.pop(sandbox.sandbox_id, None)
        self._environments.release(sandbox.sandbox_id)

    # -----------------------------------------------------------------------------------------------------------------
    # Machines that an earlier daemon, or a lost answer, left

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, E2BSandbox]:
        capabilities = self._started()
        wanted = {sandbox.sandbox_id: sandbox for sandbox in known if is_sandbox_id(sandbox.sandbox_id)}
        adopted: dict[str, E2BSandbox] = {}
        seen = await self._listed(capabilities)
        if wanted.keys() - {listed.metadata.get(SANDBOX_KEY) for listed in seen}:
            await asyncio.sleep(_LIST_AGAIN_S)  # one list is not enough to declare a session lost
            seen += await self._listed(capabilities)
        for listed in seen:
            one = wanted.get(listed.metadata.get(SANDBOX_KEY, ""))
            if one is None or one.sandbox_id in adopted:
                continue
            try:
                adopted[one.sandbox_id] = self._adopted(capabilities, listed, one)
            except SandboxFailure as failure:
                _log.warning("sandbox_not_adopted", sandbox_id=one.sandbox_id, reason=str(failure))
        await capabilities.renewer.renew_all()
        ended = await self.sweep()
        self._environments.keep_only(adopted)
        if adopted or ended:
            _log.info("sandboxes_adopted", count=len(adopted), swept=ended)
        return adopted

    def _adopted(self, capabilities: _HostCapabilities, listed: Listed, known: KnownSandbox) -> E2BSandbox:
        fingerprint, version = listed.metadata.get(FINGERPRINT_KEY, ""), listed.metadata.get(GUEST_KEY, "")
        if not _GUEST_VERSION.fullmatch(version) or len(fingerprint) > _FINGERPRINT_CHARS:
            raise SandboxFailure("its metadata are not those that it was made with")
        sandbox = capabilities.factory.new_sandbox(
            known.sandbox_id,
            image=self._section.images.get(known.spec.image) or E2BImage(template="unknown"),
            fingerprint=fingerprint,
            token=known.token,
            forget=self._forget,
            has_egress=known.spec.egress,
            guest_version=version,
        )
        sandbox.adopt(listed.cloud_id, paused=listed.paused)
        self._live[sandbox.sandbox_id] = sandbox
        return sandbox

    async def sweep(self) -> int:
        capabilities = self._started()
        failed = [sandbox for sandbox in self._live.values() if sandbox.teardown.has_failed]
        strays = [listed.cloud_id for listed in await self._listed(capabilities) if self._is_stray(listed)]
        failures = await failures_of(
            [
                *(sandbox.destroy() for sandbox in failed),
                *(with_retries(partial(end_at_cloud, capabilities.factory.cloud, cloud_id)) for cloud_id in strays),
            ]
        )
        return swept(len(failed) + len(strays), failures, "ended")

    async def _listed(self, capabilities: _HostCapabilities) -> list[Listed]:
        return await with_retries(
            lambda: capabilities.factory.cloud.list({DAEMON_KEY: capabilities.directory.daemon_id})
        )

    def _is_taken(self, cloud_id: str) -> bool:
        return any(sandbox.cloud_id == cloud_id for sandbox in self._live.values())

    def _is_stray(self, listed: Listed) -> bool:
        """True when a listed machine belongs to no sandbox here.

        To be called after the list has come: a machine that was made meanwhile is known by then. A sandbox that is
        being made has no id of the cloud yet, so a machine with its metadata is not a stray.
        """
        if self._is_taken(listed.cloud_id):
            return False
        owner = self._live.get(listed.metadata.get(SANDBOX_KEY, ""))
        return owner is None or (owner.cloud_id is not None and owner.cloud_id != listed.cloud_id)
