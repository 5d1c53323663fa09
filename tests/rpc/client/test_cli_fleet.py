"""The command line and a fleet: ids that begin with a node's name, and labels of nodes."""

from __future__ import annotations

import pytest

from executor_api.v1 import types_pb2 as types
from executor_client import cli
from tests.support.fake_daemon import SESSION, TOKEN, FakeDaemon

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def address(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTOR_ADDRESS", daemon.address)
    monkeypatch.setenv("EXECUTOR_TOKEN", TOKEN)


def test_sessions_of_a_fleet_are_shown_and_found_with_and_without_the_node(
    daemon: FakeDaemon, capsys: Captured
) -> None:
    ids = [f"node-{number}-000000013f2a{number}{'0' * 19}" for number in (1, 2)]
    daemon.sessions = [types.Session(session_id=each, state=types.SESSION_STATE_IDLE) for each in ids]
    assert cli.main(["ps"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "node-1-000000013f2a10000000",
        "node-2-000000013f2a20000000",
    ]
    for prefix, found in (("node-1", ids[0]), ("node-2-000000013f", ids[1]), ("3f2a1", ids[0])):
        assert cli.main(["ls", prefix]) == 0
        asked = [request.session_id for name, request in daemon.requests if name == "GetSession"]
        assert asked[-1] == found
    assert cli.main(["ls", "3f2a"]) == 2
    assert "'3f2a' matches 2 sessions" in capsys.readouterr().err


def test_labels_of_the_node_are_asked_for_by_name(daemon: FakeDaemon, capsys: Captured) -> None:
    assert cli.main(["run", "--node-label", "zone=a", "--node-label", "gpu=", "-c", "1"]) == 0
    assert dict(daemon.requests[0][1].node_labels) == {"zone": "a", "gpu": ""}
    with pytest.raises(SystemExit):
        cli.main(["run", "--node-label", "zone", "-c", "1"])
    assert "'zone' is not NAME=VALUE, as in zone=a" in capsys.readouterr().err
    assert cli.main(["run", "--session", SESSION, "--node-label", "zone=a", "-c", "1"]) == 2
    assert "--node-label: not possible for an existing session" in capsys.readouterr().err
