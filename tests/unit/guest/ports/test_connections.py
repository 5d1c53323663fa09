"""Connections to ports of the sandbox, with a channel that keeps what is sent."""

from __future__ import annotations

import socket
from typing import Any

from executor_server.guest.ports.connections import Connections
from executor_server.guest.wire.loop import Loop
from executor_server.guest.wire.process_messages import OpenPort, PortInput

WAIT_S = 20.0


class Channel:
    def send(self, message: object, body: bytes = b"") -> None:
        pass


def test_an_input_that_ends_before_the_connection_is_open_ends_for_the_program() -> None:
    """Without data nothing was due to be written, so the end was never passed on."""
    channel: Any = Channel()
    loop = Loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        connections = Connections(channel, loop)
        connections.take(OpenPort(op=1, port=listener.getsockname()[1], granted=0), b"")
        connections.take(PortInput(op=1, eof=True), b"")
        program, _ = listener.accept()
        with program:
            program.settimeout(WAIT_S)
            assert loop.turn(WAIT_S)
            assert program.recv(1) == b""
        connections.reset_all()
