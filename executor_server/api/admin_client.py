"""The client of AdminService, for the operators' command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from executor_api.tokens import can_be_sent
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_server.core import Address, AddressError, TcpAddress, UnixAddress, addresses

CALL_TIME_S = 60.0
COLLECTION_TIME_S = 600.0
"""Seconds for the removal of environments: a million files may take long."""
MOVE_TIME_S = 3600.0
"""Seconds for moving all sessions of a node: each may have gigabytes of files."""
MAX_PEM_BYTES = 1024 * 1024
# A daemon may have many sessions, and each may list a thousand import patterns.
MAX_RESPONSE_BYTES = 64 * 1024 * 1024


class AdminError(Exception):
    """The call could not be made, or was refused, for the reason in the message."""


@dataclass(frozen=True)
class AdminEndpoint:
    """The daemon's address and the credentials for it. The files are PEM; `ca` holds the trusted authorities."""

    address: str
    token: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class AdminClient:
    """Makes admin calls. Each returns the response as a JSON object with every field, and raises AdminError."""

    def __init__(self, channel: grpc.Channel, token: str | None) -> None:
        self._stub: Any = admin_grpc.AdminServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()

    def sessions(self, tenant: str = "") -> dict[str, Any]:
        return self._call("ListAllSessions", admin_pb.ListAllSessionsRequest(tenant=tenant))

    def kill(self, session_id: str) -> dict[str, Any]:
        return self._call("KillSession", admin_pb.KillSessionRequest(session_id=session_id))

    def stop(self, session_id: str, execution_id: str) -> dict[str, Any]:
        request = admin_pb.StopExecutionRequest(session_id=session_id, execution_id=execution_id)
        return self._call("StopExecution", request)

    def network(self, session_id: str) -> dict[str, Any]:
        return self._call("GetSessionNetwork", admin_pb.GetSessionNetworkRequest(session_id=session_id))

    def drain(self, *, resume: bool = False, node: str = "", move: bool = False) -> dict[str, Any]:
        request = admin_pb.DrainRequest(resume=resume, node=node, move=move)
        return self._call("Drain", request, MOVE_TIME_S if move else CALL_TIME_S)

    def reload(self) -> dict[str, Any]:
        return self._call("Reload", admin_pb.ReloadRequest())

    def usage(self, tenant: str = "") -> dict[str, Any]:
        return self._call("GetUsage", admin_pb.GetUsageRequest(tenant=tenant))

    def environments(self) -> dict[str, Any]:
        return self._call("ListEnvironments", admin_pb.ListEnvironmentsRequest())

    def environment(self, environment_id: str) -> dict[str, Any]:
        return self._call("GetEnvironment", admin_pb.GetEnvironmentRequest(environment_id=environment_id))

    def collect_environments(self, max_bytes: int) -> dict[str, Any]:
        request = admin_pb.CollectEnvironmentsRequest(max_bytes=max_bytes)
        return self._call("CollectEnvironments", request, COLLECTION_TIME_S)

    def fleet(self) -> dict[str, Any]:
        return self._call("GetFleet", admin_pb.GetFleetRequest())

    def _call(self, method: str, request: Message, time_s: float = CALL_TIME_S) -> dict[str, Any]:
        try:
            response: Message = getattr(self._stub, method)(request, metadata=self._metadata, timeout=time_s)
        except grpc.RpcError as error:
            call: Any = error
            raise AdminError(f"{call.code().name}: {call.details()}") from error
        return json_format.MessageToDict(
            response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )


@contextmanager
def admin_client(endpoint: AdminEndpoint) -> Iterator[AdminClient]:
    """Opens a channel to the endpoint. Raises AdminError when its address, token or files can't be used.

    The block raises it, too, for a request with text that can't be sent.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
        # A proxy named in the environment is not for the path between the command and the daemon.
        ("grpc.enable_http_proxy", 0),
    ]
    target = _target(endpoint)
    if endpoint.token is not None and not can_be_sent(endpoint.token):
        raise AdminError("The token has characters that can't be sent; use printable ASCII without spaces.")
    if endpoint.tls:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_pem(endpoint.ca), private_key=_pem(endpoint.key), certificate_chain=_pem(endpoint.cert)
        )
        channel = grpc.secure_channel(target, credentials, options)
    else:
        channel = grpc.insecure_channel(target, options)
    with channel:
        try:
            yield AdminClient(channel, endpoint.token)
        except UnicodeEncodeError as error:
            raise AdminError(f"{error.object!r} is not UTF-8 text, so it can't be sent.") from error


def is_own(address: str) -> bool:
    """True if our own token may be sent there: to this machine, not to another user's socket. Raises AdminError."""
    parsed = _parsed(address)
    if isinstance(parsed, TcpAddress):
        return parsed.is_loopback
    try:
        return parsed.path.stat().st_uid in (os.geteuid(), 0)
    except OSError:
        return False  # no socket, or not reachable


def _target(endpoint: AdminEndpoint) -> str:
    address = _parsed(endpoint.address)
    if isinstance(address, TcpAddress) and not address.is_loopback and not endpoint.tls:
        raise AdminError(f"{address} is on another machine, so the token would be sent unencrypted: use --tls.")
    if isinstance(address, UnixAddress) and endpoint.tls:
        raise AdminError("A Unix socket has no TLS: leave out --tls.")
    return str(address)


def _parsed(address: str) -> Address:
    try:
        return addresses.parse(address)
    except AddressError as error:
        raise AdminError(f"{address!r} is not an address; write HOST:PORT or unix:/PATH.") from error


def _pem(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise AdminError(f"The TLS file {path} can't be read: {error.strerror}.") from error
    if len(data) > MAX_PEM_BYTES:
        raise AdminError(f"The TLS file {path} is larger than {MAX_PEM_BYTES} bytes.")
    return data
