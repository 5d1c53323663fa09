"""A backend's directory has one owner at a time and keeps its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.backends.directory import BackendDirectory, is_sandbox_id, new_sandbox_id
from executor_server.core.errors import SandboxFailure


def test_the_id_is_the_same_for_the_next_daemon(tmp_path: Path) -> None:
    first = BackendDirectory.take(tmp_path, "docker")
    first.release()
    second = BackendDirectory.take(tmp_path, "docker")
    second.release()
    assert second.daemon_id == first.daemon_id


def test_an_incomplete_id_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / ".lock").write_text("12")
    directory = BackendDirectory.take(tmp_path, "docker")
    directory.release()
    assert (tmp_path / "docker" / ".lock").read_text() == directory.daemon_id


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure, match="too long"):
        BackendDirectory.take(tmp_path / ("x" * 80), "docker")


def test_only_directories_that_are_named_like_sandboxes_count(tmp_path: Path) -> None:
    directory = BackendDirectory.take(tmp_path, "docker")
    made = new_sandbox_id()
    directory.of(made).mkdir()
    directory.of("lost+found").mkdir()
    assert directory.sandbox_ids() == [made]
    directory.release()


@pytest.mark.parametrize("name", ["", ".", "..", "../../../etc", "-0123456789abcde", "0123456789ABCDEF", "0" * 17])
def test_a_text_that_could_lead_elsewhere_is_no_id(name: str) -> None:
    assert not is_sandbox_id(name)
