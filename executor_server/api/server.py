"""The gRPC server: its listeners, its limits, health and reflection.

A Unix socket is private (mode 0600) from the moment it exists, except the one at which users are identified by uid
(peer_socket.py). TCP listeners other than loopback need TLS. The service enforces the limits without an option here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_server.api.answers import UnsentAnswers
from executor_server.api.auth import Authentication, current_principal
from executor_server.api.callers import ClientCallers
from executor_server.api.calls import CallLimits, held_calls
from executor_server.api.errors import error_border, ignore_lost_callers
from executor_server.api.handlers import OWN_METHODS, Handler, MethodTable, Wrapper
from executor_server.api.peer_socket import PeerRelay, PeerSocket
from executor_server.core import Address, AddressError, ExecutorError, TcpAddress, UnixAddress, addresses
from executor_server.core.lifecycle import Observer
from executor_server.policy.identity import Identities
from executor_server.policy.quotas import Quotas

SERVICE_NAME = service_pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
ADMIN_SERVICE_NAME = admin_pb.DESCRIPTOR.services_by_name["AdminService"].full_name
BY_THEMSELVES = frozenset(
    f"/{SERVICE_NAME}/{name}"
    for name in (
        "CreateSession",
        "DeleteSession",
        "Execute",
        "AttachExecution",
        "CancelExecution",
        "SubmitToolResult",
        "RenewLease",
    )
) | {f"/{health.SERVICE_NAME}/Check"}
"""Methods whose calls don't wait behind those of others (handlers.py): for executions, for keeping sessions, probes."""
OTHER_METHODS = "other"
"""The name that observers get for all methods that are not ours: a caller can make up any number of names."""

# Seconds in which a connection must finish its handshake; gRPC's default is two minutes.
HANDSHAKE_TIMEOUT_S = 10.0
# Calls that have arrived and that no handler has taken yet. Above the first number gRPC resets some at random, of any
# caller, and above the second all. Its default for the first is 1,000, which one hostile tenant sends in a moment.
MAX_UNSEEN_CALLS = 4096
MAX_UNSEEN_CALLS_HARD = 8192
# Seconds by which a connection may outlive its client certificate, which is checked when the connection is made.
MAX_CONNECTION_AGE_S = 3600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of the server's certificate and, for mutual TLS, of the authority that signs clients'."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class ServerSettings:
    # From `addresses.checked_with_optional`.
    listen: tuple[Address, ...]
    tls: TlsFiles | None
    max_concurrent_calls: int
    max_message_bytes: int = 4 * 2**20  # of the largest message that a client may send
    max_metadata_bytes: int = 16 * 2**10  # of the headers of one call
    max_concurrent_streams: int = 256  # on one connection
    connection_idle_s: float = 600.0  # without a call, until a connection is closed
    keepalive_s: float = 60.0  # between pings on a quiet connection
    keepalive_timeout_s: float = 20.0  # for the answer to a ping
    peer_socket: PeerSocket | None = None
    # Addresses in `listen` that are defaults: when one can't be bound, the others serve.
    unasked: Set[str] = frozenset()


