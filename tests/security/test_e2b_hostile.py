"""Agent code in a sandbox of E2B attacks the machine around it, the cloud's agent and the daemon's key.

The sandboxes are the double's, whose machines are real: the guest's own walls refuse the attacks here, the
same that it makes in a machine of the cloud.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from executor_server.backends.e2b import E2BBackend
from executor_server.backends.e2b.cloud import Access, Cloud
from executor_server.backends.e2b.failures import CloudFailure
from tests.contract.harness import Harness
from tests.support.backends import require
from tests.support.e2b import WHY_NOT, Double, Kind, e2b_section
from tests.support.memory import growth_of

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

MIB = 2**20
# In two parts: a program that looks for it must not find its own source.
CANARY = ("e2b_" + "5" * 16, "c" * 24)
ENVD, INTERPRETER = 49_983, 49_999
FLOOD_BYTES = 200 * MIB
GROWTH_BYTES_MAX = 64 * MIB
DISK_BYTES = 16 * MIB
PROCESSES = 32

LOOK = f"""
import os
wanted, found, looked = {CANARY[0]!r}.encode() + {CANARY[1]!r}.encode(), [], 0
for directory, names, files in os.walk("/"):
    names[:] = [name for name in names if name not in ("usr", "lib", "lib64", "sys")]  # the system's own, and Python's
    for name in files:
        path = os.path.join(directory, name)
        try:
            if os.path.islink(path) or not (os.path.isfile(path) or directory.startswith("/proc")):
                continue
            with open(path, "rb") as file:
                looked += 1
                if wanted in file.read(2**20):
                    found.append(path)
        except OSError:
            pass
(looked > 10, found, [name for name, value in os.environ.items() if wanted.decode() in value])
"""
REACH = f"""
import errno, os, socket
def tried(family, address):
    with socket.socket(family) as way:
        way.settimeout(1)
        try:
            return errno.errorcode.get(way.connect_ex(address), "?")
        except OSError as error:
            return type(error).__name__
ports = [tried(socket.AF_INET, ("127.0.0.1", port)) for port in ({ENVD}, {INTERPRETER})]
sockets = [path for place in ("/run", "/opt", "/tmp", "/workspace", "/var") for path in
    (os.path.join(directory, name) for directory, _, names in os.walk(place) for name in names) if path.endswith(".sock")]
ours = [line for pid in os.listdir("/proc") if pid.isdigit() and pid not in ("1", str(os.getpid()))
    for line in [open(f"/proc/{{pid}}/cmdline").read()] if "relay" in line or "envd" in line]
(ports, sockets, ours, os.access("/opt/executor", os.W_OK))
"""
LISTEN = f"""
import socket, time
servers = [socket.create_server(("127.0.0.1", port)) for port in ({ENVD}, {INTERPRETER})]
for server in servers:
    socket.create_connection(server.getsockname()).close()
print("reached", flush=True)
time.sleep(1e6)
"""
FILL_DISK = """
import errno, itertools, os, shutil
refused = {}
for place in ("/workspace", "/tmp", "/dev/shm"):
    os.mkdir(place + "/full")
    try:
        for number in itertools.count():
            with open(f"{place}/full/{number}", "wb", buffering=0) as file:
                file.write(bytes(2**20))
                file.write(b"x")
    except OSError as error:
        refused[place] = errno.errorcode[error.errno]
    finally:
        shutil.rmtree(place + "/full")
refused
"""
FORK = """
import errno, os
made, said = [], None
while said is None and len(made) < 1000:
    try:
        pid = os.fork()
    except OSError as error:
        said = errno.errorcode[error.errno]
    else:
        if pid == 0:
            import time
            time.sleep(1e6)
        made.append(pid)
