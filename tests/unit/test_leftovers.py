"""The check for leftovers, which all other tests rely on, finds processes and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.backends import DOCKER_IMAGE, require
from tests.support.engine import engine_client
from tests.support.leftovers import CGROUP_PREFIX, CGROUP_ROOT, DAEMON_PREFIX, leftovers_since, snapshot
from tests.support.polling import eventually


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GONE_WITHIN_S", 0.05)


def test_a_child_that_still_runs_is_found() -> None:
    before = snapshot(host=False)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert any("sleep 60" in line for line in leftovers_since(before))
        child.kill()
    assert leftovers_since(before) == []


def test_an_orphan_is_found_although_it_left_session_and_parent() -> None:
    before = snapshot(host=False)
    program = "import subprocess; print(subprocess.Popen(['sleep', '61'], start_new_session=True, stdout=-3).pid)"
    orphan = int(subprocess.check_output([sys.executable, "-c", program]))
    assert any("sleep 61" in line for line in leftovers_since(before))
    os.kill(orphan, 9)
    assert eventually(lambda: not Path(f"/proc/{orphan}").exists())  # reaped, though not our child
    assert leftovers_since(before) == []


def test_a_file_in_the_temporary_directory_is_found() -> None:
    before = snapshot(host=False)
    with tempfile.NamedTemporaryFile() as file:
        assert leftovers_since(before) == [f"in the temporary directory: {Path(file.name).name}"]
    assert leftovers_since(before) == []


def test_a_container_that_was_never_started_is_found() -> None:
    require("docker")
    before = snapshot(host=True)
    with engine_client() as client:
        mounts = {"Binds": [f"{tempfile.gettempdir()}:/mnt"]}
        asked = {"Image": DOCKER_IMAGE, "Labels": {"executor.daemon": "x"}, "HostConfig": mounts}
        container = client.create_container_from_config(asked)["Id"]
        assert [line.partition(" ")[0] for line in leftovers_since(before)] == ["container"]
        client.remove_container(container)
    assert leftovers_since(before) == []


def test_a_container_of_a_daemon_that_was_there_before_is_not_left_over() -> None:
    """It keeps some ready, and makes another one when a test has taken one."""
    require("docker")
    daemon = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    before = snapshot(host=True)
    with engine_client() as client:
        asked = {
            "Image": DOCKER_IMAGE,
            "Labels": {"executor.daemon": "x"},
            "HostConfig": {"Binds": [f"{daemon}/s:/mnt"]},
        }
        container = client.create_container_from_config(asked)["Id"]
        assert leftovers_since(before) == []
        client.remove_container(container)
    shutil.rmtree(daemon)


@pytest.mark.skipif(not os.access(CGROUP_ROOT / "memory", os.W_OK), reason="no control group can be made here")
def test_a_control_group_is_found() -> None:
    before = snapshot(host=True)
    group = CGROUP_ROOT / "memory" / f"{CGROUP_PREFIX}test-{os.getpid()}"
    group.mkdir()
    assert leftovers_since(before) == [f"cgroup {group}"]
    group.rmdir()
    assert leftovers_since(before) == []


def test_control_groups_of_other_runs_that_come_and_go_are_not_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine there is always one that is empty for a moment."""
    groups = [CGROUP_ROOT / "memory" / f"{CGROUP_PREFIX}test-{os.getpid()}-{number}" for number in range(2)]
    before = snapshot(host=True)
    looks = iter([{groups[0]}, {groups[1]}])
    monkeypatch.setattr(leftovers, "_empty_cgroups", lambda _: next(looks))
    assert leftovers_since(before) == []
