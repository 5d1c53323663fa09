"""Sandboxes get users of the host that no other process has."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.backends.users import DEFAULT_UID_BASE, HostUsers, usable_uids
from executor_server.core.errors import SandboxFailure

WHOLE_HOST = "         0          0 4294967295\n"
SMALL_CONTAINER = "0 100000 65536\n"


def _usable(directory: Path, uid_map: str, gid_map: str) -> range:
    (directory / "uid_map").write_text(uid_map)
    (directory / "gid_map").write_text(gid_map)
    return usable_uids(DEFAULT_UID_BASE, directory / "uid_map", directory / "gid_map")


def test_on_a_host_they_start_at_the_base(tmp_path: Path) -> None:
    assert _usable(tmp_path, WHOLE_HOST, WHOLE_HOST).start == DEFAULT_UID_BASE


@pytest.mark.parametrize("others", [WHOLE_HOST, SMALL_CONTAINER])
def test_in_a_container_they_exist_and_have_no_name(tmp_path: Path, others: str) -> None:
    assert _usable(tmp_path, SMALL_CONTAINER, others) == range(10_000, 65_534)


@pytest.mark.parametrize(("uids", "gids"), [("0 1000 1\n", WHOLE_HOST), (SMALL_CONTAINER, "0 1000 1\n")])
def test_a_container_with_root_only_has_none(tmp_path: Path, uids: str, gids: str) -> None:
    with pytest.raises(SandboxFailure, match="does not exist"):
        _usable(tmp_path, uids, gids)


def test_no_two_are_the_same_and_a_released_one_is_free_again() -> None:
    users = HostUsers(range(100, 104))
    taken = [users.take() for _ in range(4)]
    assert sorted(taken) == [100, 101, 102, 103]
    with pytest.raises(SandboxFailure, match="taken"):
        users.take()
    users.release(102)
    assert users.take() == 102


def test_a_user_in_use_is_not_taken_again() -> None:
    users = HostUsers(range(100, 102))
    users.reserve(100)
    assert users.take() == 101
