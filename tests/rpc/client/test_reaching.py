"""A daemon that can't be reached: at once, one sentence with what to do, and not a line of gRPC's own log."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_client import AsyncExecutorClient, AuthenticationError, ExecutorClient, TlsConfig, UnavailableError
from executor_client._core import probe
from executor_client._core.endpoint import Endpoint
from tests.support import rounds
from tests.support.certificates import Authority
from tests.support.fake_daemon import FakeDaemon, serve
from tests.support.free_ports import free_port

Fails = Callable[..., str]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path / "none"))
    for variable in ("EXECUTOR_TOKEN", "http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(params=["asyncio", "sync"] if rounds.ALL else ["asyncio"])
def fails(request: pytest.FixtureRequest) -> Fails:
    """A function that returns the message of a first call's error, an UnavailableError unless another class is given."""

    def sync(address: str, kind: type[Exception] = UnavailableError, **options: Any) -> str:
        with ExecutorClient(address, **{"token": "t", **options}) as client, pytest.raises(kind) as failure:
            client.get_policy()
        return str(failure.value)

    async def asynchronous(address: str, kind: type[Exception], options: Any) -> str:
        async with AsyncExecutorClient(address, **{"token": "t", **options}) as client:
            with pytest.raises(kind) as failure:
                await client.get_policy()
        return str(failure.value)

    def on_a_loop(address: str, kind: type[Exception] = UnavailableError, **options: Any) -> str:
        return asyncio.run(asynchronous(address, kind, options))

    return sync if request.param == "sync" else on_a_loop


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@contextmanager
def tls_daemon(
    authority: Authority, tmp_path: Path, *, wants_certificate: bool = False, names: Sequence[str] = ()
) -> Iterator[FakeDaemon]:
    """Its certificate is for this machine, or for other names."""
    pair = authority.client("other", "elsewhere", dns=names) if names else authority.server()
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.cert.read_bytes())],
        authority.cert.read_bytes() if wants_certificate else None,
        require_client_auth=wants_certificate,
    )
    with serve(tmp_path, credentials) as daemon:
        yield daemon


@contextmanager
def plain_daemon() -> Iterator[str]:
    threads = ThreadPoolExecutor(1)
    server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
        threads.shutdown()


# -- no process listens


def test_no_daemon_at_a_socket(fails: Fails, tmp_path: Path) -> None:
    said = fails(f"unix:{tmp_path}/none.sock")
    assert said.startswith(
        f"no daemon answers at unix:{tmp_path}/none.sock: no daemon is running there; start one with"
    )
    assert "`executor-server serve`" in said


def test_a_socket_that_a_killed_daemon_left(fails: Fails, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    assert "no daemon is running there" in fails(f"unix:{tmp_path}/left.sock")


def test_no_daemon_at_a_port(fails: Fails) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert f"nothing listens there; start a daemon with `executor-server serve --listen {address}`" in fails(address)


def test_a_name_that_there_is_not(fails: Fails) -> None:
    assert "the name 'nowhere.invalid' can't be resolved" in fails("nowhere.invalid:1", tls=True)


def test_a_daemon_that_is_about_to_start_is_waited_for_where_that_was_asked(tmp_path: Path) -> None:
    began = threading.Event()
    with ExecutorClient(
        f"unix:{tmp_path}/d.sock", token="t", connect_timeout_s=60, on_wait=lambda _: began.set()
    ) as client:
        thread = threading.Thread(target=client.get_policy)
        thread.start()
        began.wait()
        with serve(tmp_path) as daemon:
            daemon.token = None
            thread.join()
            assert daemon.requests


# -- a daemon is killed in the first call


@contextmanager
def killed_in_the_first_call(listener: socket.socket) -> Iterator[None]:
    """Ends what listens as soon as a call has reached it."""

    def listen() -> None:
        with listener:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if connection.recv(1):  # nothing comes from a probe
                        listener.close()
                        return

    listener.listen()
    thread = threading.Thread(target=listen)
    thread.start()
    yield
    thread.join()


def ask(address: str, **options: Any) -> None:
    with ExecutorClient(address, token="t", **options) as client:
        client.get_policy()


def ask_on_a_loop(address: str, **options: Any) -> None:
    async def asynchronous() -> None:
        async with AsyncExecutorClient(address, token="t", **options) as client:
            await client.get_policy()

    asyncio.run(asynchronous())


@pytest.mark.parametrize("asks", [ask_on_a_loop, ask] if rounds.ALL else [ask_on_a_loop])
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET], ids=["socket", "port"])
def test_a_daemon_killed_in_the_first_call_is_waited_for_as_in_later_ones(
    tmp_path: Path, asks: Callable[..., None], family: socket.AddressFamily
) -> None:
    path, port, began = tmp_path / "d.sock", free_port(), threading.Event()
    listener = socket.socket(family)
    if family is socket.AF_UNIX:
        listener.bind(str(path))
        address = f"unix:{path}"
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        address = f"127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as threads:
        with killed_in_the_first_call(listener):
            asking = threads.submit(asks, address, on_wait=lambda _: began.set(), connect_timeout_s=0.01)
            assert began.wait(10)
        path.unlink(missing_ok=True)
        with serve(tmp_path, address=address) as daemon:
            daemon.token = None
            asking.result(10)


