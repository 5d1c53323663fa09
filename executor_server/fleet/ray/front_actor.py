"""The actor of the front: keeps the front's daemon running, and an actor on each of Ray's nodes.

A fleet has one such actor, since Ray knows it by a name. When it ends, the front keeps running, and the actor that Ray
starts next adopts the front.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from executor_server.core.config import StateDir, StateDirError, read_token
from executor_server.fleet.membership import CertificateError, issue_front, renew_front
from executor_server.fleet.ray.configs import write_front_config
from executor_server.fleet.ray.engine import Engine, EngineError, RayNode
from executor_server.fleet.ray.layout import FrontFiles
from executor_server.fleet.ray.node_actor import NodeActor, NodeSettings
from executor_server.fleet.ray.roster import Roster
from executor_server.fleet.ray.watcher import DaemonWatcher

STEP_S = 0.5
"""Seconds between two checks of Ray's nodes and of the front."""
CERTIFICATE_LOOK_S = 3600.0
"""Seconds between two checks of the end of the front's certificate."""
ASK_INTERVAL_S = 2.0
"""Seconds between two requests to the front for its nodes."""
EMPTY_LOOKS = 2
"""Checks in a row that must find a node drained and empty before it is released."""
DEFAULT_PLACES = 64

MAX_MORE_NODES = 8
"""Nodes to request at a time in addition to the existing ones."""
HOLD_S = 120.0
"""Seconds for which the request to Ray stands after nothing waits any more. A parked session waits for seconds, and a
machine takes a minute or two to start: a request to Ray that is withdrawn at once would never be met."""

_SERVED = ("NODE_STATE_SERVING", "NODE_STATE_DRAINING", "NODE_STATE_WAITING", "NODE_STATE_SILENT")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FrontSettings:
    """The actor's argument. Ray's head keeps it, and all of the cluster can read it: no secrets."""

    directory: str
    """The fleet's directory on each machine."""
    front_directory: str
    config: str
    selector: Mapping[str, str]


@dataclass
class Scaling:
    """Decides how many nodes to request in total: Ray's autoscaler counts existing nodes too. Takes the time as an
    argument."""

    wanted: int = 0
    until_s: float = 0.0

    def decide(self, now_s: float, *, parked: int, nodes: int, places: int) -> int:
        """Returns the number of nodes to ask for; 0: none. `places` are the sessions that one node may have."""
        if parked > 0:
            more = min(-(-parked // max(1, places)), MAX_MORE_NODES)
            self.wanted, self.until_s = max(self.wanted, nodes + more), now_s + HOLD_S
        elif now_s >= self.until_s or nodes >= self.wanted:
            self.wanted = 0
        return self.wanted


class FrontActor:
    """`ray.remote` makes an actor of this. Its calls return dictionaries of plain values."""

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self._files = FrontFiles(Path(settings.front_directory))
        self._problem = ""
        self._fleet: Mapping[str, Any] = {}
        self._asked_s = self._certified_s = 0.0
        self._empty: dict[str, int] = {}
        self._scaling = Scaling()
        self._requested = 0
        self._roster: Roster | None = None
        self._closed = threading.Event()
        command = [sys.executable, "-m", "executor_server", "front", "--config", str(self._files.daemon.config_file)]
        self._watcher = DaemonWatcher(self._files.daemon, command, self._prepare)
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        identity = self._files.daemon.identity()
        return {
            "directory": str(self._files.root),
            "pid": identity.pid if identity is not None else 0,
            "adopted": self._watcher.adopted,
            "restarts": self._watcher.restarts,
            "problem": self._watcher.problem or self._problem,
            "requested_nodes": self._requested,
            "nodes": self._roster.describe() if self._roster is not None else [],
            "fleet": dict(self._fleet),
        }

    def close(self) -> None:
        """Ends the actor's thread, so that the actors of the nodes can be ended one by one. Idempotent."""
        self._closed.set()
        self._thread.join()

    def stop(self) -> bool:
        """Ends the front in order; False when it had to be killed."""
        self.close()
        return self._watcher.stop()

    # -- in its own thread

    def _run(self) -> None:
        self._files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        engine = Engine()
        while not self._closed.is_set():
            try:
                self._step(engine, time.monotonic())
                self._problem = ""
            except (EngineError, CertificateError, OSError) as error:
                self._report(str(error))
            self._closed.wait(STEP_S)

    def _step(self, engine: Engine, now_s: float) -> None:
        if self._roster is None:
            folder = issue_front(self._files.authority).folder
            self._certified_s = now_s
            authority = (folder / "ca.pem").read_bytes()
            self._roster = Roster(
                engine, self._files, NodeActor, self._settings_for(authority), self._settings.selector
            )
            self._watcher.start()
        elif now_s - self._certified_s >= CERTIFICATE_LOOK_S:
            self._certified_s = now_s
            renew_front(self._files.authority)
        if now_s - self._asked_s >= ASK_INTERVAL_S:
            self._asked_s = now_s
            self._fleet = self._ask()
            self._release_empty(self._roster)
            self._scale(engine, now_s)
        states = {node["node"]: node["state"] for node in self._fleet.get("nodes", ())}
        served = [name for name, state in states.items() if state in _SERVED] if self._fleet else None
        self._roster.step(now_s, served)

    def _ask(self) -> Mapping[str, Any]:
        """Returns the front's answer to GetFleet; empty while it does not answer."""
        from executor_server.api import AdminEndpoint, AdminError, admin_client

        state_dir = StateDir(self._files.daemon.state_dir)
        try:
            endpoint = AdminEndpoint(f"unix:{state_dir.socket_path}", read_token(state_dir.token_path))
            with admin_client(endpoint) as client:
                return client.fleet()
        except (AdminError, StateDirError, FileNotFoundError):
            return {}

    def _release_empty(self, roster: Roster) -> None:
        """Releases machines whose node is drained and has no session: Ray's autoscaler ends those without our actor."""
        empty = {
            node["node"]
            for node in self._fleet.get("nodes", ())
            if node["state"] == "NODE_STATE_DRAINING" and not node["sessions"] and not node["creating"]
        }
        self._empty = {name: self._empty.get(name, 0) + 1 for name in empty}
        for name, looks in self._empty.items():
            if looks >= EMPTY_LOOKS:
                roster.release(name)

    def _scale(self, engine: Engine, now_s: float) -> None:
        nodes = self._fleet.get("nodes", ())
        places = max((node["max_sessions"] for node in nodes), default=0) or DEFAULT_PLACES
        wanted = self._scaling.decide(
            now_s,
            parked=int(self._fleet.get("parked", 0)),
            nodes=self._roster.nodes if self._roster is not None else 0,
            places=places,
        )
        if wanted != self._requested:
            engine.request_nodes(wanted)
            _log.info("fleet_nodes_requested", nodes=wanted)
            self._requested = wanted

    def _settings_for(self, authority: bytes) -> Any:
        def settings_for(node: RayNode) -> NodeSettings:
            of_fleet = self._settings
            return NodeSettings(of_fleet.directory, of_fleet.config, node.host, node.id, node.labels, authority)

        return settings_for

    def _prepare(self) -> None:
        write_front_config(self._files, self._settings.config)

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("fleet_on_ray_problem", problem=problem)
