"""The configuration of `namespaces`, read from its command line."""

from __future__ import annotations

import os
from binascii import a2b_base64

from .environment import Environment
from .root_files import Sizes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Config:
    """The configuration of a sandbox in a machine; namespaces.py describes its JSON."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.socket = str(values["socket"])
        self.uid = int(values["uid"])
        self.gid = int(values["gid"])
        self.environment = {str(name): str(value) for name, value in values["environment"].items()}
        self.processes = int(values["processes"])
        self.sizes = Sizes(int(values["disk_bytes"]), int(values["shm_bytes"]), int(values["max_files"]))
        self.seccomp = a2b_base64(values["seccomp"]) if values["seccomp"] is not None else None
        self.packages = Environment.of(values["packages"]) if values.get("packages") else None
        self.guest: dict[str, Any] = values["guest"]
        self.directory = os.path.dirname(self.socket)
