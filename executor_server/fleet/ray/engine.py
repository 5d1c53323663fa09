"""The calls of Ray that a fleet needs; the rest of the package uses Ray only through them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from executor_server.fleet.ray.daemon import FleetError
from executor_server.fleet.ray.layout import FRONT_ACTOR, NAMESPACE, NODE_ACTOR, RESOURCE, RESOURCE_SHARE

CALL_TIME_S = 60.0
"""Seconds for a call that its caller waits for."""
CONCURRENCY = 4
"""Calls at a time of one actor: `status` answers while `stop` waits."""


class EngineError(FleetError):
    """Ray can't do it, now or at all; the message is Ray's."""


@dataclass(frozen=True)
class RayNode:
    """A node of Ray that runs."""

    id: str
    host: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Engine:
    """Ray, as a driver or an actor sees it. Raises EngineError."""

    def nodes(self) -> list[RayNode]:
        """Returns Ray's nodes that run and offer our resource."""
        import ray

        with translated():
            found = ray.nodes()
        return [
            RayNode(node["NodeID"], node["NodeManagerAddress"], dict(node.get("Labels") or {}))
            for node in found
            if node["Alive"] and node["Resources"].get(RESOURCE, 0) > 0
        ]

    def own_node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def node_actor(self, node: str, kind: type, settings: object) -> Any:
        """Returns the actor of a node; creates it if it is missing. It can only run on that node."""
        return self._actor(
            f"{NODE_ACTOR}{node}", kind, settings, node, soft=False, resources={RESOURCE: RESOURCE_SHARE}
        )

    def front_actor(self, node: str, kind: type, settings: object, *, soft: bool) -> Any:
        """Returns the front's actor; creates it if it is missing. With `soft` it can move if the node is gone."""
        return self._actor(FRONT_ACTOR, kind, settings, node, soft=soft, resources={})

    def find(self, name: str) -> Any | None:
        """Returns the actor of that name, or None."""
        import ray

        with translated():
            try:
                return ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                return None

    def node_actors(self) -> list[str]:
        """Returns the names of all actors of nodes."""
        import ray.util

        with translated():
            named = ray.util.list_named_actors(all_namespaces=True)
        return [
            each["name"] for each in named if each["namespace"] == NAMESPACE and each["name"].startswith(NODE_ACTOR)
        ]

    def call(self, actor: Any, method: str, *arguments: object) -> Any:
        """Begins a call; `poll` and `wait` take what is returned."""
        with translated():
            return getattr(actor, method).remote(*arguments)

    def poll(self, reference: Any) -> tuple[bool, Any]:
        """Returns (True, the result) of a call, and (False, None) while it runs."""
        import ray

        with translated():
            ready, _ = ray.wait([reference], timeout=0)
            return (True, ray.get(ready[0])) if ready else (False, None)

    def wait(self, reference: Any, time_s: float = CALL_TIME_S) -> Any:
        import ray

        with translated():
            return ray.get(reference, timeout=time_s)

    def end(self, actor: Any) -> None:
        """Ends an actor for good."""
        import ray

        with translated():
            ray.kill(actor, no_restart=True)

    def request_nodes(self, number: int) -> None:
        """Requests this total number of nodes from the autoscaler; 0: only those in use."""
        from ray.autoscaler.sdk import request_resources

        with translated():
            request_resources(bundles=[{RESOURCE: 1} for _ in range(number)])

    def _actor(
        self, name: str, kind: type, settings: object, node: str, *, soft: bool, resources: Mapping[str, float]
    ) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made = ray.remote(kind).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=dict(resources),
            max_restarts=-1,
            max_concurrency=CONCURRENCY,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=soft),
        )
        with translated():
            return made.remote(settings)


@contextlib.contextmanager
def connected(address: str, environment: Mapping[str, str]) -> Iterator[Engine]:
    """Connects this process to a cluster. `environment` is for Ray's part of it. Raises EngineError."""
    before = dict(os.environ)
    os.environ.update(environment)
    import ray

    try:
        with translated():
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        yield Engine()
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns the exceptions of Ray into one; those of its core are a dozen classes, and some are built in."""
    import ray

    try:
        yield
    except (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise EngineError(str(error).strip() or type(error).__name__) from error
