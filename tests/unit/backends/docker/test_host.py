"""The Engine's socket is found, or the error names the reason and a remedy."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from executor_server.backends.docker.host import NoEngine, engine_socket

NOBODY = 65_534


@pytest.mark.parametrize("host", ["tcp://10.0.0.1:2375", "ssh://build@engine", "http://localhost:2375"])
def test_an_engine_on_another_host_is_refused_with_the_reason(host: str) -> None:
    with pytest.raises(NoEngine) as refused:
        engine_socket(host, {})
    assert host in refused.value.detail and "Unix socket" in refused.value.detail
    with pytest.raises(NoEngine, match="not on this host"):
        engine_socket(None, {"DOCKER_HOST": host})


def test_the_configuration_takes_precedence_over_the_environment(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine"))
        listener.listen()
        found = engine_socket(f"unix://{tmp_path}/engine", {"DOCKER_HOST": "tcp://elsewhere:1"})
    assert found == tmp_path / "engine"


def test_a_missing_socket_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(NoEngine) as missing:
        engine_socket(f"unix://{tmp_path}/none", {})
    assert "does not exist" in missing.value.detail and "Install Docker" in missing.value.remedy


def test_a_socket_without_a_listener_has_an_error_of_its_own(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "engine"))
        with pytest.raises(NoEngine, match="No Engine listens"):
            engine_socket(f"unix://{tmp_path}/engine", {})


def test_a_file_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "engine").touch()
    with pytest.raises(NoEngine, match="not a socket"):
        engine_socket(f"unix://{tmp_path}/engine", {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not")
def test_an_error_about_permission_names_the_remedy(tmp_path: Path) -> None:
    place = Path("/tmp", f"executor-engine-{os.getpid()}")  # the user nobody can't enter the directories of the tests
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        place.chmod(0o600)
        listener.listen()
        os.seteuid(NOBODY)
        try:
            with pytest.raises(NoEngine) as refused:
                engine_socket(f"unix://{place}", {})
        finally:
            os.seteuid(0)
            place.unlink()
    assert "may not speak to the Engine" in refused.value.detail and "usermod -aG docker" in refused.value.remedy
