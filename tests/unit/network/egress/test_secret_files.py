"""Files of secrets: opened only when no other user can read or write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor_server.network.egress.secret_files import MAX_SECRET_FILE_BYTES, open_secrets


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("abc\n")
    path.chmod(0o600)
    return path


def _problem(path: Path) -> str:
    with open_secrets({"bot": path}) as (opened, problems):
        assert opened == {}
        (problem,) = problems
    assert problem.startswith(f"The file {path} of egress.secrets.bot ")
    return problem


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_private_file_is_opened_and_closed(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with open_secrets({"bot": secret}) as (opened, problems):
        assert problems == []
        assert os.read(opened["bot"], 10) == b"abc\n"
        assert not os.get_inheritable(opened["bot"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened["bot"])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_file_that_others_can_use_is_refused_with_what_to_do(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    assert f"replace the secret, and run: chmod 600 {secret}" in _problem(secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_refused_with_what_to_do(secret: Path) -> None:
    os.chown(secret, 12345, 12345)
    assert f"belongs to user 12345, not to this one or to root; run: chown 0 {secret}" in _problem(secret)


def test_secret_in_place_of_its_file_is_not_repeated(tmp_path: Path) -> None:
    with open_secrets({"bot": tmp_path / "ghp_1234"}) as (_, problems):
        assert problems == ["The file of egress.secrets.bot can't be read: No such file or directory."]


def test_directory_or_pipe_is_refused_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "directory"
    directory.mkdir(mode=0o700)
    assert "not a regular file" in _problem(directory)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert "not a regular file" in _problem(pipe)


def test_relative_path_is_refused() -> None:
    with open_secrets({"bot": Path("token")}) as (_, problems):
        assert problems == ["The file of egress.secrets.bot must be named by its absolute path."]


def test_large_file_is_refused(secret: Path) -> None:
    secret.write_bytes(b"x" * (MAX_SECRET_FILE_BYTES + 1))
    assert "larger than 16,384 bytes" in _problem(secret)


def test_link_to_a_private_file_is_followed(secret: Path, tmp_path: Path) -> None:
    """Secrets that are mounted into containers are links. The rights are those of the file at the end."""
    link = tmp_path / "link"
    link.symlink_to(secret)
    with open_secrets({"bot": link}) as (opened, problems):
        assert (list(opened), problems) == (["bot"], [])
    secret.chmod(0o644)
    assert "other users" in _problem(link)


def test_one_bad_file_does_not_hide_the_others(secret: Path, tmp_path: Path) -> None:
    with open_secrets({"a": tmp_path / "missing", "b": secret, "c": Path("relative")}) as (opened, problems):
        assert list(opened) == ["b"]
        assert len(problems) == 2