(said, len(made) < 1000)
"""


@pytest.fixture
async def cloud() -> AsyncIterator[Double]:
    require("e2b")
    async with Double(api_key="".join(CANARY)) as double:
        yield double


@pytest.fixture
async def harness(cloud: Double) -> AsyncIterator[Harness]:
    directory = Path(tempfile.mkdtemp(prefix="h-"))
    async with Harness(E2BBackend(directory, e2b_section(cloud))) as ready:
        yield ready
    shutil.rmtree(directory)


async def test_a_program_finds_the_key_nowhere(harness: Harness) -> None:
    run = await harness.run(await harness.session(), LOOK)
    assert run.output == (True, [], []), run.ended


async def test_neither_the_cloud_s_agent_nor_the_relay_can_be_reached(harness: Harness, cloud: Double) -> None:
    """Its ports are taken in the machine, where the cloud has its agent: a sandbox in the machine's network finds them."""
    session = await harness.session()
    (sandbox,) = (each for each in cloud.sandboxes.values() if each.state == "running")
    asked = {"cmd": "python3", "args": ["-c", LISTEN], "envs": {}, "stdin": False, "user": "root"}
    _, output = await sandbox.machine.start_command(**asked)
    first = await output.events.get()
    assert first is not None and base64.b64decode(first.get("stdout", "")) == b"reached\n", first
    run = await harness.run(session, REACH)
    assert run.output == (["ECONNREFUSED", "ECONNREFUSED"], [], [], False), run.ended


async def test_a_flood_of_output_is_cut_and_fills_no_buffer(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "1")
    growth = growth_of(psutil.Process().pid)
    run = await harness.run(
        session, f"import os\nfor _ in range({FLOOD_BYTES // MIB}):\n    os.write(1, b'x' * {MIB})\n'flooded'"
    )
    (grown,) = growth()
    assert run.outcome in ("succeeded", "output_limit"), run.ended
    assert run.omitted_bytes > 0 or run.outcome == "output_limit"
    assert grown < GROWTH_BYTES_MAX
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_a_full_sandbox_does_not_fill_its_machine(harness: Harness, cloud: Double) -> None:
    """Another connection can be made afterwards, for which root starts a command in the machine."""
    session = await harness.session(disk_bytes=DISK_BYTES)
    run = await harness.run(session, FILL_DISK)
    assert run.output == dict.fromkeys(("/workspace", "/tmp", "/dev/shm"), "ENOSPC"), run.ended
    cloud.cut_all()
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_a_sandbox_full_of_processes_can_be_connected_to(harness: Harness, cloud: Double) -> None:
    session = await harness.session(processes=PROCESSES)
    run = await harness.run(session, FORK)
    assert run.output == ("EAGAIN", True), run.ended
    cloud.cut_all()
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_memory_without_end_ends_the_program_and_not_the_machine(harness: Harness, cloud: Double) -> None:
    session = await harness.session(memory_bytes=128 * MIB)
    run = await harness.run(session, "kept = []\nwhile True:\n    kept.append(bytearray(b'x' * 2**20))")
    assert run.outcome in ("out_of_memory", "exception"), run.ended
    cloud.cut_all()
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_a_program_that_attacks_its_supervisor_loses_at_most_itself(harness: Harness, cloud: Double) -> None:
    session = await harness.session()
    code = "import os, signal\nfor number in range(1, 65):\n    try:\n        os.kill(1, number)\n    except OSError:\n        pass\n'alive'"
    assert (await harness.run(session, code)).output == "alive"
    cloud.cut_all()
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_a_message_that_announces_gigabytes_is_refused() -> None:
    """Its head announces them, and then they come."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.endswith("/Start"):
            made = {"templateID": "base", "sandboxID": "i1", "clientID": "c", "envdVersion": "0.6.7"}
            return web.json_response(made, status=201)
        stream = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await stream.prepare(request)
        await stream.write(bytes([0, 255, 255, 255, 255]))
        with contextlib.suppress(ConnectionError):
            for _ in range(2**32 // MIB):
                await stream.write(bytes(MIB))
        return stream

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        cloud = Cloud(Access("".join(CANARY), url, url, request_timeout_s=5.0, concurrency=1))
        machine = await cloud.create("base", lifetime_s=60.0, metadata={}, request_id="r")
        growth = growth_of(psutil.Process().pid)
        with pytest.raises(CloudFailure):
            await machine.run("true", timeout_s=5.0)
        (grown,) = growth()
        assert grown < GROWTH_BYTES_MAX
    finally:
        await runner.cleanup()


async def test_a_cloud_that_lists_other_ids_does_not_make_the_daemon_end_them(harness: Harness, cloud: Double) -> None:
    session = await harness.session()
    foreign = await cloud.create({"templateID": "base", "metadata": {"executor-daemon": "another"}, "timeout": 300})
    for _ in range(3):
        cloud.fault(Kind.WRONG_ID, "/v2/sandboxes", method="GET")
        await harness.backend.sweep()
    assert foreign.sandbox_id in cloud.sandboxes
    assert (await harness.run(session, "40 + 2")).output == 42
