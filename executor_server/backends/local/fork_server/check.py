"""The fork server's part of check-host: makes a fork server of the first image, without its modules."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from executor_server.backends.findings import Findings
from executor_server.backends.local.fork_server.fork_servers import Fallback, ForkServers
from executor_server.backends.local.resources import Resources
from executor_server.core import SandboxFailure, SandboxSpec

_TRIAL_TIME_S = 15.0
_SUBJECT = "fork server"
_SPEC = SandboxSpec(image="", memory_bytes=2**27, processes=16, disk_bytes=2**20, orphan_time_s=1.0)
_WITHOUT = "bubblewrap makes every sandbox, with the same walls, more slowly"


async def report_fork_server(found: Findings, resources: Resources, users: tuple[int, int, int] | None) -> None:
    """Adds a finding, which is not required."""
    image = next(iter(resources.images.values()))
    with tempfile.TemporaryDirectory(prefix="executor-check-") as directory:
        fork_servers = ForkServers(Path(directory), users)
        try:
            blueprint = replace(fork_servers.blueprint(resources, image, _SPEC), modules=())
            async with asyncio.timeout(_TRIAL_TIME_S):
                problem = await fork_servers.trial(blueprint)
        except (Fallback, SandboxFailure, OSError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
        finally:
            await fork_servers.close()
    if problem:
        remedy = "It needs Linux 5.12, user namespaces, and a /proc that nothing covers."
        found.add(_SUBJECT, False, f"No fork server can be made ({problem}): {_WITHOUT}.", remedy, required=False)
    else:
        detail = "Fork server available; the policy can turn it off."
        found.add(_SUBJECT, True, detail)
