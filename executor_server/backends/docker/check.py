"""check-host: finds out what this host's Engine can isolate and limit, in sentences that say how to mend it.

For limits, the Engine's own information suffices. For isolation, it starts a container that is confined and
reached like a sandbox and reports what it sees; see probe.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.docker import seccomp
from executor_server.backends.docker.engine import OLDEST_API, Engine, EngineFacts, EngineFailure
from executor_server.backends.docker.host import NoEngine, engine_socket
from executor_server.backends.docker.images import Images
from executor_server.backends.docker.probe import PreparedImage, Unreachable
from executor_server.backends.docker.pulls import Pulls
from executor_server.backends.docker.resources import Resources
from executor_server.backends.findings import Findings
from executor_server.core import ImageNotReady, SandboxFailure
from executor_server.core.config import DockerImage, DockerSection

CONCURRENCY = 8  # requests to the Engine at a time
PULL_TIMEOUT_S = 1800.0
DOCKER_REQUEST_TIMEOUT_S = 30.0
"""Seconds that one request to the Engine may take."""
_FARAWAY_REMEDY = (
    "The Engine must run on this host, not in a virtual machine, and see the same files as the daemon: no daemon in a "
    "container of its own."
)

# CVE-2024-21626, CVE-2025-31133, -52565 and -52881 each allow code to leave a container. By minor version: the first
# release (patch, release candidate) that has the fixes.
_RUNC = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-rc\.(\d+))?")
_MENDED_RUNC = {(1, 2): (8, 0), (1, 3): (3, 0), (1, 4): (0, 3)}
_FINAL = 1_000  # in the place of a release candidate's number: after all of them


@dataclass
class Examination(Findings):
    """The findings, and the parts of a backend; these are None when a required thing is missing."""

    engine: Engine | None = None
    resources: Resources | None = None
    pulls: Pulls | None = None
    images: Images | None = None

    async def close(self) -> None:
        """Releases the parts, when only the findings were wanted."""
        if self.pulls is not None:
            await self.pulls.close()
        if self.engine is not None:
            await self.engine.close()


async def examine(section: DockerSection, directory: Path, daemon_id: str) -> Examination:
    """Tries everything that a sandbox needs, and makes one from each available image."""
    found = Examination()
    try:
        facts = await _connect(found, section)
        if facts is not None:
            _report_engine(found, facts, section)
            if found.suffices:
                await _try_images(found, facts, section, directory, daemon_id)
    except BaseException:
        await found.close()
        raise
    if not found.suffices or found.resources is None:
        await found.close()
        found.engine = found.resources = found.pulls = found.images = None
    return found


async def _connect(found: Examination, section: DockerSection) -> EngineFacts | None:
    try:
        path = await asyncio.to_thread(engine_socket, section.host)
    except NoEngine as problem:
        found.add("Engine", False, problem.detail, problem.remedy)
        return None
    found.engine = Engine(path, timeout_s=DOCKER_REQUEST_TIMEOUT_S, concurrency=CONCURRENCY)
    try:
        facts = await found.engine.connect()
    except EngineFailure as failure:
        found.add("Engine", False, f"{path}: {failure}.", "See whether it is well: docker info.")
        return None
    api = ".".join(map(str, OLDEST_API))
    new_enough = found.engine.api_version >= OLDEST_API
    detail = f"Docker Engine {facts.version} at {path}."
    found.add(
        "Engine", new_enough, detail, f"One that speaks version {api} of its interface is needed: 20.10 or newer."
    )
    return facts


def _report_engine(found: Examination, facts: EngineFacts, section: DockerSection) -> None:
    runtime = section.runtime or facts.default_runtime
    detail = f"{runtime} is registered." if runtime in facts.runtimes else f"The Engine has no runtime {runtime}."
    remedy = f"Register it in the Engine's daemon.json, or choose one of {', '.join(facts.runtimes)}."
    found.add("runtime", runtime in facts.runtimes, detail, remedy)
    if runtime == "runc" and facts.runc_version is not None and not is_mended(facts.runc_version):
        found.add(
            "runc",
            False,
            f"Version {facts.runc_version} is older than the fixes of CVE-2024-21626 and CVE-2025-31133, unless its "
            "distribution has mended it without saying so in the version.",
            "Update it to 1.2.8, 1.3.3, 1.4.0 or newer.",
            required=False,
        )
    machine = facts.abilities.machine
    if not facts.filters_system_calls:
        found.add("system call filter", False, "The Engine was built without seccomp.", "Install another build of it.")
    elif not seccomp.supports(machine):
        found.add("system call filter", False, f"There is none for {machine}.", "Run sandboxes on x86_64 or aarch64.")
    for subject, ok, enforced, missing in _limits(facts):
        remedy = (
            "See the warnings of docker info; rootless Engines need control groups of version 2 that systemd delegates."
        )
        found.add(subject, ok, enforced if ok else missing, remedy, required=False)
    slow = facts.storage_driver == "vfs"
    detail = f"{facts.storage_driver}." if not slow else "vfs: each sandbox costs a whole copy of its image."
    found.add("storage driver", not slow, detail, "Set the Engine up to use overlay2.", required=False)


def _limits(facts: EngineFacts) -> Iterator[tuple[str, bool, str, str]]:
    """Yields (subject, True when it is enforced, the sentence when it is, the sentence when it is not)."""
    abilities, by = facts.abilities, f"by control groups, version {facts.cgroup_version}"
    yield (
        "memory limit",
        abilities.limits_memory,
        f"The kernel enforces it {by}; files in memory count.",
        "The Engine can't limit memory; the supervisor of each sandbox watches over it, now and then.",
    )
    yield (
        "swap limit",
        facts.swap_limit,
        "A sandbox gets no swap.",
        "What a sandbox may not have as memory it may have as swap.",
    )
    yield (
        "process limit",
        facts.pids_limit,
        f"The kernel enforces it {by}.",
        "The Engine can't count a sandbox's processes; a limit for its user stands in.",
    )
    yield (
        "processor limit",
        abilities.limits_processors,
        "The kernel can enforce it; without one, sandboxes share the processors evenly.",
        "limits.cpus is not enforced.",
    )


def is_mended(version: str) -> bool:
    """True when a runc has the fixes. A distribution's version (1.1.5+ds1) is read as the release it was made from."""
    found = _RUNC.match(version)
    if found is None:
        return False
    major, minor, patch = (int(number) for number in found.groups()[:3])
    oldest = _MENDED_RUNC.get((major, minor))
    if oldest is None:
        return (major, minor) > max(_MENDED_RUNC)
    return (patch, int(found[4]) if found[4] else _FINAL) >= oldest