# -- a process of another protocol listens


def test_plain_against_tls(fails: Fails, authority: Authority, tmp_path: Path) -> None:
    with tls_daemon(authority, tmp_path) as daemon:
        assert "it uses TLS, and this client does not; pass tls=True" in fails(daemon.address)


def test_tls_against_plain(fails: Fails) -> None:
    with plain_daemon() as address:
        assert "it does not use TLS, and this client does; omit tls" in fails(address, tls=True)


def test_an_authority_that_is_not_trusted(fails: Fails, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "Another one")
    with tls_daemon(authority, tmp_path) as daemon:
        public = fails(daemon.address, tls=True)
        wrong = fails(daemon.address, tls=TlsConfig(other.cert))
    assert "its certificate is not signed by a CA that this client trusts" in public
    assert f"its certificate is not signed by the CA in {other.cert}" in wrong
    assert "tls=TlsConfig(ca=FILE), or --tls-ca FILE" in public and "--tls-ca FILE" in wrong


def test_a_name_that_the_certificate_has_not(fails: Fails, authority: Authority, tmp_path: Path) -> None:
    with tls_daemon(authority, tmp_path, names=["elsewhere.example"]) as daemon:
        said = fails(daemon.address, tls=TlsConfig(authority.cert))
    assert "its certificate is not for the name 'localhost' but for elsewhere.example;" in said


def test_a_client_certificate_that_is_wanted(fails: Fails, authority: Authority, tmp_path: Path) -> None:
    with tls_daemon(authority, tmp_path, wants_certificate=True) as daemon:
        assert "requires a client certificate; pass tls=TlsConfig(cert=FILE, key=FILE)" in fails(
            daemon.address, tls=TlsConfig(authority.cert)
        )


def test_what_is_no_daemon(fails: Fails) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = threading.Event()

        def answer() -> None:
            listener.settimeout(0.05)
            while not closing.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.recv(16)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            said = fails(f"127.0.0.1:{listener.getsockname()[1]}")
        finally:
            closing.set()
            thread.join()
    assert "the program that listens there is not an executor daemon" in said


# -- a daemon that does not know the caller


def test_no_credential(fails: Fails, daemon: FakeDaemon, tmp_path: Path) -> None:
    said = fails(daemon.address, AuthenticationError, token=None)
    assert f"the daemon at {daemon.address} requires a credential, and no token was found" in said
    assert "EXECUTOR_TOKEN, --token" in said


def test_an_unknown_token(fails: Fails, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not accept the token from token=: it belongs to another daemon, was revoked" in fails(
        daemon.address, AuthenticationError, token="wrong"
    )
    monkeypatch.setenv("EXECUTOR_TOKEN", "wrong")
    assert "does not accept the token from EXECUTOR_TOKEN" in fails(daemon.address, AuthenticationError, token=None)


# -- and nothing else


def test_a_connection_as_it_should_be_has_no_cause(authority: Authority, tmp_path: Path, daemon: FakeDaemon) -> None:
    assert probe.diagnosis(Endpoint(daemon.address, None)) is None
    with tls_daemon(authority, tmp_path / "tls") as other:
        assert probe.diagnosis(Endpoint(other.address, None, TlsConfig(authority.cert))) is None


@pytest.mark.parametrize("target", ["xds:///x", "vsock:1:2", "a,b:1", "host", "host:0", "host:x"])
def test_what_only_grpc_can_resolve_is_not_judged(target: str) -> None:
    assert probe.diagnosis(Endpoint(target, None)) is None


BLOCKING_ASK = """\
from executor_client import ExecutorClient, UnavailableError
def ask(address):
    ExecutorClient(address, token="t", tls=True).get_policy()
"""
ASYNCIO_ASK = """\
import asyncio
from executor_client import AsyncExecutorClient, UnavailableError
def ask(address):
    async def get_policy():
        async with AsyncExecutorClient(address, token="t", tls=True) as client:
            await client.get_policy()
    asyncio.run(get_policy())
"""


@pytest.mark.parametrize("client", [BLOCKING_ASK, ASYNCIO_ASK], ids=["blocking", "asyncio"])
def test_no_line_of_grpcs_own_log_comes_out(authority: Authority, tmp_path: Path, client: str) -> None:
    """And the level is not left to the processes that this one starts."""
    program = client + (
        "import os, sys\n"
        "try:\n"
        "    ask(sys.argv[1])\n"
        "except UnavailableError as error:\n"
        "    print(error)\n"
        "print(os.environ.get('GRPC_VERBOSITY'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    with tls_daemon(authority, tmp_path) as daemon:
        ended = subprocess.run(
            [sys.executable, "-c", program, daemon.address], env=environment, capture_output=True, text=True, check=True
        )
    assert "not signed by a CA that this client trusts" in ended.stdout
    assert (ended.stdout.splitlines()[-1], ended.stderr) == ("None", "")
