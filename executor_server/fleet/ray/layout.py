"""Files of a fleet on Ray, and the names in it.

    DIR/front/          of the front: authority/ (its key included), state/, front.toml, front.pid, front.log,
                        nodes (the addresses that the front reads), nodes.json (what the front's actor knows)
    DIR/nodes/NAME/     of each node on its own machine: certificates/, state/, node.toml, node.pid, node.log
    DIR/cluster.json    where a fleet was made on this machine alone: the processes of its Ray

Nothing secret is given to Ray: the configuration that the actors get names files, a node makes its key itself, and the
authority signs it in the front's actor. Policy and tokens come to the nodes from the front.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from executor_server.fleet.membership import is_node_name
from executor_server.fleet.ray.daemon import OwnDaemon

NAMESPACE = "remote-executor"
"""The namespace of our actors in Ray."""
FRONT_ACTOR = "executor-front"
NODE_ACTOR = "executor-node:"
RESOURCE = "executor_node"
"""The custom resource of Ray's nodes that get a daemon."""
RESOURCE_SHARE = 0.001
"""The part of it that an actor holds; Ray's autoscaler keeps a node while an actor holds something of it."""
NAME_LABEL = "remote-executor/node"
"""The label of a Ray node that names its daemon; without it the daemon has the host's name."""
MAX_NAME_CHARS = 24


@dataclass(frozen=True)
class FleetFiles:
    """The directory of a fleet."""

    root: Path

    @property
    def cluster(self) -> Path:
        return self.root / "cluster.json"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    @property
    def front(self) -> FrontFiles:
        return FrontFiles(self.root / "front")

    def node(self, name: str) -> NodeFiles:
        assert is_node_name(name), name
        return NodeFiles(self.nodes / name)

    def nodes_here(self) -> list[str]:
        """Returns the names of the nodes that have a folder on this machine."""
        if not self.nodes.is_dir():
            return []
        return sorted(path.name for path in self.nodes.iterdir() if is_node_name(path.name))


@dataclass(frozen=True)
class FrontFiles:
    root: Path

    @property
    def authority(self) -> Path:
        return self.root / "authority"

    @property
    def daemon(self) -> OwnDaemon:
        return OwnDaemon(self.root, "front")

    @property
    def addresses(self) -> Path:
        return self.root / "nodes"

    @property
    def registry(self) -> Path:
        return self.root / "nodes.json"


@dataclass(frozen=True)
class NodeFiles:
    root: Path

    @property
    def certificates(self) -> Path:
        return self.root / "certificates"

    @property
    def daemon(self) -> OwnDaemon:
        return OwnDaemon(self.root, "node")


def node_name_of(labels: Mapping[str, str], host: str) -> str:
    """Returns the name of the daemon on a Ray node: its label, else the host's name, turned into a valid name."""
    text = re.sub(r"[^a-z0-9-]+", "-", (labels.get(NAME_LABEL) or host).lower()).strip("-") or "node"
    if len(text) <= MAX_NAME_CHARS:
        return text
    # Hosts of one group often differ at the end of their names only.
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: MAX_NAME_CHARS - 9].rstrip('-')}-{digest}"
