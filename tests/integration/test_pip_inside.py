"""`pip install` and `uv pip install` inside a running session: with a network that leads to an index, and without.

The guest decides where they install to; it is the same on every backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from executor_client import ExecutionResult, ExecutorClient, Session
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of
from tests.support.internet.world import Internet
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_sdist, make_wheel

IMPORTS = ["subprocess", "sys", "os", "glaze", "kiln", "clay"]
RUN = "import subprocess, sys\nsubprocess.run([sys.executable, {arguments}])"


@dataclass
class World:
    daemon: Daemon
    index: PackageIndex

    def session(self, client: ExecutorClient, *hosts: str) -> Session:
        """A session that reaches these hosts."""
        return client.create_session(None, IMPORTS, network=hosts)

    @property
    def hosts(self) -> tuple[str, str]:
        return f"{self.index.host}:443", f"{self.index.files_host}:443"

    def pip(self, session: Session, *arguments: str) -> ExecutionResult:
        return session.execute(RUN.format(arguments=command("--index-url", self.index.url, *arguments)))


def command(*arguments: str) -> str:
    """The arguments of Python that have pip install something."""
    return ", ".join(map(repr, ("-m", "pip", "install", *arguments)))


@pytest.fixture(scope="module")
def world(internet: Internet) -> Iterator[World]:
    require("local")
    index = internet.package_index()
    index.add(make_wheel("glaze", "2.0"))
    index.add(make_wheel("kiln", "1.0", {"kiln.py": "import glaze\nVERSION = glaze.VERSION\n"}, requires=["glaze"]))
    index.add(make_sdist("clay"))
    policy = (
        'default = "potters"\n[profiles.potters]\nimports.allowed = ["*"]\n'
        f'[profiles.potters.network]\nallowed = ["{index.host}:443", "{index.files_host}:443"]\n'
    )
    with daemon_of(f"pool.size = 0\n{internet.config()}", policy=policy) as daemon:
        yield World(daemon, index)


def test_what_the_network_lets_through_is_installed_and_imported_at_once(world: World) -> None:
    with world.daemon.client() as client, world.session(client, *world.hosts) as session:
        assert not session.execute("import kiln").succeeded
        installed = world.pip(session, "kiln")
        assert "Successfully installed glaze-2.0 kiln-1.0" in installed.logs, installed.logs
        assert session.execute("import kiln\nkiln.VERSION").output == "2.0"
        child = "subprocess.run([sys.executable, '-c', 'import kiln; print(kiln.VERSION)'])"
        assert session.execute(child).logs == "2.0\n", "programs that it starts have it too"
        with world.session(client) as other:
            assert not other.execute("import kiln").succeeded, "it is this session's own"


def test_a_source_distribution_is_not_built(world: World) -> None:
    with world.daemon.client() as client, world.session(client, *world.hosts) as session:
        failed = world.pip(session, "clay")
        assert "No matching distribution found for clay" in failed.logs
        assert 'packages=["NAME"]' in failed.logs.splitlines()[-1]


def test_uv_installs_to_the_same_place(world: World) -> None:
    with world.daemon.client() as client, world.session(client, *world.hosts) as session:
        uv = "uv = os.path.join(os.path.dirname(sys.executable), 'uv')\n"
        command = f"[uv, 'pip', 'install', '--default-index', {world.index.url!r}, 'kiln']"
        done = session.execute(f"import os, subprocess, sys\n{uv}subprocess.run({command}).returncode")
        assert done.output == 0, done.logs
        assert session.execute("import kiln\nkiln.VERSION").output == "2.0"


def test_without_a_network_the_answer_is_short_and_names_packages(world: World) -> None:
    with world.daemon.client() as client, world.session(client) as session:
        failed = world.pip(session, "kiln")
        assert len(failed.logs.splitlines()) <= 5, failed.logs
        assert 'packages=["NAME"]' in failed.logs.splitlines()[-1]
        assert failed.usage.wall_time_s < 30, "it is not tried again and again"
        caught = session.execute(
            f"subprocess.run([sys.executable, {command('kiln')}], check=True, capture_output=True)"
        )
        assert caught.error is not None and 'packages=["NAME"]' in caught.error.message


def test_an_index_that_the_policy_does_not_allow_is_said(world: World) -> None:
    with world.daemon.client() as client, world.session(client, world.hosts[0]) as session:
        failed = session.execute(RUN.format(arguments=command("--index-url", "https://pypi.org/simple", "kiln")))
        assert "network: pypi.org:443 is not allowed for this session" in failed.logs
        assert 'packages=["NAME"]' in failed.logs
