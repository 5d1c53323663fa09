"""Local backends whose sandboxes are forked by a fork server, each of them: none falls back to bubblewrap unnoticed.

EXECUTOR_TEST_FORK_SERVER=shared runs the tests that make a backend in their process on such a one; `make test-forked`
does. Sandboxes with the memory that the tests give them by default come from a template process with libraries then, as those of
sessions with default limits do, and smaller ones from one without. Tests of the fork server itself ask for it by
`ForkedBackend`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor_server.backends.local import LocalBackend
from executor_server.backends.local.fork_server import fork_servers
from executor_server.backends.local.fork_server.fork_servers import Fallback
from executor_server.backends.local.fork_server.forked_process import ForkedProcess
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.core import SandboxSpec
from executor_server.core.config import LocalImage

VARIABLE = "EXECUTOR_TEST_FORK_SERVER"
DEFAULT_MEMORY_BYTES = 2**29
# The reason of the fork server for a sandbox that no fork server makes by design.
_BY_DESIGN = "unsupported"


def local_backend(state_dir: Path, images: Mapping[str, LocalImage] | None = None, **options: Any) -> LocalBackend:
    """Returns the backend that this run of the tests is for."""
    if os.environ.get(VARIABLE) != "shared":
        return LocalBackend(state_dir, images, **options)
    fork_servers._MODULES_FROM_BYTES = DEFAULT_MEMORY_BYTES
    return ForkedBackend(state_dir, images, **options)


class ForkedBackend(LocalBackend):
    """Waits for a fork server before each sandbox that it may make."""

    async def fingerprint(self, spec: SandboxSpec) -> str:
        return await super().fingerprint(replace(spec, fork_server="shared"))

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        spec = replace(spec, fork_server="shared")
        await self.fork_server_for(spec)
        sandbox = await super().create(spec)
        fallbacks = self.fork_server_stats().fallbacks
        assert isinstance(sandbox.process, ForkedProcess) or fallbacks[_BY_DESIGN], fallbacks
        return sandbox

    async def fork_server_for(self, spec: SandboxSpec) -> None:
        """Waits until there is a fork server that can make such sandboxes, if there can be one."""
        capabilities = self._started()
        if spec.packages is not None:
            return
        image = await self._image(capabilities, spec.image)
        with contextlib.suppress(Fallback):
            resources = await self._resources(capabilities, spec)
            await capabilities.fork_servers.trial(capabilities.fork_servers.blueprint(resources, image, spec))
