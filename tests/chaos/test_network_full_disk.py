"""The disk of the whole state directory is full under transfers: what is open goes on and is counted, what is new is
refused with the reason, and once there is room again everything is served and on record."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor_client import ExecutorClient, Session, UnavailableError
from tests.chaos.conftest import StartDaemon
from tests.support.daemon import Daemon
from tests.support.internet.world import RAW_PORT, SUFFIX, Internet
from tests.support.network import EVERY_SITE, networked_session, policy
from tests.support.polling import eventually

TRANSFERS = 8
PIECES, PIECE_BYTES = 20, 50_000
MOVED_BYTES = PIECES * PIECE_BYTES
HELLO = f"""
import urllib.request
def hello():
    with urllib.request.urlopen("http://files.{SUFFIX}/hello.txt", timeout=60) as answer:
        return answer.read().decode()
"""
BEGIN = f"""{HELLO}
import socket
def tunnel():
    connection = socket.create_connection(("127.0.0.1", 3128), timeout=60)
    connection.sendall(b"CONNECT raw.{SUFFIX}:{RAW_PORT} HTTP/1.1\\r\\nHost: raw.{SUFFIX}:{RAW_PORT}\\r\\n\\r\\n")
    head = b""
    while b"\\r\\n\\r\\n" not in head and (byte := connection.recv(1)):
        head += byte
    assert b" 200 " in head, head
    connection.sendall(b"echo\\n")
    return connection
def more(connection):
    "Returns how many bytes of a transfer came back: fewer where the connection ended."
    received = 0
    try:
        for piece in range({PIECES}):
            connection.sendall(bytes({PIECE_BYTES}))
            while received < (piece + 1) * {PIECE_BYTES}:
                data = connection.recv(65536)
                if not data:
                    return received
                received += len(data)
    except OSError:
        pass
    return received
"""
BEGUN = f"{BEGIN}\ntunnels = [tunnel() for _ in range({TRANSFERS})]\n[more(each) for each in tunnels]"
WHOLE = [MOVED_BYTES] * TRANSFERS


@pytest.fixture
def state_dir(directory: Path) -> Iterator[Path]:
    """The state directory as a file system of its own, of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    place = directory / "s"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def start_networked(state_dir: Path, start: StartDaemon, directory: Path, internet: Internet) -> Callable[[], Daemon]:
    file = directory / "policy.toml"
    file.write_text(policy(max_received_bytes=2**40))
    config = f"""
policy.file = "{file}"
pool.size = 0
audit.enabled = true
{internet.config()}"""
    return lambda: start(config)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fills the disk, and keeps it so: a file that is replaced or cut meanwhile makes no room."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        fill(file.fileno())
        try:
            yield
        finally:
            filler.unlink()


def fill(fd: int) -> None:
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(fd, bytes(4096))


def recorded_bytes(state_dir: Path) -> int:
    """The bytes that sessions have received, as the next daemon will know it."""
    with contextlib.closing(sqlite3.connect(state_dir / "registry.db")) as database:
        rows = database.execute("SELECT network FROM sessions").fetchall()
    return sum(int(json.loads(row[0])["received_bytes"]) for row in rows)


def refuses_new_sessions(client: ExecutorClient) -> bool:
    with pytest.raises(UnavailableError) as refusal:
        networked_session(client, *EVERY_SITE)
    return refusal.value.reason == "BACKEND_UNAVAILABLE"


def served(session: Session) -> bool:
    result = session.execute("hello()")
    return (result.output, result.usage.network.connections) == ("hello from outside\n", 1)


def test_transfers_and_counts_outlive_a_full_disk(
    start_networked: Callable[[], Daemon], state_dir: Path, internet: Internet
) -> None:
    daemon = start_networked()
    with daemon.client() as client, networked_session(client, *EVERY_SITE) as session:
        assert session.execute(BEGUN).output == WHOLE
        with full(state_dir):
            during = session.execute("[more(each) for each in tunnels]")
            assert during.output == WHOLE, during.error
            assert during.usage.network.received_bytes == TRANSFERS * MOVED_BYTES
            assert served(session), "a connection that is new"
            assert refuses_new_sessions(client)
            before = session.execute("1 + 1").usage.network
            assert (before.connections, before.received_bytes) == (0, 0)
        assert eventually(lambda: recorded_bytes(state_dir) >= 2 * TRANSFERS * MOVED_BYTES), "nothing was forgotten"
        assert session.execute("[more(each) for each in tunnels]").output == WHOLE
        with networked_session(client, *EVERY_SITE) as another:
            another.execute(HELLO)
            assert served(another)
        session.execute("for each in tunnels:\n    each.close()")
        assert eventually(lambda: internet.raw.open == 0)
        assert "incident" not in daemon.log.read_text()
