"""Writes what administrators read of environments of packages."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.environments import BuildInfo, EnvironmentInfo


def environment_to(environment: EnvironmentInfo) -> admin_pb.Environment:
    return admin_pb.Environment(
        environment_id=environment.environment_id,
        size_bytes=environment.size_bytes,
        create_time=_timestamp(environment.created_s),
        use_time=_timestamp(environment.used_s),
        sandboxes=environment.sandboxes,
        tenants=environment.requesters,
        requests=[admin_pb.RequestedPackages(packages=each) for each in environment.requests],
        images=environment.images,
        pins=environment.pins,
    )


def environment_with_lock_to(environment: EnvironmentInfo) -> admin_pb.GetEnvironmentResponse:
    lock = environment.lock
    return admin_pb.GetEnvironmentResponse(
        environment=environment_to(environment),
        modules=environment.modules,
        interpreter=lock.interpreter,
        platform=lock.platform,
        uv_version=lock.uv_version,
        lock_sha256=lock.sha256,
        lock=lock.text,
    )


def environment_build_to(build: BuildInfo) -> admin_pb.EnvironmentBuild:
    return admin_pb.EnvironmentBuild(
        packages=build.requirements,
        image=f"{build.backend}/{build.image}",
        tenant=build.requester,
        progress=str(build.progress),
        is_refresh=build.is_refresh,
        age_s=build.begun_s_ago,
    )


def _timestamp(time_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMilliseconds(round(time_s * 1000))
    return stamp
