"""A record is one bounded line of printable ASCII, whatever its fields, and names the hash of the one before."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.policy.audit.chain import (
    GENESIS,
    MAX_CODE_RECORD_BYTES,
    MAX_LIST_ENTRIES,
    MAX_RECORD_BYTES,
    AuditKind,
    Position,
    encode,
    read_fields,
    read_link,
)

TIME = "2026-11-21T09:00:00.000001Z"
HOSTILE = st.text(st.characters(codec=None), max_size=700)
VALUES = st.one_of(
    HOSTILE,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(HOSTILE, max_size=MAX_LIST_ENTRIES + 9),
    st.dictionaries(st.sampled_from("abc"), HOSTILE | st.floats()),
)


def line_of(fields: dict[str, Any], after: Position = GENESIS) -> bytes:
    return encode(after, TIME, AuditKind.TOOL_CALLED, fields)[0]


@given(st.dictionaries(st.sampled_from(["tenant", "path", "names", "x"]), VALUES))
def test_any_record_is_one_bounded_line_of_printable_ascii(fields: dict[str, Any]) -> None:
    line = line_of(fields)
    assert len(line) <= MAX_RECORD_BYTES
    assert line[-1:] == b"\n"
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    assert read_link(line) is not None


@given(st.dictionaries(st.sampled_from(["tenant", "path"]), st.text(st.characters(codec=None), max_size=500)))
def test_texts_of_ordinary_length_come_back_as_they_were(fields: dict[str, str]) -> None:
    found = read_fields(line_of(fields))
    assert found is not None
    assert {key: found[key] for key in fields} == fields


def test_the_hash_is_that_of_the_bytes_before_it() -> None:
    line = line_of({"tenant": "é"})
    before, stated = line.rsplit(b',"hash":', 1)
    assert json.loads(stated[:-2]) == hashlib.sha256(before).hexdigest()


def test_a_record_holds_the_number_and_the_hash_of_the_one_before() -> None:
    _, first = encode(GENESIS, TIME, AuditKind.TOOL_CALLED, {})
    found = read_link(line_of({}, first))
    assert found is not None
    assert (found.seq, found.prev) == (2, first.hash)


def test_what_is_too_long_is_cut_and_said_to_be() -> None:
    line = line_of({"names": ["\U0001f600" * 600] * 500, "path": "\0" * 10**6})
    found = json.loads(line)
    assert len(line) <= MAX_RECORD_BYTES
    assert found["cut"] is True
    assert found["names"][-1].endswith("more")


def test_a_record_with_a_text_like_the_end_of_one_is_read_whole() -> None:
    forged = '","hash":"' + "0" * 64 + '"}\n{"seq":9'
    found = read_fields(line_of({"path": forged}))
    assert found is not None
    assert found["path"] == forged


def test_code_is_kept_whole_up_to_its_own_limit() -> None:
    code = "x = 1\n" * 100_000
    found = json.loads(line_of({"code": code, "code_bytes": 600_000}))
    assert (found["code"], found["code_bytes"], "code_cut" in found) == (code, 600_000, False)


def test_code_past_its_limit_is_cut_and_said_to_be() -> None:
    line = line_of({"code": "\U0001f600" * 10**6})
    assert len(line) <= MAX_CODE_RECORD_BYTES
    assert json.loads(line)["code_cut"] is True


@pytest.mark.parametrize(
    "command", [["sh", "-c", "x" * 700_000], ["w"] * 50_000, ["\U0001f600" * 50_000]], ids=["text", "words", "escaped"]
)
def test_a_command_line_is_kept_whole_up_to_its_own_limit(command: list[str]) -> None:
    found = json.loads(line_of({"command": command, "process": "p"}))
    assert (found["command"], found["process"], "command_cut" in found) == (command, "p", False)


@pytest.mark.parametrize(
    "command", [["\U0001f600" * 10**6], [""] * 10**6, ["a"] * 10**6], ids=["text", "empty", "words"]
)
def test_a_command_line_past_its_limit_is_cut_and_said_to_be(command: list[str]) -> None:
    line = line_of({"command": command})
    assert len(line) <= MAX_CODE_RECORD_BYTES
    assert json.loads(line)["command_cut"] is True


def test_numbers_that_json_has_not_are_said_to_be_out_of_range() -> None:
    found = json.loads(line_of({"a": float("nan"), "b": float("inf"), "c": 10**5000, "d": 1.5}), parse_constant=str)
    assert [found[key] for key in "abcd"] == ["out of range"] * 3 + [1.5]
