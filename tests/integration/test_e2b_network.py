"""The network of sessions whose sandboxes are machines of a cloud: the proxy runs beside them there.

The cloud is the double. Its machines reach the tests' internet through a wall of the double's, as E2B's is.
"""

from __future__ import annotations

import json
import shlex
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_client import ExecutionResult, ExecutorClient, Outcome, PolicyViolationError, Session
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon
from tests.support.internet.world import RAW_PORT, Internet
from tests.support.network import words_of
from tests.support.polling import eventually

pytest.importorskip("e2b")
pytest.importorskip("aiohttp")
from e2b import Sandbox

from tests.support.e2b.threaded import ThreadedDouble
from tests.support.e2b.wall import Passage, Wall

_FETCH = """
import time, urllib.request
def fetch(url, pause_s=0.0):
    size = 0
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            while piece := page.read(1 << 16):
                size += len(piece)
                time.sleep(pause_s)
            return size
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@dataclass
class Cloud:
    """A daemon on a cloud whose machines live in the tests' internet."""

    internet: Internet
    double: ThreadedDouble
    directory: Path
    www: str
    other: str
    options: tuple[str, ...] = field(default=())

    @contextmanager
    def daemon(self) -> Iterator[Daemon]:
        with running_daemon(self.directory, *self.options) as daemon:
            yield daemon

    def settle(self) -> None:
        self.allow(self.www)
        policy, config = self.directory / "policy.toml", self.directory / "config.toml"
        keys = {
            "api_url": self.double.url,
            "sandbox_url": self.double.url,
            "api_key_file": str(self.double.api_key_file),
        }
        config.write_text(
            f'[policy]\nfile = "{policy}"\n[pool]\nsize = 0\n[server]\nbackend = "e2b"\n'
            + "[e2b]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
            + self.internet.config()
        )
        self.options = ("--config", str(config))

    def allow(self, host: str) -> None:
        """Writes a policy that allows this host alone."""
        (self.directory / "policy.toml").write_text(
            f"""
default = "open"
[profiles.open]
on_reload = "tighten"
[profiles.open.imports]
default = ["urllib.*", "time", "os"]
[profiles.open.network]
allowed = ["{host}:443"]
"""
        )

    def begin(self, client: ExecutorClient) -> Session:
        session = client.create_session(network=[f"{self.www}:443"], detached=True)
        assert session.execute(_FETCH).outcome is Outcome.SUCCEEDED
        return session

    def as_root(self, program: str) -> Any:
        """Runs a program as root in the only machine, beside the sandbox: as if whatever runs there were taken over.

        Returns the JSON that it prints.
        """
        (cloud_id,) = self.double.sandboxes
        machine = Sandbox.connect(
            cloud_id, api_key=self.double.api_key, api_url=self.double.url, sandbox_url=self.double.url
        )
        done = machine.commands.run(f"python3 -c {shlex.quote(program)}", user="root", timeout=60)
        return json.loads(done.stdout)

    @property
    def wall(self) -> Wall:
        """The only machine's."""
        (sandbox,) = self.double.sandboxes.values()
        return sandbox.wall

    @property
    def allowed_out(self) -> list[object]:
        """Returns the networks that the machines were given last."""
        return [sandbox.wall.network for sandbox in self.double.sandboxes.values()]


@pytest.fixture
def cloud(internet: Internet) -> Iterator[Cloud]:
    require("e2b")
    www, other = internet.name("www"), internet.name("www")
    outside = dict.fromkeys((www, other), internet.address)
    with ThreadedDouble(outside=outside) as double, tempfile.TemporaryDirectory(prefix="n-") as directory:
        cloud = Cloud(internet, double, Path(directory), www, other)
        cloud.settle()
        yield cloud


def fetch(session: Session, host: str, path: str = "/") -> ExecutionResult:
    return session.execute(f"fetch('https://{host}{path}')")


