"""The attacks run against the real thing: sessions of every backend in this process, and one daemon with its wire."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import harness  # noqa: F401 - the same sessions as in the contract
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon

FEW_SESSIONS = 6


@pytest.fixture(scope="package")
def daemon() -> Iterator[Daemon]:
    """A daemon of which a flood soon has too much."""
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="x-"))
    config = directory / "config.toml"
    config.write_text(f"[sessions]\nmax_sessions = {FEW_SESSIONS}\n[pool]\nsize = 1\n")
    with running_daemon(directory, "--config", str(config)) as running:
        yield running
    shutil.rmtree(directory)
