"""Hosts are asked for, granted and reported on the wire, and what went out of the sandbox is in the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_server.core import Event, NetworkUsage, Outcome, Result, VariablesState
from executor_server.policy import Policy, parse_policy
from tests.rpc.edge import AUTH, Edge, FakeExecution, refused, serving


async def test_what_went_out_of_the_sandbox_leaves_with_the_result(edge: Edge) -> None:
    session = await edge.session()
    result = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1, network=NetworkUsage(2, 1, 300, 4_000))
    for each in (result, replace(result, network=NetworkUsage())):
        session.next_execution = FakeExecution([Event(1, each)])
        (answer,) = [
            answer
            async for answer in edge.stub.Execute(
                pb.ExecuteRequest(session_id="s1", execution_id="e1", code="1"), metadata=AUTH
            )
        ]
        usage = answer.event.result.usage
        assert usage.HasField("network") == (each is result)
        network = usage.network
        used = NetworkUsage(network.connections, network.denied, network.sent_bytes, network.received_bytes)
        assert used == each.network


NETWORK = """
[profiles.a.network]
default = ["pypi.org:443"]
allowed = ["*.example.com"]
denied = ["x.example.com"]
max_connections = 3
max_new_connections_per_minute = 40
max_sent_bytes = 5_000
max_received_bytes = 6_000
max_connection_s = 7.5
[[profiles.a.network.secrets]]
host = "api.example.com"
methods = ["GET"]
paths = ["/a/*"]
header = "X-Key"
value = "${key}"
[profiles.a.quotas]
egress_bytes_per_hour = 8_000
"""


async def test_hosts_are_granted_told_and_refused(tmp_path: Path) -> None:
    file = parse_policy(f"default = 'a'\n{NETWORK}".encode(), Path("p.toml"))
    policy = Policy(file, images=["base"], backend="local", orphan_time_s=600.0)
    async with serving(tmp_path, current_policy=lambda: policy) as edge:
        request = pb.CreateSessionRequest(request_id="r", network=["API.example.com:443"])
        session = (await edge.stub.CreateSession(request, metadata=AUTH)).session
        assert list(session.network) == ["api.example.com:443", "pypi.org:443"]
        assert list(session.denied_network) == ["x.example.com"]
        reported = (await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH)).policy
        assert (reported.network, reported.quotas.egress_bytes_per_hour) == ("names", 8_000)
        assert reported.network_rules == types.NetworkRules(
            default_hosts=["pypi.org:443"],
            allowed_hosts=["*.example.com"],
            denied_hosts=["x.example.com"],
            secrets=[types.NetworkSecret(host="api.example.com", header="X-Key", methods=["GET"], paths=["/a/*"])],
            max_connections=3,
            max_new_connections_per_minute=40,
            max_sent_bytes=5_000,
            max_received_bytes=6_000,
            max_connection_s=7.5,
        )
        assert b"${key}" not in reported.SerializeToString(), "the value of a header is the policy's own affair"
        for asked, code in (("example.org", "PERMISSION_DENIED"), ("https://pypi.org", "INVALID_ARGUMENT")):
            refused_request = pb.CreateSessionRequest(request_id="s", network=["pypi.org:443", asked])
            assert (await refused(edge.stub.CreateSession(refused_request, metadata=AUTH)))[0] == code
