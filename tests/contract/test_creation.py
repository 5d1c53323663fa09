"""Sandboxes are made as their spec says, or not at all, and the error names the fault."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.backends.base import Backend, Sandbox
from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.core.errors import BackendFull, ImageNotReady, SandboxFailure
from executor_server.core.model import SandboxSpec
from tests.contract.harness import MIB, Harness
from tests.contract.marks import instead, promise
from tests.contract.probes import FULL_AT, MISSING, Probe
from tests.support.polling import eventually_awaited

SPEC = SandboxSpec("base", memory_bytes=256 * MIB, processes=32, disk_bytes=16 * MIB, orphan_time_s=60.0)


async def answers(sandbox: Sandbox, *, shown: int = 0) -> bool:
    """True when the guest answers. Each call makes another connection: `shown` were made before."""
    channel = GuestChannel(sandbox.endpoint, shown=shown)
    try:
        return (await channel.connect()).generation == 1
    finally:
        channel.close()


async def nothing_is_left(backend: Backend, probe: Probe) -> bool:
    """True once no sandbox exists. A cloud may have made a machine, or make one yet, whose answer was lost: sweeps end it."""

    async def swept() -> bool:
        await backend.sweep()
        return await probe.existing() == set()

    return await eventually_awaited(swept)


@promise("create-ready")
async def test_a_sandbox_that_is_made_answers(backend: Backend, probe: Probe) -> None:
    sandbox = await backend.create(SPEC)
    assert await answers(sandbox)
    assert await probe.existing() == {sandbox.sandbox_id}
    assert sandbox.backend_name == backend.name == probe.name


@promise("create-concurrent")
async def test_sandboxes_are_made_at_the_same_time(backend: Backend, probe: Probe) -> None:
    made = await asyncio.gather(*(backend.create(SPEC) for _ in range(3)))
    assert await asyncio.gather(*map(answers, made)) == [True] * 3
    assert await probe.existing() == {each.sandbox_id for each in made} and len(await probe.existing()) == 3


@promise("machine")
async def test_programs_find_a_small_machine(harness: Harness) -> None:
    session = await harness.session(disk_bytes=8 * MIB)
    code = """
import getpass, os, platform, shutil, socket, subprocess, tempfile
os.makedirs("/tmp/source/below", mode=0o700)
shutil.copytree("/tmp/source", "/workspace", dirs_exist_ok=True)  # sets its mode and times
tar = subprocess.run("cd /tmp/source && tar -cf ../a.tar . && cd && tar -xf /tmp/a.tar && chmod 755 .", shell=True)
with tempfile.TemporaryFile(dir="/var/tmp") as one, tempfile.TemporaryFile(dir="/var/tmp") as another:
    try:
        full = [bool(file.write(bytes(5 << 20)) and file.flush()) for file in (one, another)]
    except OSError as error:
        full = os.strerror(error.errno)
[
    getpass.getuser(), bool(platform.freedesktop_os_release()["ID"]),
    os.path.expanduser("~"), os.stat("/workspace").st_uid == os.getuid(), socket.gethostname(), tar.returncode, full,
]
"""
    run = await harness.run(session, code)
    assert run.output == ["sandbox", True, "/workspace", True, "sandbox", 0, "No space left on device"], run.message


@promise("create-spec")
async def test_a_sandbox_has_the_disk_and_the_processes_of_its_spec(harness: Harness) -> None:
    session = await harness.session(disk_bytes=8 * MIB, processes=12)
    code = """
import os
sizes = [os.statvfs(path) for path in ("/workspace", "/tmp", "/dev/shm")]
children = []
try:
    while len(children) < 100:
        pid = os.fork()
        if not pid:
            import time
            time.sleep(1e6)
        children.append(pid)
except OSError:
    pass
for pid in children:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
[size.f_blocks * size.f_frsize for size in sizes], len(children)
"""
    sizes, children = (await harness.run(session, code)).output
    assert sizes == [8 * MIB] * 3
    assert 0 < children < 12


@promise("create-no-network")
async def test_a_program_reaches_nothing_outside(harness: Harness) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(greet, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    session = await harness.session()
    code = f"""
import os, socket
found = sorted(name for name in os.listdir("/sys/class/net") if name != "lo") if os.path.isdir("/sys/class/net") else []
def reached(address):
    with socket.socket() as sock:
        sock.settimeout(2)
        return sock.connect_ex(address) == 0
