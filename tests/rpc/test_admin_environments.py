"""Environments of packages as an administrator sees them: over the wire, and by `executor-server env`."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import structlog
from click.testing import CliRunner, Result

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc
from executor_server.api.admin import AdminService
from executor_server.core import Principal, Progress, SandboxFailure
from executor_server.daemon.cli import main
from executor_server.fleet.api.front_fleet import FRONT_PRINCIPAL
from executor_server.packages import BuildInfo, Collected, EnvironmentInfo, Evicted, Lock, Statistics
from executor_server.policy.approvals import Approvals
from executor_server.policy.quotas.quotas import Quotas
from tests.rpc.edge import AUTH, TOKEN, FakeSessions, make_policy, make_server, refused, settings
from tests.support.fleet_daemon import wanted

LOCK = Lock(
    "numpy==2.5.5 \\\n --hash=sha256:aa\n", "cpython-3.12.4", "x86_64-manylinux_2_39", "0.13.9", ("numpy==2.5.5",)
)
ENVIRONMENT = EnvironmentInfo(
    environment_id=LOCK.environment_id,
    size_bytes=102_345_678,
    created_s=1_700_000_000.25,
    used_s=1_700_003_600.0,
    sandboxes=2,
    requesters=("acme", "globex"),
    requests=(("numpy>=2",), ()),
    images=("local/base",),
    pins=("numpy==2.5.5",),
    modules=("numpy",),
    lock=LOCK,
)
BUILD = BuildInfo(
    ("polars", "x\x1b[2J"), "docker", "data", "", Progress("installing", 17, 23, "packages"), False, begun_s_ago=4.2
)


@dataclass
class FakeEnvironments:
    environments: Sequence[EnvironmentInfo] = field(default_factory=lambda: [ENVIRONMENT])
    under_way: Sequence[BuildInfo] = field(default_factory=lambda: [BUILD])
    collected: deque[int] = field(default_factory=deque)
    failure: SandboxFailure | None = None

    def list(self) -> Sequence[EnvironmentInfo]:
        return self.environments

    def show(self, environment_id: str) -> EnvironmentInfo | None:
        return next((each for each in self.environments if each.environment_id == environment_id), None)

    def builds(self) -> Sequence[BuildInfo]:
        return self.under_way

    def statistics(self) -> Statistics:
        return Statistics(environments=1, total_bytes=150_000_000, max_bytes=20_000_000_000)

    async def collect(self, max_bytes: int = 0) -> Collected:
        if self.failure is not None:
            raise self.failure
        self.collected.append(max_bytes)
        return Collected((Evicted(LOCK.environment_id, 102_345_678),), 110_000_000, 40_000_000)


class World:
    def __init__(self) -> None:
        self.environments = FakeEnvironments()
        self.recorded: list[tuple[str, str]] = []

    def record(self, principal: Principal, method: str, target: str) -> None:
        if principal != FRONT_PRINCIPAL:  # a front watches the approvals of its nodes
            self.recorded.append((method, target))

    async def reload(self) -> bool:
        return False

    def service(self) -> AdminService:
        policy = make_policy()
        quotas = Quotas(policy.quotas_of)
        environments = cast("Any", self.environments)
        none = cast("Any", None)
        return AdminService(
            none, quotas, lambda: policy, self.reload, self.record, environments, Approvals(), none, none, none, none
        )


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def address(world: World, tmp_path: Path) -> AsyncIterator[str]:
    server = make_server(FakeSessions(), settings(f"unix:{tmp_path}/s"), admin=world.service())
    (found,) = await server.start()
    try:
        yield found
    finally:
        await server.stop(0)


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield pb_grpc.AdminServiceStub(channel)


@pytest.fixture
async def run(address: str) -> Any:
    async def in_thread(*arguments: str) -> Result:
        environment = {"EXECUTOR_ADDRESS": address, "EXECUTOR_TOKEN": TOKEN}
        return await asyncio.to_thread(CliRunner().invoke, main, ["env", *arguments], env=environment)

    return in_thread


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


async def test_environments_and_builds_are_listed(stub: Any) -> None:
    answer = await stub.ListEnvironments(pb.ListEnvironmentsRequest(), metadata=AUTH)
    (found,) = answer.environments
    assert (found.environment_id, found.size_bytes, found.sandboxes) == (LOCK.environment_id, 102_345_678, 2)
    assert found.create_time.ToMilliseconds() == 1_700_000_000_250
    assert (list(found.tenants), list(found.images)) == (["acme", "globex"], ["local/base"])
    assert [list(each.packages) for each in found.requests] == [["numpy>=2"], []]
    (build,) = answer.builds
    assert (build.progress, build.image, build.tenant) == ("installing, 17 of 23 packages", "docker/data", "")
    assert (answer.total_bytes, answer.max_bytes) == (150_000_000, 20_000_000_000)


async def test_one_is_shown_with_its_lock(stub: Any) -> None:
    request = pb.GetEnvironmentRequest(environment_id=LOCK.environment_id)
    answer = await stub.GetEnvironment(request, metadata=AUTH)
    assert (answer.lock, answer.lock_sha256, answer.uv_version) == (LOCK.text, LOCK.sha256, "0.13.9")
    assert list(answer.modules) == ["numpy"]
    unknown = stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="env-0"), metadata=AUTH)
    assert await refused(unknown) == ("NOT_FOUND", "ENVIRONMENT_NOT_FOUND")
    wrong = stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="../x"), metadata=AUTH)
    assert await refused(wrong) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_each_call_is_recorded_before_its_effect(world: World, stub: Any) -> None:
    world.environments.failure = SandboxFailure("/secret/path is full")
    await stub.ListEnvironments(pb.ListEnvironmentsRequest(), metadata=AUTH)
    await refused(stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="env-0"), metadata=AUTH))
    call = stub.CollectEnvironments(pb.CollectEnvironmentsRequest(max_bytes=7), metadata=AUTH)
    assert await refused(call) == ("UNAVAILABLE", "BACKEND_UNAVAILABLE")
    assert world.recorded == [("ListEnvironments", ""), ("GetEnvironment", "env-0"), ("CollectEnvironments", "7")]


async def test_only_administrators_may(stub: Any) -> None:
    assert (await refused(stub.ListEnvironments(pb.ListEnvironmentsRequest())))[0] == "UNAUTHENTICATED"
    assert (await refused(stub.CollectEnvironments(pb.CollectEnvironmentsRequest())))[0] == "UNAUTHENTICATED"


async def test_the_command_line_lists_them_as_tables(run: Any) -> None:
    done = await run("list")
    assert done.exit_code == 0
    assert words(done.stdout) == [
        "ENVIRONMENT SIZE IN USE LAST USE TENANTS IMAGES PACKAGES",
        f"{LOCK.environment_id} 102,345,678 2 2023-11-14 23:13 acme, globex local/base numpy>=2; all of the lock",
        "",
        "BEING MADE FOR TENANT SINCE PACKAGES",
        "installing, 17 of 23 packages docker/data - 4 s polars, x?[2J",
        "",
        "On the disk: 150,000,000 of 20,000,000,000 bytes.",
    ]


async def test_the_command_line_shows_one(run: Any) -> None:
    done = await run("show", LOCK.environment_id)
    lines = words(done.stdout)
    assert lines[0] == f"environment {LOCK.environment_id}"
    for line in ("size 102,345,678 bytes", "python cpython-3.12.4, x86_64-manylinux_2_39", "modules numpy"):
        assert line in lines
    assert lines[-2:] == ["", "numpy==2.5.5"]
    failed = await run("show", "env-0")
    nowhere = "no node has an" if wanted() else "there is no"
    assert (failed.exit_code, failed.stderr) == (1, f"NOT_FOUND: {nowhere} environment 'env-0'\n")


async def test_the_command_line_removes_those_that_no_sandbox_has(world: World, run: Any) -> None:
    done = await run("gc")
    assert words(done.stdout) == [
        LOCK.environment_id,
        "1 environments removed, 110,000,000 bytes freed, 40,000,000 left on the disk.",
    ]
    assert (await run("gc", "--max-bytes", "2GB")).exit_code == 0
    assert list(world.environments.collected) == [0, 2_000_000_000]
    assert (await run("gc", "--max-bytes", "99999999TB")).exit_code == 0
    failed = await run("gc", "--max-bytes", "lots")
    assert failed.exit_code == 2 and "--max-bytes" in failed.stderr


async def test_scripts_get_json(run: Any) -> None:
    assert json.loads((await run("list", "--json")).stdout)["total_bytes"] == "150000000"
    assert json.loads((await run("show", LOCK.environment_id, "--json")).stdout)["lock"] == LOCK.text
    assert json.loads((await run("gc", "--json")).stdout)["environment_ids"] == [LOCK.environment_id]


async def test_a_daemon_without_environments_has_an_empty_list(world: World, run: Any) -> None:
    world.environments.environments, world.environments.under_way = [], []
    assert words((await run("list")).stdout)[1:] == ["", "On the disk: 150,000,000 of 20,000,000,000 bytes."]


async def test_long_lists_are_cut_in_the_table_only(world: World, run: Any) -> None:
    packages = tuple(f"package-{number}" for number in range(40))
    world.environments.environments = [replace(ENVIRONMENT, requests=(packages,))]
    row = (await run("list")).stdout.splitlines()[1]
    assert row.endswith("…") and "package-39" not in row
    assert "package-39" in (await run("show", LOCK.environment_id)).stdout
