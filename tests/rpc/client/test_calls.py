"""Everything but executions: sessions, variables, files, refusals, retries."""

from __future__ import annotations

import enum
import pickle
import sys
import threading
import traceback
from typing import Any

import grpc
import pytest

from executor_api import values
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_client import (
    AuthorizationError,
    DaemonError,
    ExecutorClient,
    ExecutorClientError,
    FileLimits,
    InvalidRequest,
    Limits,
    NetworkRules,
    NetworkSecret,
    NetworkUsage,
    NotFoundError,
    OpaqueValue,
    PackagesPolicy,
    PolicyRef,
    PolicyViolationError,
    PreconditionError,
    ProtocolError,
    Quotas,
    ResourceExhaustedError,
    SessionGone,
    SessionState,
    UnavailableError,
    Violation,
)
from executor_client._core import requests
from tests.support.fake_daemon import SESSION, TOKEN, FakeDaemon, Refusal, blob, busy, chunks, value


def test_session_is_asked_for_and_described(client: Any, daemon: FakeDaemon) -> None:
    session = client.create_session("data", ["numpy.*"], {"memory_bytes": 1 << 30}, {"run": "7"}, "x = 1")
    request = daemon.requests[0][1]
    assert (request.image, list(request.authorized_imports), request.prelude) == ("data", ["numpy.*"], "x = 1")
    assert (request.limits.memory_bytes, dict(request.labels)) == (1 << 30, {"run": "7"})
    assert (session.session_id, session.info.state, session.limits.wall_time_s) == (SESSION, SessionState.IDLE, 30)
    assert session.limits.operations is None
    assert session.policy == PolicyRef("strict", "7", "abc")
    assert (session.info.denied_imports, session.info.refused_language) == (("os",), ("dynamic_code",))
    assert (session.network, session.info.denied_network) == (("pypi.org:443",), ("gist.github.com",))
    assert session.info.network_usage == NetworkUsage(2, 1, 1000, 234)
    assert (session.info.packages, session.info.environment_id) == (("polars>=1",), "env-1")
    assert session.info.images_with_missing == ("data",)
    session.close()
    session.close()
    assert daemon.names() == ["CreateSession", "DeleteSession"]


def test_more_can_be_asked_for_by_name(client: Any, daemon: FakeDaemon) -> None:
    more = {"network": ["example.com"], "packages": ["numpy==2", "pandas"], "node_labels": {"zone": "a"}}
    client.create_session(backend="docker", **more)
    request = daemon.requests[0][1]
    assert dict(request.node_labels) == {"zone": "a"}
    assert (request.backend, list(request.network)) == ("docker", ["example.com"])
    assert list(request.packages) == ["numpy==2", "pandas"]
    for name in ("authorized_imports", "network", "packages"):
        with pytest.raises(InvalidRequest, match=f"{name} is of type str; write {name}="):
            client.create_session(**{name: "numpy"})
    with pytest.raises(InvalidRequest, match="node_labels is of type dict and holds int, str; write node_labels="):
        client.create_session(node_labels={"zone": 1})


def test_policy_is_told_whole(client: Any) -> None:
    policy = client.get_policy()
    assert policy.policy == PolicyRef("strict", "7", "abc")
    assert (policy.default_limits.wall_time_s, policy.max_limits.operations) == (30, 2_000_000)
    assert policy.execution_default_limits == Limits(wall_time_s=10)
    assert policy.execution_max_limits == Limits(wall_time_s=20.5)
    assert (policy.default_imports, policy.allowed_imports, policy.denied_imports) == (("math",), ("numpy.*",), ("os",))
    assert (policy.refused_language, policy.allowed_tools) == (("dynamic_code",), ("web_*",))
    assert policy.files == FileLimits(max_put_bytes=1000, max_get_bytes=2000, max_puts=3)
    assert policy.quotas == Quotas(sessions=4, cpu_time_s_per_hour=0.5, egress_bytes_per_hour=8_000)
    assert policy.network == NetworkRules(
        default=("pypi.org:443",),
        allowed=("*.example.com",),
        denied=("gist.github.com",),
        secrets=(NetworkSecret(host="api.example.com", header="X-Key", methods=("GET",), paths=("/a/*",)),),
        max_connections=3,
        max_new_connections_per_minute=40,
        max_sent_bytes=5_000,
        max_received_bytes=6_000,
        max_connection_s=7.5,
    )
    assert policy.network


