"""Manifests from a guest are bounded and typed; a guest that sends others is believed no more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor_server.core.model import StateOmission
from executor_server.guest.state.index import omitted_entries
from executor_server.guest.wire.frames import Frame, FrameDecoder, FrameError, Kind, encode_frame
from executor_server.sessions.checkpoints import _files_part, _restored_part, _variables_part
from executor_server.sessions.state_archive import MAX_MANIFEST_BYTES, MAX_PARTS


def done(said: Any, **head: Any) -> Frame:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    (frame,) = FrameDecoder().feed(encode_frame(Kind.DONE, {"op": 1, "ok": True, **head}, body))
    return frame


def test_what_was_written_is_read() -> None:
    said = {"variables": ["a"], "omitted": [{"name": "b", "reason": "why"}], "cloudpickle": "3"}
    manifest = _variables_part(done(said))
    assert not isinstance(manifest, bytes)
    assert manifest.variables == ("a",) and manifest.omitted_variables == (StateOmission("b", "why"),)
    files = _files_part(done({"files": 2, "bytes": 7, "omitted": [{"name": "l", "reason": "a link"}]}))
    assert not isinstance(files, bytes) and files is not None and (files.files, files.file_bytes) == (2, 7)  # type: ignore[union-attr]


def test_a_state_that_may_still_be_restored_has_no_manifest() -> None:
    assert _restored_part(done(b"", restored=False)) is False


LIES: list[Any] = [
    b"",
    b"\xff",
    b"[" * 100_000,
    [],
    {"variables": "abc"},
    {"omitted": "abc"},
    {"variables": [1]},
    {"variables": ["a" * 257]},
    {"variables": ["a"] * 4097},
    {"variables": {}, "omitted": [{}]},
    {"variables": [], "omitted": [{"name": "a"}]},
    {"variables": [], "omitted": [{"name": "a", "reason": "b" * 513}]},
    {"variables": [], "omitted": ["ab"]},
    {"variables": [], "omitted": 1},
    {"variables": None},
    {"variables": [], "more": "x" * MAX_MANIFEST_BYTES},
    b" " * MAX_MANIFEST_BYTES + b'{"variables": []}',
    {"variables": [], "more": [[]] * MAX_PARTS},
    {"variables": [], "more": [1] * (MAX_PARTS + 2)},
    {"variables": ["a\ud800"]},
]


@pytest.mark.parametrize("said", LIES)
def test_what_is_no_manifest_breaks_the_protocol(said: Any) -> None:
    with pytest.raises(FrameError):
        _variables_part(done(said))
    with pytest.raises(FrameError):
        _restored_part(done(said, restored=True))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"files": -1, "bytes": 0},
        {"files": 1.5, "bytes": 0},
        {"files": True, "bytes": 0},
        {"files": 2**63, "bytes": 0},
    ],
)
def test_counts_of_files_are_counts(said: Any) -> None:
    with pytest.raises(FrameError):
        _files_part(done(said))


def test_frames_of_other_kinds_do_not_belong_here() -> None:
    (log,) = FrameDecoder().feed(encode_frame(Kind.LOG, {"op": 1}))
    for read in (_variables_part, _files_part):
        with pytest.raises(FrameError):
            read(log)


def test_names_may_consist_of_brackets() -> None:
    """The program chose these names, and must not lose its session for them."""
    for character in "[{,":
        odd = {f"{number:03}" + character * 253: character * 300 for number in range(600)}
        manifest = _variables_part(done({"variables": [character * 255] * 256, "omitted": omitted_entries(odd)}))
        assert not isinstance(manifest, bytes) and len(manifest.omitted_variables) == 513
