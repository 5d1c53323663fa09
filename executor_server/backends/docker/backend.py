"""The Docker backend: a container for each sandbox, on the Engine of this host.

These walls confine a sandbox, from outside in: a host user of its own, every kind of namespace except a user namespace
(an Engine with userns-remap adds one), no network, a read-only root file system, a limited amount of memory for the
files that it writes, a control group, no capabilities, no new privileges, and our own filter of system calls; see
options.py. Any image that has a CPython will do; see images.py. The daemon reaches the guest by a socket, and the guest
reaches nothing; see containers.py.

Containers outlive the daemon. They carry the id of its state directory as a label, and so the next daemon finds them:
those that the registry knows go on, the others are removed, and so is whatever a slow or failing Engine left behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.directory import BackendDirectory, is_sandbox_id, new_sandbox_id, remove_sandbox_directory
from executor_server.backends.docker.check import examine
from executor_server.backends.docker.containers import check_socket
from executor_server.backends.docker.engine import EngineFailure, ListedContainer
from executor_server.backends.docker.guests import Plan, start_guest
from executor_server.backends.docker.images import Images
from executor_server.backends.docker.probe import PreparedImage
from executor_server.backends.docker.pulls import Pulls
from executor_server.backends.docker.resources import (
    DAEMON_LABEL,
    FINGERPRINT_LABEL,
    SANDBOX_LABEL,
    USER_LABEL,
    Resources,
)
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.backends.environments import (
    BuildMounts,
    Environment,
    Environments,
    SandboxEnvironments,
    Target,
    environment_mount,
    give_work,
    mounts_of,
)
from executor_server.backends.settings import TOKEN_BYTES, ca_bundle_of
from executor_server.backends.teardown import Creations, check_none_left, destroy_failed, failures_of, swept
from executor_server.core import SandboxFailure, SandboxSpec, SpecUnsupported
from executor_server.core.config import DockerSection

_KIND = "docker"
_NOT_FOUND = 404
_DIGEST_CHARS = 16

_log = structlog.get_logger(__name__)


class DockerBackend:
    """Implements `executor_server.backends.base.Backend`."""

    def __init__(
        self,
        state_dir: Path,
        section: DockerSection,
        *,
        egress_bundle: Callable[[], Path] | None = None,
        environments: Callable[[], Environments] | None = None,
    ) -> None:
        """`egress_bundle` and `environments` are as the local backend's."""
        self._state_dir = state_dir.absolute()
        self._section = section
        self._egress_bundle = egress_bundle
        self._environments = SandboxEnvironments(DockerSandbox.backend_name, environments)
        self._directory: BackendDirectory | None = None
        self._resources: Resources | None = None
        self._pulls: Pulls | None = None
        self._images: Images | None = None
        self._live: dict[str, DockerSandbox] = {}  # by id; also those whose destruction failed so far
        self._creations = Creations()

    @property
    def name(self) -> str:
        return "docker"

    async def start(self) -> None:
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _KIND)
        try:
            found = await examine(self._section, directory.path, directory.daemon_id)
            if found.resources is None or found.images is None or found.pulls is None:
                raise found.refusal("Docker")
        except BaseException:
            directory.release()
            raise
        for finding in found.findings:
            if not finding.ok:
                _log.warning("docker_host", subject=finding.subject, detail=finding.detail, remedy=finding.remedy)
        self._directory, self._resources, self._images, self._pulls = (
            directory,
            found.resources,
            found.images,
            found.pulls,
        )

    async def check_host(self) -> Sequence[HostFinding]:
        found = await examine(self._section, self._state_dir / _KIND, f"check{secrets.token_hex(4)}")
        await found.close()
        return found.findings

    async def fingerprint(self, spec: SandboxSpec) -> str:
        resources, images, _ = self._started()
        image = await images.ready(spec.image, may_pull=spec.may_pull)
        plan = Plan(image, spec, (), await self._ca_bundle(spec, image))
        return _fingerprint(plan, resources, await self._environments.ready(spec, _target(plan.spec, plan.image)))

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        _, images, _ = self._started()
        image = await images.ready(spec.image, may_pull=spec.may_pull)
        return await self._environments.ready(spec, _target(spec, image))

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        resources, images, _ = self._started()
        with self._creations.one():
            plan = await self._plan(images, spec)
            return await self._make(resources, images, plan, resources.users.take())

    async def create_build_sandbox(self, spec: SandboxSpec, mounts: BuildMounts) -> DockerSandbox:
        """As `BuildSandboxes.create_build_sandbox`.

        An Engine with userns-remap, or a rootless one, maps users to others on the host, so the daemon could not use
        the files of a build sandbox.
        """
        resources, images, _ = self._started()
        if mounts.work is not None and resources.facts.few_ids:
            raise SpecUnsupported("environments can't be made in containers whose Engine gives them users of its own")
        with self._creations.one():
            plan = await self._plan(images, replace(spec, packages=None, egress=mounts.egress))
            writes = mounts.work is not None
            plan = replace(plan, mounts=mounts_of(mounts), shares_user=writes)
            if mounts.work is not None:
                give_work(mounts.work, resources.build_uid)
            user = resources.build_uid if writes else resources.users.take()
            return await self._make(resources, images, plan, user)

    async def close(self) -> None:
        resources, pulls, directory = self._resources, self._pulls, self._directory
        self._resources = None
        if resources is None or pulls is None or directory is None:
            return
        await self._creations.finished()
        failures = await failures_of(sandbox.destroy() for sandbox in self._live.values())
        await pulls.close()
        await resources.engine.close()
        directory.release()
        check_none_left(failures)

    # -----------------------------------------------------------------------------------------------------------------
    # Creation

    async def _plan(self, images: Images, spec: SandboxSpec) -> Plan:
        image = await images.ready(spec.image, may_pull=spec.may_pull)
        if image.confinement.weaknesses:  # `start` could not see them when there was no image to try
            raise SandboxFailure(f"the Engine does not confine a container: {' '.join(image.confinement.weaknesses)}")
        return Plan(image, spec, images.preload(spec.image), await self._ca_bundle(spec, image))

    async def _make(self, resources: Resources, images: Images, plan: Plan, user: int) -> DockerSandbox:
        token = secrets.token_bytes(TOKEN_BYTES)
        sandbox = resources.new_sandbox(new_sandbox_id(), "", user, token, self._forget)
        self._live[sandbox.sandbox_id] = sandbox
        try:
            environment = await self._environments.held(plan.spec, _target(plan.spec, plan.image), sandbox.sandbox_id)
            if environment is not None:
                plan = replace(plan, mounts=(environment_mount(environment.directory),))
            sandbox.fingerprint = _fingerprint(plan, resources, environment)
            await start_guest(resources, sandbox, plan)
        except BaseException as error:
            await destroy_failed(sandbox)
            if isinstance(error, EngineFailure) and error.status == _NOT_FOUND:
                images.forget(plan.spec.image)  # the image was removed after it was looked up
            raise
        return sandbox

    async def _ca_bundle(self, spec: SandboxSpec, image: PreparedImage) -> Path | None:
        """Returns the file of certificate authorities for a sandbox with a network. Raises SandboxFailure.

        A socket of a runtime with a kernel of its own exists in that kernel only: its guest can't hand the listener
        out to the egress proxy. Raises SpecUnsupported then, so that a session gets its network on another backend.
        """
        if not spec.egress:
            return None
        if image.confinement.kernel:
            runtime = self._section.runtime or "the Engine's default runtime"
            raise SpecUnsupported(f"Docker sandboxes can have no network here: {runtime} has a kernel of its own")
        return await ca_bundle_of(self._egress_bundle)

    def _forget(self, sandbox: DockerSandbox) -> None:
        self._live.pop(sandbox.sandbox_id, None)
        if self._resources is not None:
            self._resources.users.release(sandbox.user)
        self._environments.release(sandbox.sandbox_id)
        _log.debug("sandbox_destroyed", sandbox_id=sandbox.sandbox_id)

    def _started(self) -> tuple[Resources, Images, BackendDirectory]:
        if self._resources is None or self._images is None or self._directory is None:
            raise SandboxFailure("the Docker backend is not started")
        return self._resources, self._images, self._directory

    # -----------------------------------------------------------------------------------------------------------------
    # Sandboxes that an earlier daemon, or a failing Engine, left

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, DockerSandbox]:
        resources, _, _ = self._started()
        wanted = {sandbox.sandbox_id: sandbox for sandbox in known if is_sandbox_id(sandbox.sandbox_id)}
        adopted = {}
        for container in await resources.engine.containers(f"{DAEMON_LABEL}={resources.daemon_id}"):
            one = wanted.get(container.labels.get(SANDBOX_LABEL, ""))
            if one is None or not container.running:
                continue
            try:
                adopted[one.sandbox_id] = self._adopted(resources, container, one)
            except SandboxFailure as failure:
                _log.warning("sandbox_not_adopted", sandbox_id=one.sandbox_id, reason=str(failure))
        removed = await self.sweep()
        self._environments.keep_only(adopted)
        if adopted or removed:
            _log.info("sandboxes_adopted", count=len(adopted), swept=removed)
        return adopted

    def _adopted(self, resources: Resources, container: ListedContainer, known: KnownSandbox) -> DockerSandbox:
        fingerprint, user = container.labels.get(FINGERPRINT_LABEL, ""), container.labels.get(USER_LABEL, "")
        if not user.isdecimal():
            raise SandboxFailure(f"container {container.container_id} does not say which user it has")
        sandbox = resources.new_sandbox(known.sandbox_id, fingerprint, int(user), known.token, self._forget)
        sandbox.container = container.container_id
        check_socket(sandbox)
        resources.users.reserve(sandbox.user)
        self._live[sandbox.sandbox_id] = sandbox
        return sandbox

    async def sweep(self) -> int:
        resources, _, directory = self._started()
        failed = [sandbox for sandbox in self._live.values() if sandbox.teardown.has_failed]
        ours = {*self._live, *resources.trials}
        directories = await asyncio.to_thread(directory.sandbox_ids)
        listed = await resources.engine.containers(f"{DAEMON_LABEL}={resources.daemon_id}")
        ours |= {*self._live, *resources.trials}  # also those made or ended during the request
        strays = [container for container in listed if container.labels.get(SANDBOX_LABEL) not in ours]
        containers_of: dict[str, list[str]] = {sandbox_id: [] for sandbox_id in directories if sandbox_id not in ours}
        for container in strays:
            containers_of.setdefault(container.labels.get(SANDBOX_LABEL, ""), []).append(container.container_id)
        failures = await failures_of(
            [
                *(sandbox.destroy() for sandbox in failed),
                *(self._remove_stray(resources, directory, *stray) for stray in containers_of.items()),
            ]
        )
        return swept(len(failed) + len(containers_of), failures, "removed")

    async def _remove_stray(
        self, resources: Resources, directory: BackendDirectory, sandbox_id: str, containers: Iterable[str]
    ) -> None:
        for container in containers:
            await resources.engine.remove(container)
        if is_sandbox_id(sandbox_id):
            await asyncio.to_thread(remove_sandbox_directory, directory.of(sandbox_id))


def _target(spec: SandboxSpec, image: PreparedImage) -> Target:
    return Target(DockerSandbox.backend_name, spec.image, image.image_id)


def _fingerprint(plan: Plan, resources: Resources, environment: Environment | None) -> str:
    image_id = plan.image.image_id.removeprefix("sha256:")[:_DIGEST_CHARS]
    parts = [plan.spec.fingerprint, image_id, resources.guest.version]
    if plan.ca_bundle is not None:  # the same content has the same path
        parts.append(hashlib.sha256(os.fsencode(plan.ca_bundle)).hexdigest()[:_DIGEST_CHARS])
    if environment is not None:
        parts.append(environment.environment_id)
    return "-".join(parts)
