"""The egress proxy or the daemon is killed under transfers, the disk is full, name servers hang: programs get errors, what
was counted stays counted, later connections are served, and nothing is left over."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_client import ExecutionResult, ExecutorClient, Outcome, Session
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import executing
from tests.support.backends import NETWORK_IMAGE, require, require_network_image
from tests.support.daemon import Daemon
from tests.support.internet.world import RAW_PORT, SUFFIX, Internet
from tests.support.network import EVERY_SITE, networked_session, policy, proxies
from tests.support.polling import eventually
from tests.support.rounds import usual

TRANSFERS = 8
HELD_BYTES = 1_000_000
COMMAND = f"hold {HELD_BYTES}\n"
RAW = f"raw.{SUFFIX}:{RAW_PORT}"

CONNECT = f"""
import socket, threading, time, urllib.request

def connect(target, timeout_s=60):
    tunnel = socket.create_connection(("127.0.0.1", 3128), timeout=timeout_s)
    tunnel.sendall(f"CONNECT {{target}} HTTP/1.1\\r\\nHost: {{target}}\\r\\n\\r\\n".encode())
    head = b""
    while b"\\r\\n\\r\\n" not in head and (byte := tunnel.recv(1)):
        head += byte
    status = head.split(b" ")[1:2]
    if status != [b"200"]:
        tunnel.close()
        raise OSError((head.splitlines() or [b"no answer"])[0].decode())
    return tunnel

def hello():
    with urllib.request.urlopen("http://files.{SUFFIX}/hello.txt", timeout=60) as answer:
        return answer.read().decode()

def transfer(number, command, ended, received):
    try:
        with connect("{RAW}", 120) as tunnel:
            tunnel.sendall(command.encode())
            while data := tunnel.recv(65536):
                received[number] += len(data)
        ended[number] = "closed"
    except OSError as error:
        ended[number] = type(error).__name__

ended, received, threads = [None] * {TRANSFERS}, [0] * {TRANSFERS}, []
def begin(command, enough):
    for number in range({TRANSFERS}):
        threads.append(threading.Thread(target=transfer, args=(number, command, ended, received), daemon=True))
        threads[-1].start()
    while min(received) < enough and None in ended:
        time.sleep(0.01)
    print("all run", flush=True)

def end():
    for thread in threads:
        thread.join()
    return [ended, received, hello()]
"""
HOLD = f"{CONNECT}\nbegin({COMMAND!r}, {HELD_BYTES})"
ENDLESS = f"{CONNECT}\nbegin('endless\\n', 10_000_000)\nend()"


@pytest.fixture(params=usual(["local", "docker"], but=("docker",)))
def start_networked(
    request: pytest.FixtureRequest, start: StartDaemon, directory: Path, internet: Internet
) -> Callable[..., Daemon]:
    """Starts a daemon whose sessions may have a network, the next time on what the last one left."""
    if request.param == "docker":
        require_network_image()
    else:
        require(request.param)
    file = directory / "policy.toml"
    file.write_text(policy(max_received_bytes=2**40))
    base = f"""
policy.file = "{file}"
pool.size = 0
server.backend = "{request.param}"
docker.images.base = "{NETWORK_IMAGE}"
audit.enabled = true
"""
    return lambda config="": start(f"{base}{config}\n{internet.config()}")


@pytest.fixture
def connected(start_networked: Callable[..., Daemon]) -> Iterator[tuple[Daemon, ExecutorClient, Session]]:
    daemon = start_networked()
    with daemon.client() as client, networked_session(client, *EVERY_SITE) as session:
        yield daemon, client, session


def audited(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    lines = [
        line
        for path in sorted((daemon.state_dir / "audit").glob("audit-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def received_until_the_end(result: ExecutionResult) -> list[int]:
    """The bytes that each transfer had received; each has ended, and a later connection was served."""
    assert result.error is None, f"{result.error}\n{result.logs}"
    ended, received, later = result.output
    assert len(ended) == TRANSFERS
    assert set(ended) <= {"closed", "ConnectionResetError", "BrokenPipeError"}
    assert later == "hello from outside\n"
    return list(received)


def only_proxy(daemon: Daemon) -> psutil.Process:
    (proxy,) = proxies(daemon)
    return proxy


# ---------------------------------------------------------------------------------------------------------------------
# Kills


def test_a_killed_proxy_ends_its_transfers_and_the_next_one_serves_the_session(
    connected: tuple[Daemon, ExecutorClient, Session], internet: Internet
) -> None:
    daemon, _, session = connected
    before = hold(session, internet)
    first = only_proxy(daemon)
    first.kill()
    assert received_until_the_end(session.execute("end()")) == [HELD_BYTES] * TRANSFERS
    assert only_proxy(daemon).pid != first.pid
    assert eventually(lambda: internet.raw.open == before)
    closed = [record for record in audited(daemon, "connection_closed") if record["host"] == f"raw.{SUFFIX}"]
    assert [record["reason"] for record in closed] == ["proxy_ended"] * TRANSFERS
    # The session's totals have the sum (see `hold`); the killed process alone knew the parts.
    assert not any("received_bytes" in record for record in closed)


def hold(session: Session, internet: Internet) -> int:
    """Begins transfers that outlive their step, which counts them exactly. Returns how many others were open."""
    before = internet.raw.open
    begun = session.execute(HOLD)
    assert begun.error is None, f"{begun.error}\n{begun.logs}"
    usage = begun.usage.network
    assert (usage.connections, usage.denied) == (TRANSFERS, 0)
    assert (usage.sent_bytes, usage.received_bytes) == (TRANSFERS * len(COMMAND), TRANSFERS * HELD_BYTES)
    assert internet.raw.open == before + TRANSFERS
    return before


def test_a_killed_daemon_ends_the_transfers_and_the_next_one_serves_the_session(
    start_networked: Callable[..., Daemon], internet: Internet
) -> None:
    daemon = start_networked()
    with daemon.client(reconnect_timeout_s=60.0) as client, networked_session(client, *EVERY_SITE) as session:
        before = hold(session, internet)
        proxy = only_proxy(daemon)
        daemon.kill()
        # It can't outlive the daemon: what it moved would be counted nowhere.
        assert eventually(lambda: not proxy.is_running())
        assert eventually(lambda: internet.raw.open == before)
        second = start_networked()
        ended = session.execute("end()")
        assert received_until_the_end(ended) == [HELD_BYTES] * TRANSFERS
        assert ended.usage.network.connections == 1
        assert only_proxy(second).pid != proxy.pid
        # The session's rules are as they were.
        assert list(session.network) == list(EVERY_SITE)
        refused = session.execute(
            "try:\n    connect('elsewhere.example:443')\nexcept OSError as error:\n    said = str(error)\nsaid"
        )
        assert "403" in refused.output


def test_a_connection_that_is_begun_without_a_daemon_waits_for_the_next_one(
    start_networked: Callable[..., Daemon], internet: Internet
) -> None:
    """It waits in the listener's queue, and the execution goes on when it is served."""
    daemon = start_networked()
    with daemon.client(reconnect_timeout_s=60.0) as client, networked_session(client, *EVERY_SITE) as session:
        with executing(session, ENDLESS) as result:
            daemon.kill()
            start_networked()
        received_until_the_end(result.result())
        assert result.result().usage.network.connections in (1, TRANSFERS + 1)
        assert eventually(lambda: internet.raw.open == 0)


