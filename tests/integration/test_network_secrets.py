"""A secret is set in requests of one host, one method and one path; the sandbox never has it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from executor_client import Session
from tests.support.daemon import Daemon
from tests.support.internet.world import BAD_CERTIFICATES, SUFFIX, Internet
from tests.support.network import (
    FETCH,
    namespace_of,
    networked_daemon,
    networked_session,
    policy,
    proxies,
    write_secret,
)


@pytest.fixture(scope="module", params=["local", "docker"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Every readable byte of its own memory, of its environment, and of every file that it can read under the usual roots.
SEARCH = r"""
import glob, hashlib, os, re
token = re.compile(rb"tok-[0-9a-f]{40}")
found = set()
def look(data, where):
    found.update((hashlib.sha256(hit).hexdigest(), where) for hit in token.findall(data))
for process in glob.glob("/proc/[0-9]*"):
    for name in ("environ", "cmdline"):
        try:
            look(open(f"{process}/{name}", "rb").read(), f"{process}/{name}")
        except OSError:
            pass
    try:
        maps = open(f"{process}/maps").read().splitlines()
        memory = open(f"{process}/mem", "rb", buffering=0)
    except OSError:
        continue
    for line in maps:
        span, rights, *_ = line.split()
        if "r" not in rights or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        try:
            memory.seek(start)
            while start < end and (data := memory.read(min(end - start, 1 << 22))):
                look(data, f"{process}/mem")
                start += len(data)
        except OSError:
            continue
for root in ("/workspace", "/tmp", "/etc", "/dev/shm", "/run", "/var", "/home", "/root"):
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            try:
                if os.path.isfile(path) and os.path.getsize(path) < 50_000_000:
                    look(open(path, "rb").read(), path)
            except OSError:
                pass
sorted(found)
"""


@pytest.fixture(scope="module")
def token() -> str:
    return f"tok-{secrets.token_hex(20)}"


@pytest.fixture(scope="module")
def guarded(
    internet: Internet, backend: str, token: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, Session]]:
    """A session whose requests to one host, by one method, below one path, carry the token."""
    file = write_secret(tmp_path_factory.mktemp("secret") / "token", token + "\n")
    secret = {
        "host": f"files.{SUFFIX}",
        "methods": ["GET"],
        "paths": ["/hello.txt", "/mine/*"],
        "header": "Authorization",
        "value": "Bearer ${bot}",
    }
    hosts = [f"{site}.{SUFFIX}" for site in BAD_CERTIFICATES]
    elsewhere = [{"host": host, "header": "Authorization", "value": "Bearer ${bot}"} for host in hosts]
    rules = policy(secrets=[secret, *elsewhere])
    egress = {"secrets": {"bot": str(file)}}
    with (
        networked_daemon(internet, backend, rules, "[audit]\nenabled = true\n", **egress) as daemon,
        daemon.client() as client,
        networked_session(client, f"*.{SUFFIX}") as session,
    ):
        yield daemon, session


Sent = Callable[[str, str], list[list[str]]]


@pytest.fixture
def sent(internet: Internet) -> Sent:
    """Returns the Authorization headers of each request of the test for a path of a site."""
    before = len(internet.sites.requests)
    return lambda site, path: [
        each.values("authorization")
        for each in internet.sites.requests[before:]
        if (each.host, each.path) == (f"{site}.{SUFFIX}", path)
    ]


def test_the_token_is_set_for_its_host_method_and_path_alone(
    guarded: tuple[Daemon, Session], internet: Internet, token: str, sent: Sent
) -> None:
    _, session = guarded
    internet.sites.files["/mine/file"] = internet.sites.files["/mine"] = b"mine"
    result = session.execute(
        f"""{FETCH}
files = "https://files.{SUFFIX}"
[
    fetch(files + "/hello.txt?covered"), fetch(files + "/mine/file"), fetch(files + "/mine/file?own", Authorization="own"),
    fetch(files + "/hello.txt?posted", "POST", b"x"), fetch(files + "/mine?above"), fetch(files + "/mined"),
    fetch("https://www.{SUFFIX}/second"), fetch("http://files.{SUFFIX}/hello.txt?plain"),
]
"""
    )
    assert result.error is None, f"{result.error}\n{result.logs}"
    assert result.output[0] == (200, "hello from outside\n")
    expected = [[f"Bearer {token}"]]
    assert sent("files", "/hello.txt?covered") == expected
    assert sent("files", "/mine/file") == expected
    assert sent("files", "/mine/file?own") == expected  # in place of the sandbox's own
    assert sent("files", "/hello.txt?posted") == [[]]
    assert sent("files", "/mine?above") == sent("files", "/mined") == [[]]
    assert sent("www", "/second") == [[]]
    # A token in plain text would be every router's.
    assert sent("files", "/hello.txt?plain") == [[]]


def test_paths_that_can_be_read_in_two_ways_are_refused(guarded: tuple[Daemon, Session], internet: Internet) -> None:
    _, session = guarded
    paths = [
        "/mine/../mined",
        "/mine/%2e%2e/mined",
        "/mine%2ffile",
        "/mine/%252e%252e/x",
        "/mine\\\\file",
        "/mine;x/file",
    ]
    code = f"""
