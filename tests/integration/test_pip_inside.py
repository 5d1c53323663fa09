"""`pip install` and `uv pip install` inside a running session: with a network that leads to an index, and without."""

from __future__ import annotations

import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_client import ExecutionResult, ExecutorClient, Session
from tests.support.backends import DOCKER_IMAGE, require
from tests.support.daemon import Daemon, daemon_of
from tests.support.internet.world import Internet
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_sdist, make_wheel

IMPORTS = ["subprocess", "sys", "os", "glaze", "kiln", "clay"]
RUN = "import subprocess, sys\nsubprocess.run([sys.executable, {arguments}])"


@dataclass
class World:
    backend: str
    daemon: Daemon
    index: PackageIndex

    @contextmanager
    def session(self, client: ExecutorClient, *hosts: str) -> Iterator[Session]:
        """A session that reaches these hosts and has a pip, which images of ours have not."""
        with client.create_session(None, IMPORTS, network=hosts) as session:
            if self.backend == "docker":
                session.put_file("pip.zip", packed_pip())
            yield session

    @property
    def hosts(self) -> tuple[str, str]:
        return f"{self.index.host}:443", f"{self.index.files_host}:443"

    def command(self, *arguments: str) -> str:
        """The arguments of Python that have pip install something."""
        pip = ("/workspace/pip.zip/pip",) if self.backend == "docker" else ("-m", "pip")
        return ", ".join(map(repr, (*pip, "install", *arguments)))

    def pip(self, session: Session, *arguments: str) -> ExecutionResult:
        return session.execute(RUN.format(arguments=self.command("--index-url", self.index.url, *arguments)))


def packed_pip() -> bytes:
    """Returns the pip of this Python as an archive that Python can run."""
    found = importlib.util.find_spec("pip")
    assert found is not None and found.origin is not None
    directory = Path(found.origin).parent
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in directory.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(directory.parent))
    return target.getvalue()


@pytest.fixture(params=["local", "docker", "e2b"])
def world(request: pytest.FixtureRequest, internet: Internet) -> Iterator[World]:
    backend: str = request.param
    require(backend)
    index = internet.package_index()
    index.add(make_wheel("glaze", "2.0"))
    index.add(make_wheel("kiln", "1.0", {"kiln.py": "import glaze\nVERSION = glaze.VERSION\n"}, requires=["glaze"]))
    index.add(make_sdist("clay"))
    policy = (
        'default = "potters"\n[profiles.potters]\nimports.allowed = ["*"]\n'
        f'[profiles.potters.network]\nallowed = ["{index.host}:443", "{index.files_host}:443"]\n'
    )
    config = f'server.backend = "{backend}"\npool.size = 0\n{internet.config()}'
    with ExitStack() as stack:
        if backend == "docker":
            config += f'[docker.images]\nbase = "{DOCKER_IMAGE}"\n'
        if backend == "e2b":
            from tests.support.e2b import ThreadedDouble  # takes E2B's SDK

            outside = dict.fromkeys((index.host, index.files_host), internet.address)
            double = stack.enter_context(ThreadedDouble(outside=outside))
            keys = {"api_url": double.url, "sandbox_url": double.url, "api_key_file": str(double.api_key_file)}
            config += "[e2b]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        yield World(backend, stack.enter_context(daemon_of(config, policy=policy)), index)


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


@pytest.mark.parametrize("world", ["local", "e2b"], indirect=True)
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
            f"subprocess.run([sys.executable, {world.command('kiln')}], check=True, capture_output=True)"
        )
        assert caught.error is not None and 'packages=["NAME"]' in caught.error.message


def test_an_index_that_the_policy_does_not_allow_is_said(world: World) -> None:
    with world.daemon.client() as client, world.session(client, world.hosts[0]) as session:
        failed = session.execute(RUN.format(arguments=world.command("--index-url", "https://pypi.org/simple", "kiln")))
        # Notices and answers take different streams on E2B: one may come a step late.
        said = failed.logs + session.execute("1").logs
        assert "network: pypi.org:443 is not allowed for this session" in said
        assert 'packages=["NAME"]' in failed.logs
