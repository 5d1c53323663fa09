"""The files of sandboxes with a network: those of all others, with the certificate authorities of the egress proxy.

The authorities lie in another /etc, which is mounted in place of the one that sandboxes without a network have. So
neither kind has a mount more than before, and those without a network have no such file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from executor_server.backends.local.layout import build_etc
from executor_server.backends.local.resources import Resources
from executor_server.core import SandboxFailure


class EgressFiles:
    """Makes the /etc once for each bundle of authorities."""

    def __init__(self, bundle: Callable[[], Path] | None) -> None:
        self._bundle = bundle
        self._made: dict[tuple[Path, Path], Path] = {}  # by the bundle and the directory that it is made in

    def added_to(self, resources: Resources) -> Resources:
        """Returns what sandboxes with a network are made of. May block for a moment.

        Raises SandboxFailure when there is no egress proxy.
        """
        if self._bundle is None:
            raise SandboxFailure("no egress proxy runs, which a sandbox with a network needs")
        bundle, directory = self._bundle(), resources.layout.etc.parent
        try:
            if (bundle, directory) not in self._made:
                self._made = {(bundle, directory): build_etc(directory, bundle.read_bytes())}
        except OSError as error:
            raise SandboxFailure(f"the certificate authorities of the egress proxy can't be copied: {error}") from error
        return replace(resources, layout=replace(resources.layout, etc=self._made[bundle, directory]))
