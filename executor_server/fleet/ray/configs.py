"""The configurations of the front and the nodes of a fleet on Ray, derived from the operator's one configuration.

Its sections apply to both, with three exceptions: the listeners and tokens for clients, the policy and the state key
are the front's; addresses and the state directory are chosen here; of [fleet] each gets the keys of its role.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from executor_server.core.config import Config, load, parse_toml, to_toml, validated
from executor_server.fleet.ray.daemon import OwnDaemon
from executor_server.fleet.ray.layout import FrontFiles, NodeFiles
from executor_server.fleet.ray.processes import write_whole

LINK_PORT = 50061
FENCE_S = 60.0
"""`fleet.fence_s` if the configuration has none. Nodes end their sandboxes when no front comes back in this time, and
a loaded Ray took up to 36 s to start one again (docs/performance.md)."""

_OF_A_NODE = ("listen", "labels")
_OF_A_FRONT = ("nodes", "dns", "nodes_file", "park_s")
# Clients reach the front alone.
_OF_CLIENTS = ("listen", "token_file", "peer_socket", "tls_cert", "tls_key", "tls_client_ca")
# The front sends the content of these files.
_SENT = {"policy": ("file",), "state": ("key_file",)}


def check_config(text: str) -> None:
    """Raises ConfigError where the text can't be the configuration of a front and of nodes."""
    sections = _sections(text)
    of_front = _without(sections["fleet"], _OF_A_NODE) | {"role": "front", "nodes_file": "/nodes"}
    of_node = _without(sections["fleet"], _OF_A_FRONT) | {"role": "node", "listen": "127.0.0.1:1"}
    for fleet in (of_front, of_node):
        validated(Config, {**sections, "fleet": {**fleet, "certificates": "/certificates"}})


def write_front_config(files: FrontFiles, text: str) -> Config:
    """Writes the configuration of the front. Raises ConfigError."""
    sections = _sections(text)
    server = sections["server"]
    server["state_dir"] = str(files.daemon.state_dir)
    fleet = _without(sections["fleet"], _OF_A_NODE)
    fleet |= {
        "role": "front",
        "certificates": str(files.authority / "front"),
        "nodes_file": str(files.addresses),
    }
    return _written(files.daemon, {**sections, "fleet": fleet})


def write_node_config(files: NodeFiles, text: str, host: str, labels: Mapping[str, str]) -> Config:
    """Writes the configuration of a node that is reached at the IP address `host`. Raises ConfigError.

    The port is chosen when the node is made, and stays: the front knows it.
    """
    sections = _sections(text)
    for section, keys in _SENT.items():
        if section in sections:
            sections[section] = _without(sections[section], keys)
    before = load(files.daemon.config_file).fleet.listen if files.daemon.config_file.exists() else None
    server = {**_without(sections["server"], _OF_CLIENTS), "state_dir": str(files.daemon.state_dir)}
    fleet = _without(sections["fleet"], _OF_A_FRONT)
    fleet |= {
        "role": "node",
        "certificates": str(files.certificates),
        "listen": _kept(before, host),
        "labels": {**fleet.get("labels", {}), **labels},
    }
    return _written(files.daemon, {**sections, "server": server, "fleet": fleet})


def _sections(text: str) -> dict[str, Any]:
    sections = parse_toml(text.encode(), "configuration of the fleet")
    fleet = sections.get("fleet", {})
    # This also checks the shape of the tables. [fleet] has keys of both roles: each is checked with its role.
    validated(Config, {**sections, "fleet": {} if isinstance(fleet, dict) else fleet})
    return {**sections, "server": sections.get("server", {}), "fleet": {"fence_s": FENCE_S, **fleet}}


def _without(section: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def _written(daemon: OwnDaemon, sections: Mapping[str, Any]) -> Config:
    config = validated(Config, sections)
    daemon.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(daemon.config_file, to_toml(config).encode())
    return config


def _kept(before: str | None, host: str) -> str:
    """Returns the previous address if the machine still has its host; else one with a free port."""
    text = f"[{host}]" if ":" in host else host
    if before is not None and before.rpartition(":")[0] == text:
        return before
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (LINK_PORT, 0):
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, wanted))
            except OSError:
                continue
            return f"{text}:{trial.getsockname()[1]}"
    raise OSError(f"no port is free at {host}")