import http.client, os, ssl
def status(path):
    connection = http.client.HTTPSConnection("127.0.0.1", 3128, timeout=30)
    connection.set_tunnel("files.{SUFFIX}", 443)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", "files.{SUFFIX}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status
[status(path) for path in {paths!r}]
"""
    before = len(internet.sites.requests)
    result = session.execute(code)
    assert result.error is None, f"{result.error}\n{result.logs}"
    assert result.output == [400] * len(paths)
    assert len(internet.sites.requests) == before


def test_another_host_behind_the_same_tunnel_gets_nothing(guarded: tuple[Daemon, Session], internet: Internet) -> None:
    _, session = guarded
    code = f"""
import http.client
connection = http.client.HTTPSConnection("127.0.0.1", 3128, timeout=30)
connection.set_tunnel("files.{SUFFIX}", 443)
connection.putrequest("GET", "/hello.txt", skip_host=True)
connection.putheader("Host", "api.{SUFFIX}")
connection.endheaders()
connection.getresponse().status
"""
    before = len(internet.sites.requests)
    result = session.execute(code)
    assert result.error is None, f"{result.error}\n{result.logs}"
    assert (result.output, len(internet.sites.requests)) == (421, before)


@pytest.mark.parametrize("site", BAD_CERTIFICATES)
def test_a_token_goes_to_no_server_that_does_not_verify(
    guarded: tuple[Daemon, Session], internet: Internet, site: str
) -> None:
    _, session = guarded
    result = session.execute(f"{FETCH}\nfetch('https://{site}.{SUFFIX}/')")
    assert result.error is None, f"{result.error}\n{result.logs}"
    status, body = result.output
    assert status == 502 and "certificate" in body
    assert internet.sites.seen(f"{site}.{SUFFIX}") == []


def test_the_token_is_nowhere_in_the_sandbox(guarded: tuple[Daemon, Session], internet: Internet, token: str) -> None:
    daemon, session = guarded
    name = f"files.{SUFFIX}"
    before = len(internet.sites.seen(name))
    fetched = session.execute(f"{FETCH}\nfetch('https://{name}/hello.txt')").output
    assert fetched[0] == 200 and internet.sites.seen(name)[before].values("authorization") == [f"Bearer {token}"]
    inside = session.execute(SEARCH)
    assert inside.error is None, f"{inside.error}\n{inside.logs}"
    assert inside.output == []
    # From outside, as root: also the supervisor, which code in the sandbox can't look into.
    for process in namespace_of(session).processes:
        assert token.encode() not in memory_of(process), process.cmdline()
    # The daemon itself reads the names of secrets only.
    assert token.encode() not in memory_of(psutil.Process(daemon.process.pid))
    # The search finds what is there.
    (proxy,) = proxies(daemon)
    assert token.encode() in memory_of(proxy)
    session.set_variables({"planted": f"tok-{hashlib.sha1(b'planted').hexdigest()}"})
    planted = hashlib.sha256(f"tok-{hashlib.sha1(b'planted').hexdigest()}".encode()).hexdigest()
    assert planted in {digest for digest, _ in session.execute(SEARCH).output}


def test_audit_says_that_it_was_used_and_never_what_it_is(
    guarded: tuple[Daemon, Session], internet: Internet, token: str
) -> None:
    daemon, session = guarded
    session.execute(f"{FETCH}\nfetch('https://files.{SUFFIX}/hello.txt')")
    records = [
        json.loads(line)
        for path in sorted((daemon.state_dir / "audit").glob("audit-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    used = [record for record in records if record.get("secret_used")]
    assert {record["secret_used"] for record in used} == {"Authorization"}
    for path in daemon.state_dir.rglob("*"):
        if path.is_file():
            assert token.encode() not in path.read_bytes(), path
    assert token not in daemon.log.read_text()
    assert token not in json.dumps([str(each) for each in (session.info, session.execute("1"))])


def memory_of(process: psutil.Process) -> bytes:
    """The readable memory of a process, its environment and its command line."""
    pieces = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
    with Path(f"/proc/{process.pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            # Read-only maps are of files, which hold no secret that a process was given.
            if "w" not in rights or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            memory.seek(start)
            try:
                while start < end and (data := memory.read(end - start)):
                    pieces.append(data)
                    start += len(data)
            except OSError:  # a part that was never touched, of a device
                continue
    return b"".join(pieces)
