"""Images by name: finds out if the Engine has them, which content a name means now, and which Python is in it.

A name may come to mean another image at any time; a request looks it up again when the answer is a few seconds old. The
content of an image is examined once for each image id (probe.py). The image's own command is never run, so a command
that ends at once, or never, does not matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from executor_server.backends.docker.containers import NoSocket
from executor_server.backends.docker.engine import EngineImage
from executor_server.backends.docker.probe import PreparedImage, UselessImage, probe
from executor_server.backends.docker.pulls import Pulls
from executor_server.backends.docker.resources import Resources
from executor_server.core import ImageNotReady, SandboxFailure
from executor_server.core.config import DockerImage

DOCKER_IMAGE_REFRESH_S = 10.0
"""Seconds after which the image behind a name is looked up again."""

_PROBED = 256  # images whose Python is remembered
_SLOW_RETRY_S = 30.0


class Images:
    """The configured images. They raise ImageNotReady, whose text a client may see."""

    def __init__(self, resources: Resources, configured: Mapping[str, DockerImage], pulls: Pulls) -> None:
        self._resources = resources
        self._configured = dict(configured)
        self._pulls = pulls
        self._looked_up: dict[str, tuple[EngineImage, float]] = {}
        self._probed: dict[str, PreparedImage | UselessImage] = {}  # by image id
        self._failed: dict[str, tuple[SandboxFailure, float]] = {}  # the last failure of each, and its time
        self._locks = {name: asyncio.Lock() for name in configured}

    def preload(self, name: str) -> Sequence[str]:
        return self._configured[name].preload

    async def ready(self, name: str, *, may_pull: bool = False) -> PreparedImage:
        """Returns an image to make a sandbox of. Raises ImageNotReady, with a sentence for a client, or SandboxFailure.

        One request at a time asks the Engine about a name. Those that waited for it share its answer, failures
        included: an Engine that hangs takes long to fail, and otherwise they would fail one after the other.
        """
        if name not in self._configured:
            raise SandboxFailure(f"no image {name!r}")
        asked_at = time.monotonic()
        async with self._locks[name]:
            failure, failed_at = self._failed.get(name, (None, 0.0))
            if failure is not None and failed_at >= asked_at:
                raise failure
            try:
                image = await self._look_up(name, may_pull=may_pull)
                prepared = self._probed.get(image.image_id) or await self._probe(name, image)
            except SandboxFailure as failure:
                self._failed[name] = failure, time.monotonic()
                raise
        if isinstance(prepared, UselessImage):
            raise ImageNotReady(f"image {name!r} {prepared.reason}")
        return prepared

    def forget(self, name: str) -> None:
        """Drops the image behind the name, which turned out to be out of date."""
        self._looked_up.pop(name, None)

    async def _look_up(self, name: str, *, may_pull: bool) -> EngineImage:
        image, looked_up_at = self._looked_up.get(name, (None, 0.0))
        if image is not None and time.monotonic() - looked_up_at < DOCKER_IMAGE_REFRESH_S:
            return image
        reference = self._configured[name].reference
        image = await self._resources.engine.image(reference)
        if image is None:
            self.forget(name)
            if may_pull:
                raise self._pulls.fetch(name, reference)
            raise ImageNotReady(f"image {name!r} is not on this host, and the policy does not allow fetching it")
        self._looked_up[name] = image, time.monotonic()
        return image

    async def _probe(self, name: str, image: EngineImage) -> PreparedImage | UselessImage:
        try:
            prepared = await probe(self._resources, image)
        except NoSocket as slow:  # not remembered: another time it may answer
            raise ImageNotReady(f"image {name!r} has a Python that does not answer", _SLOW_RETRY_S) from slow
        if len(self._probed) >= _PROBED:
            self._probed.clear()
        self._probed[image.image_id] = prepared
        return prepared
