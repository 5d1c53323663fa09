"""Writes what administrators read of environments of packages."""

from __future__ import annotations

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.environments import BuildInfo, EnvironmentInfo


def environment_to(environment: EnvironmentInfo) -> admin_pb.Environment:
    return write(
        admin_pb.Environment,
        environment,
        create_time=environment.created_s,
        use_time=environment.used_s,
        tenants=environment.requesters,
        requests=[admin_pb.RequestedPackages(packages=each) for each in environment.requests],
    )


def environment_with_lock_to(environment: EnvironmentInfo) -> admin_pb.GetEnvironmentResponse:
    lock = environment.lock
    return write(
        admin_pb.GetEnvironmentResponse,
        environment,
        lock,
        environment=environment_to(environment),
        lock_sha256=lock.sha256,
        lock=lock.text,
    )


def environment_build_to(build: BuildInfo) -> admin_pb.EnvironmentBuild:
    return write(
        admin_pb.EnvironmentBuild,
        build,
        packages=build.requirements,
        image=f"{build.backend}/{build.image}",
        tenant=build.requester,
        progress=str(build.progress),
        age_s=build.begun_s_ago,
    )
