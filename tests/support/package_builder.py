"""The real builder of environments, on a backend of this host, with an index of the tests' own internet."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor_server.backends.docker import DockerBackend
from executor_server.backends.environments import BuildMounts, Target
from executor_server.backends.local import LocalBackend
from executor_server.core import NetworkRules, PackagesSpec, SandboxSpec
from executor_server.core.config.backend_config import DockerImage, DockerSection
from executor_server.network.egress import EgressService
from executor_server.packages import BuildSettings, BuildSlot, Built, Lock, Places, UvBuilder, Wheels
from executor_server.packages.build_sandbox import Order, open_build_sandbox
from tests.support.backends import DOCKER_IMAGE
from tests.support.egress_service import place_authority, settings_for
from tests.support.internet.world import Internet
from tests.support.package_index.index import PackageIndex

MIB = 2**20
TIMEOUT_S = 120.0


@dataclass
class Made:
    """An environment that the builder made."""

    directory: Path
    lock: Lock
    built: Built
    progress: list[str] = field(default_factory=list)

    @property
    def site(self) -> Path:
        return self.directory / "site"

    @property
    def files(self) -> dict[str, str]:
        """A digest of each file, by its path in the site directory."""
        return digests(self.site)

    @property
    def bytecode(self) -> list[str]:
        return sorted(str(path.relative_to(self.site)) for path in self.site.rglob("*.pyc"))


def digests(directory: Path) -> dict[str, str]:
    """Content, mode and modification time of each file below a directory, as one digest."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        made_of = (status.st_mode, status.st_uid, status.st_mtime_ns if path.is_file() else 0, content)
        found[str(path.relative_to(directory))] = hashlib.sha256(repr(made_of).encode()).hexdigest()
    return found


@dataclass
class Building:
    """A builder, and what it needs."""

    builder: UvBuilder
    places: Places
    backend: LocalBackend | DockerBackend
    target: Target

    async def build(self, *requirements: str, max_bytes: int = 256 * MIB, **packages: Any) -> Made:
        """Resolves and makes an environment. Raises what the builder raises, and leaves no directory then."""
        spec = PackagesSpec(tuple(sorted(requirements)), max_environment_bytes=max_bytes, **packages)
        progress: list[str] = []
        lock = await self.builder.resolve(spec, self.target, lambda made: progress.append(str(made)))
        return await self._make(lock, spec, progress)

    async def lock(self, *requirements: str) -> Lock:
        """Resolves."""
        return await self.builder.resolve(PackagesSpec(requirements), self.target, lambda _: None)

    async def make(self, lock: Lock, *requirements: str) -> Made:
        """Makes the environment of a lock."""
        return await self._make(lock, PackagesSpec(requirements), [])

    async def _make(self, lock: Lock, spec: PackagesSpec, progress: list[str]) -> Made:
        staging = Path(tempfile.mkdtemp(prefix="made-", dir=self.places.staging))
        try:
            built = await self.builder.make(lock, spec, self.target, staging, lambda made: progress.append(str(made)))
        except BaseException:
            shutil.rmtree(staging)
            raise
        return Made(staging, lock, built, progress)

    async def run(self, made: Made, code: str) -> list[dict[str, Any]]:
        """Runs code in a sandbox that sees the environment; returns the JSON objects that it printed."""
        spec = SandboxSpec("base", 512 * MIB, 64, 64 * MIB, 60.0)
        said: list[dict[str, Any]] = []
        async with open_build_sandbox(Order(self.backend, spec, BuildMounts(environment=made.directory))) as sandbox:
            await sandbox.run(code, time_s=TIMEOUT_S, on_line=said.append)
        return said

    def existing(self) -> list[str]:
        """Ids of the sandboxes that there are."""
        live = self.backend._live
        return list(live) if isinstance(live, dict) else [sandbox.sandbox_id for sandbox in live]

    @property
    def left(self) -> list[Path]:
        """What builds have left in the directories in which they work."""
        return [*self.places.work.iterdir()]


@asynccontextmanager
async def building(
    internet: Internet,
    index: PackageIndex,
    egress_settings: Mapping[str, Any] | None = None,
    *,
    backend: str = "local",
    **settings: Any,
) -> AsyncIterator[Building]:
    """A builder with directories of its own."""
    async with AsyncExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="b-"))
        stack.callback(shutil.rmtree, directory)
        directory.chmod(0o755)
        place_authority(directory / "egress")
        egress = EgressService(settings_for(internet, **(egress_settings or {})), directory / "egress")
        stack.push_async_callback(egress.close)
        made: LocalBackend | DockerBackend
        if backend == "docker":
            section = DockerSection(images={"base": DockerImage(reference=DOCKER_IMAGE)})
            made = DockerBackend(directory / "state", section, egress_bundle=lambda: egress.ca_bundle)
        else:
            made = LocalBackend(directory / "state", egress_bundle=lambda: egress.ca_bundle)
        (directory / "state").mkdir()
        stack.push_async_callback(made.close)
        await made.start()
        await made.adopt([])
        places = Places(directory / "state/environments")
        for place in (places.root, places.work, places.programs, places.wheels, places.staging):
            place.mkdir(mode=0o755)
        rules = NetworkRules((f"{index.host}:443", f"{index.files_host}:443"))
        chosen = BuildSettings(**{"index_url": index.url, "network": rules, "build_timeout_s": TIMEOUT_S, **settings})
        builder = UvBuilder(places, Wheels(places), chosen, lambda _: BuildSlot(made, "base"), egress)
        yield Building(builder, places, made, Target(backend, "base", "1"))
