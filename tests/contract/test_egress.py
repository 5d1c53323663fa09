"""A sandbox with a network has a listener, which a process outside of it serves; one without has nothing of the kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.backends.base import Backend
from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.backends.settings import CA_BUNDLE
from executor_server.core.errors import SandboxFailure
from executor_server.sessions import Session
from executor_server.sessions.journal.execution import Execution
from tests.contract.harness import PRINCIPAL, Harness, follow, open_harness
from tests.contract.marks import instead, promise
from tests.contract.probes import Probe
from tests.contract.test_creation import SPEC, answers
from tests.contract.wire import Front, harness_of
from tests.support import backends

ADDRESS = ("127.0.0.1", 3128)
PROXY = "http://127.0.0.1:3128"
WITH_NETWORK = replace(SPEC, egress=True)


async def taken(session: Session) -> socket.socket:
    listener = await session._connection.take_listener()
    assert isinstance(listener, socket.socket)
    return listener


@asynccontextmanager
async def served(listener: socket.socket, answer: Callable[[bytes], bytes]) -> AsyncIterator[list[bytes]]:
    """Answers the requests of programs, each of which ends with an empty line; provides their heads."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(heads[-1]))
        writer.close()

    async with await asyncio.start_server(serve, sock=listener):
        yield heads


def with_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)


@promise("egress-listener", "egress-variables")
async def test_a_program_reaches_the_process_that_serves_its_listener(harness: Harness) -> None:
    session = await harness.session(egress=True)
    body = bytes(range(256)) * 40_000
    code = """
import urllib.request
with urllib.request.urlopen("http://name.test:8080/page?a=1") as page:
    got = page.read()
got
"""
    async with served(await taken(session), lambda _: with_length(body)) as heads:
        run = await harness.run(session, code, whole=True)
    assert (run.outcome, run.output) == ("succeeded", body)
    assert [head.splitlines()[0] for head in heads] == [b"GET http://name.test:8080/page?a=1 HTTP/1.1"]


@promise("egress-variables")
@pytest.mark.parametrize("imports", ["import aiohttp", "import through, json"])
async def test_aiohttp_heeds_the_proxy_too(imports: str, front: Front | None) -> None:
    """It ignores the variables unless a session is made with `trust_env=True`, and agents do not write that."""
    async with _proxied(front) as (harness, session, name, text):
        run = await harness.run(session, AIOHTTP.format(imports=imports, name=name))
    assert run.output == (text, True), run.message


AIOHTTP = """
import asyncio, sys
open("through.py", "w").write("import aiohttp")
{imports}
async def ask(**options):
    async with sys.modules["aiohttp"].ClientSession(**options) as session, session.get("http://{name}/a") as answer:
        return await answer.text()
try:
    asyncio.run(ask(trust_env=False))
except OSError as error:
    direct = True
asyncio.run(ask()), direct
"""


@asynccontextmanager
async def _proxied(front: Front | None) -> AsyncIterator[tuple[Harness, Session, str, str]]:
    """A session, a name that its proxy answers for once, and the text; behind a front the node's proxy asks a site."""
    if front is None:
        async with open_harness("local") as harness:
            session = await harness.session(egress=True)
            async with served(await taken(session), lambda _: with_length(b"by the proxy")) as heads:
                yield harness, session, "name.test", "by the proxy"
            assert len(heads) == 1
        return
    name = front.internet.name("any")
    async with harness_of("", front) as harness:
        session = await harness.session_under(f'network.allowed = ["{name}:80"]', network=(f"{name}:80",))
        yield harness, session, name, f"{name} is here\n"
    assert len(front.internet.sites.seen(name)) == 1


@promise("egress-listener")
async def test_the_filter_of_system_calls_leaves_tcp_whole(harness: Harness) -> None:
    """Programs and their libraries use more of it than a request does."""
    session = await harness.session(egress=True)
    code = """
import asyncio, os, select, socket, threading
size = 8_000_000
own = socket.create_server(("127.0.0.1", 0))
open("sent", "wb").write(os.urandom(size))
def serve():
    connection, _ = own.accept()
    with connection, open("sent", "rb") as file:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendfile(file)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
thread = threading.Thread(target=serve)
thread.start()
with socket.create_connection(own.getsockname()) as one:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
    poll = select.epoll()
    poll.register(one, select.EPOLLIN | select.EPOLLET)
    ready = poll.poll(10)
    peeked = one.recv(4, socket.MSG_PEEK | socket.MSG_WAITALL)
    info = len(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    got = bytearray()
    while True:
        data, _, _, _ = one.recvmsg(65536)
        if not data:
            break
        got += data
    one.sendmsg([b"x"])
thread.join()
async def echo():
    async def serve(reader, writer):
        writer.write(await reader.read(100))
        await writer.drain()
        writer.close()
    async with await asyncio.start_server(serve, "localhost", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async def ask(number):
            reader, writer = await asyncio.open_connection("localhost", port)
            writer.write(b"%d" % number)
            answer = int(await reader.read())
            writer.close()
            return answer
        return await asyncio.gather(*map(ask, range(100)))
echoed = asyncio.run(echo())
bool(ready), peeked == got[:4], info > 0, got == open("sent", "rb").read(), echoed == list(range(100))
"""
    run = await harness.run(session, code)
    assert run.output == (True,) * 5, run.message


