"""Admin calls over the wire, and the command line that makes them, on a session layer of plain values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import structlog
from click.testing import CliRunner, Result

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc
from executor_api.v1 import types_pb2
from executor_server.api.admin import AdminService
from executor_server.api.audit_view import AuditView
from executor_server.api.ended_sessions import EndedSessions
from executor_server.api.session_views import SessionViews
from executor_server.api.status import DaemonStatus
from executor_server.core.config.key_types import ConfigError
from executor_server.core.errors import NotFound, Reason
from executor_server.core.model import AuditRules, PolicyRef, Principal, SandboxSpec, SessionFacts
from executor_server.core.network import EgressConnection, EgressDenial, NetworkRules, NetworkSecret, NetworkUsage
from executor_server.daemon.cli import main
from executor_server.fleet.api.front_fleet import FRONT_PRINCIPAL
from executor_server.policy.approvals import Approvals
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, Tenant
from executor_server.policy.profile import Profile, QuotasTable
from executor_server.policy.quotas.quotas import Quotas
from executor_server.sessions.network import OpenConnection
from tests.rpc.edge import (
    AUTH,
    TOKEN,
    FakeExecution,
    FakeNetwork,
    FakeSession,
    FakeSessions,
    make_server,
    refusal,
    refused,
    settings,
)
from tests.rpc.session_names import name_of
from tests.support.fleet_daemon import NODES, wanted
from tests.support.specs import POLICY, session_spec

SPEC = session_spec(SandboxSpec("base", 2**28, 16, 2**24, 600.0))
FILE = PolicyFile(
    version="7",
    default="plain",
    profiles={"plain": Profile(), "batch": Profile(quotas=QuotasTable(sessions=3, cpu_time_s_per_hour=7200.0))},
    tenants={"acme": Tenant(profile="batch")},
)


RULES = NetworkRules(
    ("api.example:443", "*.b.example"),
    ("no.example",),
    (NetworkSecret("api.example", "Authorization", "Bearer ${github-bot}"),),
    max_sent_bytes=1000,
)


@dataclass
class FakeManager:
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    draining: bool = False

    def list_all(self) -> list[FakeSession]:
        return list(self.sessions.values())

    def find(self, session_id: str) -> FakeSession:
        name = name_of(session_id)
        if name not in self.sessions:
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session {name!r}")
        return self.sessions[name]

    async def kill(self, session_id: str, *, unless_used: bool = False) -> None:
        self.find(session_id)
        del self.sessions[name_of(session_id)]

    def stop_taking(self) -> None:
        self.draining = True

    def take_again(self) -> None:
        self.draining = False


class World:
    """A daemon's admin side, with two sessions of two tenants."""

    def __init__(self, ended: EndedSessions) -> None:
        self.manager = FakeManager()
        self.policy = Policy(FILE, images=["base"], backend="local", orphan_time_s=600.0)
        self.quotas = Quotas(lambda tenant: self.policy.quotas_of(tenant))
        self.views = SessionViews(cast("Any", self.manager.list_all), ended)
        self.recorded: list[tuple[str, str, str]] = []
        self.reload_raises: ConfigError | None = None
        for number, tenant in enumerate(("globex", "acme")):
            owner = Principal(tenant, "ci")
            session = FakeSession(f"s{number}", owner, SPEC, create_time_s=1_700_000_000.0 - number)
            self.manager.sessions[session.session_id] = session
            facts = SessionFacts(
                session_id=session.session_id,
                request_id="r",
                owner=owner,
                policy=PolicyRef("batch", "7", "f"),
                audit=AuditRules(),
                backend="local",
                image="base",
                warm=True,
            )
            self.quotas.session_created(facts, 0.0)

    async def reload(self) -> bool:
        if self.reload_raises is not None:
            raise self.reload_raises
        before = self.policy.fingerprint
        file = FILE.model_copy(update={"version": "8"})
        self.policy = Policy(file, images=["base"], backend="local", orphan_time_s=600.0)
        return before != self.policy.fingerprint

    def record(self, principal: Principal, method: str, target: str) -> None:
        if principal != FRONT_PRINCIPAL:  # a front watches the approvals of its nodes
            session_id, slash, execution_id = target.partition("/")
            self.recorded.append((principal.tenant, method, f"{name_of(session_id)}{slash}{execution_id}"))

    def use_network(self) -> None:
        """The first session has a network, and has used it."""
        session = self.manager.sessions["s0"]
        session.spec = replace(session.spec, network=RULES)
        connection = EgressConnection("c1", "api.example", 443, "192.0.2.1", "api.example:443")
        denial = EgressDenial("x\x1b.example", 80, "not_allowed", "x is not allowed")
        session.network = FakeNetwork(
            NetworkUsage(3, 1, 999, 2000),
            (OpenConnection(connection, "e1", 1_700_000_000.0),),
            ((1_700_000_001.5, denial),),
            is_exhausted=True,
        )

    def service(self) -> AdminService:
        manager = cast("Any", self.manager)
        approvals = Approvals()
        environments = cast("Any", None)  # tests/rpc/test_admin_environments.py has some
        return AdminService(
            manager,
            self.quotas,
            lambda: self.policy,
            self.reload,
            self.record,
            environments,
            approvals,
            self.views,
            DaemonStatus(
                version="1",
                start_time_s=1_700_000_000.0,
                max_sessions=64,
                images={"local": ("base",)},
                sessions=manager,
                approvals=approvals,
                policy=lambda: self.policy,
                pool=dict,
                backends=dict,
                audit=None,
            ),
            AuditView(None, Path("none")),
            cast("Any", None),  # tests/rpc/test_viewing.py has a daemon's
        )