found, [reached((host, {port})) for host in ("127.0.0.1", "10.0.0.1", "192.0.2.1")], [name for _, name in socket.if_nameindex()]
"""
    async with server:
        interfaces, reached, names = (await harness.run(session, code)).output
    assert reached == [False] * 3
    assert set(names) <= {"lo"} and (not interfaces or set(interfaces) <= {"lo"})


@promise("create-image-unknown")
async def test_an_image_that_is_not_configured_is_refused(backend: Backend, probe: Probe) -> None:
    with pytest.raises(SandboxFailure, match="nonsense"):
        await backend.create(replace(SPEC, image="nonsense"))
    assert await probe.existing() == set()


@promise("create-image-missing")
async def test_a_missing_image_is_reported_as_missing(probe: Probe, directory: Path) -> None:
    backend = probe.with_lost_image()
    await backend.start()
    try:
        await backend.adopt(())
        probe.lose_image()
        with pytest.raises(ImageNotReady) as refusal:
            await backend.create(replace(SPEC, image=MISSING))
        assert str(directory) not in str(refusal.value), "its text goes to the client"
        assert await probe.existing() == set()
        assert await answers(await backend.create(SPEC)), "the other image is served"
    finally:
        await backend.close()


@promise("create-cancelled")
async def test_a_creation_that_is_cancelled_leaves_nothing(backend: Backend, probe: Probe) -> None:
    for turns in (0, 1, 2, 5, 20, 100):
        creation = asyncio.ensure_future(backend.create(SPEC))
        for _ in range(turns):
            await asyncio.sleep(0)
        creation.cancel()
        await asyncio.wait([creation])
        if not creation.cancelled():  # it was already done
            await creation.result().destroy()
        assert await nothing_is_left(backend, probe), turns


@promise("create-full")
async def test_a_full_backend_says_when_to_retry(probe: Probe) -> None:
    backend = probe.small()
    await backend.start()
    try:
        await backend.adopt(())
        asked = await asyncio.gather(*(backend.create(SPEC) for _ in range(FULL_AT + 2)), return_exceptions=True)
        refused = [each for each in asked if isinstance(each, BackendFull)]
        made = [each for each in asked if not isinstance(each, BaseException)]
        assert (len(made), len(refused)) == (FULL_AT, 2), asked
        assert all(each.retry_after_s > 0 for each in refused)
        assert len(await probe.existing()) == FULL_AT
        await made[0].destroy()
        assert await answers(await backend.create(SPEC)), "a place that is given back can be had"
    finally:
        await backend.close()


@instead("create-full")
async def test_a_backend_without_a_limit_makes_as_many_as_requested(probe: Probe) -> None:
    backend = probe.small()
    await backend.start()
    try:
        await backend.adopt(())
        made = await asyncio.gather(*(backend.create(SPEC) for _ in range(FULL_AT + 2)))
        assert await probe.existing() == {each.sandbox_id for each in made}
    finally:
        await backend.close()


@promise("create-down")
async def test_a_backend_whose_host_does_not_work_does_not_start(probe: Probe) -> None:
    away = probe.without_host()
    with pytest.raises(SandboxFailure, match=r"\w"):
        await away.start()
    with pytest.raises(SandboxFailure):
        await away.create(SPEC)
    await away.close()
    again = probe.backend()  # the directory was released
    await again.start()
    await again.close()


@promise("fingerprint")
async def test_another_spec_and_another_policy_have_another_fingerprint(backend: Backend) -> None:
    made = await backend.create(SPEC)
    assert made.fingerprint == await backend.fingerprint(SPEC) == await backend.fingerprint(replace(SPEC))
    others = [
        replace(SPEC, policy="another"),
        replace(SPEC, memory_bytes=SPEC.memory_bytes * 2),
        replace(SPEC, processes=8),
        replace(SPEC, disk_bytes=SPEC.disk_bytes * 2),
        replace(SPEC, orphan_time_s=1.0),
        replace(SPEC, cpus=1.0),
    ]
    fingerprints = [made.fingerprint, *[await backend.fingerprint(other) for other in others]]
    assert all(one != other for one, other in itertools.combinations(fingerprints, 2))


@promise("label")
async def test_labelling_never_fails(backend: Backend) -> None:
    sandbox = await backend.create(SPEC)
    await sandbox.label("0123456789abcdef")
    sandbox.set_cpu_share(0.5)
    await sandbox.destroy()
    await sandbox.label("0123456789abcdef")
    sandbox.set_cpu_share(1.0)