async def _try_images(
    found: Examination, facts: EngineFacts, section: DockerSection, directory: Path, daemon_id: str
) -> None:
    assert found.engine is not None
    engine = found.engine
    resources = await asyncio.to_thread(
        Resources.build, engine, facts, daemon_id=daemon_id, directory=directory, runtime=section.runtime
    )
    found.pulls = Pulls(engine.pull, PULL_TIMEOUT_S)
    found.images = Images(resources, section.images, found.pulls)
    names = tuple(section.images)
    results = await asyncio.gather(*(found.images.ready(name) for name in names), return_exceptions=True)
    none_works = not any(isinstance(result, PreparedImage) for result in results)
    for name, result in zip(names, results, strict=True):
        if isinstance(result, PreparedImage):
            _report_image(found, name, section.images[name], result)
        elif isinstance(result, SandboxFailure):
            _report_failure(found, name, section.images[name], result, none_works=none_works)
        else:
            raise result
    found.resources = resources


def _report_failure(
    found: Examination, name: str, configured: DockerImage, failure: SandboxFailure, *, none_works: bool
) -> None:
    """`none_works`: every image failed, so the reason may not be the image."""
    if isinstance(failure, ImageNotReady) or not none_works:
        remedy = f"Build it or fetch it: docker pull {configured.reference}; or set docker.images.{name}."
        found.add(f"image {name}", False, f"{configured.reference}: {failure}.", remedy, required=False)
    elif found.has("sandbox"):
        return  # reported for another image
    elif isinstance(failure, Unreachable):
        found.add("sandbox", False, f"One was tried, and {failure}.", _FARAWAY_REMEDY)
    else:
        remedy = "See the Engine's own log, and whether it runs anything: docker run --rm hello-world."
        found.add("sandbox", False, f"One was tried of image {name}: {failure}.", remedy)


def _report_image(found: Examination, name: str, configured: DockerImage, image: PreparedImage) -> None:
    version = ".".join(map(str, image.version))
    detail = f"{configured.reference} has CPython {version} ({image.python})."
    found.add(f"image {name}", True, detail, required=False)
    found.add_confinement(image.confinement.findings(), "Set docker.runtime to one that isolates so.")
