"""Bad input to a real daemon: at its start, at a reload while it serves, and in requests of clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_services
from executor_client import (
    ExecutorClientError,
    InvalidRequest,
    PolicyViolationError,
)
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon
from tests.support.fork_server import server

EXIT_CONFIG, EXIT_PLACE = 3, 4
GOOD = 'version = "{version}"\ndefault = "all"\n[profiles.all]\n'
GIGABYTE = 2**30
TIMEOUT_S = 60.0


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(GIGABYTE)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


# A replacement of the policy file, and a part of the error that it causes.
BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "can't be read: No such file or directory"),
    "a pipe": (os.mkfifo, "is not a regular file"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "a gigabyte": (_sparse, "is larger than 1,048,576 bytes"),
    "not TOML": (_text("[profiles"), "is not TOML"),
    "a default over its ceiling": (
        _text(GOOD.format(version="c") + "limits.default.wall_time_s = 90\nlimits.max.wall_time_s = 60"),
        "profiles.all.limits.default.wall_time_s: must be at most 60",
    ),
}
# Each needs a process of its own, so these are not all.
AT_START = ("missing", "a default over its ceiling")


@dataclass(frozen=True)
class Served:
    """A daemon and the file of its policy."""

    daemon: Daemon
    policy_path: Path

    def remove_policy(self) -> None:
        if self.policy_path.is_dir():
            self.policy_path.rmdir()
        else:
            self.policy_path.unlink(missing_ok=True)

    def reload(self) -> str:
        """Reloads the policy; returns the problems, "" when it is in force."""
        with grpc.insecure_channel(self.daemon.address) as channel:
            stub = admin_services.AdminServiceStub(channel)
            metadata = (("authorization", f"Bearer {self.daemon.token}"),)
            try:
                stub.Reload(admin_pb.ReloadRequest(), metadata=metadata, timeout=TIMEOUT_S)
            except grpc.RpcError as refused:
                return str(refused.details())
        return ""

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == event]

    def version(self) -> str:
        with self.daemon.client() as client:
            return client.get_policy().policy.version


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="b-"))
    policy_path = directory / "policy.toml"
    policy_path.write_text(GOOD.format(version="first"))
    (directory / "executor.toml").write_text(f'[policy]\nfile = "{policy_path}"\n[pool]\nsize = 0\n')
    with running_daemon(directory, "--config", str(directory / "executor.toml")) as daemon:
        yield Served(daemon, policy_path)
    shutil.rmtree(directory)


# -- the policy file


@pytest.mark.parametrize("what", AT_START)
def test_a_daemon_does_not_start_with_a_policy_that_it_cannot_use(what: str, tmp_path: Path) -> None:
    make, said = BAD_FILES[what]
    make(tmp_path / "p")
    config = tmp_path / "executor.toml"
    config.write_text(f'policy.file = "{tmp_path}/p"\n[server]\nlisten = ["unix:{tmp_path}/x"]\n')
    ended = server("serve", "--config", str(config), EXECUTOR_STATE_DIR=str(tmp_path / "s"))
    assert (ended.returncode, ended.stdout) == (EXIT_CONFIG, "")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_policy_that_cannot_be_used_changes_nothing_and_is_complained_of(served: Served, what: str) -> None:
    make, said = BAD_FILES[what]
    refusals = len(served.events("policy_refused"))
    served.remove_policy()
    make(served.policy_path)
    try:
        assert said in served.reload()
        assert len(served.events("policy_refused")) > refusals
        assert served.version() == "first"
    finally:
        served.remove_policy()
        served.policy_path.write_text(GOOD.format(version="first"))


def test_a_storm_of_signals_costs_no_call(served: Served) -> None:
    with served.daemon.client(reconnect_timeout_s=0.0) as client, client.create_session() as session:
        for number in range(500):
            served.daemon.process.send_signal(signal.SIGHUP)
            if number % 100 == 0:
                assert session.execute("1 + 1").output == 2


# -- what clients ask for


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"limits": {"memory_bytes": 2**64 - 1}}, PolicyViolationError, "limits.memory_bytes"),
        ({"limits": {"wall_time_s": float("nan")}}, InvalidRequest, "limits.wall_time_s must be a finite number"),
        ({"authorized_imports": ["a"] * 10**6}, InvalidRequest, "authorized_imports has more than 65,536 entries"),
        ({"image": "../../etc"}, InvalidRequest, "no image '../../etc'; available: base"),
    ],
)
def test_a_request_that_means_nothing_or_too_much_is_refused(
    served: Served, asked: dict[str, Any], error: type[ExecutorClientError], said: str
) -> None:
    with served.daemon.client() as client, pytest.raises(error) as refused:
        client.create_session(**asked)
    assert said in str(refused.value)
