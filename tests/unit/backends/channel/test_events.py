"""Messages of a guest become values that a client can be sent, or a FrameError; nothing else gets out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_api.messages import write
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api import to_wire
from executor_server.backends.channel import guest_requests
from executor_server.backends.channel.events import read_event, read_result
from executor_server.backends.channel.guest_requests import VariablesReply, variables_part
from executor_server.core.model import (
    BlobChunk,
    BlobRef,
    ErrorDetail,
    Event,
    FileInfo,
    Image,
    LimitWarning,
    Log,
    Outcome,
    OutputCut,
    ToolCall,
    VariablesState,
)
from executor_server.guest.wire.frames import CHUNK_BYTES, Fields, Frame, FrameError, Kind

RESULT = {
    "outcome": "succeeded",
    "variables": "kept",
    "generation": 1,
    "final": "",
    "error": 0,
    "operations": 1,
    "wall_time_s": 0.5,
    "cpu_time_s": 0.5,
    "peak_memory_bytes": 1,
    "output_bytes": 0,
}
WARNING = {"limit": "session_operations", "used": 8, "budget": 10}
IMAGE = {"mime": "image/png", "source": "figure"}
ERROR = {"type": "ValueError", "message": "no"}
FILE = {"path": "a", "size": 1, "directory": False, "modified": 0.5}


def frame(kind: int, head: dict[str, Any], body: bytes = b"") -> Frame:
    """A frame of this head; it says itself which execution or request it is of."""
    whose = {"op": 1, "ok": True} if kind == Kind.DONE else {"id": "e"}
    return Frame(kind, 1, 0, Fields({**whose, **head}), memoryview(body))


def result(body: bytes = b"", **more: Any) -> Frame:
    return frame(Kind.RESULT, {**RESULT, **more}, body)


def failed(**detail: Any) -> Frame:
    data = json.dumps({**ERROR, **detail}).encode()
    return result(data, error=len(data))


def variables(listed: Any, data: bytes = b"") -> Frame:
    names = json.dumps(listed).encode()
    return frame(Kind.DONE, {"names": len(names)}, names + data)


def listing(entries: Any) -> Frame:
    return frame(Kind.DONE, {"truncated": False}, json.dumps(entries).encode())


def test_each_event_is_read() -> None:
    assert read_event(frame(Kind.LOG, {"stream": "stderr"}, b"\xc3\xa4\xff")) == Log("stderr", "ä\ufffd")
    assert read_event(frame(Kind.OUTPUT_CUT, {"omitted": 7})) == OutputCut(7)
    assert read_event(frame(Kind.IMAGE, IMAGE, b"png")) == Image(b"png", "image/png", "figure")
    assert read_event(frame(Kind.IMAGE, {**IMAGE, "blob": "g1", "size": 9})) == Image(
        BlobRef("g1", 9), "image/png", "figure"
    )
    assert read_event(frame(Kind.TOOL_CALL, {"call": "c", "name": "f"}, b"()")) == ToolCall("c", "f", b"()")
    assert read_event(frame(Kind.BLOB_CHUNK, {"blob": "g1"}, b"x")) == BlobChunk("g1", b"x")
    assert read_event(frame(Kind.LIMIT_WARNING, WARNING)) == LimitWarning("session_operations", 8, 10)


def test_a_result_is_read() -> None:
    ended = read_result(result(b"packed", output=6, variables="reset", final="c1"))
    assert (ended.outcome, ended.variables_state, ended.generation) == (Outcome.SUCCEEDED, VariablesState.RESET, 1)
    assert (ended.output, ended.error, ended.final_answer_call_id) == (b"packed", None, "c1")
    assert read_result(result(blob="g1", size=3)).output == BlobRef("g1", 3)
    assert read_result(result()).output is None
    assert read_result(result()).imports == ()
    assert read_result(result(imports=["os.path", "math", ".x", "math"])).imports == (".x", "math", "os.path")
    detail = read_result(failed(line=3, exit_code=2)).error
    assert detail == ErrorDetail("ValueError", "no", line=3, exit_code=2)


def made(entries: Any, output: bytes = b"", **more: Any) -> Frame:
    """A result with artifacts, behind an error and before its output."""
    error, listed = json.dumps(ERROR).encode(), json.dumps(entries).encode()
    return result(error + listed + output, error=len(error), artifacts=len(listed), output=len(output), **more)


def test_artifacts_are_read_between_the_error_and_the_output() -> None:
    ended = read_result(made([FILE], b"packed", artifacts_truncated=True))
    assert (ended.artifacts, ended.artifacts_truncated) == ((FileInfo("a", 1, False, 0.5),), True)
    assert (ended.error, ended.output) == (ErrorDetail("ValueError", "no"), b"packed")
    assert (read_result(result()).artifacts, read_result(result()).artifacts_truncated) == ((), False)


def test_variables_and_listings_are_read() -> None:
    listed = {
        "variables": [{"name": "a", "inline": 2}, {"name": "b", "blob": "g1", "size": 9}, {"name": "c", "inline": 1}],
        "missing": ["d"],
    }
    assert variables_part(variables(listed, b"AAC")) == VariablesReply(
        (("a", b"AA"), ("b", BlobRef("g1", 9)), ("c", b"C")), ("d",)
    )
    assert guest_requests.listing(listing([FILE])) == ([FileInfo("a", 1, False, 0.5)], False)


MALFORMED: dict[str, tuple[Callable[[Frame], Any], Frame]] = {
    "not an event": (read_event, frame(Kind.DONE, {"op": 1})),
    "a stream of no name": (read_event, frame(Kind.LOG, {}, b"x")),
    "a stream of another name": (read_event, frame(Kind.LOG, {"stream": "stdin"}, b"x")),
    "a negative omission": (read_event, frame(Kind.OUTPUT_CUT, {"omitted": -1})),
    "an image of another type": (read_event, frame(Kind.IMAGE, {**IMAGE, "mime": "image/svg+xml"}, b"x")),
    "an image of a chunk and more": (read_event, frame(Kind.IMAGE, IMAGE, bytes(CHUNK_BYTES + 1))),
    "an image without its size": (read_event, frame(Kind.IMAGE, {**IMAGE, "blob": "g1"})),
    "a tool call without id": (read_event, frame(Kind.TOOL_CALL, {"name": "f"})),
    "a tool call of a long name": (read_event, frame(Kind.TOOL_CALL, {"call": "c", "name": "f" * 257})),
    "arguments of a huge size": (
        read_event,
        frame(Kind.TOOL_CALL, {"call": "c", "name": "f", "blob": "b", "size": 2**40}),
    ),
    "a chunk of no blob": (read_event, frame(Kind.BLOB_CHUNK, {}, b"x")),
    "a chunk that is too large": (read_event, frame(Kind.BLOB_CHUNK, {"blob": "b"}, bytes(CHUNK_BYTES + 1))),
    "a warning of another limit": (read_event, frame(Kind.LIMIT_WARNING, {**WARNING, "limit": "memory_bytes"})),
    "a warning of more than all": (read_event, frame(Kind.LIMIT_WARNING, {**WARNING, "used": 11})),
    "a warning of no budget": (read_event, frame(Kind.LIMIT_WARNING, {**WARNING, "used": 0, "budget": 0})),
    "a warning of a huge budget": (read_event, frame(Kind.LIMIT_WARNING, {**WARNING, "budget": 2**63})),
    "too many imports": (read_result, result(imports=["m"] * 65)),
    "an import of a long name": (read_result, result(imports=["m" * 201])),
    "imports of a great length": (read_result, result(imports=[f"{n:03}" + "é" * 100 for n in range(64)])),
    "an import of several lines": (read_result, result(imports=["a\nb"])),
    "an outcome of its own": (read_result, result(outcome="won")),
    "artifacts that are no list": (read_result, made({})),
    "artifacts past the end": (read_result, result(b"[]", artifacts=3)),
    "artifacts past the error": (read_result, result(b"{}[]", error=3, artifacts=2)),
    "too many artifacts": (read_result, made([FILE] * 257)),
    "an artifact of a year past all": (read_result, made([{**FILE, "modified": 1e12}])),
    "generation 0": (read_result, result(generation=0)),
    "an infinite time": (read_result, result(wall_time_s=float("inf"))),
    "a time that is no number": (read_result, result(cpu_time_s=float("nan"))),
    "a negative count": (read_result, result(operations=-1)),
    "an error past the end": (read_result, result(b"{}", error=3)),
    "an error that is not JSON": (read_result, result(b"{", error=1)),
    "an error that is deep": (read_result, result(b"[" * 60_000, error=60_000)),
    "an error without type": (read_result, result(b'{"message": ""}', error=15)),
    "an error of a long message": (read_result, failed(message="x" * 20_000)),
    "an exit code of 256": (read_result, failed(exit_code=256)),
    "a long output": (read_result, result(bytes(CHUNK_BYTES + 1), output=CHUNK_BYTES + 1)),
    "variables that are a list": (variables_part, variables([])),
    "variables past the end": (
        variables_part,
        variables({"variables": [{"name": "a", "inline": 2}], "missing": []}, b"x"),
    ),
    "names past the end": (variables_part, frame(Kind.DONE, {"names": 5}, b"{}")),
    "a variable without name": (variables_part, variables({"variables": [{"inline": 0}], "missing": []})),
    "a listing that is an object": (guest_requests.listing, listing({})),
    "a listing without end": (guest_requests.listing, listing([FILE] * 10_001)),
    "a file of no time": (guest_requests.listing, listing([{**FILE, "modified": None}])),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_a_frame_error(what: str) -> None:
    read, malformed = MALFORMED[what]
    with pytest.raises(FrameError):
        read(malformed)


# Fields of the right name and any value, so that the fuzzing gets past the first check.
_TEXTS = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["stdout", "image/png", "figure", "kept", "succeeded", "\ud800"]
)
_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS
_NAMES = st.sampled_from(
    ["stream", "omitted", "mime", "source", "call", "name", "blob", "size", "inline", "path", "directory", "modified"]
)
_ENTRIES = st.dictionaries(_NAMES, _VALUES, max_size=6)
_HEADS = st.fixed_dictionaries(
    {},
    optional={
        **{
            key: st.just(value) | _VALUES
            for key, value in {
                **RESULT,
                **IMAGE,
                **FILE,
                **WARNING,
                "stream": "stdout",
                "call": "c",
                "name": "f",
            }.items()
        },
        "names": st.integers(0, 60),
        "blob": _TEXTS,
        "output": _VALUES,
        "omitted": _VALUES,
        "imports": st.lists(_TEXTS, max_size=3) | _VALUES,
        "truncated": st.booleans(),
    },
)
_DETAILS = st.fixed_dictionaries(
    {}, optional={"type": _TEXTS, "message": _TEXTS, "traceback": _TEXTS, "line": _VALUES, "exit_code": _VALUES}
)
_BODIES = st.binary(max_size=60) | st.lists(_ENTRIES, max_size=3).map(lambda v: json.dumps(v).encode())


@settings(deadline=None)
@given(
    st.sampled_from(sorted(v for k, v in vars(Kind).items() if k.isupper())), _HEADS, _BODIES, _DETAILS, st.booleans()
)
def test_any_frame_gives_values_that_a_message_can_carry_or_a_frame_error(
    kind: int, head: dict[str, Any], body: bytes, detail: dict[str, Any], with_detail: bool
) -> None:
    if with_detail:
        body = json.dumps(detail).encode()
        head = {**RESULT, **head, "error": len(body)}
    for read in (read_event, read_result, variables_part, guest_requests.listing):
        try:
            value = read(frame(kind, head, body))
        except FrameError:
            continue
        carry(value)


@pytest.mark.parametrize(
    ("read", "hostile"),
    [
        (read_event, frame(Kind.TOOL_CALL, {"call": "\ud800", "name": "f"})),
        (read_event, frame(Kind.TOOL_CALL, {"call": "", "name": "f"})),
        (read_event, frame(Kind.BLOB_CHUNK, {"blob": "a b"})),
        (read_event, frame(Kind.IMAGE, {**IMAGE, "blob": "\ud800", "size": 1})),
        (read_result, result(final="c1\n")),
        (variables_part, variables({"variables": [{"name": "a", "blob": "../b", "size": 1}], "missing": []})),
    ],
)
def test_an_id_that_no_client_could_send_back_is_refused(read: Callable[[Frame], Any], hostile: Frame) -> None:
    """Agent code can choose the ids of its interpreter's tool calls, and not every text can be in a message."""
    with pytest.raises(FrameError):
        read(hostile)


def test_texts_that_utf_8_cannot_carry_reach_the_client_escaped() -> None:
    carry(read_event(frame(Kind.TOOL_CALL, {"call": "c", "name": "\ud800"})))
    carry(read_result(failed(type="\ud800", message="\ud800", traceback="\ud800", statement="\ud800")))
    carry(variables_part(variables({"variables": [{"name": "\ud800", "inline": 0}], "missing": ["\ud800"]})))
    carry(guest_requests.listing(listing([{**FILE, "path": "\ud800"}])))


def carry(value: Any) -> None:
    """Makes the message that would bring it to the client."""
    match value:
        case (list(files), bool(truncated)):
            write(service_pb.ListFilesResponse, files=files, truncated=truncated)
        case VariablesReply() as reply:
            to_wire.variables_to(reply)
        case _:
            to_wire.event_to(Event(1, value))