@asynccontextmanager
async def serving(world: World, directory: Path) -> AsyncIterator[str]:
    server = make_server(
        FakeSessions(world.manager.sessions),
        settings(f"unix:{directory}/s"),
        current_policy=lambda: world.policy,
        admin=world.service(),
        front_reload=world.reload,
    )
    (address,) = await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """Keeps the daemon's log separate from the output of the command line, which runs in the same process."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(EndedSessions(tmp_path / "ended.db")) as ended:
        yield World(ended)


@pytest.fixture
async def address(world: World, tmp_path: Path) -> AsyncIterator[str]:
    async with serving(world, tmp_path) as found:
        yield found


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield pb_grpc.AdminServiceStub(channel)


# ---------------------------------------------------------------------------------------------------------------------
# The service


async def test_sessions_of_all_tenants_are_listed_oldest_first(stub: Any) -> None:
    answer = await stub.ListAllSessions(pb.ListAllSessionsRequest(), metadata=AUTH)
    assert [(s.tenant, s.principal, s.session.session_id) for s in answer.sessions] == [
        ("acme", "ci", "s1"),
        ("globex", "ci", "s0"),
    ]


async def test_sessions_of_one_tenant_are_listed(stub: Any) -> None:
    answer = await stub.ListAllSessions(pb.ListAllSessionsRequest(tenant="acme"), metadata=AUTH)
    assert [s.session.session_id for s in answer.sessions] == ["s1"]


async def test_a_session_of_any_tenant_can_be_killed_once(world: World, stub: Any) -> None:
    await stub.KillSession(pb.KillSessionRequest(session_id="s0"), metadata=AUTH)
    assert list(world.manager.sessions) == ["s1"]
    again = stub.KillSession(pb.KillSessionRequest(session_id="s0"), metadata=AUTH)
    assert await refused(again) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_an_execution_of_any_tenant_can_be_stopped(world: World, stub: Any) -> None:
    execution = world.manager.sessions["s0"].executions["e1"] = FakeExecution()
    request = pb.StopExecutionRequest(session_id="s0", execution_id="e1")
    await stub.StopExecution(request, metadata=AUTH)
    assert execution.asked == [("stop", "an administrator stopped it")]
    assert world.recorded == [("local", "StopExecution", "s0/e1")]
    request.execution_id = "e2"
    assert await refused(stub.StopExecution(request, metadata=AUTH)) == ("NOT_FOUND", "EXECUTION_NOT_FOUND")
    request.session_id = "none"
    assert await refused(stub.StopExecution(request, metadata=AUTH)) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_the_network_of_any_session_is_shown_without_a_secrets_value(world: World, stub: Any) -> None:
    world.use_network()
    answer = await stub.GetSessionNetwork(pb.GetSessionNetworkRequest(session_id="s0"), metadata=AUTH)
    assert list(answer.rules.allowed_hosts) == ["api.example:443", "*.b.example"]
    assert list(answer.rules.secrets) == [types_pb2.NetworkSecret(host="api.example", header="Authorization")]
    assert "Bearer" not in str(answer)
    assert answer.usage == types_pb2.NetworkUsage(connections=3, denied=1, sent_bytes=999, received_bytes=2000)
    (opened,), (denied,) = answer.connections, answer.denials
    assert (opened.host, opened.port, opened.address, opened.rule, opened.execution_id, opened.open_time.seconds) == (
        *("api.example", 443, "192.0.2.1", "api.example:443", "e1"),
        1_700_000_000,
    )
    assert (denied.host, denied.port, denied.reason, denied.message) == (
        *("x\x1b.example", 80, "not_allowed"),
        "x is not allowed",
    )
    assert answer.exhausted
    without = await stub.GetSessionNetwork(pb.GetSessionNetworkRequest(session_id="s1"), metadata=AUTH)
    assert not without.HasField("rules")
    assert not without.HasField("usage")
    unknown = stub.GetSessionNetwork(pb.GetSessionNetworkRequest(session_id="none"), metadata=AUTH)
    assert await refused(unknown) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_the_list_of_sessions_says_what_they_used_of_the_network(world: World, stub: Any) -> None:
    world.use_network()
    answer = await stub.ListAllSessions(pb.ListAllSessionsRequest(tenant="globex"), metadata=AUTH)
    assert answer.sessions[0].session.network_usage.received_bytes == 2000


async def test_bytes_of_the_network_are_reported_beside_their_quota(world: World, stub: Any) -> None:
    facts = SessionFacts("s0", Principal("globex", "ci"), POLICY, AuditRules(), "local", "base", warm=True)
    world.quotas.network_moved(facts, 10, 20)
    (use,) = (await stub.GetUsage(pb.GetUsageRequest(tenant="globex"), metadata=AUTH)).tenants
    assert use.egress_bytes_in_last_hour == 30


async def test_a_drain_can_be_taken_back(world: World, stub: Any) -> None:
    world.manager.sessions["s0"].state = "busy"
    node = NODES[0] if wanted() else ""
    drained = await stub.Drain(pb.DrainRequest(node=node), metadata=AUTH)
    assert (drained.draining, drained.sessions, drained.busy) == (True, 2, 1)
    assert not (await stub.Drain(pb.DrainRequest(node=node, resume=True), metadata=AUTH)).draining


async def test_a_reload_reports_the_policy_in_force(world: World, stub: Any) -> None:
    answer = await stub.Reload(pb.ReloadRequest(), metadata=AUTH)
    assert (answer.version, answer.fingerprint, answer.changed) == ("8", world.policy.fingerprint, True)
    assert not (await stub.Reload(pb.ReloadRequest(), metadata=AUTH)).changed


async def test_a_reload_of_what_is_not_valid_lists_every_problem(world: World, stub: Any) -> None:
    world.reload_raises = ConfigError(["profiles.a.limits: is wrong", "default: no profile 'x'"])
    found = await refusal(stub.Reload(pb.ReloadRequest(), metadata=AUTH))
    assert found.code.name == "INVALID_ARGUMENT"
    assert found.message.endswith("profiles.a.limits: is wrong\ndefault: no profile 'x'")


async def test_usage_is_reported_beside_its_quotas(stub: Any) -> None:
    answer = await stub.GetUsage(pb.GetUsageRequest(), metadata=AUTH)
    assert [(use.tenant, use.profile, use.sessions) for use in answer.tenants] == [
        ("acme", "batch", 1),
        ("globex", "plain", 1),
    ]
    assert answer.tenants[0].quotas == types_pb2.Quotas(sessions=3, cpu_time_s_per_hour=7200.0)


async def test_a_tenant_that_has_used_nothing_has_its_quotas(stub: Any) -> None:
    (use,) = (await stub.GetUsage(pb.GetUsageRequest(tenant="nobody"), metadata=AUTH)).tenants
    assert (use.tenant, use.profile, use.sessions) == ("nobody", "plain", 0)


async def test_every_call_is_recorded_before_its_effect(world: World, stub: Any) -> None:
    await stub.ListAllSessions(pb.ListAllSessionsRequest(tenant="acme"), metadata=AUTH)
    await refused(stub.KillSession(pb.KillSessionRequest(session_id="none"), metadata=AUTH))
    await stub.Drain(pb.DrainRequest(resume=True), metadata=AUTH)
    await stub.Reload(pb.ReloadRequest(), metadata=AUTH)
    await stub.GetUsage(pb.GetUsageRequest(), metadata=AUTH)
    await stub.GetSessionNetwork(pb.GetSessionNetworkRequest(session_id="s1"), metadata=AUTH)
    assert world.recorded == [
        ("local", "ListAllSessions", "acme"),
        ("local", "KillSession", "none"),
        ("local", "Drain", "resume"),
        ("local", "Reload", ""),
        ("local", "GetUsage", ""),
        ("local", "GetSessionNetwork", "s1"),
    ]


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("KillSession", pb.KillSessionRequest()),
        ("KillSession", pb.KillSessionRequest(session_id="../s0")),
        ("StopExecution", pb.StopExecutionRequest(session_id="s0", execution_id="a/b")),
        ("ListAllSessions", pb.ListAllSessionsRequest(tenant="a\nb")),
        ("GetUsage", pb.GetUsageRequest(tenant="x" * 65)),
        ("GetSessionNetwork", pb.GetSessionNetworkRequest(session_id="a b")),
    ],
    ids=lambda value: str(value)[:40].strip(),
)
async def test_what_has_a_wrong_form_is_refused(world: World, stub: Any, method: str, request_message: Any) -> None:
    assert await refused(getattr(stub, method)(request_message, metadata=AUTH)) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert not world.recorded


async def test_requests_that_wait_are_listed_and_an_unknown_one_cannot_be_decided(stub: Any) -> None:
    watching = stub.WatchApprovals(pb.WatchApprovalsRequest(), metadata=AUTH)
    deciding = stub.DecideApproval(
        pb.DecideApprovalRequest(approval_id="a", decision=pb.APPROVAL_DECISION_ONCE), metadata=AUTH
    )
    assert not (await watching.read()).approvals
    watching.cancel()
    assert await refused(deciding) == ("NOT_FOUND", "APPROVAL_NOT_FOUND")


async def test_a_caller_without_credentials_learns_nothing(stub: Any) -> None:
    for method, request in (("ListAllSessions", pb.ListAllSessionsRequest()), ("Reload", pb.ReloadRequest())):
        assert (await refused(getattr(stub, method)(request)))[0] == "UNAUTHENTICATED"


# ---------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.fixture
async def run(address: str) -> Any:
    async def in_thread(*arguments: str, token: str | None = TOKEN) -> Result:
        environment = {"EXECUTOR_ADDRESS": address, "EXECUTOR_TOKEN": token}
        return await asyncio.to_thread(CliRunner().invoke, main, ["admin", *arguments], env=environment)

    return in_thread


async def test_the_command_line_lists_sessions_as_a_table(run: Any) -> None:
    lines = (await run("sessions")).stdout.splitlines()
    heads = ["SESSION", "TENANT", "PRINCIPAL", "STATE", "IMAGE", "BACKEND", "PROFILE", "CREATED", "EXPIRES", "PACKAGES"]
    assert lines[0].split() == heads
    assert lines[1].split()[:7] == ["s1", "acme", "ci", "idle", "base", "fake", "default"]


async def test_the_command_line_answers_scripts_in_json(run: Any) -> None:
    answer = json.loads((await run("sessions", "--tenant", "globex", "--json")).stdout)
    assert [session["tenant"] for session in answer["sessions"]] == ["globex"]


async def test_the_command_line_kills_drains_resumes_and_reloads(world: World, run: Any) -> None:
    assert (await run("kill", "s0")).stdout == "Session s0 has ended.\n"
    assert (await run("drain")).stdout == "The daemon takes no new sessions. There are 1, of which 0 are busy.\n"
    assert (await run("resume")).stdout == "The daemon takes new sessions. There are 1, of which 0 are busy.\n"
    printed = (await run("reload")).stdout
    assert printed == f"The policy is now version 8, fingerprint {world.policy.fingerprint}.\n"


async def test_the_command_line_shows_use_and_quota(run: Any) -> None:
    lines = (await run("usage")).stdout.splitlines()
    assert lines[0].startswith("TENANT  PROFILE  SESSIONS")
    assert lines[1].startswith("acme    batch    1 of 3    ")
    assert "0 of 7,200" in lines[1]


async def test_the_command_line_shows_the_network_of_a_session(world: World, run: Any) -> None:
    world.use_network()
    lines = [" ".join(line.split()) for line in (await run("egress", "s0")).stdout.splitlines()]
    assert lines[:8] == [
        "allowed api.example:443, *.b.example",
        "denied no.example",
        "secrets Authorization for api.example",
        "connections made 3",
        "refused 1",
        "bytes sent 999 of 1,000",
        "bytes received 2,000 of 1,073,741,824",
        "closed by a quota yes: the tenant's quota egress_bytes_per_hour is spent",
    ]
    assert lines[10].startswith("api.example:443 192.0.2.1 api.example:443 e1 2023-11-14")
    assert lines[13].startswith("x?.example:80 - not_allowed 2023-11-14")
    assert (await run("egress", "s1")).stdout == "The session has no network.\n"
    assert json.loads((await run("egress", "s0", "--json")).stdout)["usage"]["denied"] == "1"


async def test_a_refusal_is_a_sentence_and_an_exit_code(run: Any) -> None:
    failed = await run("kill", "none")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert failed.stderr == "NOT_FOUND: there is no session 'none'\n"


async def test_a_wrong_token_is_refused(run: Any) -> None:
    failed = await run("sessions", token="x" * 43)
    assert failed.exit_code == 1 and failed.stderr.startswith("UNAUTHENTICATED: ")


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["admin", "sessions", *arguments], env=environment)


def test_a_daemon_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    failed = invoke("--state-dir", str(tmp_path))
    assert failed.exit_code == 1 and failed.stderr.startswith("UNAVAILABLE: ")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "printed"),
    [
        (["--address", "example.org:1"], 1, "the token would be sent unencrypted"),
        (["--address", "nonsense"], 1, "is not an address"),
        (["--address", "unix:/x", "--tls"], 1, "A Unix socket has no TLS"),
        (["--tls-ca", "/no/such/file", "--address", "127.0.0.1:1"], 1, "can't be read: No such file"),
        (["--tls-cert", "/x"], 2, "must be given together"),
        (["--address", "127.0.0.1:1", "--token", "crlf\r\n"], 1, "The token has characters that can't be sent"),
        (["--address", "127.0.0.1:1", "--token", "é"], 1, "The token has characters that can't be sent"),
        (["--address", "unix:/x\udcff"], 1, "is not an address"),
        (["--address", "127.0.0.1:1", "--tenant", "x\udcff"], 1, "is not UTF-8 text, so it can't be sent"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_can_not_be_an_endpoint_is_a_sentence(arguments: list[str], exit_code: int, printed: str) -> None:
    failed = invoke(*arguments, EXECUTOR_TOKEN=TOKEN)
    assert failed.exit_code == exit_code and printed in failed.stderr


def test_the_token_of_this_user_is_not_sent_to_others(tmp_path: Path) -> None:
    """Otherwise the owner of any address that a user types would receive it."""
    (tmp_path / "token").write_text("secret\n")  # malformed: reading it would be another refusal
    failed = invoke("--address", "example.org:1", "--tls", "--tls-ca", "/no/such/file", "--state-dir", str(tmp_path))
    assert "/no/such/file can't be read" in failed.stderr


async def test_text_that_could_steer_a_terminal_is_not_printed(world: World, run: Any) -> None:
    session = world.manager.sessions["s1"]
    world.manager.sessions["s1"] = replace(session, owner=Principal("acme", "\x1b[2J"))
    assert "\x1b" not in (await run("sessions")).stdout
