"""The nodes of a fleet as the front's actor knows them: an actor on each of Ray's nodes, and the addresses of daemons.

`step` is called repeatedly and never waits for a node: it begins a call to an actor, and a later step takes the answer.
The address of a daemon stays listed when its Ray node is gone, because the daemon may still run. It is forgotten when
the front has not had the node's lease for `FORGET_AFTER_S`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from executor_server.core import AddressError, TcpAddress, addresses
from executor_server.fleet.membership import CertificateError, is_node_name, sign_request
from executor_server.fleet.ray.engine import EngineError, RayNode
from executor_server.fleet.ray.layout import FrontFiles
from executor_server.fleet.ray.processes import write_whole

CALL_TIME_S = 90.0
"""Seconds after which a call to a node's actor is given up; the actor is looked up again then."""
STATUS_INTERVAL_S = 2.0
FORGET_AFTER_S = 3600.0
MAX_NODES = 4096
MAX_REGISTRY_BYTES = 4 * 1024 * 1024

_log = structlog.get_logger(__name__)


class NodeCalls(Protocol):
    """The part of `engine.Engine` that is needed here. Raises EngineError."""

    def nodes(self) -> list[RayNode]: ...

    def node_actor(self, node: str, kind: type, settings: object) -> Any: ...

    def call(self, actor: Any, method: str, *arguments: object) -> Any: ...

    def poll(self, reference: Any) -> tuple[bool, Any]: ...

    def end(self, actor: Any) -> None: ...


class MakeSettings(Protocol):
    def __call__(self, node: RayNode) -> object: ...


@dataclass
class _Member:
    """A Ray node that runs, and the call to its actor that is under way."""

    node: RayNode
    actor: Any = None
    method: str = ""
    reference: Any = None
    called_s: float = 0.0
    name: str = ""
    needs_hello: bool = True
    """The answer has a request for a certificate where the node has none, or one that ends soon."""
    status: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    releasing: bool = False


