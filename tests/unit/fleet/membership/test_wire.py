"""Messages between a front and a node: what goes out comes in, and what a hostile end makes up does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from executor_api.v1 import fleet_service_pb2 as pb
from executor_server.core import InvalidRequest, ResourceExhausted
from executor_server.fleet.api import wire
from executor_server.fleet.membership.ids import MAX_EPOCH
from executor_server.fleet.membership.messages import (
    MAX_LOCKS_BYTES,
    MAX_NODE_SESSIONS,
    MAX_NUMBER,
    Control,
    FrontHello,
    NodeBackend,
    NodeHello,
    NodeReport,
    NodeSession,
    Renewal,
    TenantUse,
    WarmKind,
    fingerprint_of,
)

NODE = "n-1"
SESSION = f"{NODE}-{'0a' * 16}"

identifiers = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
tenants = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
images = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)
numbers = st.integers(0, MAX_NUMBER)
numbers_32 = st.integers(0, 2**32 - 1)
amounts = st.floats(0, 1e12)
texts = st.text("aä 字é", max_size=64)
session_ids = st.binary(min_size=16, max_size=16).map(lambda data: f"{NODE}-{data.hex()}")
labels = st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}", fullmatch=True), texts, max_size=16)

front_hellos = st.builds(
    FrontHello,
    front_id=identifiers,
    term=st.integers(1, MAX_NUMBER),
    report_interval_s=st.floats(wire.MIN_INTERVAL_S, 1),
    lease_s=st.floats(2, wire.MAX_LEASE_S),
    fence_s=st.floats(wire.MIN_LEASE_S, wire.MAX_FENCE_S),
    lost_epoch=numbers,
    instance=identifiers,
    protocol=numbers_32,
    program_version=texts,
)
lock_files = st.dictionaries(st.from_regex(r"/[a-z.]{1,20}", fullmatch=True), st.binary(), max_size=3)
controls = st.builds(
    lambda policy, key, locks: Control(policy, fingerprint_of(policy, key, locks), key, locks),
    st.binary(),
    st.binary(max_size=512),
    lock_files,
)
renewals = st.builds(
    Renewal,
    sequence=st.integers(1, MAX_NUMBER),
    egress_bytes=st.dictionaries(tenants, numbers, max_size=5),
)
node_hellos = st.builds(
    NodeHello,
    node=st.just(NODE),
    epoch=st.integers(1, MAX_EPOCH - 1),
    instance=identifiers,
    labels=labels,
    protocol=numbers_32,
    program_version=texts,
)
reports = st.builds(
    NodeReport,
    sequence=st.integers(1, MAX_NUMBER),
    epoch=st.integers(1, MAX_NUMBER),
    max_sessions=st.integers(0, MAX_NODE_SESSIONS),
    draining=st.booleans(),
    control_fingerprint=st.sampled_from(["", "ab" * 32]),
    control_problem=texts,
    load=st.floats(0, 1000),
    backends=st.lists(
        st.builds(NodeBackend, identifiers, st.booleans(), st.lists(images, max_size=3).map(tuple)),
        unique_by=lambda backend: backend.name,
        max_size=3,
    ).map(tuple),
    warm=st.dictionaries(
        st.builds(WarmKind, identifiers, images, st.booleans()),
        st.integers(0, 1000),
        max_size=3,
    ),
    full=st.booleans(),
    opened=st.lists(
        st.builds(NodeSession, session_ids, tenants, identifiers, st.booleans()),
        unique_by=lambda session: session.session_id,
        max_size=4,
    ).map(tuple),
    closed=st.lists(session_ids, max_size=4).map(tuple),
    creating=st.lists(st.builds(NodeSession, st.just(""), tenants, identifiers), max_size=4).map(tuple),
    tenants=st.dictionaries(
        tenants, st.builds(TenantUse, numbers_32, amounts, numbers, numbers, numbers_32), max_size=4
    ),
)


@given(front_hellos | controls | renewals)
def test_what_a_front_sends_arrives(message: FrontHello | Control | Renewal) -> None:
    data = wire.request_to(message).SerializeToString()
    assert wire.request_from(pb.LinkRequest.FromString(data)) == message


@given(node_hellos | reports)
def test_what_a_node_sends_arrives(message: NodeHello | NodeReport) -> None:
    data = wire.response_to(message).SerializeToString()
    assert wire.response_from(pb.LinkResponse.FromString(data), NODE) == message


@given(st.binary(max_size=200))
def test_bytes_of_a_hostile_end_are_a_message_or_refused(data: bytes) -> None:
    with suppress(DecodeError, InvalidRequest):
        assert wire.request_from(pb.LinkRequest.FromString(data))
    with suppress(DecodeError, InvalidRequest):
        assert wire.response_from(pb.LinkResponse.FromString(data), NODE)


def hello(change: Callable[[pb.FrontHello], object]) -> pb.LinkRequest:
    message = wire.request_to(FrontHello("front", 1, 0.5, 3.0, 10.0, instance="i"))
    change(message.hello)
    return message


def set_to(**fields: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


@pytest.mark.parametrize(
    "fields",
    [
        {"front_id": "a b"},
        {"instance": ""},
        {"term": 0},
        {"lost_epoch": 2**64 - 1},
        {"lease_s": float("nan")},
        {"lease_s": 601.0},
        {"fence_s": float("inf")},
        {"report_interval_s": 2.0},
        {"program_version": "x" * 65},
        {"program_version": "\x1b[2J"},
    ],
)
def test_a_hello_of_a_front_with_a_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"hello.{next(iter(fields))}"):
        wire.request_from(hello(set_to(**fields)))


def test_a_message_without_content_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is missing"):
        wire.request_from(pb.LinkRequest())
    with pytest.raises(InvalidRequest, match="is missing"):
        wire.response_from(pb.LinkResponse(), NODE)


def test_a_control_with_another_fingerprint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="fingerprint"):
        wire.request_from(wire.request_to(Control(b"p", fingerprint_of(b"", b"p"))))


def test_the_parts_of_a_control_are_told_apart() -> None:
    assert len({fingerprint_of(b"ab", b""), fingerprint_of(b"a", b"b"), fingerprint_of(b"", b"ab")}) == 3


@pytest.mark.parametrize(
    "locks",
    [
        {"relative.toml": b""},
        {"/a\x07": b""},
        {"/" + "a" * 4096: b""},
        {f"/{number}": b"" for number in range(65)},
        {"/a": bytes(MAX_LOCKS_BYTES // 2 + 1), "/b": bytes(MAX_LOCKS_BYTES // 2 + 1)},
    ],
    ids=["relative", "control character", "long", "many", "large"],
)
def test_wrong_lock_files_are_refused(locks: dict[str, bytes]) -> None:
    message = wire.request_to(Control(b"p", fingerprint_of(b"p", b"", locks), b"", locks))
    with pytest.raises((InvalidRequest, ResourceExhausted)):
        wire.request_from(message)


def test_lock_files_of_other_contents_or_paths_make_another_control() -> None:
    locks: tuple[dict[str, bytes], ...] = ({}, {"/a": b"1"}, {"/a": b"2"}, {"/b": b"1"}, {"/a": b"", "/b": b"1"})
    assert len({fingerprint_of(b"", b"", each) for each in locks}) == len(locks)


@pytest.mark.parametrize(
    "parts",
    [
        (b"x" * (wire.MAX_POLICY_BYTES + 1), b""),
        (b"", b"x" * (wire.MAX_STATE_KEY_BYTES + 1)),
    ],
    ids=["policy", "state key"],
)
def test_a_control_that_is_too_large_is_refused(parts: tuple[bytes, bytes]) -> None:
    message = wire.request_to(Control(parts[0], fingerprint_of(*parts), parts[1]))
    with pytest.raises(ResourceExhausted):
        wire.request_from(message)


@pytest.mark.parametrize(
    "renewal",
    [
        pb.Renewal(sequence=0),
        pb.Renewal(sequence=1, egress_bytes={"a b": 1}),
        pb.Renewal(sequence=1, egress_bytes={"a": 2**64 - 1}),
    ],
)
def test_a_wrong_renewal_is_refused(renewal: pb.Renewal) -> None:
    with pytest.raises(InvalidRequest, match="renewal"):
        wire.request_from(pb.LinkRequest(renewal=renewal))


@pytest.mark.parametrize(
    "fields",
    [
        {"node": "n-2"},
        {"epoch": 0},
        {"instance": ""},
        {"program_version": "\u202e"},
    ],
)
def test_a_hello_of_a_node_with_a_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    message = wire.response_to(NodeHello(NODE, 1, "i"))
    set_to(**fields)(message.hello)
    with pytest.raises(InvalidRequest, match=f"hello.{next(iter(fields))}"):
        wire.response_from(message, NODE)


@pytest.mark.parametrize(
    "wrong",
    [{"": "x"}, {"a b": "x"}, {"k" * 65: "x"}, {"k": "v" * 65}, {"k": "\x00"}, {str(each): "" for each in range(17)}],
    ids=["empty key", "space", "long key", "long value", "control character", "too many"],
)
def test_wrong_labels_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="labels"):
        wire.response_from(wire.response_to(NodeHello(NODE, 1, "i", wrong)), NODE)


def report(**fields: Any) -> pb.LinkResponse:
    return pb.LinkResponse(report=pb.NodeReport(**{"sequence": 1, "epoch": 1, **fields}))


def session(session_id: str = SESSION, tenant: str = "acme", request_id: str = "r", **fields: bool) -> pb.NodeSession:
    return pb.NodeSession(session_id=session_id, tenant=tenant, request_id=request_id, **fields)


@pytest.mark.parametrize(
    "message",
    [
        report(sequence=0),
        report(max_sessions=MAX_NODE_SESSIONS + 1),
        report(load=float("nan")),
        report(control_fingerprint="x"),
        report(control_problem="x" * 2001),
        report(control_problem="\x07"),
        report(opened=[session("n-2-" + "0a" * 16)]),
        report(opened=[session(f"{NODE}-x-{'0a' * 16}")]),
        report(opened=[session(tenant="")]),
        report(opened=[session(request_id="")]),
        report(opened=[session(), session()]),
        report(closed=["n-2-" + "0a" * 16]),
        report(creating=[session()]),
        report(creating=[session("", lost=True)]),
        report(creating=[session("", request_id="a b")]),
        report(backends=[pb.NodeBackend(name="")]),
        report(backends=[pb.NodeBackend(name="local"), pb.NodeBackend(name="local")]),
        report(backends=[pb.NodeBackend(name="local", images=["A b"])]),
        report(backends=[pb.NodeBackend(name="local", images=["a"] * 1025)]),
        report(backends=[pb.NodeBackend(name=str(each)) for each in range(17)]),
        report(warm=[pb.WarmKind(backend="local", image="")]),
        report(warm=[pb.WarmKind(backend="local", image="base"), pb.WarmKind(backend="local", image="base", ready=1)]),
        report(warm=[pb.WarmKind(backend="local", image=f"i{each}") for each in range(1025)]),
        report(tenants=[pb.NodeTenant(tenant="a b")]),
        report(tenants=[pb.NodeTenant(tenant="a"), pb.NodeTenant(tenant="a")]),
        report(tenants=[pb.NodeTenant(tenant="a", output_bytes=2**64 - 1)]),
    ],
)
def test_a_wrong_report_is_refused(message: pb.LinkResponse) -> None:
    with pytest.raises(InvalidRequest, match="report"):
        wire.response_from(message, NODE)


def test_a_report_of_too_many_sessions_is_refused_by_their_number() -> None:
    entries = pb.NodeReport(opened=[pb.NodeSession()] * (MAX_NODE_SESSIONS + 1))
    with pytest.raises(InvalidRequest, match=f"has {MAX_NODE_SESSIONS + 1} entries"):
        wire.response_from(pb.LinkResponse(report=entries), NODE)
    closed = pb.NodeReport(closed=["x"] * (MAX_NODE_SESSIONS + 1))
    with pytest.raises(InvalidRequest, match=f"has {MAX_NODE_SESSIONS + 1} entries"):
        wire.response_from(pb.LinkResponse(report=closed), NODE)
