"""The Docker backend: a container for each sandbox, on the Engine of this host.

What confines a sandbox, from outside in: a host user of its own, namespaces of every kind but that of users (which an
Engine with userns-remap adds), no network, a root file system that is read-only, sized memory for what it writes, a
control group, no capabilities, no new privileges, and our own filter of system calls; see options.py. It works with any
image that has a CPython; see images.py. How the daemon reaches the guest, and the guest nothing else: guests.py.

Containers outlive the daemon. They bear the id of its state directory as a label, and so the next daemon finds them:
those that the registry knows go on, the others are removed, and so is whatever a slow or failing Engine left behind.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from executor_server.backend_config import DockerSection
from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.directory import BackendDirectory, is_sandbox_id, new_sandbox_id
from executor_server.backends.docker.check import examine
from executor_server.backends.docker.containers import check_socket
from executor_server.backends.docker.engine import EngineFailure, ListedContainer
from executor_server.backends.docker.guests import start_guest
from executor_server.backends.docker.images import Images
from executor_server.backends.docker.kit import DAEMON_LABEL, FINGERPRINT_LABEL, SANDBOX_LABEL, USER_LABEL, Kit
from executor_server.backends.docker.pulls import Pulls
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.backends.endings import check_none_left, failures_of
from executor_server.errors import SandboxFailure
from executor_server.model import SandboxSpec

_KIND = "docker"
_TOKEN_BYTES = 32
_NOT_FOUND = 404
_DIGEST_CHARS = 16

_log = structlog.get_logger(__name__)


class DockerBackend:
    """Implements `executor_server.backends.base.Backend`."""

    def __init__(self, state_dir: Path, section: DockerSection) -> None:
        self._state_dir = state_dir.absolute()
        self._section = section
        self._directory: BackendDirectory | None = None
        self._kit: Kit | None = None
        self._pulls: Pulls | None = None
        self._images: Images | None = None
        self._live: dict[str, DockerSandbox] = {}  # by id; also those whose destruction failed so far
        self._creations: set[asyncio.Future[None]] = set()

    @property
    def name(self) -> str:
        return "docker"

    async def start(self) -> None:
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _KIND)
        try:
            found = await examine(self._section, directory.path, directory.daemon_id)
            if found.kit is None or found.images is None or found.pulls is None:
                missing = [finding for finding in found.findings if finding.required and not finding.ok]
                told = " ".join(f"{finding.subject}: {finding.detail} {finding.remedy}" for finding in missing)
                raise SandboxFailure(f"this host cannot run Docker sandboxes. {told}")
        except BaseException:
            directory.release()
            raise
        for finding in found.findings:
            if not finding.ok:
                _log.warning("docker_host", subject=finding.subject, detail=finding.detail, remedy=finding.remedy)
        self._directory, self._kit, self._images, self._pulls = directory, found.kit, found.images, found.pulls

    async def check_host(self) -> Sequence[HostFinding]:
        found = await examine(self._section, self._state_dir / _KIND, f"check{secrets.token_hex(4)}")
        await found.close()
        return found.findings

    async def fingerprint(self, spec: SandboxSpec) -> str:
        kit, images, _ = self._started()
        image = await images.ready(spec.image, may_pull=spec.may_pull)
        return _fingerprint(spec, image.image_id, kit)

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        kit, images, _ = self._started()
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creations.add(finished)
        try:
            return await self._create(kit, images, spec)
        finally:
            self._creations.discard(finished)
            finished.set_result(None)

    async def close(self) -> None:
        kit, pulls, directory = self._kit, self._pulls, self._directory
        self._kit = None
        if kit is None or pulls is None or directory is None:
            return
        # Not under their hands: a creation ends by itself, and then its sandbox is known to be whole or gone.
        await asyncio.gather(*self._creations)
        failures = await failures_of(sandbox.destroy() for sandbox in self._live.values())
        await pulls.close()
        await kit.engine.close()
        directory.release()
        check_none_left(failures)

    # -----------------------------------------------------------------------------------------------------------------
    # Creation

    async def _create(self, kit: Kit, images: Images, spec: SandboxSpec) -> DockerSandbox:
        image = await images.ready(spec.image, may_pull=spec.may_pull)
        if image.confinement.weaknesses:  # `start` could not see it, when there was no image yet to try it with
            raise SandboxFailure(f"the Engine does not confine a container: {' '.join(image.confinement.weaknesses)}")
        fingerprint, token = _fingerprint(spec, image.image_id, kit), secrets.token_bytes(_TOKEN_BYTES)
        sandbox = kit.new_sandbox(new_sandbox_id(), fingerprint, kit.users.take(), token, self._forget)
        self._live[sandbox.sandbox_id] = sandbox
        try:
            await start_guest(kit, sandbox, image, spec, images.preload(spec.image))
        except BaseException as error:
            await self._give_back(sandbox)
            if isinstance(error, EngineFailure) and error.status == _NOT_FOUND:
                images.forget(spec.image)  # it was removed since it was looked up; whoever asks next learns so
            raise
        return sandbox

    async def _give_back(self, sandbox: DockerSandbox) -> None:
        """After a failure that is the one to be told."""
        try:
            await sandbox.destroy()
        except SandboxFailure as failure:
            _log.warning("sandbox_left_over", sandbox_id=sandbox.sandbox_id, reason=str(failure))

    def _forget(self, sandbox: DockerSandbox) -> None:
        self._live.pop(sandbox.sandbox_id, None)
        if self._kit is not None:
            self._kit.users.release(sandbox.user)
        _log.debug("sandbox_destroyed", sandbox_id=sandbox.sandbox_id)

    def _started(self) -> tuple[Kit, Images, BackendDirectory]:
        if self._kit is None or self._images is None or self._directory is None:
            raise SandboxFailure("the Docker backend is not started")
        return self._kit, self._images, self._directory

    # -----------------------------------------------------------------------------------------------------------------
    # What an earlier daemon, or a failing Engine, left

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, DockerSandbox]:
        kit, _, _ = self._started()
        wanted = {sandbox.sandbox_id: sandbox for sandbox in known if is_sandbox_id(sandbox.sandbox_id)}
        adopted = {}
        for container in await kit.engine.containers(f"{DAEMON_LABEL}={kit.daemon_id}"):
            one = wanted.get(container.labels.get(SANDBOX_LABEL, ""))
            if one is None or not container.running:
                continue
            try:
                adopted[one.sandbox_id] = self._adopted(kit, container, one)
            except SandboxFailure as failure:
                _log.warning("sandbox_not_adopted", sandbox_id=one.sandbox_id, reason=str(failure))
        swept = await self.sweep()
        if adopted or swept:
            _log.info("sandboxes_adopted", count=len(adopted), swept=swept)
        return adopted

    def _adopted(self, kit: Kit, container: ListedContainer, known: KnownSandbox) -> DockerSandbox:
        fingerprint, user = container.labels.get(FINGERPRINT_LABEL, ""), container.labels.get(USER_LABEL, "")
        if not user.isdecimal():
            raise SandboxFailure(f"container {container.container_id} does not say which user it has")
        sandbox = kit.new_sandbox(known.sandbox_id, fingerprint, int(user), known.token, self._forget)
        sandbox.container = container.container_id
        check_socket(sandbox)
        kit.users.reserve(sandbox.user)
        self._live[sandbox.sandbox_id] = sandbox
        return sandbox

    async def sweep(self) -> int:
        kit, _, directory = self._started()
        condemned = [sandbox for sandbox in self._live.values() if sandbox.ending.has_failed]
        ours = {*self._live, *kit.trials}
        directories = await asyncio.to_thread(directory.sandbox_ids)
        listed = await kit.engine.containers(f"{DAEMON_LABEL}={kit.daemon_id}")
        ours |= {*self._live, *kit.trials}  # what came while the Engine was asked, and what went
        strays = [container for container in listed if container.labels.get(SANDBOX_LABEL) not in ours]
        containers_of: dict[str, list[str]] = {sandbox_id: [] for sandbox_id in directories if sandbox_id not in ours}
        for container in strays:
            containers_of.setdefault(container.labels.get(SANDBOX_LABEL, ""), []).append(container.container_id)
        failures = await failures_of(
            [
                *(sandbox.destroy() for sandbox in condemned),
                *(self._remove_stray(kit, directory, *stray) for stray in containers_of.items()),
            ]
        )
        count = len(condemned) + len(containers_of) - len(failures)
        if count:
            _log.info("sandboxes_swept", count=count)
        if failures:
            raise SandboxFailure(f"{len(failures)} sandboxes can't be removed") from failures[0]
        return count

    async def _remove_stray(
        self, kit: Kit, directory: BackendDirectory, sandbox_id: str, containers: Iterable[str]
    ) -> None:
        for container in containers:
            await kit.engine.remove(container)
        if is_sandbox_id(sandbox_id):
            try:
                await asyncio.to_thread(shutil.rmtree, directory.of(sandbox_id))
            except FileNotFoundError:
                pass
            except OSError as error:
                raise SandboxFailure(f"the directory of sandbox {sandbox_id} can't be removed: {error}") from error


def _fingerprint(spec: SandboxSpec, image_id: str, kit: Kit) -> str:
    return f"{spec.fingerprint}-{image_id.removeprefix('sha256:')[:_DIGEST_CHARS]}-{kit.guest.version}"