def test_packages_of_a_policy_are_told_whole(client: Any, daemon: FakeDaemon) -> None:
    assert client.get_policy().packages == PackagesPolicy() and not client.get_policy().packages
    daemon.policy = types.Policy(
        packages=types.PackagesPolicy(
            allowed=["pandas>=2", "*"], auto=True, max_requirements=3, max_environment_bytes=2**33, exclude_newer_s=0.5
        )
    )
    assert client.get_policy().packages == PackagesPolicy(
        allowed=("pandas>=2", "*"), auto=True, max_requirements=3, max_environment_bytes=2**33, exclude_newer_s=0.5
    )
    daemon.policy = types.Policy(packages=types.PackagesPolicy(locked=["x==1"]))
    assert client.get_policy().packages == PackagesPolicy(locked=("x==1",)) and client.get_policy().packages


def test_a_daemon_that_knows_no_network_has_none(client: Any, daemon: FakeDaemon) -> None:
    daemon.policy = types.Policy(network="none")
    assert client.get_policy().network == NetworkRules() and not client.get_policy().network


def test_list_without_end_is_not_taken(client: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_api.messages.LIST_MAX", 2)
    for name in ("denied_imports", "refused_language", "allowed_tools", "images"):
        daemon.policy = types.Policy()
        getattr(daemon.policy, name).extend(["x"] * 3)
        with pytest.raises(ProtocolError, match="more than 2"):
            client.get_policy()
    for name in ("default_hosts", "allowed_hosts", "denied_hosts"):
        daemon.policy = types.Policy()
        getattr(daemon.policy.network_rules, name).extend(["x"] * 3)
        with pytest.raises(ProtocolError, match="more than 2"):
            client.get_policy()
    for name in ("allowed", "locked"):
        daemon.policy = types.Policy()
        getattr(daemon.policy.packages, name).extend(["x"] * 3)
        with pytest.raises(ProtocolError, match="more than 2"):
            client.get_policy()
    daemon.policy = types.Policy(network_rules=types.NetworkRules(secrets=[types.NetworkSecret()] * 3))
    with pytest.raises(ProtocolError, match="more than 2"):
        client.get_policy()
    for name in ("denied_imports", "network", "denied_network", "packages", "images_with_missing"):
        daemon.sessions = [types.Session(state=types.SESSION_STATE_IDLE)]
        getattr(daemon.sessions[0], name).extend(["x"] * 3)
        with pytest.raises(ProtocolError, match="more than 2"):
            client.list_sessions()


def test_other_calls_give_values_not_messages(client: Any, daemon: FakeDaemon) -> None:
    assert [each.session_id for each in client.list_sessions()] == [SESSION]
    assert client.get_policy().images == ("base",)
    session = client.get_session(SESSION)
    assert session.keep_alive() == session.info == session.refresh()
    listed = session.list_files()
    assert ([each.path for each in listed], len(listed), listed.truncated) == (["a/b.csv"], 1, True)
    session.cancel("some-id")
    assert daemon.requests[-1][1].execution_id == "some-id"


# ---------------------------------------------------------------------------------------------------------------------
# Refusals and retries


VIOLATION = ("limits.memory_bytes", "ABOVE_CEILING", "2", "at most 1", "profiles.a.limits.max.memory_bytes")


def violations() -> types.Violations:
    field, kind, requested, allowed, rule = VIOLATION
    entry = types.Violation(field=field, kind=f"VIOLATION_KIND_{kind}", requested=requested, allowed=allowed, rule=rule)
    return types.Violations(violations=[entry], omitted=2)


@pytest.mark.parametrize(
    ("refusal", "kind", "attributes"),
    [
        (Refusal(grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_IMAGE"), InvalidRequest, {"reason": "UNKNOWN_IMAGE"}),
        (Refusal(grpc.StatusCode.OUT_OF_RANGE, "EVENT_OUT_OF_RANGE"), InvalidRequest, {}),
        (
            Refusal(grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION", more=(violations(),)),
            PolicyViolationError,
            {"violations": (Violation(*VIOLATION),), "omitted": 2},
        ),
        (Refusal(grpc.StatusCode.PERMISSION_DENIED, "ADMIN_ONLY"), AuthorizationError, {"reason": "ADMIN_ONLY"}),
        (Refusal(grpc.StatusCode.PERMISSION_DENIED), AuthorizationError, {}),
        (Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"), SessionGone, {"reason": "SESSION_NOT_FOUND"}),
        (Refusal(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND"), NotFoundError, {}),
        (Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SESSION_LOST"), SessionGone, {}),
        (Refusal(grpc.StatusCode.FAILED_PRECONDITION, "NAME_TAKEN"), PreconditionError, {}),
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED), ResourceExhaustedError, {"retry_after_s": None}),
        (Refusal(grpc.StatusCode.UNAVAILABLE, "BACKEND_UNAVAILABLE"), UnavailableError, {}),
        (Refusal(grpc.StatusCode.INTERNAL, "INTERNAL", incident_id="i-7"), DaemonError, {"incident_id": "i-7"}),
        (Refusal(grpc.StatusCode.UNIMPLEMENTED), DaemonError, {}),
        (Refusal(grpc.StatusCode.ABORTED), DaemonError, {}),
    ],
    ids=lambda each: each.code.name if isinstance(each, Refusal) else "",
)
def test_each_status_is_an_error_of_its_class(
    client: Any, daemon: FakeDaemon, refusal: Refusal, kind: type[Exception], attributes: dict[str, Any]
) -> None:
    daemon.refusals["CreateSession"].append(refusal)
    with pytest.raises(kind) as refused:
        client.create_session()
    assert {name: getattr(refused.value, name) for name in attributes} == attributes
    shown = "".join(traceback.format_exception(refused.value))
    assert "/grpc/" not in shown and "/executor_client/" not in shown
    assert isinstance(refused.value.__context__, grpc.RpcError)
    assert daemon.names() == ["CreateSession"]


def test_violations_are_said_a_line_each_with_their_rule(client: Any, daemon: FakeDaemon) -> None:
    refusal = Refusal(grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION", "cut off her…", more=(violations(),))
    daemon.refusals["CreateSession"].append(refusal)
    with pytest.raises(PolicyViolationError) as refused:
        client.create_session()
    assert str(refused.value).splitlines() == [
        "the policy refuses this:",
        "  limits.memory_bytes: asked for 2, allowed is at most 1 (profiles.a.limits.max.memory_bytes)",
        "  and 2 more",
    ]


def test_a_daemon_that_drains_is_there_and_says_so(daemon: FakeDaemon) -> None:
    refusal = Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the daemon is about to stop; it takes no new sessions")
    daemon.refusals["CreateSession"].extend([refusal] * 100)
    with ExecutorClient(daemon.address, token=TOKEN, connect_timeout_s=0.1, reconnect_timeout_s=0.1) as client:
        with pytest.raises(UnavailableError, match="can't serve this call now: the daemon is about to stop") as refused:
            client.create_session()
        assert "no daemon answers" not in str(refused.value)


def test_a_closed_session_is_not_one_that_never_was(client: Any) -> None:
    session = client.create_session()
    session.close()
    for call in (lambda: session.execute("1"), session.refresh, lambda: session.files.read("a"), session.export_state):
        with pytest.raises(SessionGone, match="this session was closed") as refused:
            call()
        assert refused.value.reason == "SESSION_CLOSED"
    session.close()


@pytest.mark.parametrize("reason", ["", "DRAINING"])
def test_call_is_repeated_unchanged_while_the_daemon_is_away(client: Any, daemon: FakeDaemon, reason: str) -> None:
    daemon.refusals["CreateSession"].extend([Refusal(grpc.StatusCode.UNAVAILABLE, reason)] * 2)
    client.create_session()
    assert daemon.names() == ["CreateSession"] * 3
    assert len({request.request_id for _, request in daemon.requests}) == 1


BUSY = [
    busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS"),
    busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "BACKEND_FULL"),
    busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"),
    busy(grpc.StatusCode.UNAVAILABLE, "AUDIT_UNAVAILABLE"),
]


@pytest.mark.parametrize("refusal", BUSY, ids=lambda refusal: refusal.reason)
def test_busy_daemon_is_asked_again_when_it_says_so(client: Any, daemon: FakeDaemon, refusal: Refusal) -> None:
    names = ("CreateSession", "KeepAlive", "SetVariables", "UploadBlob", "PutFile", "GetVariables", "DeleteSession")
    for name in names:
        daemon.refusals[name].append(refusal)
    daemon.variables = [pb.GetVariablesResponse(variables=pb.Variables())]
    session = client.create_session()
    session.keep_alive()
    session.set_variables({"large": b"x" * 600_000})
    session.put_file("a", b"x")
    session.get_variables(["x"])
    session.close()
    assert {name: daemon.names().count(name) for name in names} == {**dict.fromkeys(names, 2), "UploadBlob": 3}


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", seconds=3600), ResourceExhaustedError),
        (busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", seconds=1 << 60), ResourceExhaustedError),
        (busy(grpc.StatusCode.UNAVAILABLE, "IMAGE_NOT_READY", seconds=59), UnavailableError),
    ],
    ids=["a quota of an hour", "a time beyond all", "an image that could not be fetched"],
)
def test_what_takes_long_is_told_at_once(
    client: Any, daemon: FakeDaemon, refusal: Refusal, kind: type[ExecutorClientError]
) -> None:
    daemon.refusals["CreateSession"].append(refusal)
    with pytest.raises(kind) as refused:
        client.create_session()
    assert isinstance(refused.value, ResourceExhaustedError | UnavailableError)
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
    assert daemon.names() == ["CreateSession"]


def test_busy_daemon_is_not_asked_again_where_the_caller_does_not_wait(daemon: FakeDaemon) -> None:
    daemon.refusals["GetPolicy"].append(BUSY[0])
    with (
        ExecutorClient(daemon.address, token=TOKEN, busy_timeout_s=0) as client,
        pytest.raises(ResourceExhaustedError) as refused,
    ):
        client.get_policy()
    assert refused.value.retry_after_s == 0.001


def test_deletion_that_was_repeated_is_no_error(client: Any, daemon: FakeDaemon) -> None:
    session = client.create_session()
    daemon.refusals["DeleteSession"].extend(
        [Refusal(grpc.StatusCode.UNAVAILABLE), Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")]
    )
    session.close()


# ---------------------------------------------------------------------------------------------------------------------
# Variables


class Colour(enum.Enum):
    RED = 1


def test_variables_go_inline_or_by_blob_and_never_as_one_large_message(session: Any, daemon: FakeDaemon) -> None:
    given = {"small": {"a": [1, None]}, "large": b"x" * 600_000, **{f"v{n}": bytes([n]) * 250_000 for n in range(20)}}
    session.set_variables(given)
    request = daemon.requests[-1][1]
    assert request.ByteSize() < 4 << 20
    packed = {each.name: each.value.packed for each in request.variables}
    assert packed["large"].WhichOneof("content") == "blob"
    got = {name: values.decode(each.inline or daemon.blobs[each.blob.blob_id]) for name, each in packed.items()}
    assert got == given


def test_own_objects_are_pickled_for_the_same_python_only(session: Any, daemon: FakeDaemon) -> None:
    session.set_variables({"colour": Colour.RED})
    packed = daemon.requests[-1][1].variables[0].value.packed.inline
    prefix = b"cp%d.%d\0" % sys.version_info[:2]

    def load(foreign: memoryview) -> Any:
        assert bytes(foreign).startswith(prefix)
        return pickle.loads(bytes(foreign).removeprefix(prefix))

    assert values.decode(packed, foreign=load) is Colour.RED


def test_variable_that_cannot_be_sent_is_refused_by_name(session: Any, daemon: FakeDaemon) -> None:
    with pytest.raises(InvalidRequest, match="'lock' cannot be sent"):
        session.set_variables({"fine": 1, "lock": threading.Lock()})
    with pytest.raises(InvalidRequest, match="'1x' is not a valid variable name"):
        session.set_variables({"1x": 1})
    assert daemon.requests == []


def test_variables_that_are_too_many_or_too_large_are_refused_before_an_upload(
    session: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox held those that were uploaded before the last was refused."""
    with pytest.raises(InvalidRequest, match=r"1,025 variables are too many .* several calls"):
        session.set_variables({f"x{number}": None for number in range(1025)})
    monkeypatch.setattr(requests, "BLOB_BYTES_MAX", 1_500_000)
    with pytest.raises(ResourceExhaustedError, match="the variables have more than 1,500,000 bytes"):
        session.set_variables(dict.fromkeys("abc", b"x" * 600000))
    assert daemon.requests == []
    session.set_variables(dict.fromkeys("ab", b"x" * 600000))


def test_blobs_are_uploaded_again_when_the_call_is_repeated(session: Any, daemon: FakeDaemon) -> None:
    """A blob is used up by the message that names it, and the client cannot know whether the lost one arrived."""
    daemon.refusals["SetVariables"].append(Refusal(grpc.StatusCode.UNAVAILABLE))
    session.set_variables({"large": b"x" * 600_000})
    assert daemon.names() == ["UploadBlob", "SetVariables"] * 2


def test_variables_are_read_and_a_broken_one_hides_no_other(session: Any, daemon: FakeDaemon) -> None:
    large = value(b"y" * 600_000).packed.inline
    broken = types.Value(packed=types.Payload(inline=b"garbage"))
    variables = pb.Variables(missing=["gone"])
    variables.variables.add(name="x", value=value((1, 2)))
    variables.variables.add(name="large", value=types.Value(packed=blob("b", len(large))))
    variables.variables.add(name="broken", value=broken)
    pieces = [pb.GetVariablesResponse(blob_chunk=each.blob_chunk) for each in chunks("b", large)]
    daemon.variables = [*pieces, pb.GetVariablesResponse(variables=variables)]
    got = session.get_variables(["x", "large", "broken", "gone"])
    assert (got["x"], got["large"], type(got["broken"])) == ((1, 2), b"y" * 600_000, OpaqueValue)
    assert "gone" not in got
    daemon.variables = pieces
    with pytest.raises(ProtocolError, match="no variables"):
        session.get_variables()


def test_foreign_data_from_the_sandbox_is_never_unpickled(session: Any, daemon: FakeDaemon) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    packed = values.encode(Bomb(), fallback=lambda obj: b"cp3.11\0" + pickle.dumps(obj))
    variables = pb.Variables()
    variables.variables.add(name="bomb", value=types.Value(packed=types.Payload(inline=packed)))
    daemon.variables = [pb.GetVariablesResponse(variables=variables)]
    assert type(session.get_variables(["bomb"])["bomb"]) is OpaqueValue


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_path_that_is_no_text_is_refused(session: Any, daemon: FakeDaemon) -> None:
    for use in (session.get_file, session.list_files, lambda path: session.put_file(path, b"")):
        with pytest.raises(InvalidRequest, match="path"):
            use("\ud800")
    assert daemon.requests == []
