"""Packages on E2B: made on the daemon's host for the template's Python, and brought to the machine as an archive."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from executor_client import ExecutorClientError
from executor_server.backends.e2b import E2BBackend
from executor_server.core.errors import SandboxFailure
from executor_server.core.model import SandboxSpec
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of
from tests.support.e2b import Double, ThreadedDouble, e2b_section
from tests.support.environments import PACKAGES, ServedEnvironments
from tests.support.internet.world import Internet
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel

SPEC = SandboxSpec("base", 2**28, 32, 2**24, 60.0, packages=PACKAGES)
POLICY = """
default = "potters"
[profiles.potters]
imports.allowed = ["*"]
packages.allowed = ["kiln", "slab", "slip"]
"""
CONFIG = """
server.backend = "e2b"
pool.size = 0
{internet}
[e2b]
api_url = "{url}"
sandbox_url = "{url}"
api_key_file = "{key}"
[environments]
index_url = "{index.url}"
index_hosts = ["{index.host}:443", "{index.files_host}:443"]
max_archive_bytes = "10MiB"
"""


@pytest.fixture
def potters(internet: Internet) -> Iterator[Daemon]:
    require("e2b")
    require("local")
    index: PackageIndex = internet.package_index()
    index.add(make_wheel("kiln", "1.0", {"kiln.py": "def heat():\n    return __file__, __cached__\n"}))
    noise = os.urandom(11 * 2**20).hex()  # together more than an archive may have
    index.add(make_wheel("slab", "1.0", {"slab/__init__.py": "", "slab/noise": noise[: len(noise) * 3 // 4]}))
    index.add(make_wheel("slip", "1.0", {"slip/__init__.py": "", "slip/noise": noise}))
    with (
        ThreadedDouble() as double,
        daemon_of(
            CONFIG.format(internet=internet.config(), url=double.url, key=double.api_key_file, index=index),
            policy=POLICY,
        ) as daemon,
    ):
        yield daemon


def test_a_machine_has_the_packages_that_were_made_for_its_python(potters: Daemon) -> None:
    with (
        potters.client() as client,
        client.create_session(packages=["kiln"], authorized_imports=["*"]) as session,
    ):
        result = session.execute("import kiln\nkiln.heat()")
        assert result.error is None
        at, cached = result.output
        assert at == "/run/executor/environment/site/kiln.py"
        assert session.execute(f"import os\nos.path.exists({cached!r})").output is True, "it has its bytecode"
        assert session.execute("os.access(kiln.__file__, os.W_OK)").output is False


def test_packages_that_need_more_than_one_upload_arrive_whole(potters: Daemon) -> None:
    with (
        potters.client() as client,
        client.create_session(packages=["slab"], authorized_imports=["*"]) as session,
    ):
        code = "import os, slab\nat = os.path.dirname(slab.__file__)\nos.path.getsize(f'{at}/noise')"
        assert session.execute(code).output == 16.5 * 2**20
        assert session.execute("sorted(name for name in os.listdir('/run/executor/environment'))").output == ["site"]


def test_packages_that_make_too_large_an_archive_are_refused_with_what_to_do(potters: Daemon) -> None:
    with (
        potters.client() as client,
        pytest.raises(ExecutorClientError, match=r"more than 10 MiB .* environments\.max_archive_bytes"),
    ):
        client.create_session(packages=["slip"])


async def test_a_template_that_was_built_again_with_another_python_is_asked_again(tmp_path: Path) -> None:
    """Packages for the Python that it had would fail at their import."""
    require("e2b")
    async with Double() as double:
        served = ServedEnvironments(tmp_path)
        backend = E2BBackend(tmp_path, e2b_section(double), environments=lambda: served)
        await backend.start()
        try:
            await backend.prepare_environment(SPEC)
            factory = backend._started().factory
            now = factory.templates.known("base")
            assert now is not None and now.version == sys.version_info[:2]
            factory.templates._prepared["base"] = replace(now, version=(3, 8))
            with pytest.raises(SandboxFailure, match=r"its packages are for Python 3\.8, and this is 3"):
                await backend.create(SPEC)
            assert served.held == set() and not double.sandboxes
            sandbox = await backend.create(SPEC)
            assert served.targets[-1].interpreter is not None
            assert served.targets[-1].interpreter.version == now.version
            assert served.held == {sandbox.sandbox_id}
        finally:
            await backend.close()
        assert served.held == set()