def test_a_session_that_ends_under_transfers_closes_them(
    connected: tuple[Daemon, ExecutorClient, Session], internet: Internet
) -> None:
    daemon, client, _ = connected
    other = networked_session(client, *EVERY_SITE)
    begun = len(internet.raw.conversations)
    with executing(other, ENDLESS) as result:
        other.close()
    assert result.result().outcome is Outcome.CANCELLED
    assert eventually(lambda: internet.raw.open == 0)
    assert len(internet.raw.conversations) == begun + TRANSFERS
    closed = audited(daemon, "connection_closed")
    assert [record["reason"] for record in closed] == ["session_ended"] * TRANSFERS


def test_a_stopped_proxy_holds_up_nothing_but_connections(connected: tuple[Daemon, ExecutorClient, Session]) -> None:
    """It hangs: executions of others, and their results, do not wait for it for long."""
    daemon, client, session = connected
    session.execute(CONNECT)
    assert session.execute("hello()").output == "hello from outside\n"
    proxy = only_proxy(daemon)
    proxy.send_signal(signal.SIGSTOP)
    try:
        with client.create_session() as other:
            assert other.execute("6 * 7").output == 42
        assert session.execute("6 * 7").output == 42
    finally:
        proxy.send_signal(signal.SIGCONT)
    assert session.execute("hello()").output == "hello from outside\n"


# ---------------------------------------------------------------------------------------------------------------------
# Name servers and disks


def test_names_whose_server_hangs_hold_up_no_other_name(
    connected: tuple[Daemon, ExecutorClient, Session], internet: Internet
) -> None:
    _, client, session = connected
    hanging = [f"hanging-{number}.{SUFFIX}" for number in range(20)]
    for name in hanging:
        internet.names.hang(name)
    code = f"""{CONNECT}
def attempt(name, ended):
    began = time.monotonic()
    try:
        connect(name + ":443", 100).close()
        said = "connected"
    except OSError as error:
        said = str(error)
    ended.append((said, time.monotonic() - began))
ended = []
threads = [threading.Thread(target=attempt, args=(name, ended)) for name in {hanging!r}]
for thread in threads:
    thread.start()
print("all hang", flush=True)
for thread in threads:
    thread.join()
ended
"""
    with networked_session(client, *EVERY_SITE) as other, executing(other, code) as result:
        session.execute(CONNECT)
        began = session.execute("began = time.monotonic()\n[hello(), time.monotonic() - began < 5]")
        assert began.output == ["hello from outside\n", True]
    assert len(result.result().output) == len(hanging)
    for said, took_s in result.result().output:
        assert " 504 " in said, said
        assert took_s < 45
    for name in hanging:
        internet.names.forget(name)


def test_a_full_disk_of_the_audit_log_loses_no_connection_and_no_count(
    disk: Path, start_networked: Callable[..., Daemon]
) -> None:
    daemon = start_networked(f'audit.directory = "{disk / "audit"}"\naudit.sync = "always"\n')
    with daemon.client() as client, networked_session(client, *EVERY_SITE) as session:
        session.execute(CONNECT)
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        results = [session.execute("hello()") for _ in range(5)]
        assert [(each.output, each.usage.network.connections) for each in results] == [("hello from outside\n", 1)] * 5
        filler.unlink()
        assert session.execute("hello()").output == "hello from outside\n"
