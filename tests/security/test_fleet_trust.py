"""A node serves its front alone, which a certificate proves, and the front each client for its own tenant only."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import fleet_service_pb2 as fleet_pb
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_client import ExecutorClientError, NotFoundError
from executor_server.fleet.membership.certificates import Member, issue_front
from executor_server.fleet.membership.messages import PROTOCOL
from executor_server.policy.identity import TokenFile
from tests.support.backends import require
from tests.support.machines import Fleet, fleet, new_id
from tests.support.polling import eventually

PRINCIPAL_KEY = "x-executor-principal-bin"
CALL_TIMEOUT_S = 10.0
ADMIN = {"tenant": "local", "name": "token", "is_admin": True, "front": ""}
REVOKED_WITHIN_S = 15.0


@pytest.fixture(scope="module")
def machines() -> Iterator[Fleet]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with fleet(directory, "n1", "n2") as made:
        yield made
    shutil.rmtree(directory)


# ---------------------------------------------------------------------------------------------------------------------
# The front's listener of a node


@dataclass(frozen=True)
class Caller:
    """A caller of `fleet.listen`, by the folder of its certificate; None: it shows none."""

    folder: Path | None
    authority: Path

    def channel(self, machines: Fleet, node: str) -> grpc.Channel:
        key, cert = (
            ((self.folder / name).read_bytes() for name in ("key.pem", "cert.pem")) if self.folder else (None,) * 2
        )
        credentials = grpc.ssl_channel_credentials((self.authority / "ca.pem").read_bytes(), key, cert)
        options = [
            ("grpc.ssl_target_name_override", Member("node", node).name),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        return grpc.secure_channel(machines.nodes[node].link_address, credentials, options)


def status_of(call: Callable[[], Any]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def sessions_seen(channel: grpc.Channel, *metadata: tuple[str, str | bytes]) -> service_pb.ListSessionsResponse:
    stub = service_grpc.ExecutorServiceStub(channel)
    answer: service_pb.ListSessionsResponse = stub.ListSessions(
        service_pb.ListSessionsRequest(), metadata=metadata, timeout=CALL_TIMEOUT_S
    )
    return answer


def link(channel: grpc.Channel) -> fleet_pb.LinkResponse:
    hello = fleet_pb.FrontHello(
        front_id="f" * 32,
        term=2**40,
        protocol=PROTOCOL,
        report_interval_s=0.5,
        lease_s=3,
        fence_s=10,
        instance="i" * 32,
    )
    stub = fleet_grpc.FleetServiceStub(channel)
    answers = stub.Link(iter([fleet_pb.LinkRequest(hello=hello)]), timeout=CALL_TIMEOUT_S)
    first: fleet_pb.LinkResponse = next(answers)
    return first


def strangers(machines: Fleet, directory: Path) -> dict[str, Caller]:
    ours = machines.directory / "ca"
    other = issue_front(directory / "other").folder
    return {
        "nobody": Caller(None, ours),
        "the front of another fleet": Caller(other, ours),
        "the node itself": Caller(ours / "nodes" / "n1", ours),
        "another node": Caller(ours / "nodes" / "n2", ours),
    }


@pytest.mark.parametrize("stranger", ["nobody", "the front of another fleet", "the node itself", "another node"])
def test_only_the_front_of_the_fleet_can_call_a_node_there(machines: Fleet, tmp_path: Path, stranger: str) -> None:
    caller = strangers(machines, tmp_path)[stranger]
    shown = (PRINCIPAL_KEY, json.dumps(ADMIN).encode())
    with caller.channel(machines, "n1") as channel:
        refused = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED}
        assert status_of(lambda: link(channel)) in refused
        assert status_of(lambda: sessions_seen(channel, shown)) in refused
        admin = admin_grpc.AdminServiceStub(channel)
        request = admin_pb.ListAllSessionsRequest()
        assert status_of(lambda: admin.ListAllSessions(request, metadata=[shown], timeout=CALL_TIMEOUT_S)) in refused
        token = ("authorization", f"Bearer {machines.token}")
        assert status_of(lambda: sessions_seen(channel, token)) in refused
    assert machines.states()["n1"] == "SERVING"


def principal(**fields: object) -> bytes:
    return json.dumps({**ADMIN, **fields}).encode()


def test_a_client_that_names_a_principal_is_who_its_token_says(machines: Fleet) -> None:
    address = machines.front.address
    forged, token = (PRINCIPAL_KEY, principal()), ("authorization", f"Bearer {new_token(machines, 'plain')}")
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        admin, request = admin_grpc.AdminServiceStub(channel), admin_pb.ListAllSessionsRequest()

        def status_with(*metadata: tuple[str, str | bytes]) -> grpc.StatusCode:
            return status_of(lambda: admin.ListAllSessions(request, metadata=metadata, timeout=CALL_TIMEOUT_S))

        assert eventually(lambda: status_with(token, forged) is grpc.StatusCode.PERMISSION_DENIED), status_with(token)
        assert status_with(forged) is grpc.StatusCode.UNAUTHENTICATED


# ---------------------------------------------------------------------------------------------------------------------
# Tenants


def new_token(machines: Fleet, tenant: str) -> str:
    """A token as the command line makes it at the front; the whole fleet knows it a moment later."""
    _, secret = TokenFile(machines.front.state_dir / "tokens.json").new(tenant, "default")

    def is_known() -> bool:
        with machines.client_with(secret) as client:
            try:
                client.get_policy()
            except ExecutorClientError:
                return False
        return set(machines.states().values()) == {"SERVING"}

    assert eventually(is_known), machines.logs()
    return secret


def test_ids_of_other_tenants_are_unknown(machines: Fleet) -> None:
    theirs, ours = new_token(machines, "they"), new_token(machines, "we")
    with machines.client_with(theirs) as they, machines.client_with(ours) as we, they.create_session() as session:
        for guessed in (session.session_id, f"n1-{new_id()}", f"n2-{new_id()}"):
            with pytest.raises(NotFoundError):
                we.get_session(guessed)
        assert we.list_sessions() == []
        assert session.execute("1").output == 1


@pytest.mark.parametrize(
    "guessed",
    ["0" * 32, "n1", "n1-", f"-{'0' * 32}", f"n3-{'0' * 32}", f"n1-n2-{'0' * 32}", f"n1-{'0' * 31}", f"N1-{'0' * 32}"],
)
def test_ids_that_no_node_has_made_are_not_found(machines: Fleet, guessed: str) -> None:
    with machines.client() as client, pytest.raises(NotFoundError):
        client.get_session(guessed)


def test_one_request_id_of_two_tenants_makes_two_sessions(machines: Fleet) -> None:
    request_id = new_id()
    made = [machines.create(request_id, token=new_token(machines, tenant)) for tenant in ("left", "right")]
    again = [machines.create(request_id, token=new_token(machines, tenant)) for tenant in ("left", "right")]
    ids = [each.session_id for each in made if each is not None]
    assert len(set(ids)) == 2
    assert [each.session_id for each in again if each is not None] == ids
    with machines.client() as client:
        for session_id in ids:
            with pytest.raises(NotFoundError):
                client.get_session(session_id)


def test_a_revoked_token_is_refused(machines: Fleet) -> None:
    token = new_token(machines, "gone")
    with machines.client_with(token) as client:
        session = client.create_session()
        assert session.execute("1").output == 1
        assert TokenFile(machines.front.state_dir / "tokens.json").revoke(token.split("_")[1]) is not None

        def is_refused() -> bool:
            with grpc.insecure_channel(machines.front.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                shown = ("authorization", f"Bearer {token}")
                return status_of(lambda: sessions_seen(channel, shown)) is grpc.StatusCode.UNAUTHENTICATED

        assert eventually(is_refused, timeout_s=REVOKED_WITHIN_S)
    with machines.client() as operator:
        assert operator.list_sessions() is not None