class Roster:
    """Owned by one thread. `selector` are labels that a Ray node must have; `kind` is the class of the actors."""

    def __init__(
        self,
        engine: NodeCalls,
        files: FrontFiles,
        kind: type,
        make_settings: MakeSettings,
        selector: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._files = files
        self._kind = kind
        self._make_settings = make_settings
        self._selector = selector
        self._members: dict[str, _Member] = {}
        self._links: dict[str, str] = {}  # by the name of the node
        self._released: set[str] = set()  # Ray nodes
        self._unseen_since: dict[str, float] = {}
        self._read()
        self._write_addresses()

    @property
    def nodes(self) -> int:
        return len(self._members)

    def describe(self) -> list[dict[str, Any]]:
        """Returns a dictionary of plain values for each node, also for nodes that Ray no longer has."""
        found = [
            {**member.status, "name": member.name, "ray_node": member.node.id, "host": member.node.host}
            | {"problem": member.problem or member.status.get("problem", "")}
            for member in self._members.values()
        ]
        known = {member.name for member in self._members.values()}
        return found + [
            {"name": name, "ray_node": "", "host": "", "link": link, "problem": "Ray does not have its machine now."}
            for name, link in self._links.items()
            if name not in known
        ]

    def step(self, now_s: float, served: Iterable[str] | None) -> None:
        """`served` are the nodes whose lease the front has; None while the front does not answer."""
        self._look(self._engine.nodes())
        for member in list(self._members.values()):
            try:
                self._advance(member, now_s)
            except EngineError as error:
                member.problem, member.actor, member.reference = str(error), None, None
        if served is not None:
            self._forget(now_s, set(served))

    def release(self, name: str) -> None:
        """Ends the daemon of a node and its actor, for good. For nodes that are drained and empty."""
        for member in self._members.values():
            if member.name == name and not member.releasing and member.actor is not None:
                _log.info("fleet_node_released", node=name)
                member.releasing = True
                member.reference = None

    # -- steps

    def _look(self, nodes: list[RayNode]) -> None:
        there = {
            node.id: node
            for node in nodes[:MAX_NODES]
            if node.id not in self._released and self._selector.items() <= dict(node.labels).items()
        }
        for gone in self._members.keys() - there.keys():
            del self._members[gone]
        for id_, node in there.items():
            if id_ not in self._members:
                self._members[id_] = _Member(node)

    def _advance(self, member: _Member, now_s: float) -> None:
        if member.actor is None:
            member.actor = self._engine.node_actor(member.node.id, self._kind, self._make_settings(member.node))
        if member.reference is not None:
            done, answer = self._engine.poll(member.reference)
            if not done:
                if now_s - member.called_s > CALL_TIME_S:
                    member.problem, member.actor, member.reference = "Its actor does not answer.", None, None
                return
            member.reference = None
            self._take(member, answer, now_s)
        elif member.releasing:
            self._call(member, "stop", now_s)
        elif member.needs_hello:
            self._call(member, "hello", now_s)
        elif now_s - member.called_s >= STATUS_INTERVAL_S:
            self._call(member, "status", now_s)

    def _call(self, member: _Member, method: str, now_s: float, *arguments: object) -> None:
        member.method, member.called_s = method, now_s
        member.reference = self._engine.call(member.actor, method, *arguments)

    def _take(self, member: _Member, answer: Any, now_s: float) -> None:
        member.problem = ""
        if member.method == "hello":
            self._welcome(member, str(answer["name"]), bytes(answer["request"]), now_s)
            member.needs_hello = not member.name
        elif member.method == "stop":
            self._end(member)
        else:
            member.status, member.needs_hello = answer, not answer["certified"]
            self._list(member.name, str(answer["link"]))

    def _welcome(self, member: _Member, name: str, request: bytes, now_s: float) -> None:
        others = [each for each in self._members.values() if each is not member and each.name == name]
        if not is_node_name(name) or others:
            member.problem = (
                f"Another of Ray's nodes has a daemon that is called {name!r} too." if others else "no name"
            )
            return
        known, member.name = member.name, name
        if request:
            try:
                signed = sign_request(self._files.authority, name, request)
            except CertificateError as error:
                member.name, member.problem = known, str(error)
                return
            self._call(member, "certify", now_s, signed.authority, signed.certificate)

    def _end(self, member: _Member) -> None:
        self._engine.end(member.actor)
        self._released.add(member.node.id)
        self._links.pop(member.name, None)
        del self._members[member.node.id]
        self._write()

    def _list(self, name: str, link: str) -> None:
        if not link or self._links.get(name) == link:
            return
        try:
            if not isinstance(addresses.parse(link), TcpAddress):
                return
        except AddressError:
            return
        self._links[name] = link
        self._write()

    def _forget(self, now_s: float, served: set[str]) -> None:
        with_actor = {member.name for member in self._members.values()}
        for name in list(self._links):
            if name in with_actor or name in served:
                self._unseen_since.pop(name, None)
            elif now_s - self._unseen_since.setdefault(name, now_s) > FORGET_AFTER_S:
                del self._links[name], self._unseen_since[name]
                self._write()

    # -- files

    def _read(self) -> None:
        try:
            fields = json.loads(_bounded(self._files.registry))
            self._links = {str(name): str(link) for name, link in fields["links"].items() if is_node_name(name)}
            self._released = {str(node) for node in fields["released"]}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # The actors on the nodes report their addresses again.
            _log.warning("fleet_registry_unusable", path=str(self._files.registry), problem=str(error))

    def _write(self) -> None:
        fields = {"links": self._links, "released": sorted(self._released)}
        write_whole(self._files.registry, json.dumps(fields, indent=1).encode())
        self._write_addresses()

    def _write_addresses(self) -> None:
        write_whole(self._files.addresses, "".join(f"{link}\n" for link in sorted(set(self._links.values()))).encode())


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_REGISTRY_BYTES)
