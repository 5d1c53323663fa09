"""A node's only listener: it serves the front, which makes the calls of clients.

TLS has verified that a caller's certificate is of the fleet's authority; here it must name the front. The front has
authenticated its clients, and names the principal of each call in its metadata. It also names its own start: calls of a
front that the node does not obey any more are refused, since that front may not know which sessions are lost.

The front holds tenants to their limits of calls. Health and reflection are not served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import structlog

from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import fleet_service_pb2
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_server.api.auth import Authentication
from executor_server.api.errors import error_border
from executor_server.api.handlers import Context, MethodTable, Wrapper
from executor_server.api.server import BY_THEMSELVES, ServerSettings, open_port, server_options
from executor_server.core import Address, ExecutorError, Principal, Reason, Unauthenticated
from executor_server.fleet.api.wire import MAX_CONTROL_BYTES, PRINCIPAL_KEY, Caller, caller_from
from executor_server.fleet.membership import FRONT, CertificateError, Credentials, member_of, read_credentials
from executor_server.policy.identity import certificate_in

# Calls of all clients of the front share one connection or two; the front bounds them.
MAX_STREAMS = 65_536
KEEPALIVE_S = 5.0
KEEPALIVE_TIMEOUT_S = 5.0
# The front pings often, to learn soon that a node hangs; gRPC's default takes this for a flood.
MIN_PING_INTERVAL_S = 0.5

_LINK = Caller(Principal(tenant="", name="front"), None)  # no tenant has an empty name
_LINK_METHODS = f"/{fleet_service_pb2.DESCRIPTOR.services_by_name['FleetService'].full_name}/"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FrontServices:
    link: fleet_grpc.FleetServiceServicer
    service: service_grpc.ExecutorServiceServicer
    admin: admin_grpc.AdminServiceServicer


class NodeServer:
    """Serves `services` at one address, to the front of the fleet whose certificates are in `folder`."""

    def __init__(
        self,
        address: Address,
        folder: Path,
        services: FrontServices,
        settings: ServerSettings,
        on_refusal: Callable[[str, ExecutorError], None],
        obeyed: Callable[[], str | None],
        *,
        wrappers: Sequence[Wrapper] = (),
        on_start: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Opens nothing yet. `obeyed` returns the front's start that the node obeys now. Raises CertificateError."""
        self._on_start = on_start
        self._address = address
        self._certificates = _Certificates(folder)
        self._authentication = Authentication(FrontCallers(obeyed), on_denial=on_refusal)
        options = {
            **dict(server_options(settings)),
            "grpc.max_receive_message_length": MAX_CONTROL_BYTES,
            "grpc.max_concurrent_streams": MAX_STREAMS,
            "grpc.keepalive_time_ms": round(KEEPALIVE_S * 1000),
            "grpc.keepalive_timeout_ms": round(KEEPALIVE_TIMEOUT_S * 1000),
            "grpc.http2.ping_timeout_ms": round(KEEPALIVE_TIMEOUT_S * 1000),
            "grpc.http2.min_ping_interval_without_data_ms": round(MIN_PING_INTERVAL_S * 1000),
        }
        # No limit on concurrent calls: it could refuse the link.
        self._server = grpc.aio.server(options=list(options.items()))
        methods: Any = MethodTable(
            BY_THEMSELVES | {f"{_LINK_METHODS}Link"},
            (self._authentication.around, *wrappers, error_border(on_refusal)),
        )
        fleet_grpc.add_FleetServiceServicer_to_server(services.link, methods)
        service_grpc.add_ExecutorServiceServicer_to_server(services.service, methods)
        admin_grpc.add_AdminServiceServicer_to_server(services.admin, methods)
        methods.serve_by(self._server)

    def bind(self) -> Address:
        """Opens the listener; calls wait for `start`. Raises AddressError."""
        self._address = open_port(self._server, self._address, self._certificates.server_credentials())
        return self._address

    async def start(self) -> list[str]:
        """Begins to serve. Returns the addresses."""
        if self._on_start is not None:
            await self._on_start()
        await self._server.start()
        await self._authentication.start()
        return [str(self._address)]

    async def announce_end(self) -> None:
        """Does nothing: the node's reports say that it drains."""

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
        await self._authentication.close()


@dataclass(frozen=True)
class _Shown:
    caller: Caller
    is_front: bool


class FrontCallers:
    """Identifies callers by the front's certificate and the principal that it names (`CallerSource`)."""

    def __init__(self, obeyed: Callable[[], str | None]) -> None:
        self._obeyed = obeyed

    def shown_by(self, method: str, context: Context) -> _Shown:
        certificate = certificate_in(cast("Any", context).auth_context())
        is_front = certificate is not None and member_of(certificate.names) == FRONT
        return _Shown(self._caller_in(method, context), is_front)

    def _caller_in(self, method: str, context: Context) -> Caller:
        """Raises Unauthenticated."""
        metadata = context.invocation_metadata() or ()
        given = [value for key, value in metadata if key == PRINCIPAL_KEY]
        if any(key == "authorization" for key, _ in metadata):
            raise _unauthenticated()
        if method.startswith(_LINK_METHODS):
            return _LINK
        caller = caller_from(given[0]) if len(given) == 1 else None
        if caller is None:
            raise _unauthenticated()
        return caller

    def principal_of(self, shown: _Shown) -> Principal | None:
        front = shown.caller.front
        is_obeyed = shown.is_front and (front is None or front == self._obeyed())
        return shown.caller.principal if is_obeyed else None

    async def refresh(self) -> None:
        return


def _unauthenticated() -> Unauthenticated:
    return Unauthenticated(Reason.UNAUTHENTICATED, "this listener serves the front of the fleet")


class _Certificates:
    """The node's certificate, read again for each connection: one that was renewed is used without a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = read_credentials(folder, "node")
        self._problem = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._known), self._renewed, require_client_authentication=True
        )

    def _renewed(self) -> Any:
        """Returns the new certificate; None if there is none or it can't be used. Runs in a thread of gRPC."""
        try:
            found = read_credentials(self._folder, "node")
        except CertificateError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.error("fleet_certificate_refused", problem=self._problem)
            return None
        if found == self._known or found.member != self._known.member:
            return None
        self._known, self._problem = found, ""
        _log.info("fleet_certificate_renewed", expire_time=found.expire_time.isoformat())
        return _configuration(found)


def _configuration(credentials: Credentials) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], root_certificates=credentials.authority
    )
