"""The files of a session in both clients: from disk to disk, whole or not at all, and nothing more than was asked for."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_client import ExecutorClient, InvalidRequest, NotFoundError, ProtocolError, UnavailableError
from tests.support.fake_daemon import TOKEN, FakeDaemon, Refusal, result, serve

PIECE_BYTES = 262_144


def served(data: bytes, *, size_bytes: int | None = None, is_directory: bool = False) -> list[pb.GetFileResponse]:
    """Returns the messages that a daemon sends for a file."""
    info = types.FileInfo(
        path="f", size_bytes=len(data) if size_bytes is None else size_bytes, is_directory=is_directory
    )
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    return [pb.GetFileResponse(file=info), *(pb.GetFileResponse(data=piece) for piece in pieces)]


def tree(directory: Path) -> dict[str, bytes | None]:
    found = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize("size_bytes", [0, 1, PIECE_BYTES + 1])
def test_a_file_goes_from_disk_to_disk(session: Any, daemon: FakeDaemon, tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (tmp_path / "here").write_bytes(data)
    assert session.files.put(tmp_path / "here", "there").size_bytes == size_bytes
    assert session.files.put(str(tmp_path / "here"), "too").path == "too"
    assert session.files.put(data, "bytes").path == session.files.write("bytes", data).path
    assert daemon.files == {"there": data, "too": data, "bytes": data}
    daemon.file = served(data)
    assert session.files.get("there", tmp_path / "back").size_bytes == size_bytes
    assert tree(tmp_path) == {"here": data, "back": data}
    assert session.files.read("there") == data
    assert {request.format for name, request in daemon.requests} == {types.FILE_FORMAT_PLAIN}


def test_a_file_that_is_larger_than_its_reader_takes_is_refused_by_its_announcement(
    session: Any, daemon: FakeDaemon, tmp_path: Path
) -> None:
    daemon.file = served(b"x" * 10)
    session.files.get("f", tmp_path / "f", max_bytes=10)
    daemon.file = daemon.file[:1]
    with pytest.raises(InvalidRequest, match="'f' has 10 bytes; max_bytes is 9"):
        session.files.get("f", tmp_path / "f", max_bytes=9)


def test_a_directory_goes_from_disk_to_disk(session: Any, daemon: FakeDaemon, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a/large").write_bytes(os.urandom(2 * PIECE_BYTES))
    (source / "empty").touch()
    session.files.put_directory(source, "to")
    assert daemon.requests[-1][1].size_bytes == len(daemon.files["to"])
    daemon.file = served(daemon.files["to"], size_bytes=4096, is_directory=True)
    assert session.files.get_directory("to", tmp_path / "deep/er").is_directory
    assert tree(tmp_path / "deep/er") == tree(source)
    assert {request.format for name, request in daemon.requests} == {types.FILE_FORMAT_TAR}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (served(b"short", size_bytes=6), "5 bytes arrived; 6"),
        (served(b"far too long", size_bytes=3), "announced 3 bytes"),
        (served(b"", size_bytes=1 << 40), "the limit is"),
        (served(b"", is_directory=True), "not requested"),
        ([*served(b""), *served(b"")], "twice"),
        (served(b"x")[1:], "not announced"),
        ([], "no file arrived"),
    ],
)
def test_a_file_that_does_not_arrive_as_announced_leaves_what_was_there(
    session: Any, daemon: FakeDaemon, tmp_path: Path, messages: list[pb.GetFileResponse], said: str
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    daemon.file = messages
    with pytest.raises(ProtocolError, match=said):
        session.files.get("f", tmp_path / "f")
    assert tree(tmp_path) == {"f": b"old"}


def test_a_directory_with_a_hostile_name_leaves_nothing(session: Any, daemon: FakeDaemon, tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("fine"))
        tar.addfile(tarfile.TarInfo("../escaped"))
    daemon.file = served(raw.getvalue(), is_directory=True)
    with pytest.raises(ProtocolError, match="escaped"):
        session.files.get_directory("d", tmp_path / "d")
    daemon.file = served(raw.getvalue()[:-9000], is_directory=True)
    with pytest.raises(ProtocolError):
        session.files.get_directory("d", tmp_path / "d")
    assert tree(tmp_path) == {}


def test_what_is_not_there_makes_no_file(session: Any, daemon: FakeDaemon, tmp_path: Path) -> None:
    for _ in range(2):
        daemon.refusals["GetFile"].append(Refusal(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND"))
    with pytest.raises(NotFoundError):
        session.files.get("f", tmp_path / "f")
    with pytest.raises(NotFoundError):
        session.files.get_directory("d", tmp_path / "d")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("direction", ["put", "get"])
def test_a_transfer_that_breaks_off_is_begun_anew(
    session: Any, daemon: FakeDaemon, tmp_path: Path, direction: str
) -> None:
    (tmp_path / "f").write_bytes(b"data")
    daemon.file = served(b"data")
    daemon.refusals["PutFile" if direction == "put" else "GetFile"].append(Refusal(grpc.StatusCode.UNAVAILABLE))
    if direction == "put":
        session.files.put(tmp_path / "f", "f")
    else:
        session.files.get("f", tmp_path / "f")
    assert (daemon.files.get("f", b"data"), tree(tmp_path)) == (b"data", {"f": b"data"})
    assert len(daemon.requests) == 2


def test_an_append_of_which_nothing_has_left_is_tried_again(tmp_path: Path) -> None:
    with ExecutorClient(f"unix:{tmp_path}/d.sock", token=TOKEN, reconnect_timeout_s=0.3) as client:
        with serve(tmp_path):
            session = client.create_session(detached=True)
        with pytest.raises(UnavailableError, match="no daemon answers"):
            session.files.write("f", b"data", append=True)


def test_a_local_problem_is_raised_as_what_it_is(session: Any, daemon: FakeDaemon, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        session.files.put(tmp_path / "missing", "f")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        session.files.put(tmp_path, "f")
    with pytest.raises(NotADirectoryError):
        (tmp_path / "f").touch()
        session.files.put_directory(tmp_path / "f", "f")
    daemon.file = served(b"")
    with pytest.raises(IsADirectoryError):
        session.files.get("f", tmp_path)
    assert daemon.requests == []


def test_a_file_that_shrinks_under_the_transfer_is_said(session: Any) -> None:
    """Files of /sys have a size that their content does not keep."""
    source = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    assert len(source.read_bytes()) < source.stat().st_size
    with pytest.raises(InvalidRequest, match="became shorter"):
        session.files.put(source, "f")


def test_artifacts_come_with_the_result(session: Any, daemon: FakeDaemon) -> None:
    daemon.journal = [result(artifacts=[types.FileInfo(path="a", size_bytes=3)], artifacts_truncated=True)]
    ended = session.execute("1")
    assert [(each.path, each.size_bytes, each.is_directory) for each in ended.artifacts] == [("a", 3, False)]
    assert ended.artifacts_truncated
    daemon.journal = [result(artifacts=[types.FileInfo(path="a")] * 1001)]
    with pytest.raises(ProtocolError, match="artifacts"):
        session.execute("1")
