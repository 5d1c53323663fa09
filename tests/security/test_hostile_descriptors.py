"""Descriptors that a program sends to the supervisor over its interpreter's link: what closing or reading them may cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.harness import MIB, Harness, supervisor_of
from tests.support.attacks import LINK, WAIT
from tests.support.polling import eventually_async

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

# The supervisor closes the socket that was sent, or the kernel does on receipt because there are too many.
_SENDINGS = {
    "taken": 'say({"t": "output"}, b"1", fds=[sent])',
    "discarded": 'say({"t": "output"}, b"1", fds=[link.fileno()] * 9 + [sent])',
}


@pytest.mark.parametrize("how", _SENDINGS)
async def test_a_socket_that_lingers_holds_up_no_deadline(harness: Harness, how: str) -> None:
    """Closing it took the supervisor a minute, in which it kept no limit, and then its session was lost."""
    session = await harness.session(wall_time_s=1.0)
    result = await harness.run(session, f"{LINK}{_LINGERING}{_SENDINGS[how]}\nos.close(sent){WAIT}")
    assert result.outcome == ("timeout" if how == "taken" else "crashed"), result.message
    assert result.stdout in ("PermissionError\n", "OSError\n")
    assert (await harness.run(session, "40 + 2")).output == 42


_UNSOLICITED = """
body = b"[" + b"[]," * (20 * 2**20) + b"1]"
say({KIND, "memfd": True}, fds=[memory_file(body)])
"""


@pytest.mark.parametrize("kind", ['"t": "op_done", "ok": True', '"t": "booted"', '"t": "limit", "limit": "operations"'])
async def test_a_large_message_that_nobody_asked_for_is_not_read(harness: Harness, kind: str) -> None:
    """It was read and parsed before it was asked whether anybody waits for it: 60 MB took 1.5 GB."""
    session = await harness.session()
    supervisor = supervisor_of(session)
    before = _peak_bytes(supervisor.pid)  # a template's child begins with libraries
    result = await harness.run(session, LINK + _UNSOLICITED.replace("KIND", kind) + WAIT)
    assert result.outcome == "crashed"
    assert _peak_bytes(supervisor.pid) - before < 32 * MIB
    assert (await harness.run(session, "40 + 2")).output == 42


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def test_refused_messages_leave_no_descriptor_with_the_supervisor(harness: Harness) -> None:
    """Each kept one open, with all the memory that was in its file, which no limit counted any more."""
    session = await harness.session()
    assert (await harness.run(session, "1")).output == 1
    await session.list_files("")  # answered once the run's pipes are closed, and those of the next one made
    supervisor = supervisor_of(session)
    before = supervisor.num_fds()
    for lie in (
        'say({"t": "output", "memfd": True}, fds=[memory_file(b"1")]); say({"t": "output", "memfd": True}, fds=[memory_file(b"2")])',
        'say({"t": "image", "call": "c", "mime": "x", "source": "x", "memfd": True}, fds=[memory_file(b"1")])',
        'say({"t": "op_done", "ok": True, "memfd": True}, fds=[memory_file(b"1")])',
        'say({"t": "state", "memfd": True}, fds=[memory_file(b"1")])',
        'say({"t": "nonsense", "memfd": True}, fds=[memory_file(b"1")])',
        'say({"t": "tool_call", "memfd": True}, fds=[memory_file(b"1")])',
    ):  # fmt: skip
        assert (await harness.run(session, LINK + lie + WAIT)).outcome == "crashed"
    assert (await harness.run(session, "1")).output == 1
    await session.list_files("")
    assert await eventually_async(lambda: supervisor.num_fds() <= before)


_OF_HUGE_PAGES = """
import ctypes, errno
fd = ctypes.CDLL(None, use_errno=True).memfd_create(b"payload", 2 | 4)  # MFD_ALLOW_SEALING, MFD_HUGETLB
if fd < 0:
    print(errno.errorcode[ctypes.get_errno()])
else:
    os.ftruncate(fd, 2 * 2**20)
    fcntl.fcntl(fd, 1033, 15)
    say({"t": "output", "memfd": True}, fds=[fd])
    done()
    time.sleep(1e6)
"""


async def test_a_file_of_huge_pages_is_no_output_and_breaks_no_connection(harness: Harness) -> None:
    """It can't be sent from file to socket. Taken for a broken connection, that was tried again without end."""
    session = await harness.session(wall_time_s=10.0)
    result = await harness.run(session, LINK + _OF_HUGE_PAGES)
    if result.stdout:
        pytest.skip(f"no huge pages here: {result.stdout.strip()}")
    assert (result.outcome, result.state) == ("crashed", "reset")
    assert (await harness.run(session, "40 + 2")).output == 42
