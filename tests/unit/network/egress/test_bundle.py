"""The certificate authorities of sandboxes, where the process that creates the proxy's own fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from executor_server.network.egress import EgressError, bundle
from executor_server.network.egress.bundle import build_bundle


def test_a_process_that_does_not_end_is_an_error_of_the_egress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_MAKE_S", 0.0)
    with pytest.raises(EgressError, match="can't be created within 0 seconds"):
        build_bundle(tmp_path / "egress", None)


def test_a_process_that_can_not_be_started_is_an_error_of_the_egress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(EgressError, match="can't be created: No such file"):
        build_bundle(tmp_path / "egress", None)
