"""Descriptors that a program sends to the supervisor over its interpreter's link: what closing or reading them may cost."""

from __future__ import annotations

import pytest

from tests.contract.harness import Harness
from tests.support.attacks import LINK, WAIT

_LINGERING = """
import struct
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
client = socket.socket()
try:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
except OSError as error:
    print(type(error).__name__, flush=True)
client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
client.connect(server.getsockname())
client.setblocking(False)
try:
    while True:
        client.send(b"x" * 65536)
except BlockingIOError:
    pass
sent = client.detach()
# Something to do first, so that the supervisor is the last to close what comes behind it.
for _ in range(50):
    say({"t": "image", "call": "c", "mime": "image/png", "source": "figure"}, b"x" * 60_000)
"""

# Whether the supervisor closes it, or the kernel does on receipt because there are too many.
_SENDINGS = {
    "taken": 'say({"t": "output"}, b"1", fds=[sent])',
    "discarded": 'say({"t": "output"}, b"1", fds=[link.fileno()] * 9 + [sent])',
}


@pytest.mark.parametrize("how", _SENDINGS)
async def test_a_socket_that_lingers_holds_up_no_deadline(harness: Harness, how: str) -> None:
    """Closing it took the supervisor a minute, in which it kept no limit, and then its session was lost."""
    session = await harness.session(wall_time_s=1.0)
    told = await harness.run(session, f"{LINK}{_LINGERING}{_SENDINGS[how]}\nos.close(sent){WAIT}")
    assert told.outcome == ("timeout" if how == "taken" else "crashed"), told.message
    assert told.stdout in ("PermissionError\n", "OSError\n")
    assert (await harness.run(session, "40 + 2")).output == 42
