"""The seam between backends and the environments that sandboxes see: what the service of environments promises.

An environment is a directory of this host, made once from packages and never changed. A backend mounts it read-only at
ENVIRONMENT_PATH, where the guest adds its packages to those of the image; E2B's machines get it as an archive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from executor_server.backends.base import Sandbox
from executor_server.core import PackagesSpec, SandboxFailure, SandboxSpec, SpecUnsupported
from executor_server.guest.wire.paths import ENVIRONMENT_PATH, PROGRAMS_PATH, WORK_PATH


@dataclass(frozen=True)
class Interpreter:
    """The Python of an image on a cloud's machines, which no build sandbox can examine."""

    version: tuple[int, int]
    machine: str  # as uname -m
    libc: str  # "glibc" or "musl"
    libc_version: tuple[int, int]


@dataclass(frozen=True)
class Target:
    """The image that an environment is made for."""

    backend: str  # name of the backend
    image: str  # name of the image
    identity: str  # changes when the content of the image does
    interpreter: Interpreter | None = None  # None: a build sandbox of this backend and image finds it out


@dataclass(frozen=True)
class Environment:
    """An environment that is ready. Every user may read what is in the directory; no link in it leads out of it."""

    environment_id: str  # "env-" and a hash of what it is made of; part of a sandbox's fingerprint
    directory: Path  # on this host; the packages are in `site` below it, their programs in `site/bin`
    size_bytes: int
    modules: tuple[str, ...]  # top-level modules that it has
    pins: tuple[str, ...] = ()  # packages that it has, sorted, as "numpy==2.5.5"


@dataclass(frozen=True)
class BuildMounts:
    """The mounts of a sandbox in which the daemon itself works on environments. No agent code runs in one.

    Either `work` is mounted and code may write to it, or `environment` is and code can write only inside the sandbox.
    """

    work: Path | None = None  # writable, at WORK_PATH: the cache and the environment that is being made
    programs: Path | None = None  # read-only, at PROGRAMS_PATH: uv
    environment: Path | None = None  # read-only, at ENVIRONMENT_PATH, as sessions will see it
    egress: bool = False


@runtime_checkable
class BuildSandboxes(Protocol):
    """A backend that can make sandboxes for the daemon's own work on environments: local and Docker."""

    async def create_build_sandbox(self, spec: SandboxSpec, mounts: BuildMounts) -> Sandbox:
        """Makes a sandbox of the spec's image with these mounts; as `Backend.create` otherwise.

        All with a `work` directory run as the same user of the host, who gets the directory, so that its files have one
        owner: a reserved user under root's daemon, else the daemon's own. Build sandboxes of an earlier daemon are
        destroyed when the next one starts. Raises SpecUnsupported where there can be no such sandboxes.
        """
        ...


class Environments(Protocol):
    """The environments of this daemon. `executor_server.packages.EnvironmentService` is the implementation."""

    async def ready(self, packages: PackagesSpec, target: Target) -> Environment:
        """Returns the environment of these packages, made for this image.

        If it is missing, it is made in the background, and ImageNotReady is raised with progress and a retry time.
        Raises EnvironmentFailed when it can't be made.
        """
        ...

    def hold(self, environment_id: str, backend: str, sandbox_id: str) -> None:
        """Keeps an environment from being evicted until `release`, over restarts of the daemon. Idempotent.

        To be called before the environment is mounted, within seconds of `ready`. Raises SandboxFailure when it is not
        there any more, or the hold can't be written.
        """
        ...

    def release(self, sandbox_id: str) -> None:
        """Ends the hold of a sandbox that is gone. Idempotent; unknown ids are ignored."""
        ...

    def held_by(self, sandbox_id: str) -> str:
        """Returns the id of the environment that a sandbox holds; empty without one."""
        ...

    def keep_only(self, backend: str, sandbox_ids: Collection[str]) -> None:
        """Releases every other sandbox of a backend: those of an earlier daemon that were not adopted."""
        ...


# ---------------------------------------------------------------------------------------------------------------------
# For backends


@dataclass(frozen=True)
class Mount:
    """A directory of the host that a sandbox sees, in addition to those of every sandbox."""

    source: Path
    target: str
    read_only: bool = True


def mounts_of(mounts: BuildMounts) -> tuple[Mount, ...]:
    all_mounts = (
        None if mounts.work is None else Mount(mounts.work, WORK_PATH, read_only=False),
        None if mounts.programs is None else Mount(mounts.programs, PROGRAMS_PATH),
        None if mounts.environment is None else environment_mount(mounts.environment),
    )
    return tuple(mount for mount in all_mounts if mount is not None)


def environment_mount(directory: Path) -> Mount:
    return Mount(directory, ENVIRONMENT_PATH)


def have_environment(mounts: Iterable[Mount]) -> bool:
    return any(mount.target == ENVIRONMENT_PATH for mount in mounts)


def give_work(directory: Path, uid: int | None) -> None:
    """Gives a build sandbox's directory to the user that writes there, once. Raises SandboxFailure.

    `uid` None stands for the daemon's own user, who owns it already. Everything below it was made by that user.
    """
    try:
        if uid is not None and directory.lstat().st_uid != uid:
            os.chown(directory, uid, uid, follow_symlinks=False)
    except OSError as error:
        raise SandboxFailure(f"a directory to make environments in can't be used: {error}") from error


def refuse_packages(spec: SandboxSpec, backend: str) -> None:
    """Raises SpecUnsupported for a spec with packages, in a backend that was given no environments."""
    if spec.packages is not None:
        raise SpecUnsupported(f"the {backend} backend makes no environments of packages here")


class SandboxEnvironments:
    """The environments of one backend's sandboxes: found, and held as long as their sandbox is there."""

    def __init__(self, backend: str, find: Callable[[], Environments] | None) -> None:
        """`find` returns the daemon's environments; None: it makes none, and no sandbox can have one."""
        self._backend = backend
        self._find = find

    @property
    def are_made(self) -> bool:
        """True when sandboxes can have one."""
        return self._find is not None

    async def ready(self, spec: SandboxSpec, target: Target) -> Environment | None:
        """Returns the environment of the spec, None when it has no packages.

        Raises SpecUnsupported, and what `Environments.ready` does.
        """
        if self._find is None:
            refuse_packages(spec, self._backend)
        if spec.packages is None or self._find is None:
            return None
        return await self._find().ready(spec.packages, target)

    async def held(self, spec: SandboxSpec, target: Target, sandbox_id: str) -> Environment | None:
        """Returns the environment, which stays until `release`; as `ready` otherwise.

        It is held before it is mounted, and the hold fails if it was evicted meanwhile. So an environment that is being
        removed is never mounted.
        """
        environment = await self.ready(spec, target)
        if environment is not None:
            assert self._find is not None
            self._find().hold(environment.environment_id, self._backend, sandbox_id)
        return environment

    def release(self, sandbox_id: str) -> None:
        if self._find is not None:
            self._find().release(sandbox_id)

    def keep_only(self, sandbox_ids: Collection[str]) -> None:
        if self._find is not None:
            self._find().keep_only(self._backend, sandbox_ids)
