"""Callers that need no token: client certificates, and users of this host at the peer socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc
from executor_server.api import peer_socket
from executor_server.api.peer_socket import PeerSocket
from executor_server.api.server import RpcServer, TlsFiles
from executor_server.core.addresses import AddressError, UnixAddress
from executor_server.core.model import Event, Log, Principal
from executor_server.policy.decide import Policy
from executor_server.policy.file import Tenant
from executor_server.policy.identity.token_file import TokenFile
from executor_server.policy.identity.tokens import Tokens
from tests.rpc.edge import AUTH, TOKEN, FakeExecution, FakeSessions, make_policy, make_server, refused, settings
from tests.support.certificates import Authority, Pair, self_signed
from tests.support.polling import eventually_async

DENIED = ("UNAUTHENTICATED", "UNAUTHENTICATED")
OWN_UID = os.geteuid()
AS_ROOT = pytest.mark.skipif(OWN_UID != 0, reason="only root can become other users")


class Admin(admin_grpc.AdminServiceServicer):
    async def GetUsage(self, request: Any, context: Any) -> admin_pb.GetUsageResponse:
        return admin_pb.GetUsageResponse()


def bearer(token: str) -> Any:
    return (("authorization", f"Bearer {token}"),)


async def owner(channel: grpc.aio.Channel, sessions: FakeSessions, metadata: Any = ()) -> Principal:
    """Returns the principal that the daemon takes the caller for. Raises AioRpcError."""
    stub: Any = pb_grpc.ExecutorServiceStub(channel)
    request_id = f"r{len(sessions.sessions)}"
    await stub.CreateSession(pb.CreateSessionRequest(request_id=request_id), metadata=metadata, timeout=10)
    return sessions.sessions[request_id].owner


# -- client certificates


class TlsEdge:
    """A server that requires certificates of an authority, and clients with one."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "tls")
        self.file = TokenFile(directory / "tokens.json")
        self.sessions = FakeSessions()
        self.address = ""
        self.policy: Policy = make_policy()

    @asynccontextmanager
    async def serving(self, **tenants: Tenant) -> AsyncIterator[RpcServer]:
        self.policy = make_policy(**tenants)
        pair = self.authority.server()
        server = make_server(
            self.sessions,
            settings("127.0.0.1:0", tls=TlsFiles(pair.cert, pair.key, client_ca=self.authority.cert)),
            tokens=Tokens(TOKEN, self.file),
            current_policy=lambda: self.policy,
            admin=Admin(),
        )
        (self.address,) = await server.start()
        try:
            yield server
        finally:
            await server.stop(0)

    @asynccontextmanager
    async def channel(self, pair: Pair | None) -> AsyncIterator[grpc.aio.Channel]:
        key, cert = (pair.key.read_bytes(), pair.cert.read_bytes()) if pair is not None else (None, None)
        credentials = grpc.ssl_channel_credentials(self.authority.cert.read_bytes(), key, cert)
        async with grpc.aio.secure_channel(self.address, credentials) as channel:
            yield channel

    async def owner(self, pair: Pair | None, metadata: Any = ()) -> Principal:
        async with self.channel(pair) as channel:
            return await owner(channel, self.sessions, metadata)

    async def refused(self, pair: Pair | None, metadata: Any = ()) -> tuple[str, str]:
        async with self.channel(pair) as channel:
            return await refused(owner(channel, self.sessions, metadata))


@pytest.fixture
def tls(tmp_path: Path) -> TlsEdge:
    return TlsEdge(tmp_path)


async def test_a_certificate_is_its_tenants_by_common_name(tls: TlsEdge) -> None:
    async with tls.serving(acme=Tenant(certificates=("agents.acme",))):
        found = await tls.owner(tls.authority.client("a", "agents.acme"))
    assert found == Principal("acme", "certificate:agents.acme")


