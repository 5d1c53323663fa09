"""The places, each made once for all its probes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import docker
import docker.errors
import pytest
from smolagents import AgentLogger, LogLevel
from smolagents.remote_executors import DockerExecutor

from executor_server.backends.docker.resources import SANDBOX_LABEL
from tests.features.places import Docker, Local, Ours, Place, ended
from tests.support.backend_daemon import daemon_on
from tests.support.backends import DOCKER_IMAGE
from tests.support.free_ports import free_port
from tests.support.leftovers import ENGINE_SOCKET

JUPYTER = "remote-executor-bench/jupyter"
# Libraries that smolagents would install at the start, which takes an index: those of our own image for data.
JUPYTER_WITH_DATA = f"""\
FROM {DOCKER_IMAGE}
COPY --from={JUPYTER} /usr/local /usr/local
CMD ["jupyter", "kernelgateway", "--KernelGatewayApp.ip=0.0.0.0", "--KernelGatewayApp.port=8888"]
"""


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "local":
        yield Local()
    elif request.param == "docker":
        with _jupyter() as jupyter:
            yield jupyter
    else:
        with _ours(request.param) as ours:
            yield ours


@contextmanager
def _ours(name: str) -> Iterator[Place]:
    backend = name.removeprefix("ours_")
    with daemon_on(backend, "[pool]\nsize = 0\n") as daemon:
        yield Ours(name, daemon)


@contextmanager
def _jupyter() -> Iterator[Place]:
    """A container of smolagents' own, without the network that it would need to install things."""
    client = docker.from_env() if ENGINE_SOCKET.exists() else pytest.skip("there is no Engine")
    try:
        for image in (JUPYTER, DOCKER_IMAGE):
            client.images.get(image)
    except docker.errors.ImageNotFound as error:
        client.close()
        pytest.skip(f"smolagents' DockerExecutor has no image; `make images bench-images` builds it ({error})")
    before = {container.id for container in client.containers.list(all=True, ignore_removed=True)}
    # An Engine may have no default network, and its executor is spoken to over a port.
    network = client.networks.create(f"features-{secrets.token_hex(4)}")
    kwargs = {
        "image_name": f"{JUPYTER}-data",
        "dockerfile_content": JUPYTER_WITH_DATA,
        "build_new_image": False,
        "container_run_kwargs": {"network": network.name},
        "port": free_port(),
    }
    try:
        # Built of what is there now, which the Engine knows to be what it built before.
        executor = DockerExecutor([], AgentLogger(level=LogLevel.OFF), **{**kwargs, "build_new_image": True})
        try:
            yield Docker(kwargs, executor)
        finally:
            ended(executor)
    finally:
        # It leaves the containers that it makes and never starts: of a build, and of a port that is taken. Other tests of this run
        # make containers at the same time: of images by their names, and sandboxes, which have a label.
        for container in client.containers.list(all=True, filters={"status": "created"}, ignore_removed=True):
            image = container.attrs["Config"]["Image"]
            if (
                container.id not in before
                and SANDBOX_LABEL not in container.labels
                and (image.startswith("sha256:") or JUPYTER in image)
            ):
                container.remove(force=True)
        network.remove()
        client.close()
