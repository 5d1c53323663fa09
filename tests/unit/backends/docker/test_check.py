"""Versions of the runtime with known container escapes are recognised."""

from __future__ import annotations

import pytest

from executor_server.backends.docker.check import is_mended


@pytest.mark.parametrize(
    "version", ["1.2.8", "1.2.9+ds1", "1.3.3", "1.3.3-1~deb13u1", "1.4.0-rc.3", "1.4.0", "1.5.0", "2.0.0"]
)
def test_versions_with_the_fixes(version: str) -> None:
    assert is_mended(version)


@pytest.mark.parametrize("version", ["1.0.3", "1.1.5+ds1", "1.1.12", "1.2.7", "1.3.2", "1.4.0-rc.2", "unknown", ""])
def test_versions_without_the_fixes(version: str) -> None:
    assert not is_mended(version)
