"""The listeners: private, exclusive, and encrypted where others could listen in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc
from executor_server.api.server import TlsFiles
from executor_server.core.addresses import AddressError
from tests.rpc.edge import AUTH, FakeSessions, make_server, serving, settings
from tests.support.certificates import Authority


async def get_policy(channel: grpc.aio.Channel, timeout_s: float = 10.0) -> Any:
    stub: Any = pb_grpc.ExecutorServiceStub(channel)
    return await stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH, timeout=timeout_s)


async def test_the_unix_socket_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "s").exists()


async def test_files_made_after_binding_have_their_usual_rights(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    async with serving(tmp_path):
        (tmp_path / "after").touch()
    assert (tmp_path / "after").stat().st_mode == (tmp_path / "before").stat().st_mode


async def test_a_second_daemon_does_not_take_a_live_ones_socket(tmp_path: Path) -> None:
    async with serving(tmp_path) as edge:
        second = make_server(FakeSessions(), settings(edge.address))
        with pytest.raises(AddressError, match="another process listens"):
            await second.start()
        await second.stop(0)
        assert (await get_policy(edge.channel)).policy.backend == "local"


async def test_a_port_is_not_shared_with_another_daemon() -> None:
    first = make_server(FakeSessions(), settings("127.0.0.1:0"))
    (address,) = await first.start()
    second = make_server(FakeSessions(), settings(address))
    with pytest.raises(AddressError, match="in use"):
        await second.start()
    await second.stop(0)
    await first.stop(0)


async def test_port_0_says_which_port_it_got() -> None:
    server = make_server(FakeSessions(), settings("127.0.0.1:0"))
    (address,) = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await get_policy(channel)).policy.policy.profile == "default"
    await server.stop(0)


async def test_with_tls_a_plain_client_gets_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.server()
    server = make_server(FakeSessions(), settings("127.0.0.1:0", tls=TlsFiles(pair.cert, pair.key)))
    (address,) = await server.start()
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with grpc.aio.secure_channel(address, credentials) as channel:
        assert (await get_policy(channel)).policy.policy.profile == "default"
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await get_policy(channel)
    await server.stop(0)


async def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = make_server(FakeSessions(), settings("0.0.0.0:0", tls=missing))
    with pytest.raises(AddressError, match=r"key\.pem can't be read"):
        await server.start()
    await server.stop(0)


async def test_a_connection_whose_peer_has_frozen_is_given_up_in_time(tmp_path: Path) -> None:
    """gRPC waits a minute for a ping by default, however short `keepalive_timeout_s` is."""
    server_settings = replace(settings(f"unix:{tmp_path}/s"), keepalive_s=1.0, keepalive_timeout_s=0.1)
    server = make_server(FakeSessions(), server_settings)
    await server.start()
    reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))  # settings: none
        async with asyncio.timeout(30):  # and then silence, like a stopped process
            while await reader.read(1024):
                pass
    finally:
        writer.transport.abort()
        await server.stop(0)


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_a_taken_default_port_is_a_sentence_and_the_socket_serves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with taken_port() as taken:
        server_settings = replace(settings(f"unix:{tmp_path}/s", taken), unasked={taken})
        server = make_server(FakeSessions(), server_settings)
        try:
            with capture_logs() as lines:
                assert await server.start() == [f"unix:{tmp_path}/s"]
            problem = f"Can't listen on {taken}: it is in use; choose another port with --listen."
            assert {"event": "address_not_served", "problem": problem, "log_level": "warning"} in lines
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
                assert (await get_policy(channel)).policy.backend == "local"
        finally:
            await server.stop(0)
    assert capfd.readouterr().err == ""  # gRPC logs an error there by default


async def test_nothing_to_listen_on_is_an_error_even_for_default_addresses() -> None:
    with taken_port() as taken:
        server = make_server(FakeSessions(), replace(settings(taken), unasked={taken}))
        with pytest.raises(AddressError, match="in use"):
            server.bind()
        await server.stop(0)
