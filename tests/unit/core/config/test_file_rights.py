"""A policy or a configuration that another user could have written is not obeyed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.config import config
from executor_server.core.config.file_rights import untrusted
from executor_server.core.config.key_types import ConfigError
from executor_server.policy import file

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

READERS: dict[str, tuple[Any, str]] = {
    "policy": (file.load_policy, "[profiles.default]\n"),
    "configuration": (config.load, "[server]\nmax_concurrent_calls = 7\n"),
}


@pytest.fixture(params=READERS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A file of that kind, which only its owner may write, and a function that reads it."""
    read, text = READERS[request.param]
    path = tmp_path / "own" / "file.toml"
    path.parent.mkdir(mode=0o755)
    path.write_text(text)
    path.chmod(0o644)
    return path, lambda: read(path)


def refusal(load: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load()
    (problem,) = refused.value.problems
    return str(problem)


def test_a_file_of_ones_own_is_read(load: Any) -> None:
    assert load[1]() is not None


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o602])
def test_a_file_that_others_can_write_is_refused_with_what_to_run(load: Any, mode: int) -> None:
    path, read = load
    path.chmod(mode)
    assert f"{path} can be written by other users; run: chmod go-w {path}" in refusal(read)


def test_a_directory_that_others_can_write_is_no_place_for_it(load: Any) -> None:
    path, read = load
    path.parent.chmod(0o777)
    assert f"run: chmod go-w {path.parent}" in refusal(read)
    path.parent.chmod(0o1777)  # as /tmp: no user can remove the file of another there
    assert read() is not None


def test_where_a_link_lies_counts_as_much_as_what_it_leads_to(load: Any, tmp_path: Path) -> None:
    path, _ = load
    link = tmp_path / "links" / "link.toml"
    link.parent.mkdir()
    link.symlink_to(path)
    link.parent.chmod(0o777)
    with path.open("rb") as file:
        assert untrusted(file.fileno(), path) is None
        assert f"chmod go-w {link.parent}" in str(untrusted(file.fileno(), link))


@AS_ROOT
def test_another_users_file_is_refused(load: Any) -> None:
    path, read = load
    os.chown(path, 12_345, -1)
    assert f"belongs to user 12345, not to this one or to root; run: chown 0 {path}" in refusal(read)


@AS_ROOT
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o1777])
def test_another_users_directory_is_no_place_for_it(load: Any, mode: int) -> None:
    """Its owner may remove and put files there, whoever owns them and even where it is sticky."""
    path, read = load
    path.parent.chmod(mode)
    os.chown(path.parent, 12_345, -1)
    assert f"is in {path.parent}, a directory of user 12345, who could replace it" in refusal(read)


@AS_ROOT
def test_a_group_may_write_that_is_its_owners_alone(load: Any) -> None:
    """On systems where every user has a group of its own, the umask is 002, and all files look like this."""
    path, read = load
    path.chmod(0o664)  # root's group is root's
    assert read() is not None
    os.chown(path, -1, 12_345)
    assert "chmod go-w" in refusal(read)
