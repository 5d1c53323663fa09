"""The daemon is killed while processes print: each byte arrives once, and the processes go on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import pytest

from executor_client import ProcessOutput
from tests.chaos.observe import WAIT_S
from tests.support.daemon import Daemon
from tests.support.polling import eventually
from tests.support.rounds import usual

# tests/chaos/test_process_restarts.py has one of these on each backend.
pytestmark = pytest.mark.parametrize(
    "restart_on_each", usual(["local", "docker", "e2b"], but=("docker", "e2b")), indirect=True
)

ECHO = """
import socket, threading
def serve(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
listener = socket.create_server(("127.0.0.1", 9000))
print("listening")
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


def test_input_that_was_given_before_the_kill_is_given_once(restart_on_each: Callable[[], Daemon]) -> None:
    daemon = restart_on_each()
    with daemon.client() as client:
        session = client.create_session()
        process = session.processes.start(["cat"], stdin=True)
        process.write("before ")
        daemon.kill()
        daemon = restart_on_each()
        process.write("after")
        process.close_stdin()
        said = b"".join(event.data for event in process if isinstance(event, ProcessOutput))
        assert said == b"before after"
        found = session.processes.list()
        assert [(info.argv, info.running) for info in found] == [(("cat",), False)]


def test_a_forwarded_connection_ends_with_the_daemon_and_the_listener_finds_the_next(
    restart_on_each: Callable[[], Daemon],
) -> None:
    daemon = restart_on_each()
    with daemon.client() as client:
        session = client.create_session()
        for _ in session.processes.start(["python3", "-u", "-c", ECHO]):
            break  # it listens
        with session.ports.forward(9000) as forward:
            with (
                socket.create_connection(forward.address, WAIT_S) as forwarded,
                session.ports.connect(9000) as connected,
            ):
                for connection in (forwarded, connected):
                    connection.sendall(b"first")
                    assert connection.recv(5) == b"first"
                daemon.kill()
                for connection in (forwarded, connected):
                    with pytest.raises(ConnectionResetError):
                        connection.recv(1)
            daemon = restart_on_each()

            def served() -> bool:
                with contextlib.suppress(OSError), socket.create_connection(forward.address, WAIT_S) as connection:
                    connection.sendall(b"again")
                    return connection.recv(5) == b"again"
                return False

            assert eventually(served), "the server inside has outlived its connection and the daemon"
