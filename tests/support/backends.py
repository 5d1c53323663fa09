"""The backends that this host can run, the way a test gets one, and those that a run of the tests must have.

A test asks with `require("local")`. Where the backend cannot work the test is skipped, with the reason; where the
environment names it in REQUIRED_BACKENDS (comma-separated, as CI does) the test fails instead: a suite that skips what
it was meant to prove must not look like one that passed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path

import docker
import docker.errors
import pytest

from executor_server.backends.base import Backend
from executor_server.backends.docker import DockerBackend
from executor_server.backends.e2b import E2BBackend
from executor_server.core.config.backend_config import DockerImage, DockerSection, E2BSection
from tests.support.certificates import Authority
from tests.support.environments import ServedEnvironments
from tests.support.fork_server import server
from tests.support.forked_backend import local_backend

# The image of the tests, with the libraries that they use.
DOCKER_IMAGE = os.environ.get("EXECUTOR_TEST_IMAGE", "remote-executor/data")
# Made of tests/support/network_image.
NETWORK_IMAGE = "remote-executor-tests/network"


def make_backend(backend: str, state_dir: Path, *, e2b: E2BSection | None = None) -> Backend:
    """A backend whose image is called "base" and has what the tests import; its environments are made by hand.

    `e2b` says where a double of the cloud is, and what it wants to see.
    """
    served = ServedEnvironments(state_dir)
    if backend == "docker":
        section = DockerSection(images={"base": DockerImage(reference=DOCKER_IMAGE)})
        return DockerBackend(
            state_dir, section, egress_bundle=lambda: egress_bundle(state_dir), environments=lambda: served
        )
    if backend == "e2b":
        assert e2b is not None
        return E2BBackend(state_dir, e2b, environments=lambda: served)
    return local_backend(state_dir, egress_bundle=lambda: egress_bundle(state_dir), environments=lambda: served)


def egress_bundle(state_dir: Path) -> Path:
    """The certificate authorities of sandboxes with a network, on a host whose egress proxy is the test."""
    path = state_dir / "authority" / "ca.pem"
    return path if path.exists() else Authority(path.parent).cert


def require(backend: str) -> None:
    """Skips the test, or fails it, when `backend` cannot run here."""
    reason = why_not(backend)
    if not reason:
        return
    if backend in os.environ.get("REQUIRED_BACKENDS", "").split(","):
        pytest.fail(f"backend {backend} is required here, but {reason}", pytrace=False)
    pytest.skip(f"backend {backend}: {reason}")


def require_image(name: str) -> None:
    """Skips the test, or fails it, when the Docker backend cannot run here or lacks our image of this name."""
    _require_image(f"remote-executor/{name}", "make images")


def require_network_image() -> None:
    """The same for the image whose programs and libraries reach a network, NETWORK_IMAGE."""
    _require_image(NETWORK_IMAGE, "make test-images")


def _require_image(reference: str, built_by: str) -> None:
    require("docker")
    reason = _why_no_image(reference, built_by)
    if not reason:
        return
    if "docker" in os.environ.get("REQUIRED_BACKENDS", "").split(","):
        pytest.fail(f"it is required here, but {reason}", pytrace=False)
    pytest.skip(reason)


@functools.cache
def why_not(backend: str) -> str:
    """The reason why `backend` cannot run here; empty when it can. The daemon's own answer, asked once."""
    if sys.platform != "linux":
        return "it needs Linux"
    if backend == "e2b":
        return _why_no_double()
    checked = server("check-host", "--backend", backend)
    if checked.returncode != 0:
        return f"check-host says:\n{checked.stdout}{checked.stderr}"
    return _why_no_image(DOCKER_IMAGE, "make images") if backend == "docker" else ""


def _why_no_double() -> str:
    """The cloud's double makes its machines as the local backend makes its sandboxes."""
    missing = [name for name in ("e2b", "e2b_code_interpreter", "aiohttp") if importlib.util.find_spec(name) is None]
    if missing:
        return f"there is no {' or '.join(missing)} in this environment"
    if os.geteuid() != 0:
        return "the double of E2B's cloud maps users into its sandboxes, which takes root"
    return why_not("local")


def _why_no_image(reference: str, built_by: str) -> str:
    client = docker.APIClient()
    try:
        client.inspect_image(reference)
    except docker.errors.ImageNotFound:
        return f"the Engine has no image {reference}; `{built_by}` builds it"
    finally:
        client.close()
    return ""