def proxies() -> list[psutil.Process]:
    """The proxies beside sandboxes, which are processes of this one's machines."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "egress" in (words := words_of(process)) and any(word.endswith("guest.sock") for word in words)
    ]


def test_a_host_that_is_allowed_is_reached_and_another_one_is_refused_with_the_reason(cloud: Cloud) -> None:
    with cloud.daemon() as daemon, daemon.client() as client, cloud.begin(client) as session:
        reached = fetch(session, cloud.www)
        assert isinstance(reached.output, int) and reached.output > 0, reached
        assert (reached.usage.network.connections, reached.usage.network.received_bytes > 0) == (1, True)
        refused = fetch(session, cloud.other)
        assert f"{cloud.other}:443 is not allowed" in str(refused.output)
        # Notices and answers take different streams: one may come a step late.
        assert f"{cloud.other}:443 is not allowed" in refused.logs + session.execute("1").logs
        assert refused.usage.network.denied == 1
        assert cloud.allowed_out == [{"allowOut": [cloud.www], "denyOut": ["0.0.0.0/0"]}]
        with pytest.raises(PolicyViolationError):
            client.create_session(network=[f"{cloud.other}:443"])


def test_a_session_without_a_network_has_no_proxy_and_no_opened_wall(cloud: Cloud) -> None:
    with cloud.daemon() as daemon, daemon.client() as client, client.create_session() as session:
        assert session.execute("import os; os.environ.get('https_proxy')").output is None
        assert (cloud.allowed_out, proxies()) == ([{"allow_internet_access": False}], [])


def test_a_killed_proxy_is_followed_by_another_one(cloud: Cloud) -> None:
    with cloud.daemon() as daemon, daemon.client() as client, cloud.begin(client) as session:
        assert isinstance(fetch(session, cloud.www).output, int)
        (proxy,) = proxies()
        proxy.kill()
        assert isinstance(fetch(session, cloud.www).output, int)
        assert [each.pid for each in proxies()] != [proxy.pid]


def test_a_broken_stream_leaves_one_proxy(cloud: Cloud) -> None:
    with cloud.daemon() as daemon, daemon.client() as client, cloud.begin(client) as session:
        (before,) = proxies()
        cloud.double.cut_all()
        assert isinstance(fetch(session, cloud.www).output, int)
        assert eventually(lambda: len(proxies()) == 1)
        assert before.pid not in [each.pid for each in proxies()]


def test_the_next_daemon_serves_the_session_again(cloud: Cloud) -> None:
    with cloud.daemon() as daemon:
        with daemon.client() as client:
            session = cloud.begin(client)
            assert isinstance(fetch(session, cloud.www).output, int)
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        with cloud.daemon() as later, later.client() as client, client.get_session(session.session_id) as again:
            assert isinstance(fetch(again, cloud.www).output, int)
            assert eventually(lambda: len(proxies()) == 1)
    assert eventually(lambda: not proxies())


_AROUND = """
import json, os, socket, ssl
def attempt(address, port, name=None, host=None):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((address, port), timeout=20) as sock:
            if port == 443:
                sock = context.wrap_socket(sock, server_hostname=name)
            sock.sendall(f"GET / HTTP/1.1\\r\\nHost: {host or name}\\r\\nConnection: close\\r\\n\\r\\n".encode())
            return sock.recv(12).decode() or "nothing"
    except OSError as error:
        return "refused by " + type(error).__name__
"""


def test_the_machines_own_wall_stands_where_all_in_the_machine_was_taken_over(cloud: Cloud) -> None:
    """The proxy is gone around, as root and outside of the sandbox's walls."""
    address, www, other = cloud.internet.address, cloud.www, cloud.other
    attempts = [
        (address, 443, www, www),
        ("192.0.2.1", 443, www, www),  # an address of the machine's own choice counts for nothing
        (address, 80, None, www),
        (address, 443, other, www),
        (address, 80, None, other),
        (address, 443, None, www),  # no server name
        (address, RAW_PORT, None, www),
        (cloud.internet.trap.own, 443, other, other),
        (address, 53, None, www),
        ("127.0.0.1", int(cloud.double.url.rpartition(":")[2]), None, www),  # a service of the host
    ]
    program = f"""{_AROUND}
print(json.dumps([os.geteuid(), [attempt(*each) for each in {attempts!r}]]))
"""
    with cloud.daemon() as daemon, daemon.client() as client, cloud.begin(client) as session:
        (proxy,) = proxies()
        proxy.suspend()
        asked = len(cloud.internet.names.questions)
        user, tried = cloud.as_root(program)
        assert user == 0
        assert tried[:3] == ["HTTP/1.1 200"] * 3
        assert all(each.startswith("refused by") or each == "nothing" for each in tried[3:]), tried
        assert Passage(other, address, 443, let_out=False) in cloud.wall.passages
        assert (len(cloud.internet.names.questions), cloud.internet.trap.connections) == (asked, [])
        proxy.resume()
        assert isinstance(fetch(session, www).output, int)


def test_a_policy_that_tightens_closes_the_machines_own_wall_too(cloud: Cloud) -> None:
    attempts = [(cloud.internet.address, 443, cloud.www)]
    program = f"{_AROUND}\nprint(json.dumps([attempt(*each) for each in {attempts!r}]))"
    with cloud.daemon() as daemon, daemon.client() as client, cloud.begin(client) as session:
        assert cloud.as_root(program) == ["HTTP/1.1 200"]
        cloud.allow(cloud.other)
        assert eventually(lambda: cloud.allowed_out == [{"allowOut": [], "denyOut": ["0.0.0.0/0"]}])
        assert cloud.as_root(program) != ["HTTP/1.1 200"]
        assert "is not allowed" in str(fetch(session, cloud.www).output)


def test_the_machine_of_a_session_without_a_network_lets_nothing_out(cloud: Cloud) -> None:
    program = f"{_AROUND}\nprint(json.dumps([attempt({cloud.internet.address!r}, 443, {cloud.www!r})]))"
    with cloud.daemon() as daemon, daemon.client() as client, client.create_session() as session:
        assert session.execute("1").output == 1
        assert cloud.as_root(program) != ["HTTP/1.1 200"]
        assert [each.let_out for each in cloud.wall.passages] == [False]
