"""The network of sessions whose sandboxes are machines of a cloud: the proxy runs beside them there.

The cloud is the double. Its machines have this host's network where a test wants one, and only note what they are to
let out: that wall is E2B's.
"""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from executor_client import ExecutionResult, ExecutorClient, Outcome, PolicyViolationError, Session
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon
from tests.support.internet.world import Internet
from tests.support.polling import eventually

pytest.importorskip("e2b")
pytest.importorskip("aiohttp")
from tests.support.e2b.threaded import ThreadedDouble

_FETCH = """
import ssl, time, urllib.request
context = ssl.create_default_context(cafile="ca.pem")
opener = urllib.request.build_opener(urllib.request.ProxyHandler(), urllib.request.HTTPSHandler(context=context))
def fetch(url, pause_s=0.0):
    size = 0
    try:
        with opener.open(url, timeout=60) as page:
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
        policy, config = self.directory / "policy.toml", self.directory / "config.toml"
        policy.write_text(
            f"""
default = "open"
[profiles.open]
on_reload = "tighten"
[profiles.open.imports]
default = ["urllib.*", "ssl", "time", "os"]
[profiles.open.network]
allowed = ["{self.www}:443"]
"""
        )
        keys = {
            "api_url": self.double.url,
            "sandbox_url": self.double.url,
            "api_key_file": str(self.double.api_key_file),
        }
        config.write_text(
            f'[policy]\nfile = "{policy}"\nwatch_interval_s = 0.1\n[pool]\nsize = 0\n[server]\nbackend = "e2b"\n'
            + "[e2b]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
            + self.internet.config()
        )
        self.options = ("--config", str(config))

    def begin(self, client: ExecutorClient) -> Session:
        session = client.create_session(network=[f"{self.www}:443"], detached=True)
        session.put_file("ca.pem", self.internet.ca_file.read_bytes())
        assert session.execute(_FETCH).outcome is Outcome.SUCCEEDED
        return session

    @property
    def allowed_out(self) -> list[object]:
        """Returns the networks that the machines were given last."""
        return [sandbox.network for sandbox in self.double.sandboxes.values()]


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
        if "egress" in process.cmdline() and any(part.endswith("guest.sock") for part in process.cmdline())
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
        assert (cloud.allowed_out, proxies()) == ([None], [])


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
