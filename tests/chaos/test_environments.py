"""Environments of a real daemon, made by uv, when the daemon is killed, the disk is full, or bytes have changed."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_client import ExecutorClientError
from tests.chaos.conftest import StartDaemon
from tests.support.daemon import Daemon
from tests.support.internet.world import Internet
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel
from tests.support.polling import eventually

POLICY = 'default = "p"\n[profiles.p]\nimports.allowed = ["*"]\n[profiles.p.packages]\nallowed = ["glaze", "clay"]\n'
CLAY_BYTES = 24 * 2**20
DISK = "size=40m,mode=0700"


@dataclass
class World:
    index: PackageIndex
    environments: Path
    start: Callable[[], Daemon]

    def files(self, place: str) -> list[str]:
        directory = self.environments / place
        return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


@pytest.fixture
def world(start: StartDaemon, directory: Path, internet: Internet) -> World:
    index = internet.package_index()
    index.add(make_wheel("glaze", "2.0"))
    file = directory / "policy.toml"
    file.write_text(POLICY)
    config = (
        f'policy.file = "{file}"\npool.size = 0\n{internet.config()}\n[environments]\nindex_url = "{index.url}"\n'
        f'index_hosts = ["{index.host}:443", "{index.files_host}:443"]\n'
    )
    return World(index, directory / "s/environments", lambda: start(config))


@pytest.fixture
def small_disk(directory: Path) -> Iterator[None]:
    """The state directory as a file system of its own, of 40 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    place = directory / "s"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "none", str(place)], check=True)
    yield
    subprocess.run(["umount", str(place)], check=True)


def version_in_a_session(daemon: Daemon) -> object:
    with daemon.client() as client, client.create_session(packages=["glaze"], authorized_imports=["glaze"]) as session:
        return session.execute("import glaze\nglaze.VERSION").output


def test_daemon_killed_in_mid_build_leaves_nothing_that_the_next_one_believes(world: World) -> None:
    (release,) = world.index.projects["glaze"]
    release.behaviour = "stops"  # in the middle of the wheel
    daemon = world.start()
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(version_in_a_session, daemon)
        assert eventually(lambda: any(path.endswith(".whl") for path in world.index.requests)), daemon.log.read_text()
        daemon.kill()
        with pytest.raises(ExecutorClientError):
            asked.result()
    assert world.files("work") and not world.files("ready")
    release.behaviour = "whole"
    assert version_in_a_session(world.start()) == "2.0"
    assert world.files("staging") == [] and len(world.files("ready")) == 1
    assert world.files("work") == []


def test_environment_that_was_damaged_is_told_and_made_again(world: World) -> None:
    daemon = world.start()
    assert version_in_a_session(daemon) == "2.0"
    daemon.kill()
    (module,) = world.environments.glob("ready/*/tree/site/glaze.py")
    os.truncate(module, 0)
    daemon = world.start()
    assert version_in_a_session(daemon) == "2.0"
    assert "environment_damaged" in daemon.log.read_text()


def test_full_disk_is_said_and_the_daemon_goes_on_serving(small_disk: None, world: World) -> None:
    rows = random.Random(0).randbytes(CLAY_BYTES)  # can't be compressed
    world.index.add(make_wheel("clay", "1.0", {"clay.py": "", "rows.bin": rows, "more.bin": rows[::-1]}))
    daemon = world.start()
    with daemon.client(image_timeout_s=20) as client:
        # By uv where it writes, by the daemon where it does.
        with pytest.raises(ExecutorClientError, match=r"No space left on device|disk is full") as refused:
            client.create_session(packages=["clay"])
        assert str(world.environments) not in str(refused.value)
        assert world.files("staging") == [] and world.files("ready") == []
        with client.create_session() as session:
            assert session.execute("1 + 1").output == 2
    assert version_in_a_session(daemon) == "2.0"
