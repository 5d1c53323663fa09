"""The Docker backend's sandboxes with a network, as far as no Engine is needed to decide about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.backends.docker.backend import DockerBackend
from executor_server.backends.docker.probe import Confinement, PreparedImage
from executor_server.core.config.backend_config import DockerSection
from executor_server.core.errors import SpecUnsupported
from tests.support.fake_backend import SPEC

NETWORK = replace(SPEC, egress=True)
BUNDLE = Path("/state/egress/ca.pem")


def image(kernel: str = "") -> PreparedImage:
    walls = Confinement(1000, False, ("lo",), True, False, False, True, kernel)
    return PreparedImage("sha256:abc", (), "/usr/bin/python3", (3, 11), walls)


def backend(runtime: str | None = None) -> DockerBackend:
    return DockerBackend(Path("/state"), DockerSection(runtime=runtime), egress_bundle=lambda: BUNDLE)


async def test_a_runtime_with_a_kernel_of_its_own_can_have_no_network() -> None:
    """A socket of gVisor is none of the host's: its guest could not hand the listener out."""
    with pytest.raises(SpecUnsupported, match="runsc has a kernel of its own"):
        await backend(runtime="runsc")._ca_bundle(NETWORK, image("4.4.0"))
    assert await backend(runtime="runsc")._ca_bundle(SPEC, image("4.4.0")) is None
