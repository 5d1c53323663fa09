"""Images by name: whether the Engine has them, which content a name means now, and which Python is in it.

A name may come to mean another image at any time; it is looked up again every few seconds, by whoever asks then. What
is in an image is found out once for each content, by running its Python, confined as a sandbox is: `python3`, else
`python`, as its PATH has it. The image's own command is not run, so one that ends at once or never does not matter.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from executor_server.backends.docker.engine import EngineImage
from executor_server.backends.docker.kit import Kit, ShortRun
from executor_server.backends.docker.options import ContainerRequest
from executor_server.backends.docker.pulls import Pulls
from executor_server.config import DockerImage
from executor_server.errors import ImageNotReady, SandboxFailure
from executor_server.model import SandboxSpec

OLDEST_PYTHON = (3, 9)

_COMMANDS = ("python3", "python")
_PROBE_TIMEOUT_S = 20.0
_PROBE_SPEC = SandboxSpec("", memory_bytes=2**28, processes=16, disk_bytes=2**20, orphan_time_s=1.0)
_PROBED = 256  # images whose Python is remembered
_PATH_CHARS = 1024

# Written so that a Python of any age can say how old it is.
_PROBE = """\
import json, os, socket, sys
told = {"implementation": getattr(getattr(sys, "implementation", None), "name", "python"),
    "version": sys.version_info[:2], "executable": sys.executable}
if sys.version_info >= (3, 9):
    told["user"] = os.getuid()
    told["writes_root"] = os.access("/", os.W_OK)
    told["interfaces"] = [name for _, name in socket.if_nameindex()]
    told["processes"] = [name for name in os.listdir("/proc") if name.isdigit()]
    told["status"] = dict(line.split(None, 1) for line in open("/proc/self/status") if len(line.split()) > 1)
print(json.dumps(told))
"""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Confinement:
    """What a process in a container of ours said of how it is confined."""

    user: int
    writes_root: bool
    interfaces: tuple[str, ...]
    is_alone: bool
    has_capabilities: bool
    can_gain_privileges: bool
    is_filtered: bool


@dataclass(frozen=True)
class PreparedImage:
    """An image that sandboxes can be made of."""

    image_id: str
    volumes: tuple[str, ...]
    python: str  # the interpreter's path inside
    version: tuple[int, int]
    confinement: Confinement


class Images:
    """Knows the configured images. Its answers are ImageNotReady, which names no more than a client may know."""

    def __init__(self, kit: Kit, configured: Mapping[str, DockerImage], pulls: Pulls, refresh_s: float) -> None:
        self._kit = kit
        self._configured = dict(configured)
        self._pulls = pulls
        self._refresh_s = refresh_s
        self._looked_up: dict[str, tuple[EngineImage, float]] = {}
        self._probed: dict[str, PreparedImage | str] = {}  # by image id; text: why it can't serve
        self._turns = {name: asyncio.Lock() for name in configured}

    def preload(self, name: str) -> Sequence[str]:
        return self._configured[name].preload

    async def ready(self, name: str, *, may_pull: bool = False) -> PreparedImage:
        """What to make a sandbox of. Raises ImageNotReady, with a sentence that says why, or SandboxFailure."""
        if name not in self._configured:
            raise SandboxFailure(f"no image {name!r}")
        async with self._turns[name]:  # one asks the Engine; the others have the answer
            image = await self._look_up(name, may_pull=may_pull)
            prepared = self._probed.get(image.image_id)
            if prepared is None:
                prepared = await self._prepare(image)
                if len(self._probed) >= _PROBED:
                    self._probed.clear()
                self._probed[image.image_id] = prepared
        if isinstance(prepared, str):
            raise ImageNotReady(f"image {name!r} {prepared}")
        return prepared

    def forget(self, name: str) -> None:
        """The name's meaning turned out to be out of date."""
        self._looked_up.pop(name, None)

    async def _look_up(self, name: str, *, may_pull: bool) -> EngineImage:
        image, looked_up_at = self._looked_up.get(name, (None, 0.0))
        if image is not None and time.monotonic() - looked_up_at < self._refresh_s:
            return image
        reference = self._configured[name].reference
        image = await self._kit.engine.image(reference)
        if image is None:
            self.forget(name)
            if may_pull:
                raise self._pulls.fetch(name, reference)
            raise ImageNotReady(f"image {name!r} is not on this host, and the policy does not allow fetching it")
        self._looked_up[name] = image, time.monotonic()
        return image

    async def _prepare(self, image: EngineImage) -> PreparedImage | str:
        """The image with its Python, or why it can't serve. Raises EngineFailure when that can't be found out."""
        facts = self._kit.facts
        if (image.system, image.architecture) != ("linux", facts.architecture):
            return f"is made for {image.system}/{image.architecture}, and this host is linux/{facts.architecture}"
        run = await self._probe(image)
        if run is None:
            return "has no Python: there is neither python3 nor python on its PATH"
        if run.exit_code is None:
            return f"has a Python that does not answer within {_PROBE_TIMEOUT_S:g} s"
        try:
            return _read_probe(image, run)
        except (ValueError, KeyError, TypeError, IndexError):
            _log.info("image_probe_failed", image=image.image_id, exit_code=run.exit_code)
            return f"has a Python that does not run (exit code {run.exit_code})"

    async def _probe(self, image: EngineImage) -> ShortRun | None:
        user = self._kit.users.take()
        try:
            for command in _COMMANDS:
                request = ContainerRequest(
                    image_id=image.image_id,
                    image_volumes=image.volumes,
                    command=(command, "-I", "-S", "-c", _PROBE),
                    user=user,
                    spec=_PROBE_SPEC,
                    labels={},
                )
                run = await self._kit.run_briefly(request, _PROBE_TIMEOUT_S)
                if not run.could_not_begin:
                    return run
        finally:
            self._kit.users.release(user)
        return None


def _read_probe(image: EngineImage, run: ShortRun) -> PreparedImage | str:
    told: Any = json.loads(run.stdout)
    implementation, version = str(told["implementation"])[:32], (int(told["version"][0]), int(told["version"][1]))
    if implementation != "cpython" or version < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return f"has {implementation} {version[0]}.{version[1]}; CPython {wanted} or newer is needed"
    python, status = str(told["executable"]), told["status"]
    if not python.startswith("/") or len(python) > _PATH_CHARS or "\0" in python:
        raise ValueError("not the path of an interpreter")
    confinement = Confinement(
        user=int(told["user"]),
        writes_root=bool(told["writes_root"]),
        interfaces=tuple(map(str, told["interfaces"])),
        is_alone=told["processes"] == ["1"],
        has_capabilities=any(int(status[key], 16) for key in ("CapPrm:", "CapEff:", "CapBnd:")),
        can_gain_privileges=status.get("NoNewPrivs:", "").strip() != "1",
        is_filtered=status.get("Seccomp:", "").strip() == "2",
    )
    return PreparedImage(image.image_id, image.volumes, python, version, confinement)
