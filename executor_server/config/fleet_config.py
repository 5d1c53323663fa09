"""The section [fleet]: a daemon as the front of a fleet, or as one of its nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from executor_server.config.settings import AbsolutePath, Seconds, Section

NodeName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?$")]


class FleetSection(Section):
    """Many daemons behind one address. Without a role the daemon belongs to no fleet."""

    role: Literal["front", "node"] | None = None
    """`front` places sessions on nodes and makes none itself; `node` serves while a front renews its lease."""
    certificates: AbsolutePath | None = None
    """The folder with `ca.pem`, `cert.pem` and `key.pem` of this front or node (`executor-server fleet init`)."""
    # -- of a front
    nodes: Annotated[tuple[str, ...], Field(max_length=4096)] = ()
    """The nodes' addresses for the front, `HOST:PORT` each."""
    dns: str | None = None
    """A DNS name, `HOST:PORT`, whose addresses are those of the nodes; it is asked every `dns_interval_s`."""
    dns_interval_s: Seconds = 5.0
    """Seconds between two questions for that name."""
    nodes_file: AbsolutePath | None = None
    """A file that lists the nodes' addresses, one a line; it is read again when it changes."""
    proxy: bool = False
    """True when the front passes calls for sessions on to their nodes, for clients that can't reach nodes."""
    park_s: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 5.0
    """Seconds that a request for a session waits for a place when all nodes are full."""
    report_interval_s: Seconds = 0.5
    """Seconds between two reports of a node."""
    lease_s: Seconds = 3.0
    """Seconds for which a node may serve after a report that the front has answered. One second after them the front
    declares the node's sessions lost."""
    fence_s: Seconds = 10.0
    """Seconds without a lease after which a node ends its sandboxes."""
    # -- of a node
    listen: str | None = None
    """The address at which the node serves its front, `HOST:PORT`."""
    address: str | None = None
    """The address at which clients reach the node. Not set: the first TCP address of `server.listen`."""
    labels: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)
    """Labels of the node, for clients that ask for some with `node_labels`."""
