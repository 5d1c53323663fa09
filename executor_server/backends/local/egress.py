"""The files of sandboxes with a network: those of all sandboxes, and the egress proxy's certificate authorities.

The authorities lie in another /etc, which is mounted in place of the one that sandboxes without a network have. So
neither kind needs one more mount, and sandboxes without a network have no such file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from executor_server.backends.local.layout import build_etc
from executor_server.backends.local.resources import Resources
from executor_server.backends.settings import ca_bundle_of
from executor_server.core import SandboxFailure


class EgressFiles:
    """Makes the /etc once for each bundle of authorities."""

    def __init__(self, bundle: Callable[[], Path] | None) -> None:
        self._bundle = bundle
        self._made: dict[tuple[Path, Path], Path] = {}  # by the bundle and the directory that it is made in

    async def added_to(self, resources: Resources) -> Resources:
        """Returns the resources of sandboxes with a network. Raises SandboxFailure when there is no egress proxy."""
        bundle, directory = await ca_bundle_of(self._bundle), resources.layout.etc.parent
        if (bundle, directory) not in self._made:
            try:
                etc = await asyncio.to_thread(lambda: build_etc(directory, bundle.read_bytes()))
            except OSError as error:
                raise SandboxFailure(f"the egress proxy's certificate authorities can't be copied: {error}") from error
            self._made = {(bundle, directory): etc}
        return replace(resources, layout=replace(resources.layout, etc=self._made[bundle, directory]))
