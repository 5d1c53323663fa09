"""The callers on a node's listener for its front: the front itself, and those whose calls it makes.

TLS has verified that a certificate is of the fleet's authority; here it must name the front. The front has
authenticated its clients, and says in the metadata of a call whose it is. These metadata are believed on this listener
alone: the one for clients never reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import grpc

from executor_api.v1 import fleet_service_pb2
from executor_server.api.handlers import Context
from executor_server.core import Principal, Reason, Unauthenticated
from executor_server.core.config import is_name
from executor_server.fleet.membership import FRONT, member_of
from executor_server.policy.identity import certificate_in

PRINCIPAL_KEY = "x-executor-principal-bin"
"""The metadata with the caller that a call is made for: a JSON object of tenant, name and is_admin."""
MAX_PRINCIPAL_BYTES = 4096
MAX_NAME_CHARS = 256

_FRONT = Principal(tenant="", name="front")  # no tenant has an empty name
_LINK_METHODS = f"/{fleet_service_pb2.DESCRIPTOR.services_by_name['FleetService'].full_name}/"


@dataclass(frozen=True)
class _Shown:
    principal: Principal
    is_front: bool


class FrontCallers:
    """Knows callers by the front's certificate and the principal that it names (`CallerSource`)."""

    checks_connections = True

    def named_in(self, call: grpc.HandlerCallDetails) -> Principal:
        """Raises Unauthenticated."""
        metadata = call.invocation_metadata or ()
        given = [value for key, value in metadata if key == PRINCIPAL_KEY]
        if any(key == "authorization" for key, _ in metadata):
            raise _unauthenticated()
        if call.method.startswith(_LINK_METHODS):
            return _FRONT
        principal = principal_from(given[0]) if len(given) == 1 else None
        if principal is None:
            raise _unauthenticated()
        return principal

    def shown_by(self, named: Principal, context: Context | None) -> _Shown:
        certificate = certificate_in(cast("Any", context).auth_context())
        return _Shown(named, certificate is not None and member_of(certificate.names) == FRONT)

    def principal_of(self, shown: _Shown) -> Principal | None:
        return shown.principal if shown.is_front else None

    async def refresh(self) -> None:
        return


def principal_from(data: str | bytes) -> Principal | None:
    """Reads the principal of a call; None when it is not exactly of the form that a front writes."""
    if not isinstance(data, bytes) or len(data) > MAX_PRINCIPAL_BYTES:
        return None
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.keys() != {"tenant", "name", "is_admin"}:
        return None
    tenant, name, is_admin = values["tenant"], values["name"], values["is_admin"]
    if not (isinstance(tenant, str) and isinstance(name, str) and isinstance(is_admin, bool)):
        return None
    if not is_name(tenant) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        return None
    return Principal(tenant, name, is_admin)


def _unauthenticated() -> Unauthenticated:
    return Unauthenticated(Reason.UNAUTHENTICATED, "this listener serves the front of the fleet")