@pytest.mark.parametrize("names", [{"dns": ["x.test", "agents.acme"]}, {"uris": ["spiffe://acme/agent"]}])
async def test_a_certificate_is_its_tenants_by_alternative_name(tls: TlsEdge, names: Any) -> None:
    async with tls.serving(acme=Tenant(certificates=("agents.acme", "spiffe://acme/agent"))):
        assert (await tls.owner(tls.authority.client("a", "somebody", **names))).tenant == "acme"


async def test_a_certificate_is_its_tenants_by_fingerprint(tls: TlsEdge) -> None:
    pair = tls.authority.client("a", "x")
    async with tls.serving(acme=Tenant(certificates=(f"sha256:{pair.fingerprint}",))):
        assert (await tls.owner(pair)).tenant == "acme"
        assert await tls.refused(tls.authority.client("b", "x")) == DENIED


async def test_a_certificate_that_the_policy_does_not_name_is_no_tenants(tls: TlsEdge) -> None:
    async with tls.serving(acme=Tenant(certificates=("agents.acme",))):
        for number, name in enumerate(("agents", "agents.acme.test", "AGENTS.ACME", "*.acme", "agents.acme ")):
            assert await tls.refused(tls.authority.client(f"c{number}", name)) == DENIED


async def test_the_common_name_counts_only_where_there_are_no_other_names(tls: TlsEdge) -> None:
    async with tls.serving(acme=Tenant(certificates=("agents.acme",))):
        assert await tls.refused(tls.authority.client("a", "agents.acme", dns=["x.test"])) == DENIED
        assert await tls.refused(tls.authority.client("b", "agents.acme", emails=["x@x.test"])) == DENIED


async def test_an_email_address_is_not_the_name_of_a_host(tls: TlsEdge) -> None:
    async with tls.serving(acme=Tenant(certificates=("agents@acme.test",))):
        assert await tls.refused(tls.authority.client("a", "x", emails=["agents@acme.test"])) == DENIED


async def test_a_certificate_of_two_tenants_names_is_no_tenants(tls: TlsEdge) -> None:
    async with tls.serving(a=Tenant(certificates=("a.test",)), b=Tenant(certificates=("b.test",))):
        assert await tls.refused(tls.authority.client("ab", "x", dns=["a.test", "b.test"])) == DENIED


async def test_bad_certificates_do_not_get_through_the_handshake(tls: TlsEdge, tmp_path: Path) -> None:
    """Their names are a tenant's, and the calls have a valid token besides."""
    bad = {
        "expired a second ago": tls.authority.client("old", "agents.acme", expired_since=timedelta(seconds=1)),
        "of another authority": Authority(tmp_path / "other").client("a", "agents.acme"),
        "of another authority of the same name": Authority(tmp_path / "same", tls.authority.name).client("a", "x"),
        "self-signed": self_signed(tmp_path, "agents.acme"),
        "none": None,
    }
    async with tls.serving(acme=Tenant(certificates=("agents.acme",))):
        codes = {why: (await tls.refused(pair, AUTH))[0] for why, pair in bad.items()}
    assert codes == dict.fromkeys(bad, "UNAVAILABLE")
    assert tls.sessions.sessions == {}


async def test_a_token_counts_over_a_certificate_that_is_no_tenants(tls: TlsEdge) -> None:
    async with tls.serving():
        assert (await tls.owner(tls.authority.client("a", "x"), AUTH)).tenant == "local"
        assert await tls.refused(tls.authority.client("b", "x")) == DENIED


async def test_a_token_over_another_tenants_certificate_is_refused(tls: TlsEdge) -> None:
    mine, theirs = tls.file.new("acme", "x")[1], tls.file.new("other", "x")[1]
    async with tls.serving(acme=Tenant(certificates=("agents.acme",))):
        pair = tls.authority.client("a", "agents.acme")
        assert await tls.refused(pair, bearer(theirs)) == DENIED
        assert await tls.refused(pair, AUTH) == DENIED
        assert (await tls.owner(pair, bearer(mine))).name.startswith("token:")


async def test_a_wrong_token_is_refused_over_a_good_certificate(tls: TlsEdge) -> None:
    async with tls.serving(acme=Tenant(certificates=("agents.acme",))):
        assert await tls.refused(tls.authority.client("a", "agents.acme"), bearer("x" * 43)) == DENIED


