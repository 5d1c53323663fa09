"""A node of a fleet that says what a test wants: it has a certificate of the fleet, links, reports, and makes no
sandboxes.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import fleet_service_pb2 as fleet_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.fleet.membership.messages import PROTOCOL

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_THREADS = 16
_EXECUTOR_SERVICE = service_pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
_SERVICE = fleet_pb.DESCRIPTOR.services_by_name["FleetService"].full_name


@dataclass
class Link:
    """One link of the front: its hello, and what came after it."""

    hello: fleet_pb.FrontHello
    epoch: int
    renewals: int = 0
    controls: list[fleet_pb.Control] = field(default_factory=list)


class LyingNode:
    """Serves the front on a port of its own, with the certificate in `folder`.

    `hello` makes its hello for a link from an honest one, and `report` each report; a report may be the bytes of a
    whole LinkResponse. `session` makes its answer to CreateSession. All three can be changed at any time.
    """

    def __init__(self, folder: Path, name: str, *, port: int = 0) -> None:
        self.name = name
        self.epoch = 1
        self.instance = secrets.token_hex(16)
        self.hello: Callable[[fleet_pb.NodeHello], fleet_pb.NodeHello] = lambda honest: honest
        self.report: Callable[[fleet_pb.NodeReport], fleet_pb.NodeReport | bytes] = lambda honest: honest
        self.session: Callable[[pb.Session], pb.Session] = lambda honest: honest
        self.asked = 0
        """Sessions that it was asked for."""
        self.links: list[Link] = []
        self._renewed_s: list[float] = []
        self._hangs_up = 0
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(_THREADS)
        self._server = grpc.server(
            self._threads,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        handler = grpc.stream_stream_rpc_method_handler(self._link, fleet_pb.LinkRequest.FromString, _serialized)
        create = grpc.unary_unary_rpc_method_handler(
            self._create, service_pb.CreateSessionRequest.FromString, service_pb.CreateSessionResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(_SERVICE, {"Link": handler}),
                grpc.method_handlers_generic_handler(_EXECUTOR_SERVICE, {"CreateSession": create}),
            ]
        )
        key, cert, ca = ((folder / f"{each}.pem").read_bytes() for each in ("key", "cert", "ca"))
        credentials = grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)
        self.port = self._server.add_secure_port(f"127.0.0.1:{port}", credentials)
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.stop(0).wait()
        self._threads.shutdown()

    def _link(self, requests: Iterator[fleet_pb.LinkRequest], context: Any) -> Iterator[fleet_pb.LinkResponse | bytes]:
        hello = next(requests).hello
        if hello.lost_epoch >= self.epoch:
            self.epoch = hello.lost_epoch + 1
        link = Link(hello, self.epoch)
        self.links.append(link)
        self._threads.submit(self._listen, requests, link)
        honest = fleet_pb.NodeHello(
            node=self.name,
            epoch=self.epoch,
            instance=self.instance,
            protocol=PROTOCOL,
            program_version="0",
            labels={"name": self.name},
        )
        yield fleet_pb.LinkResponse(hello=self.hello(honest))
        sequence = 0
        before = self._hangs_up
        while context.is_active() and not self._ended.is_set() and self._hangs_up == before:
            sequence += 1
            report = self.report(self._honest(sequence, link))
            yield report if isinstance(report, bytes) else fleet_pb.LinkResponse(report=report)
            self._ended.wait(hello.report_interval_s)

    def _create(self, _request: service_pb.CreateSessionRequest, _context: Any) -> service_pb.CreateSessionResponse:
        self.asked += 1
        session_id = f"{self.name}-{self.epoch:08x}{secrets.token_hex(12)}"
        honest = pb.Session(session_id=session_id, state=pb.SESSION_STATE_IDLE, node=self.name, backend="local")
        return service_pb.CreateSessionResponse(session=self.session(honest))

    def _honest(self, sequence: int, link: Link) -> fleet_pb.NodeReport:
        return fleet_pb.NodeReport(
            sequence=sequence,
            epoch=self.epoch,
            control_fingerprint=link.controls[-1].fingerprint if link.controls else "",
            max_sessions=64,
            backends=[fleet_pb.NodeBackend(name="local", ready=True, images=["base"])],
            full=sequence == 1,
        )

    def _listen(self, requests: Iterator[fleet_pb.LinkRequest], link: Link) -> None:
        try:
            for request in requests:
                if request.HasField("renewal"):
                    link.renewals += 1
                    self._renewed_s.append(time.monotonic())
                elif request.HasField("control"):
                    link.controls.append(request.control)
        except grpc.RpcError:  # the link has ended
            return

    def hang_up(self) -> None:
        """Ends the links that there are."""
        self._hangs_up += 1

    def forget_waits(self) -> None:
        """Begins to measure `longest_wait_s` again."""
        del self._renewed_s[:-1]

    @property
    def longest_wait_s(self) -> float:
        """Seconds of the longest time between two renewals so far."""
        times = list(self._renewed_s)
        return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)

    @property
    def renewals(self) -> int:
        return sum(link.renewals for link in self.links)


def _serialized(message: fleet_pb.LinkResponse | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
