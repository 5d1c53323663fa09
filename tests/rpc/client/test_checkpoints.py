"""Saving and restoring against a daemon that plays its part badly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import Checkpoint, InvalidRequest, PreconditionError, ProtocolError
from executor_client import checkpoint as module
from tests.support.fake_daemon import FakeDaemon, Refusal, busy


def piece(data: bytes) -> pb.ExportStateResponse:
    return pb.ExportStateResponse(data=data)


END = pb.ExportStateResponse(manifest=pb.StateManifest(variables=["a"], files=1))


def test_a_checkpoint_is_its_bytes_with_a_manifest(client: Any, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.state = [piece(b"one"), piece(b"two"), END]
    saved = client.create_session().export_state()
    assert saved == b"onetwo" and saved.manifest is not None and saved.manifest.variables == ("a",)
    saved.save(tmp_path / "file")
    assert Checkpoint.load(tmp_path / "file") == saved and "onetwo" not in repr(saved)


@pytest.mark.parametrize("stream", [[], [piece(b"one")], [END, piece(b"more")], [END, END]])
def test_a_stream_without_its_end_is_no_checkpoint(
    client: Any, daemon: FakeDaemon, stream: list[pb.ExportStateResponse]
) -> None:
    daemon.state = stream
    with pytest.raises(ProtocolError):
        client.create_session().export_state()


def test_more_than_is_accepted_is_not_held(client: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATE_BYTES_MAX", 10)
    daemon.state = [piece(b"12345678"), piece(b"12345678"), END]
    with pytest.raises(ProtocolError, match="more than the accepted"):
        client.create_session().export_state()


def test_a_file_that_is_too_large_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATE_BYTES_MAX", 10)
    (tmp_path / "file").write_bytes(bytes(11))
    with pytest.raises(InvalidRequest):
        Checkpoint.load(tmp_path / "file")


def test_a_session_that_could_not_be_restored_is_deleted(client: Any, daemon: FakeDaemon) -> None:
    daemon.refusals["RestoreState"].append(Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SESSION_USED"))
    with pytest.raises(PreconditionError):
        client.create_session(state=b"state")
    assert daemon.names()[-3:] == ["CreateSession", "RestoreState", "DeleteSession"]


def test_restoring_is_repeated_where_the_daemon_is_busy(client: Any, daemon: FakeDaemon) -> None:
    daemon.refusals["RestoreState"].append(busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    session = client.create_session(state=bytes(300_000))
    assert session.restored.variables == ("a",)
    (messages,) = [request for name, request in daemon.requests if name == "RestoreState"][-1:]
    assert messages[0].session_id == session.session_id
    assert b"".join(each.data for each in messages[1:]) == bytes(300_000)


@pytest.mark.parametrize("state", [b"", "text", 5, bytearray()])
def test_what_can_be_no_state_asks_for_no_session(client: Any, daemon: FakeDaemon, state: Any) -> None:
    with pytest.raises(InvalidRequest):
        client.create_session(state=state)
    assert "CreateSession" not in daemon.names()
