"""The daemon's environments of packages: their service, and the builder that works in the backends' build sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from executor_server.backends import Backend, BuildSandboxes, Interpreter, Target
from executor_server.core import NetworkRules, NetworkSecret, SandboxFailure
from executor_server.core.config import GIB, Config, EnvironmentsSection
from executor_server.daemon.helper_build_sandboxes import HelperBuildSandboxes
from executor_server.network.egress import Egress
from executor_server.packages import (
    BuildSettings,
    BuildSlot,
    EnvironmentObserver,
    EnvironmentService,
    EnvironmentSettings,
    UvBuilder,
    foreign_python,
)

PUBLIC_INDEX_URL = "https://pypi.org/simple"
# Bytes that one build sandbox may receive. The policy limits what they become on the disk.
_MAX_RECEIVED_BYTES = 64 * GIB


class EnvironmentOwner:
    """Owns the service. If no client asks for packages, only this object exists."""

    def __init__(self, config: Config) -> None:
        section = config.environments
        self._config = config
        self._section = section
        self._helper: HelperBuildSandboxes | None = None
        settings = EnvironmentSettings(max_bytes=section.max_bytes, build_timeout_s=section.build_timeout_s)
        self.service = EnvironmentService(section.directory_in(config.server.state_dir), settings)

    def build_in(self, backends: Sequence[Backend], egress: Egress, egress_bundle: Callable[[], Path]) -> None:
        """Sets the backends whose build sandboxes make environments, and their egress. Call it before `start`."""
        by_name: dict[str, object] = {backend.name: backend for backend in backends}

        def slot(target: Target) -> BuildSlot:
            backend = by_name.get(target.backend)
            if target.interpreter is not None:
                return self._foreign_slot(by_name.get("local"), target.interpreter, egress_bundle)
            if not isinstance(backend, BuildSandboxes):
                raise SandboxFailure(f"the {target.backend} backend has no build sandboxes for environments")
            return BuildSlot(backend, target.image)

        settings = _build_settings(self._section)
        self.service.build_with(UvBuilder(self.service.places, self.service.wheels, settings, slot, egress))

    def _foreign_slot(self, local: object, interpreter: Interpreter, egress_bundle: Callable[[], Path]) -> BuildSlot:
        """Makes environments for machines in a cloud on this host: by the local backend, or by a helper."""
        foreign = foreign_python(interpreter)
        if isinstance(local, BuildSandboxes):
            return BuildSlot(local, next(iter(self._config.local.images)), foreign)
        if self._helper is None:
            self._helper = HelperBuildSandboxes(self._config, egress_bundle)
        return BuildSlot(self._helper, self._helper.image, foreign)

    async def start(self, observers: Sequence[EnvironmentObserver]) -> None:
        """Opens what an earlier daemon has left, before backends adopt its sandboxes. Raises SandboxFailure."""
        for observer in observers:
            self.service.notify(observer)
        await self.service.start()

    async def close(self) -> None:
        await self.service.close()
        if self._helper is not None:
            await self._helper.close()


def _build_settings(section: EnvironmentsSection) -> BuildSettings:
    index_url = section.index_url or PUBLIC_INDEX_URL
    secrets: tuple[NetworkSecret, ...] = ()
    if section.index_authorization is not None:
        host = urlsplit(index_url).hostname or ""
        secrets = (NetworkSecret(host, "Authorization", section.index_authorization),)
    return BuildSettings(
        index_url=index_url,
        network=NetworkRules(allowed=section.hosts, secrets=secrets, max_received_bytes=_MAX_RECEIVED_BYTES),
        build_timeout_s=section.build_timeout_s,
        uv=section.uv,
    )
