"""check-host: what this host's Engine can isolate and limit, in sentences that say how to mend it.

What the Engine says of itself is believed for limits. For isolation a container is asked that is confined as a sandbox
is, and reached as one; see probe.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from executor_server.backend_config import DockerImage, DockerSection
from executor_server.backends.base import HostFinding
from executor_server.backends.docker import seccomp
from executor_server.backends.docker.engine import OLDEST_API, Engine, EngineFacts, EngineFailure
from executor_server.backends.docker.host import NoEngine, engine_socket
from executor_server.backends.docker.images import Images
from executor_server.backends.docker.kit import Kit
from executor_server.backends.docker.probe import PreparedImage, Unreachable
from executor_server.backends.docker.pulls import Pulls
from executor_server.errors import ImageNotReady, SandboxFailure

_FARAWAY_REMEDY = (
    "The Engine must run on this host, not in a virtual machine, and see the same files as the daemon: no daemon in a "
    "container of its own."
)

# CVE-2024-21626, CVE-2025-31133, -52565 and -52881: each lets a container out. By minor version: the first without.
_RUNC = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-rc\.(\d+))?")
_MENDED_RUNC = {(1, 2): (8, 0), (1, 3): (3, 0), (1, 4): (0, 3)}
_FINAL = 1_000  # in the place of a release candidate's number: after all of them


@dataclass
class Examination:
    """What was found, in the order of finding; the parts are None when a required thing is missing."""

    findings: list[HostFinding] = field(default_factory=list)
    engine: Engine | None = None
    kit: Kit | None = None
    pulls: Pulls | None = None
    images: Images | None = None

    def add(self, subject: str, ok: bool, detail: str, remedy: str = "", *, required: bool = True) -> None:
        self.findings.append(HostFinding(subject, ok, detail, "" if ok else remedy, required))

    def has(self, subject: str) -> bool:
        return any(finding.subject == subject for finding in self.findings)

    @property
    def suffices(self) -> bool:
        return all(finding.ok for finding in self.findings if finding.required)

    async def close(self) -> None:
        """For whoever wanted the findings only."""
        if self.pulls is not None:
            await self.pulls.close()
        if self.engine is not None:
            await self.engine.close()


async def examine(section: DockerSection, directory: Path, daemon_id: str) -> Examination:
    """Tries everything that a sandbox needs, one of the first image that is there included."""
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
    if not found.suffices or found.kit is None:
        await found.close()
        found.engine = found.kit = found.pulls = found.images = None
    return found


async def _connect(found: Examination, section: DockerSection) -> EngineFacts | None:
    try:
        path = await asyncio.to_thread(engine_socket, section.host)
    except NoEngine as problem:
        found.add("Engine", False, problem.detail, problem.remedy)
        return None
    found.engine = Engine(path, timeout_s=section.request_timeout_s, concurrency=section.concurrency)
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
    """(subject, whether it is enforced, the sentence when it is, the sentence when it is not)."""
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
    """Whether a runc has the fixes. A distribution's version (1.1.5+ds1) is read as the release it was made from."""
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
    kit = await asyncio.to_thread(
        Kit.build, engine, facts, daemon_id=daemon_id, directory=directory, runtime=section.runtime
    )
    found.pulls = Pulls(engine.pull, section.pull_timeout_s)
    found.images = Images(kit, section.images, found.pulls, section.image_refresh_s)
    names = tuple(section.images)
    results = await asyncio.gather(*(found.images.ready(name) for name in names), return_exceptions=True)
    hopeless = not any(isinstance(result, PreparedImage) for result in results)
    for name, result in zip(names, results, strict=True):
        if isinstance(result, PreparedImage):
            _report_image(found, name, section.images[name], result)
        elif isinstance(result, SandboxFailure):
            _report_failure(found, name, section.images[name], result, hopeless=hopeless)
        else:
            raise result
    found.kit = kit


def _report_failure(
    found: Examination, name: str, configured: DockerImage, failure: SandboxFailure, *, hopeless: bool
) -> None:
    """`hopeless`: no other image could be tried with success, so this may be no matter of the image."""
    if isinstance(failure, ImageNotReady) or not hopeless:
        remedy = f"Build it or fetch it: docker pull {configured.reference}; or set docker.images.{name}."
        found.add(f"image {name}", False, f"{configured.reference}: {failure}.", remedy, required=False)
    elif found.has("sandbox"):
        pass  # the same, of another image
    elif isinstance(failure, Unreachable):
        found.add("sandbox", False, f"One was tried, and {failure}.", _FARAWAY_REMEDY)
    else:
        remedy = "See the Engine's own log, and whether it runs anything: docker run --rm hello-world."
        found.add("sandbox", False, f"One was tried of image {name}: {failure}.", remedy)


def _report_image(found: Examination, name: str, configured: DockerImage, image: PreparedImage) -> None:
    version = ".".join(map(str, image.version))
    detail = f"{configured.reference} has CPython {version} ({image.python})."
    found.add(f"image {name}", True, detail, required=False)
    for subject, ok, detail in image.confinement.findings():
        if not found.has(subject):  # the same for each image
            found.add(subject, ok, detail, "Set docker.runtime to one that isolates so.")
