"""The local backend: sandboxes made of Linux namespaces by bubblewrap, on this host, without a service or an account.

It works for root and for an ordinary user; `check_host` reports, and `start` requires, that this host can isolate.
These walls confine a sandbox, from outside in: a host user of its own (under root's daemon; else the daemon's user),
namespaces of every kind, no network, a file system of its own (layout.py), a control group or else resource limits
(cgroups.py), no capabilities, no new privileges, and a filter of system calls (seccomp_program.py). bwrap_process.py
puts them up in order; where the policy allows it, a sandbox is forked behind the same walls instead (fork_server/).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.channel import SocketEndpoint
from executor_server.backends.directory import SOCKET_NAME, BackendDirectory, new_sandbox_id
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
from executor_server.backends.local.building import Plan, blueprint_of, build_sandbox
from executor_server.backends.local.egress import EgressFiles
from executor_server.backends.local.fork_server.check import report_fork_server
from executor_server.backends.local.fork_server.fork_server import Blueprint
from executor_server.backends.local.fork_server.fork_servers import Fallback, ForkServers, ForkServerStats
from executor_server.backends.local.host import Examination, examine_host
from executor_server.backends.local.images import Image, probe_image
from executor_server.backends.local.recovery import fork_server_of, recover, still_serves
from executor_server.backends.local.resources import Resources
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.backends.local.system import neutral_directory
from executor_server.backends.settings import TOKEN_BYTES
from executor_server.backends.teardown import Creations, check_none_left, destroy_failed, failures_of
from executor_server.backends.users import DEFAULT_UID_BASE, HostUsers
from executor_server.core import ImageNotReady, SandboxFailure, SandboxSpec
from executor_server.core.config import LocalImage

DEFAULT_IMAGE = "base"
# Below the state directory: a directory for each sandbox, and the files that all of them mount.
_SANDBOXES, _RUNTIME = "sandboxes", "runtime"
_SWEEP_TIMEOUT_S = 30.0
# Index of the first user of a sandbox in the range of host users.
_FIRST_USER = 128

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _HostCapabilities:
    """The parts that `start` found and took possession of, and `close` releases."""

    resources: Resources
    directory: BackendDirectory
    users: HostUsers | None
    build_uid: int | None  # the user of the build sandboxes that write; None: the daemon's own
    images: dict[str, Image]  # as they are now; those of `resources` are as they were at the start
    fork_servers: ForkServers


class LocalBackend:
    """Implements `executor_server.backends.base.Backend`.

    `images` maps names to Python environments of this host; without any, "base" is the interpreter of the daemon.
    `egress_bundle` returns the file of the egress proxy's certificate authorities, or raises SandboxFailure; without
    it, sandboxes can have no network. `environments` returns the daemon's environments; without it, a spec with
    packages raises SpecUnsupported.
    """

    def __init__(
        self,
        state_dir: Path,
        images: Mapping[str, LocalImage] | None = None,
        *,
        bwrap: Path | None = None,
        egress_bundle: Callable[[], Path] | None = None,
        environments: Callable[[], Environments] | None = None,
    ) -> None:
        self._state_dir = state_dir.absolute()
        self._images = dict(images or {DEFAULT_IMAGE: LocalImage(python=Path(sys.executable))})
        self._bwrap = bwrap
        self._egress_files = EgressFiles(egress_bundle)
        self._environments = SandboxEnvironments(LocalSandbox.backend_name, environments)
        self._capabilities: _HostCapabilities | None = None
        self._live: set[LocalSandbox] = set()  # from before a sandbox has any part until no part is left
        self._creations = Creations()
        self._probing = asyncio.Lock()

    @property
    def name(self) -> str:
        return "local"

    async def start(self) -> None:
        directory = await asyncio.to_thread(BackendDirectory.take, self._state_dir, _SANDBOXES)
        try:
            found = await self._examine()
            if found.resources is None:
                raise found.refusal("local")
        except BaseException:
            directory.release()
            raise
        # The first user is the examination's: at the next start it must not be that of an adopted sandbox. The second
        # owns what build sandboxes write, and so is the same for every daemon. The others below _FIRST_USER are
        # for fork servers.
        users, build_uid = (HostUsers(found.uids[_FIRST_USER:]), found.uids[1]) if found.uids else (None, None)
        images = dict(found.resources.images)
        fork_servers = ForkServers(self._state_dir, _fork_server_users(found.uids))
        self._capabilities = _HostCapabilities(found.resources, directory, users, build_uid, images, fork_servers)

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, LocalSandbox]:
        capabilities = self._started()
        tokens = {sandbox.sandbox_id: sandbox.token for sandbox in known}
        found = self._recover(capabilities, tokens)
        adopted = {
            sandbox.sandbox_id: sandbox for sandbox in found if sandbox.sandbox_id in tokens and still_serves(sandbox)
        }
        swept = await self._remove(capabilities, [sandbox for sandbox in found if sandbox.sandbox_id not in adopted])
        capabilities.fork_servers.adopt({fork_server_of(sandbox) for sandbox in adopted.values()})
        self._environments.keep_only(adopted)
        if adopted or swept:
            _log.info("sandboxes_adopted", adopted=len(adopted), swept=swept)
        return adopted

    async def sweep(self) -> int:
        capabilities = self._started()
        capabilities.fork_servers.sweep()
        failed = [sandbox for sandbox in self._live if sandbox.teardown.has_failed]
        return await self._remove(capabilities, [*failed, *self._recover(capabilities, {})])

    async def fingerprint(self, spec: SandboxSpec) -> str:
        capabilities = self._started()
        resources = await self._resources(capabilities, spec)
        image = await self._image(capabilities, spec.image)
        return _fingerprint(resources, image, spec, await self._environments.ready(spec, _target(image)))

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        image = await self._image(self._started(), spec.image)
        return await self._environments.ready(spec, _target(image))

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        capabilities = self._started()
        with self._creations.one():
            image = await self._image(capabilities, spec.image)
            plan = Plan(await self._resources(capabilities, spec), image, spec)
            return await self._make(capabilities, plan, _next_user(capabilities))

    async def keep_fork_servers(self, specs: Sequence[SandboxSpec]) -> Sequence[SandboxSpec]:
        """Runs fork servers for sandboxes of these specs and no others; if there are too many, the first ones get one.

        Specs for other backends and specs whose image can't be used now get none.

        Returns the specs whose fork server has just become ready. Raises SandboxFailure.
        """
        capabilities = self._started()
        blueprints: dict[SandboxSpec, Blueprint] = {}
        for spec in specs:
            if spec.fork_server == "off" or (spec.backends and self.name not in spec.backends):
                continue
            with contextlib.suppress(Fallback, SandboxFailure):
                image = await self._image(capabilities, spec.image)
                plan = Plan(await self._resources(capabilities, spec), image, spec)
                blueprints[spec] = blueprint_of(plan, capabilities.fork_servers)
        ready = await capabilities.fork_servers.keep(blueprints.values())
        return [spec for spec, blueprint in blueprints.items() if blueprint in ready]

    async def create_build_sandbox(self, spec: SandboxSpec, mounts: BuildMounts) -> LocalSandbox:
        capabilities = self._started()
        spec = replace(spec, packages=None, egress=mounts.egress)
        with self._creations.one():
            image = await self._image(capabilities, spec.image)
            resources = await self._resources(capabilities, spec)
            plan = Plan(resources, image, spec, mounts_of(mounts))
            if mounts.work is None:
                host_uid = _next_user(capabilities)
            else:
                host_uid = capabilities.build_uid
                give_work(mounts.work, host_uid)
            return await self._make(capabilities, plan, host_uid)

    async def _make(self, capabilities: _HostCapabilities, plan: Plan, host_uid: int | None) -> LocalSandbox:
        sandbox = self._new_sandbox(capabilities, host_uid)
        try:
            environment = await self._environments.held(plan.spec, _target(plan.image), sandbox.sandbox_id)
            if environment is not None:
                plan = replace(plan, mounts=(environment_mount(environment.directory),))
            sandbox.fingerprint = _fingerprint(plan.resources, plan.image, plan.spec, environment)
            await build_sandbox(sandbox, plan, capabilities.directory.daemon_id, capabilities.fork_servers)
        except BaseException as error:
            await destroy_failed(sandbox)
            if isinstance(error, OSError):  # no descriptors, memory or space left
                raise SandboxFailure(f"cannot make a sandbox: {error}") from error
            raise
        return sandbox

    def fork_server_stats(self) -> ForkServerStats:
        """Returns counts of sandboxes that the fork server has made, and of those that it left to bubblewrap."""
        return self._capabilities.fork_servers.stats if self._capabilities is not None else ForkServerStats()

    async def check_host(self) -> Sequence[HostFinding]:
        found = await self._examine()
        if found.resources is not None:
            await report_fork_server(found, found.resources, _fork_server_users(found.uids))
        return found.findings

    async def close(self) -> None:
        capabilities, self._capabilities = self._capabilities, None
        await self._creations.finished()
        failures = await failures_of(sandbox.destroy() for sandbox in self._live)
        if capabilities is not None:
            failures += await failures_of([capabilities.fork_servers.close()])
            capabilities.directory.release()
        check_none_left(failures)

    def _started(self) -> _HostCapabilities:
        if self._capabilities is None:
            raise SandboxFailure("the local backend is not started")
        return self._capabilities

    async def _examine(self) -> Examination:
        base = DEFAULT_UID_BASE if os.geteuid() == 0 else None
        return await examine_host(neutral_directory(self._state_dir / _RUNTIME), self._images, self._bwrap, base)

    async def _image(self, capabilities: _HostCapabilities, name: str) -> Image:
        """Returns the image as it is now: an environment may be rebuilt at any time, even from another Python."""
        image = capabilities.images.get(name)
        if image is None:
            raise SandboxFailure(f"no image {name!r}")
        if image.is_current():
            return image
        async with self._probing:
            if not capabilities.images[name].is_current():
                configured = self._images[name]
                try:
                    capabilities.images[name] = await asyncio.to_thread(
                        probe_image, name, configured.python, configured.preload
                    )
                except SandboxFailure as problem:
                    _log.warning("image_not_usable", image=name, error=str(problem))
                    raise ImageNotReady(f"image {name!r} cannot be used as it is now") from problem
                _log.info("image_changed", image=name)
            return capabilities.images[name]

    async def _resources(self, capabilities: _HostCapabilities, spec: SandboxSpec) -> Resources:
        if not spec.egress:
            return capabilities.resources
        return await self._egress_files.added_to(capabilities.resources)

    # -----------------------------------------------------------------------------------------------------------------
    # Sandboxes of this daemon and of earlier ones

    def _new_sandbox(self, capabilities: _HostCapabilities, host_uid: int | None) -> LocalSandbox:
        sandbox_id = new_sandbox_id()
        directory = capabilities.directory.of(sandbox_id)
        endpoint = SocketEndpoint(directory / SOCKET_NAME, secrets.token_bytes(TOKEN_BYTES))
        forget = self._forgetting(capabilities.users)
        sandbox = LocalSandbox(sandbox_id, directory, endpoint, "", forget, host_uid=host_uid)
        self._live.add(sandbox)
        return sandbox

    def _recover(self, capabilities: _HostCapabilities, tokens: Mapping[str, bytes]) -> list[LocalSandbox]:
        """Returns the sandboxes that have a directory and were unknown; now they are known and their users taken."""
        known = {sandbox.sandbox_id for sandbox in self._live}
        forget = self._forgetting(capabilities.users)
        try:
            unknown = [sandbox_id for sandbox_id in capabilities.directory.sandbox_ids() if sandbox_id not in known]
            found = [recover(capabilities.directory.of(name), tokens.get(name, b""), forget) for name in unknown]
        except OSError as error:
            raise SandboxFailure(f"cannot look for sandboxes of an earlier daemon: {error}") from error
        for sandbox in found:
            self._live.add(sandbox)
            if capabilities.users and sandbox.host_uid is not None:
                capabilities.users.reserve(sandbox.host_uid)
        return found

    def _forgetting(self, users: HostUsers | None) -> Callable[[LocalSandbox], None]:
        def forget(sandbox: LocalSandbox) -> None:
            self._live.discard(sandbox)
            if users and sandbox.host_uid is not None:
                users.release(sandbox.host_uid)
            self._environments.release(sandbox.sandbox_id)

        return forget

    async def _remove(self, capabilities: _HostCapabilities, sandboxes: Sequence[LocalSandbox]) -> int:
        """Destroys these, and control groups without a sandbox; returns their number. Tries all before it raises."""
        deadline = asyncio.get_running_loop().time() + _SWEEP_TIMEOUT_S
        results = await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes), return_exceptions=True)
        # After the sandboxes: one that a killed daemon was making may have a group that no record names yet.
        living = {sandbox.sandbox_id for sandbox in self._live}
        groups = capabilities.resources.leftover_cgroups(capabilities.directory.daemon_id, living)
        results += await asyncio.gather(*(group.remove(deadline) for group in groups), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            _log.warning("sandbox_left_over", error=str(failure))
        if failures:
            raise SandboxFailure(f"{len(failures)} sandboxes can't be removed: {failures[0]}") from failures[0]
        return len(results)


def _next_user(capabilities: _HostCapabilities) -> int | None:
    return capabilities.users.take() if capabilities.users else None


def _fork_server_users(uids: range | None) -> tuple[int, int, int] | None:
    """Returns the users of fork servers, as `ForkServers` takes them."""
    return (uids[2], uids[_FIRST_USER], len(uids) - _FIRST_USER) if uids else None


def _target(image: Image) -> Target:
    return Target(LocalSandbox.backend_name, image.name, image.identity)


def _fingerprint(resources: Resources, image: Image, spec: SandboxSpec, environment: Environment | None) -> str:
    layout = resources.layout
    network = f"-{layout.etc.name}" if spec.egress else ""  # another bundle makes another /etc
    packages = f"-{environment.environment_id}" if environment else ""
    return f"{spec.fingerprint}-{image.identity}-{layout.guest.version}{network}{packages}"
