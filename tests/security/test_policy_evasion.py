"""A tenant that tries to evade its strict profile, over the wire of a real daemon."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_services
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as services
from executor_api.v1 import types_pb2 as types
from executor_server.policy.identity.token_file import TokenFile
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import Daemon, code_of, running_daemon
from tests.support.polling import eventually

POLICY = """
version = "{version}"
[profiles.held]
on_reload = "tighten"
language.preset = "strict"
imports.default = ["math"]
imports.allowed = []
tools.allowed = ["search", "web_*"]
audit.code = "full"
files = {{ max_put_bytes = 30_000, max_puts = 2, max_get_bytes = 5_000 }}
limits.execution_max = {{ wall_time_s = {wall_time_s}, operations = 1_000_000 }}
[profiles.free]
limits.execution_max.wall_time_s = {wall_time_s}
[tenants.held]
profile = "held"
[tenants.free]
profile = "free"
[tenants.local]
profile = "free"
"""
TIMEOUT_S = 60.0


@dataclass
class Held:
    """A daemon, and the tenant that is held to a strict profile."""

    daemon: Daemon
    policy_path: Path
    channel: grpc.Channel
    tokens: dict[str, str]

    def call(self, method: str, request: Any, tenant: str = "held", stub: Any = services.ExecutorServiceStub) -> Any:
        asked = iter(request) if isinstance(request, list) else request
        metadata = (("authorization", f"Bearer {self.tokens[tenant]}"),)
        return getattr(stub(self.channel), method)(asked, metadata=metadata, timeout=TIMEOUT_S)

    def create(self, **asked: Any) -> types.Session:
        session: types.Session = self.call(
            "CreateSession", pb.CreateSessionRequest(**{"request_id": uuid.uuid4().hex, **asked})
        ).session
        return session

    def execute(self, session_id: str, code: str, execution_id: str = "", **limits: Any) -> types.ExecutionResult:
        request = pb.ExecuteRequest(
            session_id=session_id,
            execution_id=execution_id or uuid.uuid4().hex,
            code=code,
            limits=types.Limits(**limits),
        )
        result: types.ExecutionResult = list(self.call("Execute", request))[-1].event.result
        return result

    def put(self, session_id: str, data: bytes, **header: Any) -> Any:
        size_bytes = header.pop("size_bytes", len(data))
        head = pb.PutFileHeader(session_id=session_id, size_bytes=size_bytes, **header)
        return self.call("PutFile", [pb.PutFileRequest(header=head), pb.PutFileRequest(data=data)])

    def reload(self, version: str, wall_time_s: float) -> None:
        new = self.policy_path.with_suffix(".new")
        new.write_text(POLICY.format(version=version, wall_time_s=wall_time_s))
        new.rename(self.policy_path)
        self.call("Reload", admin_pb.ReloadRequest(), "local", admin_services.AdminServiceStub)


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="e-"))
    policy_path = directory / "policy.toml"
    policy_path.write_text(POLICY.format(version="1", wall_time_s=2))
    (directory / "executor.toml").write_text(f'[policy]\nfile = "{policy_path}"\n[pool]\nsize = 0\n')
    with (
        running_daemon(directory, "--config", str(directory / "executor.toml")) as daemon,
        grpc.insecure_channel(daemon.address) as channel,
    ):
        tokens = {name: TokenFile(daemon.state_dir / "tokens.json").new(name, "test")[1] for name in ("held", "free")}
        ready = Held(daemon, policy_path, channel, {**tokens, "local": daemon.token})
        assert eventually(lambda: code_of(partial(ready.call, "GetPolicy", pb.GetPolicyRequest(), "free")) == "OK")
        yield ready
    shutil.rmtree(directory)


@pytest.fixture
def session_id(held: Held) -> Iterator[str]:
    session = held.create()
    yield session.session_id
    held.call("DeleteSession", pb.DeleteSessionRequest(session_id=session.session_id))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return str(refused.value.details())


# -- the client's prelude


@pytest.mark.parametrize(
    ("prelude", "said"),
    [
        ("import os", "import_denied"),
        ("eval('1')", "policy_denied"),
        ("().__class__", "policy_denied"),
        ("open('/etc/passwd')", "policy_denied"),
        ("while True: pass", "operation_limit at 'while True: pass': OperationLimitExceeded: Reached the max number"),
        ("import math\nmath.factorial(3_000_000)", "timeout"),
    ],
)
def test_a_prelude_is_held_to_what_an_execution_is(held: Held, prelude: str, said: str) -> None:
    assert f"the prelude ended as {said}" in refusal(partial(held.create, prelude=prelude))


def test_a_prelude_is_in_the_audit_log_as_code_is(held: Held) -> None:
    session = held.create(prelude="hidden = 'in the prelude'")
    held.call("DeleteSession", pb.DeleteSessionRequest(session_id=session.session_id))
    requested = [each for each in records(held.daemon.state_dir / "audit") if each["kind"] == "session_requested"]
    assert requested[-1]["code"] == "hidden = 'in the prelude'"


# -- tools


@pytest.mark.parametrize(
    "name",
    ["Search", "searcher", "search ", "\N{CYRILLIC SMALL LETTER DZE}earch", "web", "_web_x", "__import__", "*", ""],
)
def test_a_tool_by_another_name_is_refused(held: Held, session_id: str, name: str) -> None:
    request = pb.RegisterToolsRequest(session_id=session_id, tools=[types.ToolSpec(name=name)])
    assert code_of(partial(held.call, "RegisterTools", request)) in ("PERMISSION_DENIED", "INVALID_ARGUMENT")


# -- files


def archive(count: int, size_bytes: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for number in range(count):
            member = tarfile.TarInfo(f"{number}")
            member.size = size_bytes
            tar.addfile(member, io.BytesIO(b"x" * size_bytes))
    return packed.getvalue()


def test_an_archive_is_held_to_the_size_of_a_file(held: Held, session_id: str) -> None:
    put = partial(held.put, session_id, path="", format=types.FILE_FORMAT_TAR)
    assert code_of(partial(put, archive(1, 30_000))) == "PERMISSION_DENIED"
    assert code_of(partial(put, archive(1, 30_000), size_bytes=25_000)) == "INVALID_ARGUMENT"


def test_an_archive_that_breaks_off_counts_for_what_came_before(held: Held, session_id: str) -> None:
    broken = archive(3, 100)[: 3 * 1024]
    codes = [code_of(partial(held.put, session_id, broken, path="", format=types.FILE_FORMAT_TAR)) for _ in range(3)]
    assert codes == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "PERMISSION_DENIED"]


def test_a_directory_is_not_had_in_one_piece_when_it_is_too_large(held: Held, session_id: str) -> None:
    held.put(session_id, archive(4, 2_000), path="d", format=types.FILE_FORMAT_TAR)
    request = pb.GetFileRequest(session_id=session_id, path="d", format=types.FILE_FORMAT_TAR)
    received = 0
    with pytest.raises(grpc.RpcError):
        for response in held.call("GetFile", request):
            received += len(response.data)
    assert received <= 5_000


# -- another policy


def test_an_id_from_before_gives_nothing_that_the_new_policy_does_not(held: Held) -> None:
    session_id = held.create(request_id="kept").session_id
    first = held.execute(session_id, "1 + 1", "e", wall_time_s=2)
    try:
        held.reload("2", 1)
        assert held.execute(session_id, "1 + 1", "e", wall_time_s=2) == first
        assert "asked for 2, allowed is at most 1" in refusal(lambda: held.execute(session_id, "1", wall_time_s=2))
        assert "EXECUTION_ID_REUSED" in reason_of(lambda: held.execute(session_id, "2", "e", wall_time_s=2))
        again = held.create(request_id="kept")
        assert (again.session_id, again.policy.version) == (session_id, "2")
    finally:
        held.call("DeleteSession", pb.DeleteSessionRequest(session_id=session_id))
        held.reload("1", 2)


def test_a_session_being_created_gets_what_the_new_policy_grants(held: Held) -> None:
    """Its profile keeps sessions as they were granted; this one is not granted yet."""
    prelude = "import time\nfor _ in range(10): time.sleep(0.1)"
    log = held.daemon.state_dir / "audit"
    with ThreadPoolExecutor(1) as threads:
        request = pb.CreateSessionRequest(request_id="on-its-way", prelude=prelude)
        creation = threads.submit(held.call, "CreateSession", request, "free")
        assert eventually(lambda: "on-its-way" in [each.get("request") for each in records(log)])
        held.reload("3", 1.5)
        session = creation.result().session
    held.reload("1", 2)
    held.call("DeleteSession", pb.DeleteSessionRequest(session_id=session.session_id), "free")
    assert session.policy.version == "3"


def reason_of(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return str([item.value for item in refused.value.trailing_metadata()])


# -- tokens


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "Bearer {held}"), ("authorization", "Bearer {local}")],
        [("authorization", "Bearer  {held}")],
        [("authorization", "Bearer {held} ")],
        [("authorization", "{held}")],
        [("authorization", "Basic {held}")],
        [("x-authorization", "Bearer {held}")],
        [("cookie", "authorization=Bearer {held}")],
    ],
)
def test_a_token_counts_only_where_it_belongs(held: Held, metadata: list[tuple[str, str]]) -> None:
    given = [(key, text.format(**held.tokens)) for key, text in metadata]
    get_policy = services.ExecutorServiceStub(held.channel).GetPolicy
    assert code_of(lambda: get_policy(pb.GetPolicyRequest(), metadata=given, timeout=TIMEOUT_S)) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        *(
            (f"/executor_api.v1.AdminService/{method.name}", "PERMISSION_DENIED")
            for method in admin_pb.DESCRIPTOR.services_by_name["AdminService"].methods
        ),
        ("/executor_api.v1.AdminService/", "PERMISSION_DENIED"),
        ("//executor_api.v1.AdminService/Drain", "UNIMPLEMENTED"),
        ("/executor_api.v1.adminservice/Drain", "UNIMPLEMENTED"),
        ("", "UNIMPLEMENTED"),
    ],
)
def test_no_spelling_of_the_method_makes_an_admin_call(held: Held, path: str, code: str) -> None:
    call = held.channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
    assert code_of(lambda: call(b"", timeout=TIMEOUT_S)) == "UNAUTHENTICATED"
    metadata = (("authorization", f"Bearer {held.tokens['held']}"),)
    assert code_of(lambda: call(b"", metadata=metadata, timeout=TIMEOUT_S)) == code
