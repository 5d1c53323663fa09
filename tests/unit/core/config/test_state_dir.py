"""The state directory is private, and one daemon's at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor_server.core.config.state_dir import (
    AlreadyRunning,
    StateDir,
    StateDirError,
    claim,
    read_or_make_state_key,
    read_or_make_token,
)


def test_a_second_daemon_is_refused_and_a_later_one_is_not(tmp_path: Path) -> None:
    root = tmp_path / "a" / "state"
    with claim(root), pytest.raises(AlreadyRunning, match="Another executor-server is running"), claim(root):
        pass
    with claim(root):
        pass


def test_directory_and_token_are_private_and_the_token_stays(tmp_path: Path) -> None:
    with claim(tmp_path / "state") as state_dir:
        token = read_or_make_token(state_dir)
        assert len(token) >= 43
        assert state_dir.root.stat().st_mode & 0o777 == 0o700
        assert state_dir.token_path.stat().st_mode & 0o777 == 0o600
        assert state_dir.token_path.stat().st_nlink == 1
        assert read_or_make_token(state_dir) == token
        assert sorted(entry.name for entry in state_dir.root.iterdir()) == ["lock", "token"]


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(StateDirError, match="chmod 700"), claim(root):
        pass


@pytest.mark.parametrize("make", ["file", "link"])
def test_only_a_real_directory_will_do(tmp_path: Path, make: str) -> None:
    root = tmp_path / "state"
    if make == "file":
        root.touch()
    else:
        root.symlink_to(tmp_path)
    with pytest.raises(StateDirError), claim(root):
        pass


def test_a_token_that_others_may_have_read_is_refused(tmp_path: Path) -> None:
    with claim(tmp_path / "state") as state_dir:
        read_or_make_token(state_dir)
        state_dir.token_path.chmod(0o644)
        with pytest.raises(StateDirError, match=r"can be read by other users.*; remove it, and the daemon makes"):
            read_or_make_token(state_dir)


@pytest.mark.parametrize("content", ["", "short", "x" * 300, "a b" * 20, "ä" * 40])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: str) -> None:
    with claim(tmp_path / "state") as state_dir:
        state_dir.token_path.write_text(content)
        state_dir.token_path.chmod(0o600)
        with pytest.raises(StateDirError, match="holds no token"):
            read_or_make_token(state_dir)


def test_a_token_is_not_read_through_a_link(tmp_path: Path) -> None:
    with claim(tmp_path / "state") as state_dir:
        (tmp_path / "other").write_text("x" * 40)
        state_dir.token_path.symlink_to(tmp_path / "other")
        with pytest.raises(StateDirError, match="can't be read"):
            read_or_make_token(state_dir)


def test_a_directory_in_which_no_lock_can_be_made_is_told_in_a_sentence() -> None:
    """As on a read-only mount: the daemon ended with a traceback."""
    with pytest.raises(StateDirError, match=r"lock of the state directory .* can't be taken"):
        claim(Path(f"/proc/{os.getpid()}")).__enter__()


def test_a_directory_in_the_place_of_the_token_is_told_in_a_sentence(tmp_path: Path) -> None:
    with claim(tmp_path / "state") as state_dir:
        state_dir.token_path.mkdir()
        with pytest.raises(StateDirError, match="is not a regular file"):
            read_or_make_token(state_dir)


def test_a_token_that_can_not_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    """On a full disk the daemon ended with a traceback."""
    with pytest.raises(StateDirError, match=r"token can't be made: No such file or directory\."):
        read_or_make_token(StateDir(tmp_path / "missing"))


def test_the_key_of_states_is_private_and_stays(tmp_path: Path) -> None:
    with claim(tmp_path / "state") as state_dir:
        key = read_or_make_state_key(state_dir)
        assert len(key) >= 43 and key == read_or_make_state_key(state_dir)
        assert key != read_or_make_token(state_dir).encode()
        assert state_dir.state_key_path.stat().st_mode & 0o777 == 0o600


def test_a_shared_key_is_read_and_never_made(tmp_path: Path) -> None:
    shared = tmp_path / "key"
    with claim(tmp_path / "state") as state_dir:
        with pytest.raises(StateDirError, match=r"key file .* does not exist"):
            read_or_make_state_key(state_dir, shared)
        shared.write_text("k" * 43 + "\n")
        shared.chmod(0o640)
        with pytest.raises(StateDirError, match=r"can be read by other users.*; write a new key .*\(state\.key_file\)"):
            read_or_make_state_key(state_dir, shared)
        shared.chmod(0o600)
        assert read_or_make_state_key(state_dir, shared) == b"k" * 43
        assert not state_dir.state_key_path.exists()