async def test_admin_calls_are_for_tenants_whose_certificates_may_make_them(tls: TlsEdge) -> None:
    async with tls.serving(ops=Tenant(certificates=("ops",), admin=True), acme=Tenant(certificates=("acme",))):
        async with tls.channel(tls.authority.client("o", "ops")) as channel:
            stub: Any = admin_grpc.AdminServiceStub(channel)
            await stub.GetUsage(admin_pb.GetUsageRequest())
        async with tls.channel(tls.authority.client("a", "acme")) as channel:
            stub = admin_grpc.AdminServiceStub(channel)
            assert await refused(stub.GetUsage(admin_pb.GetUsageRequest())) == ("PERMISSION_DENIED", "ROLE_MISSING")


async def test_a_stream_ends_when_the_policy_takes_its_certificate_away(tls: TlsEdge) -> None:
    async with (
        tls.serving(acme=Tenant(certificates=("acme",))),
        tls.channel(tls.authority.client("a", "acme")) as channel,
    ):
        await owner(channel, tls.sessions)
        session = tls.sessions.sessions["r0"]
        session.next_execution = FakeExecution([Event(1, Log("stdout", "x"))], stays_open=True)
        stub: Any = pb_grpc.ExecutorServiceStub(channel)
        stream = stub.Execute(
            pb.ExecuteRequest(
                session_id="r0", execution_id="e", code="1", output_mode="OUTPUT_MODE_TRAILING_EXPRESSION"
            )
        )
        await anext(aiter(stream))
        tls.policy = make_policy(other=Tenant(certificates=("acme",)))
        assert await refused(stream) == DENIED


async def test_a_stranger_over_tls_learns_nothing_of_methods_and_sends_nothing(tls: TlsEdge) -> None:
    async with tls.serving(), tls.channel(tls.authority.client("a", "x")) as channel:
        for path in ("/executor_api.v1.ExecutorService/PutFile", "/executor_api.v1.ExecutorService/No", "/x/y"):
            silent: Any = channel.stream_stream(path)  # type: ignore[call-arg]
            assert await refused(silent()) == DENIED
        for_admins: Any = channel.unary_unary("/executor_api.v1.ExecutorService/No")  # type: ignore[call-arg]
        assert (await refused(for_admins(b"", metadata=AUTH)))[0] == "UNIMPLEMENTED"


async def test_requests_of_every_shape_reach_their_handlers_without_a_token(tls: TlsEdge) -> None:
    async with (
        tls.serving(acme=Tenant(certificates=("acme",))),
        tls.channel(tls.authority.client("a", "acme")) as channel,
    ):
        await owner(channel, tls.sessions)
        stub: Any = pb_grpc.ExecutorServiceStub(channel)
        session = tls.sessions.sessions["r0"]
        session.parts = [b"ab", b"c"]
        header = pb.PutFileRequest(header=pb.PutFileHeader(session_id="r0", path="a", size_bytes=3))
        put = await stub.PutFile(iter([header, pb.PutFileRequest(data=b"abc")]))
        got = [part.data async for part in stub.GetFile(pb.GetFileRequest(session_id="r0", path="a"))]
        gone = await refused(stub.GetSession(pb.GetSessionRequest(session_id="no")))
        empty: Any = channel.stream_unary("/executor_api.v1.ExecutorService/GetPolicy")  # type: ignore[call-arg]
        assert await refused(empty(iter(()))) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert (put.file.size_bytes, got, gone[1]) == (3, [b"ab", b"c"], "SESSION_NOT_FOUND")


# -- users of this host


