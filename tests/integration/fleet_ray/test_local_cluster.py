"""A local cluster whose nodes fail to start, with a program in place of Ray that does what the test says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.fleet.ray import local_cluster
from executor_server.fleet.ray.local_cluster import ClusterError, read_cluster, start_cluster, stop_cluster
from tests.support.rounds import usual

# Fails as often as the file FAILURES of the node's address says, then runs until it is ended.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
host = next(each for each in sys.argv if each.startswith("--node-ip-address=")).partition("=")[2]
folder = Path({folder!r})
with (folder / "starts").open("a") as file:
    file.write(host + " " + os.environ["RAY_raylet_start_wait_time_s"] + chr(10))
failures = folder / host
if failures.exists() and int(failures.read_text()) > 0:
    failures.write_text(str(int(failures.read_text()) - 1))
    if os.fork() == 0:
        time.sleep(600)  # as a raylet that outlives its starter
    print("The current node timed out during startup.", flush=True)
    time.sleep({lives_s!r})
    sys.exit(1)
if (folder / "stubborn").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("Ray runtime started.", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=usual([0.0, 0.5], but=(0.5,)), ids={0.0: "at-once", 0.5: "later"}.get)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The program's folder; a node that fails ends after some seconds, as its starter looks or after that."""
    package = tmp_path / "modules" / "ray" / "scripts"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "scripts.py").write_text(PROGRAM.format(folder=str(tmp_path), lives_s=request.param))
    monkeypatch.setenv("PYTHONPATH", str(package.parent.parent))
    yield tmp_path
    stop_cluster(tmp_path / "cluster.json")


def _starts(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "starts").read_text().splitlines()]


def test_nodes_start_one_after_the_other_with_a_longer_limit_than_rays(folder: Path) -> None:
    start_cluster(folder / "cluster.json", 3)
    assert (folder / "starts").read_text() == "127.0.0.2 90\n127.0.0.3 90\n127.0.0.4 90\n"


def test_a_node_that_fails_to_start_is_started_once_more_and_leaves_nothing(folder: Path) -> None:
    (folder / "127.0.0.3").write_text("1")
    cluster = start_cluster(folder / "cluster.json", 3)
    assert _starts(folder) == ["127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.4"]
    assert len(cluster.processes()) == 3


def test_a_node_that_fails_again_ends_the_cluster_and_says_why(folder: Path) -> None:
    (folder / "127.0.0.4").write_text("2")
    with pytest.raises(ClusterError, match=r"local-3 \(3 of 3\) did not start in 2 attempts(.|\n)*timed out during"):
        start_cluster(folder / "cluster.json", 3)
    assert read_cluster(folder / "cluster.json") is None


def test_a_process_that_only_names_a_log_of_the_cluster_is_none_of_it(folder: Path) -> None:
    """A `less` on the log was killed; another user's, which may not be signalled, ended `ray down` with a traceback."""
    cluster = start_cluster(folder / "cluster.json", 1)
    with subprocess.Popen(["tail", "-f", cluster.nodes[0].log_file], stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            named = [process.pid for process in cluster.processes()]
            stop_cluster(folder / "cluster.json")
            assert reader.pid not in named
            assert reader.poll() is None
        finally:
            reader.kill()


def test_a_process_of_a_start_that_was_killed_halfway_is_found(folder: Path) -> None:
    """The pid file is missing, so nothing leads to its session."""
    cluster = start_cluster(folder / "cluster.json", 1)
    (process,) = cluster.processes()
    cluster.nodes[0].pid_file.unlink()
    stop_cluster(folder / "cluster.json")
    assert not process.is_alive


def test_a_process_that_does_not_end_is_named_and_ended_by_the_next_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "stubborn").touch()
    cluster = start_cluster(folder / "cluster.json", 1)
    (process,) = cluster.processes()
    with monkeypatch.context() as limits:
        limits.setattr(local_cluster, "STOP_TIME_S", 0.0)
        limits.setattr(local_cluster, "KILL_TIME_S", 0.0)
        with pytest.raises(ClusterError, match=f"processes {process.pid} were killed"):
            stop_cluster(folder / "cluster.json")
    stop_cluster(folder / "cluster.json")
    assert not process.is_alive
    assert not cluster.temporary.exists()
