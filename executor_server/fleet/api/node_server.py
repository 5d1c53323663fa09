"""A node's listener for its front: the link, and the calls that the front makes for its clients.

It is a server of its own beside that for clients. So clients can use up neither the calls nor the connections that the
link needs, and nothing that is believed here can be said there. Tenants' limits of calls are kept by the front; health
and reflection are not served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_server.api.auth import Authentication
from executor_server.api.errors import ErrorBorder
from executor_server.api.server import ServerSettings, open_port, server_options
from executor_server.core import Address, ExecutorError
from executor_server.fleet.api.front_callers import FrontCallers
from executor_server.fleet.api.wire import MAX_CONTROL_BYTES
from executor_server.fleet.membership import CertificateError, Credentials, read_credentials

# Calls of all clients of the front share one connection or two; the front bounds them.
MAX_STREAMS = 65_536
KEEPALIVE_S = 5.0
KEEPALIVE_TIMEOUT_S = 5.0

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
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        guards: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    ) -> None:
        """Opens nothing yet. `settings` are those of the listener for clients. Raises CertificateError."""
        self._address = address
        self._certificates = _Certificates(folder)
        self._authentication = Authentication(FrontCallers(), on_denial=on_refusal, admit_call=_admit_all)
        options = {
            **dict(server_options(settings)),
            "grpc.max_receive_message_length": MAX_CONTROL_BYTES,
            "grpc.max_concurrent_streams": MAX_STREAMS,
            "grpc.keepalive_time_ms": round(KEEPALIVE_S * 1000),
            "grpc.keepalive_timeout_ms": round(KEEPALIVE_TIMEOUT_S * 1000),
            "grpc.http2.ping_timeout_ms": round(KEEPALIVE_TIMEOUT_S * 1000),
        }
        # No maximum of calls: the link must not be refused because of them.
        self._server = grpc.aio.server(
            interceptors=(self._authentication, *interceptors, ErrorBorder(on_refusal), *guards),
            options=list(options.items()),
        )
        fleet_grpc.add_FleetServiceServicer_to_server(services.link, self._server)
        service_grpc.add_ExecutorServiceServicer_to_server(services.service, self._server)
        admin_grpc.add_AdminServiceServicer_to_server(services.admin, self._server)

    def bind(self) -> Address:
        """Opens the listener; calls wait for `start`. Raises AddressError."""
        self._address = open_port(self._server, self._address, self._certificates.server_credentials())
        return self._address

    async def start(self) -> None:
        await self._server.start()
        await self._authentication.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
        await self._authentication.close()


async def _admit_all(_tenant: str, _method: str) -> None:
    return


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
        """Returns what has changed; None when nothing has, or what is there can't be used. In a thread of gRPC."""
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