class PeerEdge:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sockets = PeerSocket(UnixAddress(directory / "public" / "p"), UnixAddress(directory / "inner"))
        self.file = TokenFile(directory / "tokens.json")
        self.sessions = FakeSessions()
        self.policy = make_policy()
        self.sockets.outer.path.parent.mkdir()

    @asynccontextmanager
    async def serving(self, **tenants: Tenant) -> AsyncIterator[RpcServer]:
        self.policy = make_policy(**tenants)
        server = make_server(
            self.sessions,
            settings(f"unix:{self.directory}/s", peer_socket=self.sockets),
            tokens=Tokens(TOKEN, self.file),
            current_policy=lambda: self.policy,
        )
        await server.start()
        try:
            yield server
        finally:
            await server.stop(0)

    async def owner(self, metadata: Any = (), address: str = "") -> Principal:
        async with grpc.aio.insecure_channel(address or str(self.sockets.outer)) as channel:
            return await owner(channel, self.sessions, metadata)


@pytest.fixture
def peers(tmp_path: Path) -> PeerEdge:
    return PeerEdge(tmp_path)


async def test_a_user_is_its_tenant_without_a_token(peers: PeerEdge) -> None:
    async with peers.serving(me=Tenant(uids=(OWN_UID,))):
        assert await peers.owner() == Principal("me", f"uid:{OWN_UID}")


async def test_a_user_that_the_policy_does_not_name_is_no_tenant(peers: PeerEdge) -> None:
    async with peers.serving(other=Tenant(uids=(OWN_UID + 1,))):
        assert await refused(peers.owner()) == DENIED


async def test_at_the_other_socket_a_user_needs_a_token(peers: PeerEdge) -> None:
    async with peers.serving(me=Tenant(uids=(OWN_UID,))):
        assert await refused(peers.owner(address=f"unix:{peers.directory}/s")) == DENIED
        assert (await peers.owner(AUTH, f"unix:{peers.directory}/s")).tenant == "local"


async def test_a_direct_connection_to_the_inner_socket_identifies_no_user(peers: PeerEdge) -> None:
    async with peers.serving(me=Tenant(uids=(OWN_UID,))):
        assert await refused(peers.owner(address=str(peers.sockets.inner))) == DENIED


async def test_a_token_over_another_tenants_user_is_refused(peers: PeerEdge) -> None:
    mine, theirs = peers.file.new("me", "x")[1], peers.file.new("other", "x")[1]
    async with peers.serving(me=Tenant(uids=(OWN_UID,))):
        assert await refused(peers.owner(bearer(theirs))) == DENIED
        assert (await peers.owner(bearer(mine))).tenant == "me"


async def test_a_new_policy_counts_for_connections_that_there_are(peers: PeerEdge) -> None:
    async with (
        peers.serving(me=Tenant(uids=(OWN_UID,))),
        grpc.aio.insecure_channel(str(peers.sockets.outer)) as channel,
    ):
        assert (await owner(channel, peers.sessions)).tenant == "me"
        peers.policy = make_policy(they=Tenant(uids=(OWN_UID,)))
        assert (await owner(channel, peers.sessions)).tenant == "they"
        peers.policy = make_policy()
        assert await refused(owner(channel, peers.sessions)) == DENIED


async def test_large_messages_pass_whole(peers: PeerEdge) -> None:
    async with (
        peers.serving(me=Tenant(uids=(OWN_UID,))),
        grpc.aio.insecure_channel(str(peers.sockets.outer)) as channel,
    ):
        await owner(channel, peers.sessions)
        stub: Any = pb_grpc.ExecutorServiceStub(channel)
        session = peers.sessions.sessions["r0"]
        session.parts = [os.urandom(262_144) for _ in range(32)]
        parts = [part.data async for part in stub.GetFile(pb.GetFileRequest(session_id="r0", path="a"))]
        assert parts == session.parts


async def test_the_sockets_have_the_rights_that_they_need_and_go_with_the_server(peers: PeerEdge) -> None:
    places = (peers.sockets.outer.path, peers.sockets.inner.path)
    async with peers.serving():
        assert [path.stat().st_mode & 0o777 for path in places] == [0o666, 0o600]
    assert not any(path.exists() for path in places)