class RpcServer:
    """Serves one ExecutorService, and perhaps an AdminService, to callers that `identities` knows."""

    def __init__(
        self,
        service: service_grpc.ExecutorServiceServicer,
        identities: Identities,
        settings: ServerSettings,
        *,
        admin: admin_grpc.AdminServiceServicer | None = None,
        observer: Observer | None = None,
        quotas: Quotas | None = None,
        wrappers: Sequence[Wrapper] = (),
        handlers: Mapping[str, Mapping[str, Handler]] | None = None,
    ) -> None:
        """Opens nothing yet.

        `quotas` limits the calls of a tenant; `observer` is notified of refused calls; `wrappers` are put around the
        calls of known callers. `handlers`, by the names of service and method, serve methods instead of the services.
        """
        ignore_lost_callers()
        on_refusal = refusals_to(observer or Observer())
        self._settings = settings
        self._relay = (
            PeerRelay(settings.peer_socket, identities.knows_uid) if settings.peer_socket is not None else None
        )
        has_certificates = settings.tls is not None and settings.tls.client_ca is not None
        callers = ClientCallers(
            identities,
            checks_connections=has_certificates or self._relay is not None,
            uid_of_peer=self._relay.uid_of if self._relay is not None else _no_uid,
        )
        self._authentication = Authentication(
            callers,
            on_denial=on_refusal,
            admit_call=(
                None if quotas is None else CallLimits(quotas, held_calls(settings.max_concurrent_calls)).admit
            ),
        )
        self._bound: list[Address] = []
        self._inner: list[Address] = []  # not announced
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        self._server = grpc.aio.server(
            options=server_options(settings), maximum_concurrent_rpcs=settings.max_concurrent_calls
        )
        # The order matters: an unknown caller's call must not reach the handlers at all.
        methods: Any = MethodTable(
            BY_THEMSELVES,
            (self._authentication.around, *wrappers, error_border(on_refusal), UnsentAnswers().around),
        )
        service_grpc.add_ExecutorServiceServicer_to_server(service, methods)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, methods)
        if admin is not None:
            admin_grpc.add_AdminServiceServicer_to_server(admin, methods)
        for name, own_handlers in (handlers or {}).items():
            methods.add_registered_method_handlers(name, own_handlers)
        own = (SERVICE_NAME, *((ADMIN_SERVICE_NAME,) if admin is not None else ()))
        shown: Any = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]  # the stubs lack it
            (*own, health.SERVICE_NAME, reflection.SERVICE_NAME)
        )
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(shown, methods)
        methods.serve_by(self._server)

    def bind(self) -> None:
        """Opens the listeners, and logs defaults that are taken; calls wait for `start`. Raises AddressError."""
        problems = []
        credentials = _credentials(self._settings.tls) if self._settings.tls is not None else None
        for address in self._settings.listen:
            try:
                self._bound.append(open_port(self._server, address, credentials))
            except AddressError as error:
                if str(address) not in self._settings.unasked:
                    raise
                problems.append(str(error))
        if not self._bound:
            raise AddressError(" ".join(problems))
        for problem in problems:
            _log.warning("address_not_served", problem=problem)
        if self._relay is not None and self._settings.peer_socket is not None:
            self._inner.append(open_port(self._server, self._settings.peer_socket.inner, None))
            self._relay.bind()

    async def start(self) -> list[str]:
        """Begins to serve. Returns the addresses, with the port that was chosen for port 0. Raises AddressError."""
        if not self._bound:
            self.bind()
        await self._server.start()
        await self._authentication.start()
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        listening = [str(address) for address in self._bound]
        if self._relay is not None and self._settings.peer_socket is not None:
            await self._relay.start()
            listening.append(str(self._settings.peer_socket.outer))
        return listening

    async def announce_end(self) -> None:
        """Answers health probes with NOT_SERVING from now on; calls are still served."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, cancels calls that haven't ended within the grace, and closes the listeners."""
        await self._server.stop(grace_s)
        await self._authentication.close()
        if self._relay is not None:
            await self._relay.close()
        for address in (*self._bound, *self._inner):
            if isinstance(address, UnixAddress):
                address.path.unlink(missing_ok=True)


def refusals_to(observer: Observer) -> Callable[[str, ExecutorError], None]:
    """Returns a function that notifies `observer` of a refused call, by its method and error."""

    def on_refusal(method: str, error: ExecutorError) -> None:
        known = method if method in OWN_METHODS else OTHER_METHODS
        observer.request_refused(current_principal.get(None), known, error)

    return on_refusal


def open_port(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> Address:
    """Opens a listener; returns its address, with the port that was chosen for port 0. Raises AddressError."""
    if isinstance(address, UnixAddress):
        addresses.clear_stale_socket(address)
    else:
        addresses.check_port(address)
    try:
        with addresses.umask(0o177):  # other users have no rights to the socket
            if isinstance(address, TcpAddress) and credentials is not None:
                port = server.add_secure_port(str(address), credentials)
            else:
                port = server.add_insecure_port(str(address))
    except RuntimeError as error:  # grpc says no more than that; its log has the errno
        raise AddressError(f"Can't listen on {address}: it is in use, or not an address of this machine.") from error
    return TcpAddress(address.host, port) if isinstance(address, TcpAddress) else address


def _no_uid(_peer: str) -> int | None:
    return None


def server_options(settings: ServerSettings) -> Sequence[tuple[str, int]]:
    has_certificates = settings.tls is not None and settings.tls.client_ca is not None
    age_ms = round(MAX_CONNECTION_AGE_S * 1000) if has_certificates else 2**31 - 1  # without end
    return (
        # Calls on an old connection may end; further calls use a new one.
        ("grpc.max_connection_age_ms", age_ms),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.server.max_pending_requests", MAX_UNSEEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_UNSEEN_CALLS_HARD),
        ("grpc.max_connection_idle_ms", round(settings.connection_idle_s * 1000)),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_time_ms", round(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        # gRPC waits for an unanswered ping for the longer of this and its own minute, so both are set.
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Only uncompressed messages: a small compressed one could unpack to a large one.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Off, since two daemons on one port would each get some of the calls.
        ("grpc.so_reuseport", 0),
    )


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    try:
        key, cert = tls.key.read_bytes(), tls.cert.read_bytes()
        client_ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
    except OSError as error:
        raise AddressError(f"The TLS file {error.filename} can't be read: {error.strerror}.") from error
    return grpc.ssl_server_credentials(
        [(key, cert)], root_certificates=client_ca, require_client_auth=client_ca is not None
    )