@promise("egress-listener")
async def test_many_connections_at_once_are_served(harness: Harness) -> None:
    session = await harness.session(egress=True)
    code = """
import concurrent.futures, urllib.request
def ask(number):
    with urllib.request.urlopen(f"http://name.test/{number}") as page:
        return page.read()
with concurrent.futures.ThreadPoolExecutor(40) as pool:
    answers = set(pool.map(ask, range(400)))
answers
"""
    async with served(await taken(session), lambda _: with_length(b"well")) as heads:
        run = await harness.run(session, code)
    assert (run.output, len(heads)) == ({b"well"}, 400)


@promise("egress-listener")
async def test_each_sandbox_has_a_listener_of_its_own(harness: Harness) -> None:
    one, other = await harness.session(egress=True), await harness.session(egress=True)
    code = "import urllib.request\nurllib.request.urlopen('http://name.test/').read().decode()"
    async with (
        served(await taken(one), lambda _: with_length(b"one")),
        served(await taken(other), lambda _: with_length(b"other")),
    ):
        runs = await asyncio.gather(harness.run(one, code), harness.run(other, code))
    assert [run.output for run in runs] == ["one", "other"]


@promise("egress-listener")
async def test_a_program_can_neither_take_nor_share_the_port(harness: Harness) -> None:
    session = await harness.session(egress=True)
    code = """
import errno, socket
tried = []
for family, address in (
    (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"),
    (socket.AF_INET6, "::ffff:127.0.0.1"),
):
    for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        with socket.socket(family) as other:
            if family == socket.AF_INET6:
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if option is not None:
                other.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                other.bind((address, 3128))
                other.listen(1)
                tried.append(f"{address} {option}: bound")
            except OSError as error:
                tried.append(errno.errorcode[error.errno])
tried
"""
    with await taken(session):
        run = await harness.run(session, code)
    # A host without IPv6 has no such address.
    assert len(run.output) == 12 and set(run.output) <= {"EADDRINUSE", "EADDRNOTAVAIL", "EAFNOSUPPORT"}
    assert set(run.output[:6]) == {"EADDRINUSE"}


# Lists the descriptors, of processes that a program may look into, of the socket that listens at the port.
_HOLDERS = """
import os
def inodes():
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return [f"socket:[{row[9]}]" for row in rows if row[1].endswith(":0C38") and row[3] == "0A"]
def holders():
    found, seen = [], 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                seen += 1
                if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes():
                    found.append(f"{pid}/{fd}")
        except (PermissionError, FileNotFoundError):
            continue
    return len(inodes()), seen > 0, found
"""


@promise("egress-listener")
async def test_no_process_of_a_program_has_the_listener(harness: Harness) -> None:
    """One that had it could accept the connections of others in the sandbox, and read what they send."""
    session = await harness.session(egress=True)
    with await taken(session):
        assert (await harness.run(session, f"{_HOLDERS}holders()")).output == (1, True, [])
        child = f"{_HOLDERS}print(*holders())"
        code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], close_fds=False)"
        assert (await harness.run(session, code)).stdout == "1 True []\n"
        assert (await harness.run(session, "import os\nos._exit(3)")).outcome == "exited"
        assert (await harness.run(session, f"{_HOLDERS}holders()")).output == (1, True, []), "in the next interpreter"


@promise("egress-listener")
async def test_a_program_can_not_open_the_listener_through_the_supervisor(harness: Harness) -> None:
    session = await harness.session(egress=True)
    code = """
import ctypes, errno, os
tried = []
try:
    os.listdir("/proc/1/fd")
except OSError as error:
    tried.append(errno.errorcode[error.errno])
libc = ctypes.CDLL(None, use_errno=True)
for number in range(64):
    pidfd = libc.syscall(434, 1, 0)
    if pidfd < 0 or libc.syscall(438, pidfd, number, 0) < 0:
        tried.append(errno.errorcode[ctypes.get_errno()])
    else:
        tried.append(f"descriptor {number}")
    if pidfd >= 0:
        os.close(pidfd)
sorted(set(tried))
"""
    with await taken(session):
        refusals = (await harness.run(session, code)).output
    assert refusals and set(refusals) <= {"EACCES", "EPERM", "ENOSYS"}


@promise("egress-listener", "egress-variables")
async def test_a_sandbox_without_a_network_has_nothing_of_it(harness: Harness) -> None:
    session = await harness.session()
    code = f"""
import os, socket
with socket.socket() as one:
    refused = one.connect_ex(("127.0.0.1", 3128))
names = [name for name in os.environ if "proxy" in name.lower() or name.endswith(("_CERT_FILE", "_CA_BUNDLE"))]
refused, names, os.path.exists({CA_BUNDLE!r})
"""
    assert (await harness.run(session, code)).output == (111, [], False)
    with pytest.raises(SandboxFailure, match="did not hand its listener out"):
        await taken(session)
    assert (await harness.run(session, "1")).output == 1


