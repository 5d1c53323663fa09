"""Our own E2B backend as a client of our own gateway: each of its requests to the cloud.

It makes no sandbox there: its guest makes namespaces as root, and a sandbox gives its code neither. So the contract of
backends runs on the double, whose machines have a root (tests/support/e2b), and here the backend must say why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_server.backends.e2b import E2BBackend
from executor_server.backends.e2b.access import open_cloud
from executor_server.backends.e2b.cloud import Cloud
from executor_server.backends.e2b.failures import CommandFailed, Final, Missing
from executor_server.backends.e2b.sandbox import SANDBOX_KEY
from executor_server.backends.e2b.sandbox_factory import DAEMON_KEY
from executor_server.core import SandboxFailure, SandboxSpec
from executor_server.core.config.backend_config import E2BSection
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway, running_gateway

MIB = 1 << 20


@dataclass(frozen=True)
class Account:
    section: E2BSection
    state_dir: Path
    cloud: Cloud


@pytest.fixture(scope="module")
def gateway(daemon: Daemon) -> Iterator[Gateway]:
    with running_gateway(daemon, config='[gateway]\nusers = ["root"]\n') as running:
        yield running


@pytest.fixture
async def account(gateway: Gateway, tmp_path: Path) -> AsyncIterator[Account]:
    """The tenant's account at the gateway. At the end it must have no sandbox."""
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(gateway.token)
    section = E2BSection.model_validate(
        {"api_url": gateway.url, "sandbox_url": gateway.url, "api_key_file": str(key), "images": {"base": "base"}}
    )
    cloud = open_cloud(section)
    yield Account(section, tmp_path, cloud)
    assert await cloud.list({}) == []


async def test_each_request_of_our_backend_is_answered_as_by_the_cloud(account: Account) -> None:
    cloud, metadata = account.cloud, {"a": "1"}
    made = [await cloud.create("base", lifetime_s=60, metadata=metadata, request_id="r-1") for _ in range(2)]
    (cloud_id,) = {machine.cloud_id for machine in made}
    assert [each.cloud_id for each in await cloud.list(metadata)] == [cloud_id]
    assert await cloud.list({"a": "2"}) == []
    await cloud.prolong(cloud_id, lifetime_s=600)
    assert dict((await cloud.look(cloud_id)).metadata) == metadata
    assert (await cloud.connect(cloud_id, lifetime_s=60)).cloud_id == cloud_id
    for refused in (cloud.pause(cloud_id), cloud.allow_hosts(cloud_id, ["example.com"])):
        with pytest.raises(Final, match="not offered"):
            await refused
    with pytest.raises(Missing):
        await cloud.create("no-such", lifetime_s=60, metadata={}, request_id="r-2")
    await made[0].upload("/tmp/a/large", data := bytes(3 * MIB))
    assert await made[0].run("id -un; wc -c < /tmp/a/large; echo no >&2", timeout_s=30) == f"sandbox\n{len(data)}\n"
    with pytest.raises(CommandFailed) as failed:
        await made[0].run("echo no >&2; exit 7", timeout_s=30)
    assert (failed.value.exit_code, failed.value.stderr) == (7, "no")
    received: asyncio.Queue[str] = asyncio.Queue()
    command = await made[0].start("cat; exit 3", received.put)
    await command.send(b"through\n")
    assert await received.get() == "through\n"
    await command.stop()
    assert await cloud.kill(cloud_id)
    assert not await cloud.kill(cloud_id)
    with pytest.raises(Missing):
        await cloud.look(cloud_id)


async def test_our_backend_ends_strays_and_says_why_it_makes_no_sandbox_here(account: Account) -> None:
    backend = E2BBackend(account.state_dir, account.section)
    await backend.start()
    try:
        daemon_id = (account.state_dir / "e2b" / ".lock").read_text()
        metadata = {DAEMON_KEY: daemon_id, SANDBOX_KEY: "0" * 16}
        await account.cloud.create("base", lifetime_s=60, metadata=metadata, request_id="stray")
        await backend.adopt(())
        assert await account.cloud.list({}) == []
        findings = {finding.subject: finding for finding in await backend.check_host()}
        assert findings["E2B"].ok
        with pytest.raises(SandboxFailure, match="has no root who could make a sandbox in it"):
            await backend.create(
                SandboxSpec("base", memory_bytes=256 * MIB, processes=32, disk_bytes=16 * MIB, orphan_time_s=60.0)
            )
    finally:
        await backend.close()
