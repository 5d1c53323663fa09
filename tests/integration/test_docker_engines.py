"""An Engine with another runtime, and one that dies and comes back, each with sandboxes on it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from executor_server.backends.docker import DockerBackend
from executor_server.core.config.backend_config import DockerImage, DockerSection
from executor_server.core.model import SandboxSpec
from tests.contract.harness import Harness
from tests.support.backends import require
from tests.support.engine import OwnEngine, engine_client, own_engine

IMAGE = "remote-executor/base"
SPEC = SandboxSpec("base", memory_bytes=2**28, processes=32, disk_bytes=2**24, orphan_time_s=60.0)


@pytest.fixture
def engine() -> Iterator[OwnEngine]:
    require("docker")
    if os.geteuid() != 0 or not all(map(shutil.which, ("dockerd", "unshare", "crun"))):
        pytest.skip("only root, with dockerd and crun at hand, can start an Engine of its own")
    with own_engine(IMAGE) as ready:
        yield ready


@pytest.fixture
def directory() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="d-"))
    yield place
    shutil.rmtree(place)


def _backend(directory: Path, engine: OwnEngine, runtime: str | None = None) -> DockerBackend:
    images = {"base": DockerImage(reference=IMAGE)}
    return DockerBackend(directory, DockerSection(images=images, host=engine.host, runtime=runtime))


@pytest.fixture
async def backend(directory: Path, engine: OwnEngine) -> AsyncIterator[DockerBackend]:
    ready = _backend(directory, engine)
    await ready.start()
    await ready.adopt(())
    yield ready
    await ready.close()
    with engine_client(engine.socket) as client:
        assert client.containers(all=True) == []


async def test_sessions_run_under_another_runtime(directory: Path, engine: OwnEngine) -> None:
    async with Harness(_backend(directory, engine, "crun")) as harness:
        session = await harness.session()
        with engine_client(engine.socket) as client:
            (container,) = client.containers()
            assert client.inspect_container(container["Id"])["HostConfig"]["Runtime"] == "crun"
        assert (await harness.run(session, "40 + 2")).output == 42
