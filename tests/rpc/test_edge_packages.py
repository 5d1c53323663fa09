"""Packages on the wire: what a policy grants of them, and the refusals that a client reads."""

from __future__ import annotations

from pathlib import Path

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2 as types
from executor_server.policy import Policy, parse_policy
from tests.rpc.edge import AUTH, refusal, serving

PACKAGES = """
[profiles.a.packages]
allowed = ["Pandas>=2", "scikit-learn"]
auto = true
exclude_newer = "36h"
max_requirements = 2
max_environment_bytes = "1GiB"
"""


def policy_of(text: str) -> Policy:
    file = parse_policy(f"default = 'a'\n{text}".encode(), Path("p.toml"))
    return Policy(file, images=["base"], backend="local", orphan_time_s=600.0)


async def test_the_packages_of_a_policy_are_reported(tmp_path: Path) -> None:
    policy = policy_of(PACKAGES)
    async with serving(tmp_path, current_policy=lambda: policy) as edge:
        reported = (await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH)).policy
        assert reported.packages == types.PackagesPolicy(
            allowed=["pandas>=2", "scikit-learn"],
            auto=True,
            max_requirements=2,
            max_environment_bytes=2**30,
            exclude_newer_s=129_600.0,
        )


async def test_a_policy_without_packages_reports_none(tmp_path: Path) -> None:
    policy = policy_of("[profiles.a]")
    async with serving(tmp_path, current_policy=lambda: policy) as edge:
        assert not (await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH)).policy.HasField("packages")


async def test_refused_packages_are_violations_and_malformed_ones_are_wrong_fields(tmp_path: Path) -> None:
    policy = policy_of(PACKAGES)
    async with serving(tmp_path, current_policy=lambda: policy) as edge:

        async def answer(*packages: str) -> tuple[str, str]:
            request = pb.CreateSessionRequest(request_id="r", packages=packages)
            found = await refusal(edge.stub.CreateSession(request, metadata=AUTH))
            return found.code.name, found.message

        code, message = await answer("torch", "pandas<2")
        assert code == "PERMISSION_DENIED"
        assert "packages: asked for pandas<2, allowed is pandas>=2;" in message
        assert "packages: asked for torch, allowed is pandas>=2, scikit-learn" in message
        code, message = await answer("pandas", "x @ file:///etc/passwd")
        assert code == "INVALID_ARGUMENT"
        assert message.startswith("packages[1] is a URL, but packages come from the daemon's index only; write ")
