"""The daemon is killed while uv makes an environment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutorClientError
from tests.chaos.conftest import StartDaemon
from tests.support.daemon import Daemon
from tests.support.internet.world import Internet
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel
from tests.support.polling import eventually

POLICY = 'default = "p"\n[profiles.p]\nimports.allowed = ["*"]\n[profiles.p.packages]\nallowed = ["glaze"]\n'


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


def version_in_a_session(daemon: Daemon, **options: Any) -> object:
    with (
        daemon.client(**options) as client,
        client.create_session(packages=["glaze"], authorized_imports=["glaze"]) as session,
    ):
        return session.execute("import glaze\nglaze.VERSION").output


def test_daemon_killed_in_mid_build_leaves_nothing_that_the_next_one_believes(world: World) -> None:
    (release,) = world.index.projects["glaze"]
    release.behaviour = "stops"  # in the middle of the wheel
    daemon = world.start()
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(version_in_a_session, daemon, reconnect_timeout_s=0.1)
        assert eventually(lambda: any(path.endswith(".whl") for path in world.index.requests)), daemon.log.read_text()
        daemon.kill()
        with pytest.raises(ExecutorClientError):
            asked.result()
    assert world.files("work") and not world.files("ready")
    release.behaviour = "whole"
    assert version_in_a_session(world.start()) == "2.0"
    assert world.files("staging") == [] and len(world.files("ready")) == 1
    assert world.files("work") == []
