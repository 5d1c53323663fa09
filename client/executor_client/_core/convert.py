"""Converts wire messages to values and back. Beyond this file only `assembler.py` handles wire types, the events.

Incoming messages are checked: an unknown enum value is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from executor_api.sizes import bytes_of
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client._core.limits import NAMES_LISTED_MAX
from executor_client._core.suggest import nearest
from executor_client.errors import InvalidRequest, ProtocolError
from executor_client.file_results import FileChange, FileChanges, FileInfo
from executor_client.process_results import PortRules, ProcessRules
from executor_client.results import (
    EnvironmentInfo,
    ErrorDetail,
    FileLimits,
    Limits,
    NetworkRules,
    NetworkSecret,
    NetworkUsage,
    Outcome,
    PackagesPolicy,
    Policy,
    PolicyRef,
    Quotas,
    SessionInfo,
    SessionState,
    StateManifest,
    StateRules,
    Usage,
    VariablesState,
)

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

LIMIT_NAMES = tuple(field.name for field in dataclasses.fields(Limits))
QUOTA_NAMES = tuple(field.name for field in dataclasses.fields(Quotas))

OUTCOMES = {pb.Outcome.Value(f"OUTCOME_{each.name}"): each for each in Outcome}
VARIABLES_STATES = {pb.VariablesState.Value(f"VARIABLES_STATE_{each.name}"): each for each in VariablesState}
SESSION_STATES = {pb.SessionState.Value(f"SESSION_STATE_{each.name}"): each for each in SessionState}
OUTPUT_MODES = {
    "trailing_expression": pb.OUTPUT_MODE_TRAILING_EXPRESSION,
    "last_statement": pb.OUTPUT_MODE_LAST_STATEMENT,
}

_CHANGE_KINDS: dict[int, Literal["created", "changed", "deleted"]] = {
    pb.FILE_CHANGE_KIND_CREATED: "created",
    pb.FILE_CHANGE_KIND_CHANGED: "changed",
    pb.FILE_CHANGE_KIND_DELETED: "deleted",
}


def named_limits(limits: Limits | Mapping[str, float | int | str] | None) -> dict[str, Any]:
    """Returns the limits that are set, by name."""
    if isinstance(limits, Limits):
        return {name: value for name in LIMIT_NAMES if (value := getattr(limits, name)) is not None}
    return dict(limits or {})


def limits_to_wire(limits: Limits | Mapping[str, float | int | str] | None) -> pb.Limits | None:
    """Returns the limits of a request. Raises InvalidRequest for a name or a number that the wire cannot carry."""
    if limits is None:
        return None
    asked = named_limits(limits)
    unknown = sorted(set(map(str, asked)) - set(LIMIT_NAMES))
    if unknown:
        meant = nearest(unknown[0], LIMIT_NAMES)
        asked_for = f"{', '.join(unknown)}{f' (did you mean {meant}?)' if meant else ''}"
        raise InvalidRequest(f"no such limits: {asked_for}. There are {', '.join(LIMIT_NAMES)}")
    wire = pb.Limits()
    for name, value in asked.items():
        if value is None:
            continue
        try:
            setattr(wire, name, bytes_of(value) if isinstance(value, str) and name.endswith("_bytes") else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"limits.{name} cannot be {value!r}: {error}") from error
    return wire


def limits_from_wire(wire: pb.Limits) -> Limits:
    return Limits(**{name: getattr(wire, name) for name in LIMIT_NAMES if wire.HasField(name)})


def session_from_wire(wire: pb.Session) -> SessionInfo:
    if wire.state not in SESSION_STATES:
        raise ProtocolError(f"unknown session state {wire.state}")
    return SessionInfo(
        session_id=wire.session_id,
        state=SESSION_STATES[wire.state],
        generation=wire.generation,
        backend=wire.backend,
        image=wire.image,
        limits=limits_from_wire(wire.limits),
        authorized_imports=names_from_wire(wire.authorized_imports, "authorized imports"),
        python_version=wire.python_version,
        create_time=time_from_wire(wire.create_time),
        expire_time=time_from_wire(wire.expire_time),
        warm=wire.warm,
        labels=dict(wire.labels),
        policy=policy_ref_from_wire(wire.policy),
        lost_reason=wire.lost_reason,
        denied_imports=names_from_wire(wire.denied_imports, "denied imports"),
        workspace_imports=wire.workspace_imports,
        refused_language=names_from_wire(wire.refused_language, "language rules"),
        missing_modules=names_from_wire(wire.missing_modules, "missing modules"),
        detached=not wire.leased,
        network=names_from_wire(wire.network, "hosts"),
        denied_network=names_from_wire(wire.denied_network, "denied hosts"),
        network_usage=_network_usage_from_wire(wire.network_usage),
        packages=names_from_wire(wire.packages, "packages"),
        environment_id=wire.environment_id,
        images_with_missing=names_from_wire(wire.images_with_missing, "images"),
        node=wire.node,
        address=wire.address,
        name=wire.name,
        env_names=names_from_wire(wire.env_names, "environment variables"),
    )


def environment_from_wire(wire: service_pb.PrepareEnvironmentResponse) -> EnvironmentInfo:
    return EnvironmentInfo(
        environment_id=wire.environment_id,
        pins=names_from_wire(wire.pins, "pins"),
        size_bytes=wire.size_bytes,
        modules=names_from_wire(wire.modules, "modules"),
    )


def policy_ref_from_wire(wire: pb.PolicyRef) -> PolicyRef:
    return PolicyRef(wire.profile, wire.version, wire.fingerprint)


def file_from_wire(wire: pb.FileInfo) -> FileInfo:
    return FileInfo(wire.path, wire.size_bytes, wire.is_directory, time_from_wire(wire.modify_time))


def changes_from_wire(wire: service_pb.WatchFilesResponse) -> FileChanges:
    return FileChanges(tuple(map(_change_from_wire, wire.changes)), wire.overflowed)


def _change_from_wire(wire: pb.FileChange) -> FileChange:
    kind = _CHANGE_KINDS.get(wire.kind)
    if kind is None:
        raise ProtocolError(f"unknown kind {wire.kind} of a change")
    return FileChange(wire.path, kind, wire.is_directory)


def state_manifest_from_wire(wire: service_pb.StateManifest) -> StateManifest:
    names_from_wire([each.name for each in (*wire.omitted_variables, *wire.omitted_files)], "omissions of a state")
    return StateManifest(
        variables=names_from_wire(wire.variables, "variables of a state"),
        omitted_variables={each.name: each.reason for each in wire.omitted_variables},
        files=wire.files,
        file_bytes=wire.file_bytes,
        omitted_files={each.name: each.reason for each in wire.omitted_files},
        python_version=wire.python_version,
    )


def policy_from_wire(wire: pb.Policy) -> Policy:
    return Policy(
        policy=policy_ref_from_wire(wire.policy),
        default_limits=limits_from_wire(wire.default_limits),
        max_limits=limits_from_wire(wire.max_limits),
        execution_default_limits=limits_from_wire(wire.execution_default_limits),
        execution_max_limits=limits_from_wire(wire.execution_max_limits),
        default_imports=names_from_wire(wire.default_imports, "default imports"),
        allowed_imports=names_from_wire(wire.allowed_imports, "allowed imports"),
        denied_imports=names_from_wire(wire.denied_imports, "denied imports"),
        workspace_imports=wire.workspace_imports,
        refused_language=names_from_wire(wire.refused_language, "language rules"),
        images=names_from_wire(wire.images, "images"),
        backend=wire.backend,
        backends=names_from_wire(wire.backends, "backends"),
        tool_placements=names_from_wire(wire.tool_placements, "tool placements"),
        allowed_tools=names_from_wire(wire.allowed_tools, "allowed tools"),
        files=_file_limits_from_wire(wire.files),
        network=_network_rules_from_wire(wire.network_rules),
        packages=_packages_policy_from_wire(wire.packages),
        quotas=Quotas(**{name: getattr(wire.quotas, name) for name in QUOTA_NAMES if wire.quotas.HasField(name)}),
        state=_state_rules_from_wire(wire.state),
        processes=_process_rules_from_wire(wire.processes),
        ports=_port_rules_from_wire(wire.ports),
    )


def names_from_wire(wire: Sequence[str], what: str) -> tuple[str, ...]:
    """Returns a list of a policy or a session. Raises ProtocolError for one that is too long."""
    if len(wire) > NAMES_LISTED_MAX:
        raise ProtocolError(f"more than {NAMES_LISTED_MAX} {what}")
    return tuple(wire)


def _state_rules_from_wire(wire: pb.StateRules) -> StateRules:
    return StateRules(
        export=wire.export,
        restore=wire.restore,
        max_bytes=wire.max_bytes,
        allow_foreign=wire.allow_foreign,
        savepoints=wire.savepoints,
        savepoint_file_bytes=wire.savepoint_file_bytes,
        branches=wire.branches,
    )


def _process_rules_from_wire(wire: pb.ProcessRules) -> ProcessRules:
    return ProcessRules(allowed=wire.allowed, pty=wire.pty, max=wire.max, max_output_bytes=wire.max_output_bytes)


def _port_rules_from_wire(wire: pb.PortRules) -> PortRules:
    return PortRules(allowed=names_from_wire(wire.allowed, "ports"), max_connections=wire.max_connections)


def _network_rules_from_wire(wire: pb.NetworkRules) -> NetworkRules:
    if len(wire.secrets) > NAMES_LISTED_MAX:
        raise ProtocolError(f"more than {NAMES_LISTED_MAX} headers")
    return NetworkRules(
        default=names_from_wire(wire.default_hosts, "default hosts"),
        allowed=names_from_wire(wire.allowed_hosts, "allowed hosts"),
        denied=names_from_wire(wire.denied_hosts, "denied hosts"),
        secrets=tuple(map(_network_secret_from_wire, wire.secrets)),
        max_connections=wire.max_connections,
        max_new_connections_per_minute=wire.max_new_connections_per_minute,
        max_sent_bytes=wire.max_sent_bytes,
        max_received_bytes=wire.max_received_bytes,
        max_connection_s=wire.max_connection_s,
    )


def _packages_policy_from_wire(wire: pb.PackagesPolicy) -> PackagesPolicy:
    return PackagesPolicy(
        allowed=names_from_wire(wire.allowed, "allowed packages"),
        locked=names_from_wire(wire.locked, "locked packages"),
        auto=wire.auto,
        max_requirements=wire.max_requirements,
        max_environment_bytes=wire.max_environment_bytes,
        exclude_newer_s=wire.exclude_newer_s if wire.HasField("exclude_newer_s") else None,
    )


def _network_secret_from_wire(wire: pb.NetworkSecret) -> NetworkSecret:
    return NetworkSecret(
        host=wire.host,
        header=wire.header,
        methods=names_from_wire(wire.methods, "methods of a header"),
        paths=names_from_wire(wire.paths, "paths of a header"),
    )


def _file_limits_from_wire(wire: pb.FileLimits) -> FileLimits:
    return FileLimits(
        max_put_bytes=wire.max_put_bytes,
        max_get_bytes=wire.max_get_bytes,
        max_puts=wire.max_puts if wire.HasField("max_puts") else None,
        max_gets=wire.max_gets if wire.HasField("max_gets") else None,
    )


def outcome_from_wire(wire: int) -> Outcome:
    if wire not in OUTCOMES:
        raise ProtocolError(f"unknown outcome {wire}")
    return OUTCOMES[wire]


def variables_state_from_wire(wire: int) -> VariablesState:
    if wire not in VARIABLES_STATES:
        raise ProtocolError(f"unknown state of the variables {wire}")
    return VARIABLES_STATES[wire]


def error_from_wire(wire: pb.ErrorDetail) -> ErrorDetail:
    exit_code = wire.exit_code if wire.HasField("exit_code") else None
    return ErrorDetail(wire.type, wire.message, wire.traceback, wire.line, wire.statement, exit_code)


_NO_NETWORK_USE = NetworkUsage()


def usage_from_wire(wire: pb.Usage) -> Usage:
    return Usage(
        wire.operations,
        wire.wall_time_s,
        wire.cpu_time_s,
        wire.peak_memory_bytes,
        wire.output_bytes,
        _network_usage_from_wire(wire.network) if wire.HasField("network") else _NO_NETWORK_USE,
    )


def _network_usage_from_wire(wire: pb.NetworkUsage) -> NetworkUsage:
    return NetworkUsage(wire.connections, wire.denied, wire.sent_bytes, wire.received_bytes)


def time_from_wire(wire: Timestamp) -> datetime:
    try:
        return datetime.fromtimestamp(wire.seconds + wire.nanos / 1e9, UTC)
    except (OverflowError, OSError, ValueError) as error:
        raise ProtocolError(f"a time is out of range: {wire.seconds} s") from error
