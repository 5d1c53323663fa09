"""The actor on one of Ray's nodes: starts or adopts the daemon of its machine.

Nothing depends on the actor's state. The daemon survives the end of the actor or its raylet, and the next actor finds
the daemon by its pid file.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_server.core.config import ConfigError, load
from executor_server.fleet.membership import (
    CertificateError,
    SignedCertificate,
    accept_certificate,
    is_certified,
    request_certificate,
)
from executor_server.fleet.ray.configs import write_node_config
from executor_server.fleet.ray.layout import FleetFiles, node_name_of
from executor_server.fleet.ray.watcher import DaemonWatcher


@dataclass(frozen=True)
class NodeSettings:
    """The actor's argument. Ray's head keeps it, and all of the cluster can read it: no secrets."""

    directory: str
    config: str
    host: str
    ray_node: str
    labels: Mapping[str, str]
    authority: bytes


class NodeActor:
    """`ray.remote` makes an actor of this. Its calls return dictionaries of plain values."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._name = node_name_of(settings.labels, socket.gethostname())
        self._files = FleetFiles(Path(settings.directory)).node(self._name)
        self._problem = ""
        command = [sys.executable, "-m", "executor_server", "serve", "--config", str(self._files.daemon.config_file)]
        self._watcher = DaemonWatcher(self._files.daemon, command, self._prepare)
        if self._is_certified():
            self._watcher.start()

    def hello(self) -> dict[str, Any]:
        """Returns the node's name, and the request for a certificate where it has none."""
        request = b"" if self._is_certified() else request_certificate(self._files.certificates, self._name)
        return {"name": self._name, "request": request}

    def certify(self, authority: bytes, certificate: bytes) -> dict[str, Any]:
        """Takes the certificate, and starts the daemon."""
        try:
            accept_certificate(self._files.certificates, SignedCertificate(authority, certificate))
            self._problem = ""
        except CertificateError as error:
            self._problem = str(error)
        else:
            self._watcher.start()
        return self.status()

    def status(self) -> dict[str, Any]:
        identity = self._files.daemon.identity()
        try:
            fleet = load(self._files.daemon.config_file).fleet
            link = fleet.listen or ""
        except ConfigError:  # it was never started
            link = ""
        return {
            "name": self._name,
            "ray_node": self._settings.ray_node,
            "directory": str(self._files.root),
            "pid": identity.pid if identity is not None else 0,
            "adopted": self._watcher.adopted,
            "restarts": self._watcher.restarts,
            "certified": self._is_certified(),
            "link": link,
            "problem": self._problem or self._watcher.problem,
        }

    def stop(self) -> bool:
        """Ends the daemon in order, and with it its sessions; False when it had to be killed."""
        return self._watcher.stop()

    def _is_certified(self) -> bool:
        return is_certified(self._files.certificates, self._name, self._settings.authority)

    def _prepare(self) -> None:
        settings = self._settings
        # Labels of `ray.io/` are Ray's own; the others are the operator's, and clients may ask for them.
        labels = {key: value for key, value in settings.labels.items() if not key.startswith("ray.io/")}
        write_node_config(self._files, settings.config, settings.host, labels)
