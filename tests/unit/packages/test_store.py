"""The store of environments: bytes are checked before they are believed, and removed by whole environments."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from executor_server.backends.environments import Environment
from executor_server.core import ImageNotReady, SandboxFailure
from executor_server.packages import EnvironmentService, EnvironmentSettings, catalog
from executor_server.packages.holds import Holds
from tests.unit.packages.conftest import Bench, made
from tests.unit.packages.fake_builder import IMAGE, packages

NUMPY = packages("numpy")
SANDBOX = "0123456789abcdef"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _link(path: Path) -> None:
    copy = path.with_name("copy")
    path.rename(copy)
    path.symlink_to(copy)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DATA, MANIFEST = "tree/site/numpy/data.txt", "manifest.json"
DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    *((DATA, damage) for damage in (_flip, _link, _pipe, Path.unlink)),
    *((MANIFEST, damage) for damage in (_flip, _empty, _pipe, Path.unlink)),
]


async def stopped_after_one(bench: Bench) -> Path:
    """Returns the directory of an environment that an earlier daemon made."""
    environment = await made(await bench.service(), NUMPY)
    await bench.close()
    return environment.directory.parent


async def rebuilt(bench: Bench) -> Environment:
    environment = await made(await bench.service(), NUMPY)
    assert bench.builder.made[environment.environment_id] == 2 and bench.builder.resolved.total() == 1
    module = (environment.directory / "site/numpy/__init__.py").read_bytes()
    assert (environment.directory / "site/numpy/data.txt").read_text() == "numpy==1.0"
    assert len(module) == bench.builder.file_bytes and module == bench.builder.content_of("numpy==1.0")
    return environment


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
async def test_damaged_file_is_told_and_the_environment_made_again(
    bench: Bench, file: str, damage: Callable[[Path], object]
) -> None:
    directory = await stopped_after_one(bench)
    damage(directory / file)
    with capture_logs() as logs:
        await rebuilt(bench)
    assert any(line["event"] in ("environment_damaged", "environment_rejected") for line in logs)
    if file.startswith("tree"):
        assert [reason for _, reason in bench.observer.evicted] == ["it was damaged"]


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "site/numpy/new.py").write_text("evil = True"),
        lambda tree: (tree / "site/new").mkdir(),
        lambda tree: (tree / "site/new.pth").symlink_to("/etc/passwd"),
        lambda tree: (tree / "site/numpy/data.txt").chmod(0o666),
    ],
    ids=["file", "directory", "link", "mode"],
)
async def test_tree_that_is_not_the_listed_one_is_not_believed(bench: Bench, change: Callable[[Path], object]) -> None:
    change(await stopped_after_one(bench) / "tree")
    await rebuilt(bench)


async def test_undamaged_environment_is_checked_once_in_a_daemons_life(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stopped_after_one(bench)
    service = await bench.service()
    with capture_logs() as logs:
        first = await made(service, NUMPY)
        assert [line["event"] for line in logs].count("environment_checked") == 1
        monkeypatch.setattr(asyncio, "to_thread", None)  # from now on no thread is needed
        assert await service.ready(NUMPY, IMAGE) == first
    assert bench.builder.made.total() == 1


async def test_environment_that_was_removed_by_hand_is_made_again(bench: Bench) -> None:
    service = await bench.service()
    environment = await made(service, NUMPY)
    shutil.rmtree(environment.directory.parent)
    assert await made(service, NUMPY) == environment
    assert bench.builder.made.total() == 2


async def test_start_removes_what_a_killed_daemon_left(bench: Bench) -> None:
    environment = await made(await bench.service(), NUMPY)
    await bench.close()
    deep = bench.places.work / "install-2"
    for directory in (bench.places.staging / "new-0123/tree/site", bench.places.work / "install-1/cache", deep):
        directory.mkdir(parents=True)
        (directory / "half.py").touch()
    for number in range(10):  # from below, as one path may not be that long
        bottom = (chain := bench.places.work / f"chain-{number}").joinpath(*["d"] * 150)
        bottom.mkdir(parents=True)
        deep.rename(bottom / "d")
        deep = chain
    await bench.service()
    assert [*bench.places.staging.iterdir(), *bench.places.work.iterdir()] == []
    assert environment.directory.is_dir() and len(list(bench.places.wheels.iterdir())) == 1


async def test_damaged_environment_in_use_stays_as_it_is_until_its_sandbox_has_gone(bench: Bench) -> None:
    service = await bench.service()
    environment = await made(service, NUMPY)
    service.hold(environment.environment_id, "local", SANDBOX)
    await bench.close()
    _flip(environment.directory / DATA.removeprefix("tree/"))
    mounted = os.open(environment.directory, os.O_RDONLY)
    try:
        service = await bench.service()
        await made(service, NUMPY)
        assert os.listdir(mounted) == ["site"]  # noqa: PTH208 - as a mount sees it
        (aside,) = bench.places.damaged.iterdir()
        service.release(SANDBOX)
        await service.collect(2**40)
        assert not aside.exists()
    finally:
        os.close(mounted)


@pytest.mark.parametrize("damage", [_empty, _flip], ids=["empty", "flip"])
async def test_index_that_is_damaged_costs_a_resolution(bench: Bench, damage: Callable[[Path], object]) -> None:
    environment = await made(await bench.service(), NUMPY)
    await bench.close()
    index = bench.places.index
    if damage is _flip:
        index.write_bytes(b"SQLite format 3\0" + os.urandom(8000))
    else:
        damage(index)
    assert await made(await bench.service(), NUMPY) == environment
    assert bench.builder.resolved.total() == 2 and bench.builder.made.total() == 1


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("requests", "resolved_s = 4e9"),
        ("requests", "lock = replace(lock, '1.0', '6.6')"),
        ("requests", "lock = '[]'"),
        ("uses", "used_s = 4e9"),
    ],
)
async def test_row_that_was_changed_is_not_believed(bench: Bench, table: str, change: str) -> None:
    environment = await made(await bench.service(), NUMPY)
    await bench.close()
    shutil.rmtree(environment.directory.parent)  # so that the lock is needed
    database = sqlite3.connect(bench.places.index)
    database.execute(f"UPDATE {table} SET {change}")
    database.commit()
    database.close()
    service = await bench.service()
    again = await made(service, NUMPY)
    assert again.environment_id == environment.environment_id and again.pins == ("numpy==1.0",)
    info = service.show(again.environment_id)
    assert info is not None and info.used_s == bench.now_s
    assert bench.builder.resolved.total() == (1 if table == "uses" else 2)


# ---------------------------------------------------------------------------------------------------------------------
# Holds and eviction


async def test_hold_survives_the_daemon_and_ends_with_its_sandbox(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_ANSWER_S", 0.0)
    service = await bench.service()
    environment = await made(service, NUMPY)
    service.hold(environment.environment_id, "local", SANDBOX)
    service.hold(environment.environment_id, "local", SANDBOX)
    await bench.close()
    service = await bench.service()
    service.keep_only("docker", [])
    service.keep_only("local", [SANDBOX])
    assert (await service.collect()).evicted == () and environment.directory.is_dir()
    service.keep_only("local", [])
    (evicted,) = (await service.collect()).evicted
    assert evicted.environment_id == environment.environment_id and not environment.directory.exists()


async def test_environment_is_not_evicted_between_answer_and_hold(bench: Bench) -> None:
    service = await bench.service()
    environment = await made(service, NUMPY)
    assert (await service.collect()).evicted == ()
    service.hold(environment.environment_id, "local", SANDBOX)
    assert (await service.collect()).evicted == ()


async def test_holding_what_is_not_there_is_refused(bench: Bench) -> None:
    service = await bench.service()
    with pytest.raises(SandboxFailure, match="not open"):
        service.hold("env-none", "local", SANDBOX)
    await made(service, NUMPY)
    with pytest.raises(SandboxFailure, match="not there"):
        service.hold("env-none", "local", SANDBOX)


@pytest.mark.parametrize("name", ["..", "a/b", "", "a.b", "x" * 65])
def test_no_id_of_a_sandbox_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(SandboxFailure, match="not a valid sandbox id"):
        Holds(tmp_path).add("env-1", "local", name)
    assert list(tmp_path.iterdir()) == []


async def test_least_recently_used_are_evicted_when_there_is_too_much(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_ANSWER_S", 0.0)
    bench.builder.file_bytes = 100_000
    service = await bench.service()
    environments = {}
    for name in ("first", "second", "third"):
        bench.now_s += 1000
        environments[name] = await made(service, packages(name))
    bench.now_s += 1000
    await service.ready(packages("first"), IMAGE)
    total = (await service.collect(2**40)).total_bytes
    collected = await service.collect(total - 350_000)  # the three wheels, and one environment
    assert [each.environment_id for each in collected.evicted] == [environments["second"].environment_id]
    assert 100_000 < collected.evicted[0].freed_bytes < collected.freed_bytes  # wheels were used before it
    assert collected.total_bytes <= total - 100_000
    assert service.statistics().total_bytes == collected.total_bytes
    assert bench.observer.evicted == [(environments["second"].environment_id, "an administrator made room")]
    with pytest.raises(ImageNotReady):
        bench.builder.may_make.clear()
        await service.ready(packages("second"), IMAGE)
    bench.builder.may_make.set()


async def test_wheels_that_were_used_before_the_environments_go_first(bench: Bench) -> None:
    service = await bench.service()
    environment = await made(service, NUMPY)
    (kept,) = bench.places.wheels.iterdir()
    old = bench.places.wheels / "old"
    old.mkdir()
    (old / "module.whl").write_bytes(bytes(100_000))
    os.utime(old, (1, 1))
    total = (await service.collect(2**40)).total_bytes
    collected = await service.collect(total - 1)
    assert collected.evicted == () and not old.exists() and kept.exists() and environment.directory.is_dir()


async def test_a_wheel_is_not_evicted_while_a_build_uses_it(bench: Bench) -> None:
    service = await bench.service()
    await made(service, NUMPY)
    (wheel,) = bench.places.wheels.iterdir()
    with service.wheels.in_use([wheel.name]):
        await service.collect()
        assert wheel.is_dir()
    await service.collect()
    assert not wheel.exists()


async def test_builds_make_room_by_themselves(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_ANSWER_S", 0.0)
    bench.builder.file_bytes = 500_000
    service = await bench.service(EnvironmentSettings(max_bytes=1_200_000))
    for number in range(6):
        bench.now_s += 1000
        last = await made(service, packages(f"p{number}"))
    await collected(service)
    assert last.environment_id in {info.environment_id for info in service.list()}
    assert 0 < service.statistics().total_bytes <= 1_200_000


async def collected(service: EnvironmentService) -> None:
    """Waits for what collects in the background."""
    task = service._collecting
    assert task is not None
    await task
