"""Environments of packages on the wire: asked for without a session, and said to be on their way."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_server.core import PackagesSpec, Progress, Reason, Unavailable
from tests.rpc.edge import AUTH, Edge, refusal, refused


async def test_an_environment_that_is_ready_is_described(edge: Edge) -> None:
    answer = await edge.stub.PrepareEnvironment(pb.PrepareEnvironmentRequest(), metadata=AUTH)
    assert (answer.environment_id, list(answer.pins), answer.size_bytes) == ("env-1", ["numpy==2.5.5"], 7)
    assert list(answer.modules) == ["numpy"]
    assert not edge.sessions.sessions


async def test_the_policy_decides_about_it_as_about_a_session(edge: Edge) -> None:
    request = pb.PrepareEnvironmentRequest(packages=["numpy"])
    found = await refusal(edge.stub.PrepareEnvironment(request, metadata=AUTH))
    assert (found.code, found.reason) == (grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION")
    assert [each.field for each in found.violations] == ["packages"]
    request = pb.PrepareEnvironmentRequest(image="nothing-of-ours")
    assert await refused(edge.stub.PrepareEnvironment(request, metadata=AUTH)) == ("INVALID_ARGUMENT", "UNKNOWN_IMAGE")


@pytest.mark.parametrize(
    ("progress", "metadata"),
    [
        (Progress("resolving"), {"step": "resolving", "done": "0", "total": "0", "unit": ""}),
        (
            Progress("installing", 17, 23, "packages"),
            {"step": "installing", "done": "17", "total": "23", "unit": "packages"},
        ),
        (None, {}),
    ],
)
async def test_progress_is_in_the_metadata(edge: Edge, progress: Progress | None, metadata: dict[str, str]) -> None:
    edge.sessions.raises = edge.sessions.environment = Unavailable(
        Reason.IMAGE_NOT_READY, "not yet", 0.5, progress=progress
    )
    asked = (
        edge.stub.PrepareEnvironment(pb.PrepareEnvironmentRequest(), metadata=AUTH),
        edge.stub.CreateSession(pb.CreateSessionRequest(request_id="r"), metadata=AUTH),
    )
    for call in asked:
        found = await refusal(call)
        assert (found.code.name, found.reason, found.retry_delay_s) == ("UNAVAILABLE", "IMAGE_NOT_READY", 0.5)
        assert found.metadata == metadata


async def test_a_session_says_its_packages_and_the_images_that_have_what_it_lacks(edge: Edge) -> None:
    session = await edge.session()
    packages = PackagesSpec(("polars", "scikit-learn>=1.5"))
    session.spec = replace(session.spec, sandbox=replace(session.spec.sandbox, packages=packages))
    session.environment_id, session.images_with_missing = "env-1", ("data",)
    answer = await edge.stub.GetSession(pb.GetSessionRequest(session_id="s1"), metadata=AUTH)
    assert list(answer.session.packages) == ["polars", "scikit-learn>=1.5"]
    assert (answer.session.environment_id, list(answer.session.images_with_missing)) == ("env-1", ["data"])
