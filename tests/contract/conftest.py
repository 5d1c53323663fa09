"""The contract: what every backend promises, stated once and run over each of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.harness import Harness
from tests.support.backends import make_backend, require

BACKENDS = ("local", "docker")


@pytest.fixture(params=BACKENDS)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """Sessions on a backend, without the wire: in this process, with the real guest in a real sandbox."""
    require(request.param)
    directory = Path(tempfile.mkdtemp(prefix="c-"))
    directory.chmod(0o755)
    async with Harness(make_backend(request.param, directory)) as ready:
        yield ready
    shutil.rmtree(directory)
