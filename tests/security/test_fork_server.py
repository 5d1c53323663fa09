"""A sandbox that a template process forked has the walls of one that bubblewrap made, field by field; and shares nothing.

As root and as an ordinary user. The programs run as agent code does, in sessions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import require

ROOT = Path(__file__).parents[2]
USER = 23_458
TIMEOUT_S = 100.0
# glibc's own signal for changes of user, which it handles once a library has started a thread.
SIGSETXID_BIT = 1 << 32
# Numbers of descriptors differ, and which namespace it is.
OF_EACH = {
    *("random", "states", "namespaces", "descriptors", "mounts", "file systems"),
    *("uid_map", "gid_map", "setgroups", "status", "groups"),
}
# Fewer rights than bubblewrap's: that keeps those to change its user in two sets, and some of /proc writable.
STRICTER_STATUS = {"CapBnd", "CapInh"}
# Not compared, a known difference: under an ordinary user's daemon, agent code of a forked sandbox may write the
# oom_score_adj of the checker, which has no mount of its own. It may end that process as well (docs/backends.md).
ALWAYS_READ_ONLY = {"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/1"}


def _python_of_the_user(home: Path) -> str:
    name = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    tried = subprocess.run(
        [name, "-c", "import executor_server.backends.local, pytest"], env=_environment(home), cwd=home, **_as_user()
    )
    if tried.returncode != 0:
        pytest.skip("no Python of this version that an ordinary user may run can import us")
    return name


def _environment(home: Path) -> dict[str, str]:
    packages = [path for path in sys.path if path.endswith("site-packages")]
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONPATH": ":".join(map(str, [ROOT, ROOT / "client", ROOT / "proto", *packages])),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _as_user() -> dict[str, Any]:
    return {"user": USER, "group": USER, "extra_groups": [], "capture_output": True, "text": True}


@pytest.fixture(scope="module", params=["our own user", "an ordinary user"])
def seen(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Facts of a sandbox of bubblewrap and of two forked ones (two_ways.py)."""
    require("local")
    home = Path(tempfile.mkdtemp(prefix="w-", dir="/tmp"))
    try:
        if request.param == "our own user":
            command = [sys.executable, "-m", "tests.security.two_ways", str(home), sys.executable]
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        else:
            if os.geteuid() != 0:
                pytest.skip("the tests run as an ordinary user already")
            os.chown(home, USER, USER)
            python = _python_of_the_user(home)
            command = [python, "-m", "tests.security.two_ways", str(home), python]
            ran = subprocess.run(command, cwd=home, env=_environment(home), timeout=TIMEOUT_S, **_as_user())
        assert ran.returncode == 0, ran.stderr[-3000:]
        answer: dict[str, Any] = json.loads(ran.stdout)
        yield {**answer, "as root": request.param == "our own user" and os.geteuid() == 0}
    finally:
        shutil.rmtree(home)


def test_every_fact_is_that_of_a_sandbox_of_bubblewrap(seen: dict[str, Any]) -> None:
    for forked in seen["forked"]:
        different = {
            name: (fact, forked[name])
            for name, fact in seen["bubblewrap"].items()
            if name not in OF_EACH | {"writable in proc"} and forked[name] != fact
        }
        assert different == {}


def test_a_sandbox_has_what_docs_backends_md_names(seen: dict[str, Any]) -> None:
    for facts in (seen["bubblewrap"], *seen["forked"]):
        machine = facts["machine"]
        listed = machine.pop("ps")
        # The supervisor, the checker and the interpreter; setsid has become ps.
        assert set(listed[::2]) == {"sandbox"} and len(listed[1::2]) == 4 and listed[-1] == "ps", listed
        assert machine == {
            "missing tools": [],
            "os-release": True,
            "host name": ["sandbox"],
            "same": True,
            "home": True,
            "own": [1000, "/workspace"],
        }


def test_rights_and_signals_are_the_same_or_fewer(seen: dict[str, Any]) -> None:
    expected = seen["bubblewrap"]["status"]
    for forked in seen["forked"]:
        status = forked["status"]
        assert status.keys() == expected.keys()
        caught = int(status["SigCgt"], 16) & ~SIGSETXID_BIT
        assert caught == int(expected["SigCgt"], 16) & ~SIGSETXID_BIT
        same = status.keys() - STRICTER_STATUS - {"SigCgt"}
        assert {name: status[name] for name in same} == {name: expected[name] for name in same}
        assert {int(status[name], 16) for name in status if name.startswith("Cap")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_the_processes_of_a_sandbox_are_not_counted_in_its_siblings(seen: dict[str, Any]) -> None:
    assert seen["beside a full one"] == 0


def test_descriptors_are_of_the_same_kinds(seen: dict[str, Any]) -> None:
    kinds = sorted(seen["bubblewrap"]["descriptors"].values())
    for forked in seen["forked"]:
        assert sorted(forked["descriptors"].values()) == kinds


def test_mounts_are_the_same_and_more_of_proc_is_read_only(seen: dict[str, Any]) -> None:
    expected = {json.dumps(mount) for mount in seen["bubblewrap"]["mounts"]}
    for forked in seen["forked"]:
        mounts = {json.dumps(mount) for mount in forked["mounts"]}
        assert expected - mounts == set()
        more = [json.loads(mount) for mount in mounts - expected]
        assert {place for place, _, _ in more} <= ALWAYS_READ_ONLY
        assert all("ro" in options for _, options, _ in more)
        assert forked["writable in proc"] == []


def test_the_map_of_users_has_one_line_and_no_user_of_the_daemons_but_its_own(seen: dict[str, Any]) -> None:
    users = set()
    for forked in seen["forked"]:
        ((inside, outside, count),) = forked["uid_map"]
        assert forked["gid_map"] == [[inside, outside, count]]
        assert (inside, count, forked["setgroups"]) == ("1000", "1", ["deny"])
        users.add(outside)
    if seen["as root"]:
        assert len(users) == len(seen["forked"]) and "0" not in users


def test_two_forks_of_one_template_share_no_namespace(seen: dict[str, Any]) -> None:
    first, second = (forked["namespaces"] for forked in seen["forked"])
    same = {name for name in first if first[name] == second[name]}
    assert same <= {"time", "time_for_children"}  # no process has one of its own
    outside = {name: str(Path("/proc/self/ns", name).readlink()) for name in first}
    assert {name for name in first if first[name] == outside[name]} <= {"time", "time_for_children"}


def test_two_forks_of_one_template_share_no_random_state(seen: dict[str, Any]) -> None:
    first, second = (forked["random"] for forked in seen["forked"])
    assert {name for name in first if first[name] == second[name] and first[name] is not None} == set()


def test_no_generator_of_two_forks_is_in_the_same_state(seen: dict[str, Any]) -> None:
    first, second = (set(forked["states"]) for forked in seen["forked"])
    assert first and first & second == set()


def test_two_forks_of_one_template_can_write_to_nothing_together(seen: dict[str, Any]) -> None:
    first, second = (forked["file systems"] for forked in seen["forked"])
    assert {place for place in first if first[place] == second[place]} == set()
    assert [forked["shared memory"] for forked in seen["forked"]] == [[], []]


def test_a_fork_sees_neither_the_fork_server_nor_its_siblings(seen: dict[str, Any]) -> None:
    for forked in seen["forked"]:
        assert forked["processes"] == ["1"]  # those of parent namespaces have no number in it
        assert forked["place"][1] == 1
        assert forked["in tmp"] == seen["bubblewrap"]["in tmp"]
        assert forked["abstract sockets"] == 0