async def test_another_daemons_peer_socket_is_not_taken(peers: PeerEdge) -> None:
    async with peers.serving(me=Tenant(uids=(OWN_UID,))):
        inner = UnixAddress(peers.directory / "second")
        second = make_server(
            FakeSessions(), settings(f"unix:{peers.directory}/s2", peer_socket=PeerSocket(peers.sockets.outer, inner))
        )
        with pytest.raises(AddressError, match="another process listens"):
            await second.start()
        await second.stop(0)
        assert (await peers.owner()).tenant == "me"


@contextmanager
def connections(path: Path, count: int) -> Iterator[list[socket.socket]]:
    made = []
    try:
        for _ in range(count):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.setblocking(False)
            one.connect(str(path))
            made.append(one)
        yield made
    finally:
        for one in made:
            one.close()


async def closed(one: socket.socket) -> None:
    """Returns when the other side has closed."""
    async with asyncio.timeout(10):
        while await asyncio.get_running_loop().sock_recv(one, 65_536):
            pass


async def test_one_user_has_so_many_connections_and_no_more(peers: PeerEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_socket, "MAX_CONNECTIONS_PER_USER", 4)
    async with peers.serving(me=Tenant(uids=(OWN_UID,))) as server:
        with connections(peers.sockets.outer.path, 5) as made:
            await closed(made[4])
            assert len(server._relay._links) == 4  # type: ignore[union-attr]
        await eventually_async(lambda: not server._relay._links)  # type: ignore[union-attr]
        assert (await peers.owner()).tenant == "me"


async def test_strangers_share_a_few_connections(peers: PeerEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_socket, "MAX_CONNECTIONS_OF_UNKNOWN", 1)
    async with peers.serving() as server:
        relay = server._relay
        assert relay is not None
        with connections(peers.sockets.outer.path, 2) as made:
            await closed(made[1])
            assert relay._counts == {None: 1}


async def test_connections_end_with_the_server(peers: PeerEdge) -> None:
    async with peers.serving(me=Tenant(uids=(OWN_UID,))) as server:
        with connections(peers.sockets.outer.path, 2) as made:
            await eventually_async(lambda: len(server._relay._links) == 2)  # type: ignore[union-attr]
            await server.stop(0)
            for one in made:
                await closed(one)


def let_others_through(*paths: Path) -> None:
    """Lets other users reach these paths, through each directory of ours above them."""
    for path in paths:
        for directory in path.parents:
            if directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o711)


ASK_AS = """
import os, sys, grpc, grpc._channel  # all of it: that user may not be able to read this environment
from executor_api.v1 import executor_service_pb2 as pb, executor_service_pb2_grpc as services
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
with grpc.insecure_channel(sys.argv[1]) as channel:
    try:
        services.ExecutorServiceStub(channel).CreateSession(pb.CreateSessionRequest(request_id="r"), timeout=20)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name)
"""


@AS_ROOT
async def test_users_are_distinguished(peers: PeerEdge) -> None:
    let_others_through(peers.directory / "any", peers.sockets.outer.path)
    async with peers.serving(one=Tenant(uids=(41_001,)), two=Tenant(uids=(41_002,))):
        for uid, tenant in ((41_001, "one"), (41_002, "two"), (41_003, None)):
            command = [sys.executable, "-c", ASK_AS, str(peers.sockets.outer), str(uid)]
            asked = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            assert asked.stdout == ("OK\n" if tenant else "UNAUTHENTICATED\n"), asked.stderr
            if tenant:
                assert peers.sessions.sessions.pop("r").owner == Principal(tenant, f"uid:{uid}")


@AS_ROOT
async def test_the_uid_of_users_of_other_namespaces_is_no_tenant(peers: PeerEdge) -> None:
    overflow_uid = int(Path("/proc/sys/kernel/overflowuid").read_text())
    let_others_through(peers.directory / "any", peers.sockets.outer.path)
    async with peers.serving(me=Tenant(uids=(overflow_uid,))):
        command = [sys.executable, "-c", ASK_AS, str(peers.sockets.outer), str(overflow_uid)]
        asked = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert asked.stdout == "UNAUTHENTICATED\n"
