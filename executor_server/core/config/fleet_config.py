"""The section [fleet]: a daemon as the front of a fleet, or as one of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import InitErrorDetails

from executor_server.core.config.key_types import AbsolutePath, HostPort, Seconds, Section
from executor_server.core.config.problems import contradiction, refuse

NodeName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?$")]

_SOURCES = ("nodes", "dns", "nodes_file")
_OF_FRONT = (*_SOURCES, "refused_nodes")
_OF_NODE = ("listen", "labels")


class FleetSection(Section):
    """Many daemons behind one address. Without a role the daemon belongs to no fleet."""

    role: Literal["front", "node"] | None = None
    """`front` places sessions on nodes and makes none itself; `node` has sessions, and serves its front alone."""
    certificates: AbsolutePath | None = None
    """The folder with this member's `ca.pem`, `cert.pem` and `key.pem` (`executor-server fleet init`)."""
    # -- of a front
    nodes: Annotated[tuple[HostPort, ...], Field(max_length=4096)] = ()
    """The nodes' addresses for the front, `HOST:PORT` each."""
    dns: HostPort | None = None
    """A DNS name, `HOST:PORT`, of the nodes' addresses; resolved every five seconds."""
    nodes_file: AbsolutePath | None = None
    """A file with the nodes' addresses, one a line; read again when it changes."""
    refused_nodes: Annotated[tuple[NodeName, ...], Field(max_length=4096)] = ()
    """Names of nodes that the front refuses, such as after a certificate was stolen. SIGHUP and `executor-server admin
    reload` read them again and close the links of new ones."""
    park_s: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 5.0
    """Seconds that a session request waits if all nodes are full."""
    report_interval_s: Seconds = 0.5
    """Seconds between two reports of a node."""
    lease_s: Seconds = 3.0
    """Seconds without a report of a node, plus one, after which the front reports the node's sessions lost."""
    fence_s: Seconds = 10.0
    """Seconds beyond `lease_s` without an answer of the front after which a node ends its sessions."""
    wrong_retry_s: Seconds = 30.0
    """Seconds before the front retries a node that sent something wrong. They double each time, up to twenty times."""
    # -- of a node
    listen: HostPort | None = None
    """The address at which the node serves its front, `HOST:PORT`."""
    labels: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)
    """Labels of the node, which clients can require with `node_labels`."""

    @model_validator(mode="after")
    def _check_role(self) -> FleetSection:
        refuse(self, [*self._missing(), *self._of_other_role(), *self._times()])
        return self

    def _missing(self) -> Iterator[InitErrorDetails]:
        if self.role is not None and self.certificates is None:
            yield contradiction(("certificates",), f"is missing: a {self.role} needs a certificate", self)
        if self.role == "front" and not any(getattr(self, key) for key in _SOURCES):
            yield contradiction(("nodes",), "is missing: a front needs nodes, dns or nodes_file", self)
        if self.role == "node" and self.listen is None:
            yield contradiction(("listen",), "is missing: the front connects to a node there", self)

    def _of_other_role(self) -> Iterator[InitErrorDetails]:
        others = {"front": _OF_NODE, "node": _OF_FRONT, None: (*_OF_FRONT, *_OF_NODE)}[self.role]
        for key in others:
            if value := getattr(self, key):
                whose = "front" if key in _OF_FRONT else "node"
                yield contradiction((key,), f"is for a {whose}, but role is {self.role!r}", value, also=[("role",)])

    def _times(self) -> Iterator[InitErrorDetails]:
        if self.report_interval_s > self.lease_s / 4:
            text = "must be at most a quarter of lease_s: one lost report must not lose a node"
            yield contradiction(("report_interval_s",), text, self.report_interval_s, also=[("lease_s",)])
        if self.fence_s < self.lease_s:
            text = "must be at least lease_s"
            yield contradiction(("fence_s",), text, self.fence_s, also=[("lease_s",)])
