"""Each end accepts everything that the other may send, since both hold to one table of limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from executor_api import limits
from executor_api.limits import (
    BLOB_BYTES_MAX,
    EXECUTION_BLOBS_BYTES_MAX,
    EXECUTION_BLOBS_OPEN_MAX,
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
    PIECE_BYTES,
    TOOL_ARGUMENTS_BYTES_MAX,
    TOOL_CALLS_OPEN_MAX,
    VALUE_BYTES_MAX,
    VARIABLES_BYTES_MAX,
    VARIABLES_MAX,
)
from executor_api.v1 import types_pb2 as pb
from executor_api.values import ValueLimits
from executor_client._core.blobs import IncomingBlobs
from executor_client.errors import ProtocolError
from executor_server.guest.supervisor.prelude import REQUEST
from executor_server.guest.supervisor.run import Call, Run
from executor_server.guest.wire import frames
from executor_server.guest.wire.messages import MAX_PAYLOAD_BYTES

ROOT = Path(__file__).resolve().parents[2]


def new_run() -> Run:
    return Run(REQUEST.but(id="e"), "", 1, None)  # type: ignore[arg-type]


def test_limits_that_are_derived_agree_with_the_table() -> None:
    assert frames.CHUNK_BYTES == PIECE_BYTES
    assert ValueLimits().total_bytes == VALUE_BYTES_MAX
    assert min(BLOB_BYTES_MAX, MAX_PAYLOAD_BYTES, TOOL_ARGUMENTS_BYTES_MAX) >= VALUE_BYTES_MAX


def _used(*folders: str) -> set[str]:
    text = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return set(re.findall(r"\b[A-Z_]+\b", text))


def test_every_limit_of_the_table_is_used_at_both_ends() -> None:
    everything = {name for name in vars(limits) if name.isupper() and name[0] != "_"}
    # Sums that only the receiver needs.
    sums = {"EXECUTION_BLOBS_BYTES_MAX", "EXECUTION_BLOBS_OPEN_MAX"}
    assert _used("executor_server", "proto/executor_api/values") >= everything - sums
    # The client receives no more than the sums allow, and leaves the rest of a request's form to the daemon.
    summed = {"IMAGE_BYTES_MAX", "IMAGES_BYTES_MAX", "TOOL_ARGUMENTS_BYTES_MAX", "TOOL_CALLS_OPEN_MAX"}
    summed |= {"VALUE_BYTES_MAX", "BLOB_BYTES_MAX"}
    checked_by_the_daemon = {"IDENTIFIER_CHARS_MAX", "PATH_BYTES_MAX", "TOOLS_MAX", "TOOL_PARAMETERS_MAX"}
    checked_by_the_daemon |= {"ARGUMENTS_MAX", "VARIABLES_NAMED_MAX", "EXCLUDED_MAX", "EXCLUDED_BYTES_MAX"}
    # executor_api.values holds both ends to them
    everything -= {"OUTPUT_VALUE_BYTES_MAX", "OUTPUT_NODES_MAX", "OUTPUT_PIXELS_MAX"}
    everything -= {"DISPLAY_BYTES_MAX", "DISPLAY_TYPES_MAX"}  # executor_api.displays holds both ends to them
    assert _used("client/executor_client") >= everything - summed - checked_by_the_daemon


def test_no_end_has_a_number_of_its_own_for_a_limit_of_the_table() -> None:
    names = "|".join(name.removesuffix("_MAX") for name in vars(limits) if name.isupper() and name[0] != "_")
    own = re.compile(rf"^(MAX_({names})|({names})_MAX) = [0-9]", re.MULTILINE)
    ends = [ROOT / "client/executor_client", ROOT / "client/executor_client/_core"]
    ends += [ROOT / "executor_server" / name for name in ("channel", "rpc")]
    ends += [ROOT / "executor_server/guest" / name for name in ("files", "interpreter", "supervisor", "wire")]
    for path in (path for end in ends for path in end.glob("*.py")):
        assert not own.search(path.read_text()), path


def test_a_client_holds_all_that_an_execution_may_send() -> None:
    blobs = IncomingBlobs(bytes_max=EXECUTION_BLOBS_BYTES_MAX, open_max=EXECUTION_BLOBS_OPEN_MAX)
    run, piece = new_run(), bytes(PIECE_BYTES)
    sent = 0
    while not run.take_image(PIECE_BYTES * 16, "image/png"):
        sent += PIECE_BYTES * 16
    while not run.why_no_call(PIECE_BYTES * 16):
        run.open_call(Call("tool", "w", PIECE_BYTES * 16))
        sent += PIECE_BYTES * 16
    sent += VALUE_BYTES_MAX
    assert sent > 300 << 20
    for number in range(sent // PIECE_BYTES):
        blobs.add(pb.BlobChunk(blob_id=f"b{number // 100 % 8}", data=piece))
    assert sent <= EXECUTION_BLOBS_BYTES_MAX


def test_images_are_counted_by_number_and_by_bytes() -> None:
    run = new_run()
    assert [run.take_image(10, "image/png") for _ in range(IMAGES_MAX)] == [""] * IMAGES_MAX
    assert f"at most {IMAGES_MAX} images" in run.take_image(10, "image/png")
    large = new_run()
    assert f"at most {IMAGE_BYTES_MAX} bytes" in large.take_image(IMAGE_BYTES_MAX + 1, "image/png")
    for _ in range(IMAGES_BYTES_MAX // IMAGE_BYTES_MAX):
        assert not large.take_image(IMAGE_BYTES_MAX, "image/png")
    assert "together" in large.take_image(1, "image/png")


def test_arguments_count_while_their_call_is_open() -> None:
    run = new_run()
    call_id = run.open_call(Call("tool", "w", TOOL_ARGUMENTS_BYTES_MAX))
    assert "together" in run.why_no_call(1)
    run.calls.pop(call_id)
    assert not run.why_no_call(TOOL_ARGUMENTS_BYTES_MAX)
    for _ in range(TOOL_CALLS_OPEN_MAX):
        run.open_call(Call("tool", "w", 0))
    assert f"at most {TOOL_CALLS_OPEN_MAX} tool calls" in run.why_no_call(0)


def test_a_client_takes_as_many_variables_as_are_sent_and_no_more() -> None:
    blobs = IncomingBlobs(bytes_max=VARIABLES_BYTES_MAX, open_max=VARIABLES_MAX)
    for number in range(VARIABLES_MAX):
        blobs.add(pb.BlobChunk(blob_id=f"b{number}", data=b"x"))
    with pytest.raises(ProtocolError, match=f"more than {VARIABLES_MAX} blobs"):
        blobs.add(pb.BlobChunk(blob_id="one more", data=b"x"))