@instead("egress-listener", "egress-variables", "egress-restart")
async def test_where_no_listener_can_be_handed_out_a_proxy_beside_it_takes_it(harness: Harness) -> None:
    """tests/integration/test_e2b_network.py has such a proxy serve."""
    session = await harness.session(egress=True)
    listener = await session._connection.take_listener()
    assert not isinstance(listener, socket.socket)
    assert len({listener.next_token() for _ in range(3)}) == 3
    assert (await harness.run(session, "1 + 1")).output == 2


@promise("egress-variables")
async def test_programs_find_the_proxy_and_the_authorities(harness: Harness) -> None:
    session = await harness.session(egress=True)
    code = """
import json, os, subprocess, sys
dict(os.environ), json.loads(subprocess.check_output([sys.executable, "-c",
    "import json, os; print(json.dumps(dict(os.environ)))"]))
"""
    run = await harness.run(session, code)
    for variables in run.output:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            assert variables[name] == variables[name.upper()] == PROXY
        assert variables["no_proxy"] == variables["NO_PROXY"] == "localhost,127.0.0.1,::1"
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO"):
            assert variables[name] == variables["NODE_EXTRA_CA_CERTS"] == CA_BUNDLE


@promise("egress-variables")
async def test_the_authorities_are_readable_and_can_not_be_changed(harness: Harness) -> None:
    session = await harness.session(egress=True)
    code = f"""
import errno, os, ssl
path = {CA_BUNDLE!r}
def tried(change):
    try:
        change()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "changed"
changes = [
    lambda: open(path, "a"), lambda: os.unlink(path), lambda: os.rename(path, path + ".old"),
    lambda: os.chmod(path, 0o666), lambda: os.rename("/etc/remote-executor", "/etc/other"),
    lambda: open("/etc/remote-executor/other", "w"),
]
names = [dict(pair for (pair,) in each["subject"]) for each in ssl.create_default_context().get_ca_certs()]
open(path, "rb").read(), [tried(change) for change in changes], [each["commonName"] for each in names]
"""
    content, tries, names = (await harness.run(session, code)).output
    assert content == harness.probe.egress_bundle.read_bytes()
    assert set(tries) <= {"EROFS", "EACCES", "EPERM", "EBUSY"}
    assert names == ["Test authority"], "Python trusts it, and what else is in the bundle"


@promise("egress-variables")
async def test_other_authorities_make_another_kind_of_sandbox(
    backend: Backend, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm sandbox with the old ones would trust no certificate that the proxy makes."""
    first, without = await backend.fingerprint(WITH_NETWORK), await backend.fingerprint(SPEC)
    assert await backend.fingerprint(WITH_NETWORK) == first != without
    assert (await backend.create(WITH_NETWORK)).fingerprint == first
    other = directory / "other.pem"
    other.write_text("# none\n")
    monkeypatch.setattr(backends, "egress_bundle", lambda _: other)
    assert await backend.fingerprint(WITH_NETWORK) != first
    assert await backend.fingerprint(SPEC) == without


@promise("egress-listener")
async def test_where_no_proxy_runs_no_sandbox_with_a_network_is_made(
    backend: Backend, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> Path:
        raise SandboxFailure("no proxy runs")

    monkeypatch.setattr(backends, "egress_bundle", fail)
    with pytest.raises(SandboxFailure, match="no proxy runs"):
        await backend.create(WITH_NETWORK)
    assert await probe.existing() == set()
    assert await answers(await backend.create(SPEC))


# -- restarts


@promise("egress-restart")
async def test_the_next_daemon_serves_the_same_listener(probe: Probe) -> None:
    books, session_id, execution_id = await probe.session_of_a_killed_daemon(WITH_NETWORK)
    async with Harness(probe.backend(), books) as harness:
        session = harness.manager.get(PRINCIPAL, session_id)
        session.execution(execution_id).cancel()
        await follow(session.execution(execution_id))
        code = "import urllib.request\nurllib.request.urlopen('http://name.test/').read().decode()"
        waiting: Execution = await harness.begin(session, f"print('asked', flush=True)\n{code}")
        await anext(waiting.events())
        async with served(await taken(session), lambda _: with_length(b"served")) as heads:
            run = await follow(waiting)
        assert (run.output, len(heads)) == ("served", 1)


@promise("egress-restart")
async def test_a_sandbox_that_was_never_asked_is_asked_by_the_next_daemon(probe: Probe) -> None:
    known, fingerprint = await probe.left_by_a_killed_daemon(WITH_NETWORK)
    backend = probe.backend()
    await backend.start()
    try:
        sandbox = (await backend.adopt([known]))[known.sandbox_id]
        assert fingerprint == await backend.fingerprint(WITH_NETWORK)
        channel = GuestChannel(sandbox.endpoint)
        await channel.connect()
        with await channel.take_listener() as listener:
            assert listener.getsockname() == ADDRESS
        channel.close()
    finally:
        await backend.close()
