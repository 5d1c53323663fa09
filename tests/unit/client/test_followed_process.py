"""The client's state of one process: events in order, cuts, ends, what is kept of its output."""

from __future__ import annotations

import os
from typing import Any

import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_client import ExecutorClient, InvalidRequest, ProcessOutput, ProcessOutputCut, ProtocolError, TerminalSize
from executor_client._core import process
from executor_client._core.assembler import EventGap
from executor_client._core.process import FollowedProcess, HeadAndTail
from executor_client._core.retry import Retries
from executor_client._core.waiting import NO_WAITS


def followed(request: pb.StartProcessRequest | None = None) -> FollowedProcess:
    retries = Retries(away_timeout_s=1, busy_timeout_s=1)
    return FollowedProcess("s", "p", request, retries, (), NO_WAITS, "address")


def event(number: int, **kind: Any) -> pb.AttachProcessResponse:
    return pb.AttachProcessResponse(event=types.ProcessEvent(number=number, **kind))


def output(number: int, data: bytes = b"x") -> pb.AttachProcessResponse:
    return event(number, output=types.ProcessOutput(stream=types.OUTPUT_STREAM_STDOUT, data=data))


def test_the_start_is_repeated_until_an_event_has_come_and_then_attached_to() -> None:
    request = pb.StartProcessRequest(session_id="s", process_id="p")
    one = followed(request)
    assert one.opening() is request and not one.may_have_begun
    assert one.feed(event(1, started=types.ProcessStarted(pid=7))) is None
    assert one.pid == 7 and one.may_have_begun
    assert one.opening() == pb.AttachProcessRequest(session_id="s", process_id="p", after_event=1)


def test_events_come_in_order_and_once() -> None:
    one = followed()
    assert one.feed(output(1, b"a")) == ProcessOutput(1, "stdout", b"a")
    for number in (1, 3):
        with pytest.raises(EventGap):
            one.feed(output(number))
    assert one.feed(output(2, b"b")) == ProcessOutput(2, "stdout", b"b")


def test_a_cut_stands_for_all_events_that_were_dropped() -> None:
    one = followed()
    cut = event(9, output_cut=types.ProcessOutputCut(omitted_bytes=100))
    assert one.feed(cut) == ProcessOutputCut(9, 100)
    assert one.feed(output(10)) == ProcessOutput(10, "stdout", b"x")


@pytest.mark.parametrize(
    "message",
    [
        event(1),
        event(1, output=types.ProcessOutput(stream=types.OUTPUT_STREAM_STDOUT)),
        event(1, output=types.ProcessOutput(data=b"x")),
        output(1, b"x" * (256 * 1024 + 1)),
        event(1, result=types.ProcessResult()),
    ],
)
def test_an_event_of_a_wrong_form_is_refused(message: pb.AttachProcessResponse) -> None:
    with pytest.raises(ProtocolError):
        followed().feed(message)


def test_nothing_follows_the_result() -> None:
    one = followed()
    end = types.ProcessResult(outcome=types.PROCESS_OUTCOME_EXITED, exit_code=0)
    assert one.feed(event(1, result=end)) is None
    assert one.has_ended() and one.result is not None and one.result.succeeded
    with pytest.raises(ProtocolError):
        one.feed(output(2))


def test_a_process_that_is_lost_with_its_node_says_why() -> None:
    one = followed()
    one.lost("the node is gone")
    assert one.result is not None and (one.result.outcome, one.result.exit_code) == ("lost", None)
    assert one.result.lost_reason == "the node is gone" and not one.result.succeeded


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_head_and_tail_are_kept_whatever_the_pieces(piece_bytes: int) -> None:
    data = bytes(index % 251 for index in range(100_000))
    kept = HeadAndTail(11)
    for start in range(0, len(data), piece_bytes):
        kept.add(data[start : start + piece_bytes])
    note = b"\n[99989 bytes left out]\n"
    assert kept.finish() == data[:6] + note + data[-5:] and kept.omitted_bytes == 99_989


def test_output_within_the_limit_is_kept_as_it_is() -> None:
    kept = HeadAndTail(10)
    kept.add(b"0123456789")
    assert (kept.finish(), kept.omitted_bytes) == (b"0123456789", 0)


def test_input_is_written_in_pieces_with_their_offsets() -> None:
    made = process.write_requests("s", "p", 5, b"x" * 70_000, eof=True)
    assert [(each.offset, len(each.data), each.eof) for each in made] == [(5, 65_536, False), (65_541, 4_464, True)]


@pytest.mark.parametrize("env", [{"A": 1}, {1: "a"}, {"A": "geheim\ud800"}, ["geheim"], "geheim"])
def test_a_wrong_environment_is_refused_without_its_values(env: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ExecutorClient("unix:/nowhere", token="t").create_session(env=env)  # type: ignore[arg-type]
    assert "geheim" not in str(caught.value) and caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("size", [TerminalSize(-1, 5), TerminalSize(2**40, 5), os.terminal_size((80, 24))])
def test_a_size_out_of_range_or_of_another_form_is_refused(size: Any) -> None:
    with pytest.raises(InvalidRequest):
        process.start_request("s", "top", env=None, pty=size)
