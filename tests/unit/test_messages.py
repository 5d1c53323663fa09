"""Values and messages are copied by field name."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import pytest

from executor_api.messages import LIST_MAX, Unreadable, on_wire, read, write
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client import process_results, results, savepoint
from executor_server import core

NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)


class End(Enum):
    SUCCEEDED = 1


@dataclass(frozen=True)
class Ended:
    outcome: End


@dataclass(frozen=True)
class Hosts:
    allowed: tuple[str, ...] = field(default=(), metadata=on_wire("allowed_hosts"))


def test_a_savepoint_arrives_as_it_was_sent() -> None:
    sent = core.Savepoint(3, 1.5, 2, 10, ("sockets",), is_branch=True)
    assert read(savepoint.Savepoint, write(service_pb.Savepoint, sent)) == savepoint.Savepoint(
        number=3,
        made_time=datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC),
        files=2,
        file_bytes=10,
        left_out=("sockets",),
        is_branch=True,
    )


def test_nested_values_arrive_and_absent_ones_stay_absent() -> None:
    sent = core.BranchEnd(number=1, variables=core.Changes(added=("x",), truncated=True))
    assert read(savepoint.Branch, write(pb.BranchEnd, sent)) == savepoint.Branch(
        number=1, variables=savepoint.Changes(added=("x",), truncated=True)
    )


def test_an_absent_number_is_none_and_zero_is_zero() -> None:
    assert read(results.FileLimits, write(pb.FileLimits, core.FileRules(max_puts=0))) == results.FileLimits(
        max_put_bytes=2**30, max_get_bytes=2**30, max_puts=0, max_gets=None
    )


def test_what_a_message_does_not_say_is_as_in_an_empty_one() -> None:
    info = read(results.SessionInfo, pb.Session(state=pb.SESSION_STATE_IDLE), detached=True)
    assert (info.limits, info.create_time, info.detached) == (results.Limits(), NO_TIME, True)


def test_a_field_of_another_name_is_read_from_that() -> None:
    assert read(Hosts, pb.NetworkRules(allowed_hosts=["a"], default_hosts=["b"])) == Hosts(("a",))


@pytest.mark.parametrize("number", [0, 2, 99])
def test_a_member_that_the_reader_does_not_know_is_refused(number: int) -> None:
    assert read(Ended, pb.ExecutionResult(outcome=pb.OUTCOME_SUCCEEDED)) == Ended(End.SUCCEEDED)
    with pytest.raises(Unreadable, match=str(number)):
        read(Ended, pb.ExecutionResult(outcome=number))  # type: ignore[arg-type]


def test_a_list_without_end_and_a_time_out_of_range_are_refused() -> None:
    with pytest.raises(Unreadable, match="allowed_hosts"):
        read(Hosts, pb.NetworkRules(allowed_hosts=["a"] * (LIST_MAX + 1)))
    message = pb.Session(state=pb.SESSION_STATE_IDLE)
    message.create_time.seconds = 2**60
    with pytest.raises(Unreadable, match="time"):
        read(results.SessionInfo, message, detached=True)


def test_a_value_that_lacks_a_field_of_the_message_is_not_written() -> None:
    with pytest.raises(LookupError, match="size_bytes"):
        write(pb.FileInfo, core.FileChange("a", "created", is_directory=False))


def test_an_attribute_of_two_values_is_not_guessed_at() -> None:
    with pytest.raises(LookupError, match="2 of the values"):
        write(pb.QueuedEvent, core.Queued(1), core.Queued(2))


def test_the_value_of_a_secret_header_stays_behind() -> None:
    secret = core.NetworkSecret("a.example", "Authorization", "Bearer ${token}")
    assert b"token" not in write(pb.NetworkSecret, secret).SerializeToString()


def test_text_that_is_not_utf_8_is_escaped() -> None:
    assert write(pb.LogEvent, core.Log("stdout", "é \ud800")).text == "é \\ud800"


@pytest.mark.parametrize(
    ("members", "message", "name"),
    [
        (core.Outcome, pb.ExecutionResult, "outcome"),
        (core.VariablesState, pb.ExecutionResult, "variables_state"),
        (core.ProcessOutcome, pb.ProcessResult, "outcome"),
        (core.ViolationKind, pb.Violation, "kind"),
    ],
)
def test_each_member_has_a_value_on_the_wire(members: type[enum.Enum], message: Any, name: str) -> None:
    given = {each.name: None for each in message.DESCRIPTOR.fields}
    numbers = {getattr(write(message, **{**given, name: each}), name) for each in members}
    assert len(numbers) == len(members) and 0 not in numbers


def test_the_client_knows_each_end_of_a_process() -> None:
    for outcome in core.ProcessOutcome:
        sent = write(pb.ProcessResult, core.ProcessResult(outcome))
        assert read(process_results.ProcessResult, sent) == process_results.ProcessResult(
            outcome=outcome.value, exit_code=None
        )
