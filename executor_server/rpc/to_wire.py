"""Writes responses: values of the daemon become the wire's messages.

Text that came out of a sandbox may hold characters that UTF-8 can't encode; they are sent escaped. Limits, usage and
quotas have the same field names in both forms, so one that is missing in a message fails at the first conversion.
Protobuf types go no further than here and from_wire.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from executor_api.displays import DISPLAY_TYPE
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import (
    NO_NETWORK_USE,
    BlobChunk,
    BlobRef,
    BranchEnd,
    ErrorDetail,
    Event,
    ExecutionLimits,
    FileInfo,
    Image,
    Limits,
    LimitWarning,
    Log,
    NetworkRules,
    NetworkUsage,
    Outcome,
    OutputCut,
    Payload,
    PolicyRef,
    Queued,
    Result,
    Savepoints,
    StateManifest,
    StateOmission,
    ToolCall,
    VariablesState,
)
from executor_server.policy import PackagesSummary, PolicySummary, QuotasTable
from executor_server.sessions import Session, VariablesReply

# By name, so that a member that is added on one side only fails at import and not at some client.
_OUTCOMES: dict[Outcome, Any] = {outcome: pb.Outcome.Value(f"OUTCOME_{outcome.name}") for outcome in Outcome}
_VARIABLES_STATES: dict[VariablesState, Any] = {
    state: pb.VariablesState.Value(f"VARIABLES_STATE_{state.name}") for state in VariablesState
}
_SESSION_STATES = {
    "idle": pb.SESSION_STATE_IDLE,
    "busy": pb.SESSION_STATE_BUSY,
    "lost": pb.SESSION_STATE_LOST,
    "paused": pb.SESSION_STATE_PAUSED,
}
_OUTPUT_STREAMS = {"stdout": pb.OUTPUT_STREAM_STDOUT, "stderr": pb.OUTPUT_STREAM_STDERR}


def session_to(session: Session) -> pb.Session:
    spec = session.spec
    return pb.Session(
        session_id=session.session_id,
        state=_SESSION_STATES[session.state],
        generation=session.generation,
        backend=session.backend_name,
        image=spec.sandbox.image,
        limits=limits_to(spec.limits),
        authorized_imports=spec.authorized_imports,
        python_version=_text(session.python_version),
        create_time=timestamp_to(session.create_time_s),
        expire_time=timestamp_to(session.expire_time_s),
        warm=session.warm,
        labels=spec.labels,
        lost_reason=_text(session.lost_reason),
        policy=policy_ref_to(spec.policy),
        denied_imports=spec.denied_imports,
        workspace_imports=spec.workspace_imports,
        refused_language=spec.refused_language,
        missing_modules=session.missing_modules,
        leased=session.leased,
        network=spec.network.allowed,
        denied_network=spec.network.denied,
        network_usage=network_usage_to(session.network.usage),
        packages=spec.sandbox.packages.requirements if spec.sandbox.packages is not None else (),
        environment_id=session.environment_id,
        images_with_missing=session.images_with_missing,
        node=session.node,
        address=session.address,
        name=spec.name,
        env_names=spec.env_names,
    )


def policy_ref_to(policy: PolicyRef) -> pb.PolicyRef:
    return pb.PolicyRef(profile=policy.profile, version=policy.version, fingerprint=policy.fingerprint)


def limits_to(limits: Limits | ExecutionLimits) -> pb.Limits:
    return pb.Limits(**vars(limits))


def event_to(event: Event) -> pb.Event:
    kind = event.kind
    match kind:
        case Log():
            log = pb.LogEvent(stream=_OUTPUT_STREAMS[kind.stream], text=_text(kind.text))
            return pb.Event(number=event.number, log=log)
        case Result():
            return pb.Event(number=event.number, result=_result_to(kind))
        case ToolCall():
            call = pb.ToolCallEvent(call_id=kind.call_id, name=_text(kind.name), arguments=_value_to(kind.arguments))
            return pb.Event(number=event.number, tool_call=call)
        case BlobChunk():
            return pb.Event(number=event.number, blob_chunk=blob_chunk_to(kind))
        case Image(mime_type=mime_type) if mime_type == DISPLAY_TYPE:
            return pb.Event(number=event.number, display=pb.DisplayEvent(data=_payload_to(kind.data)))
        case Image():
            image = pb.ImageEvent(
                data=_payload_to(kind.data), mime_type=_text(kind.mime_type), source=_text(kind.source)
            )
            return pb.Event(number=event.number, image=image)
        case OutputCut():
            return pb.Event(number=event.number, output_cut=pb.OutputCutEvent(omitted_bytes=kind.omitted_bytes))
        case Queued():
            return pb.Event(number=event.number, queued=pb.QueuedEvent(ahead=kind.ahead))
        case LimitWarning():
            warning = pb.LimitWarningEvent(limit=kind.limit, used=kind.used, budget=kind.budget)
            return pb.Event(number=event.number, limit_warning=warning)


def blob_chunk_to(chunk: BlobChunk) -> pb.BlobChunk:
    return pb.BlobChunk(blob_id=chunk.blob_id, data=chunk.data)


def variables_to(reply: VariablesReply) -> service_pb.Variables:
    return service_pb.Variables(
        variables=[pb.NamedValue(name=_text(name), value=_value_to(packed)) for name, packed in reply.variables],
        missing=[_text(name) for name in reply.missing],
    )


def file_to(file: FileInfo) -> pb.FileInfo:
    return pb.FileInfo(
        path=_text(file.path),
        size_bytes=file.size_bytes,
        is_directory=file.is_directory,
        modify_time=timestamp_to(file.modify_time_s),
    )


def state_manifest_to(manifest: StateManifest) -> service_pb.StateManifest:
    return service_pb.StateManifest(
        variables=map(_text, manifest.variables),
        omitted_variables=map(_omission_to, manifest.omitted_variables),
        files=manifest.files,
        file_bytes=manifest.file_bytes,
        omitted_files=map(_omission_to, manifest.omitted_files),
        python_version=_text(manifest.python_version),
    )


def _omission_to(omission: StateOmission) -> service_pb.StateOmission:
    return service_pb.StateOmission(name=_text(omission.name), reason=_text(omission.reason))


def files_to(files: Iterable[FileInfo], *, truncated: bool) -> service_pb.ListFilesResponse:
    return service_pb.ListFilesResponse(files=[file_to(file) for file in files], truncated=truncated)


def policy_to(summary: PolicySummary) -> pb.Policy:
    return pb.Policy(
        policy=policy_ref_to(summary.policy),
        default_limits=limits_to(summary.default_limits),
        max_limits=limits_to(summary.max_limits),
        execution_default_limits=limits_to(summary.execution_default),
        execution_max_limits=limits_to(summary.execution_max),
        default_imports=summary.default_imports,
        allowed_imports=summary.allowed_imports,
        denied_imports=summary.denied_imports,
        workspace_imports=summary.workspace_imports,
        refused_language=summary.refused_language,
        images=summary.images,
        backend=next(iter(summary.backends), ""),
        backends=summary.backends,
        tool_placements=summary.tools.placements,
        allowed_tools=summary.tools.allowed,
        files=pb.FileLimits(**vars(summary.files)),
        network="names" if summary.network.rules.any else "none",
        network_rules=_network_rules_to(summary.network.rules, summary.network.default, summary.network.allowed),
        quotas=quotas_to(summary.quotas),
        state=pb.StateRules(**vars(summary.state)),
        packages=_packages_policy_to(summary.packages),
        processes=pb.ProcessRules(**vars(summary.processes)),
        ports=pb.PortRules(allowed=summary.ports.written, max_connections=summary.ports.max_connections),
    )


def _packages_policy_to(packages: PackagesSummary) -> pb.PackagesPolicy | None:
    return pb.PackagesPolicy(**vars(packages)) if packages != PackagesSummary() else None


def _network_rules_to(rules: NetworkRules, default: Sequence[str], allowed: Sequence[str]) -> pb.NetworkRules | None:
    if not rules.any:
        return None
    return pb.NetworkRules(
        default_hosts=default,
        allowed_hosts=allowed,
        denied_hosts=rules.denied,
        secrets=[
            pb.NetworkSecret(host=each.host, header=each.header, methods=each.methods, paths=each.paths)
            for each in rules.secrets
        ],
        max_connections=rules.max_connections,
        max_new_connections_per_minute=rules.max_new_connections_per_minute,
        max_sent_bytes=rules.max_sent_bytes,
        max_received_bytes=rules.max_received_bytes,
        max_connection_s=rules.max_connection_s,
    )


def quotas_to(quotas: QuotasTable) -> pb.Quotas:
    return pb.Quotas(**quotas.model_dump())


def _result_to(result: Result) -> pb.ExecutionResult:
    return pb.ExecutionResult(
        outcome=_OUTCOMES[result.outcome],
        output=None if result.output is None else _value_to(result.output),
        error=None if result.error is None else _error_to(result.error),
        usage=_usage_to(result),
        variables_state=_VARIABLES_STATES[result.variables_state],
        generation=result.generation,
        final_answer_call_id=result.final_answer_call_id,
        artifacts=[file_to(file) for file in result.artifacts],
        artifacts_truncated=result.artifacts_truncated,
        policy_fingerprint=result.policy_fingerprint,
        savepoint=result.savepoint,
        savepoint_refused=result.savepoint_refused,
        branch=None if result.branch is None else _branch_to(result.branch),
    )


def _branch_to(branch: BranchEnd) -> pb.BranchEnd:
    return pb.BranchEnd(
        number=branch.number,
        refused=branch.refused,
        why_not_kept=branch.why_not_kept,
        variables=None if branch.variables is None else pb.Changes(**vars(branch.variables)),
        files=None if branch.files is None else pb.Changes(**vars(branch.files)),
        left_out=branch.left_out,
    )


def savepoints_to(answer: Savepoints) -> list[service_pb.Savepoint]:
    return [
        service_pb.Savepoint(
            number=each.number,
            made_time=timestamp_to(each.made_s),
            files=each.files,
            file_bytes=each.file_bytes,
            left_out=each.left_out,
            is_branch=each.is_branch,
        )
        for each in answer.savepoints
    ]


def _usage_to(result: Result) -> pb.Usage:
    return pb.Usage(**vars(result.usage), network=network_usage_to(result.network))


def network_usage_to(usage: NetworkUsage) -> pb.NetworkUsage | None:
    return None if usage == NO_NETWORK_USE else pb.NetworkUsage(**vars(usage))


def session_network_to(session: Session) -> admin_pb.GetSessionNetworkResponse:
    rules, state = session.spec.network, session.network.state
    return admin_pb.GetSessionNetworkResponse(
        rules=_network_rules_to(rules, (), rules.allowed),
        usage=network_usage_to(state.usage),
        exhausted=state.is_exhausted,
        connections=[
            admin_pb.OpenConnection(
                host=_text(each.connection.host),
                port=each.connection.port,
                address=_text(each.connection.address),
                rule=_text(each.connection.rule),
                execution_id=each.execution_id,
                open_time=timestamp_to(each.open_time_s),
            )
            for each in state.open
        ],
        denials=[
            admin_pb.DeniedConnection(
                host=_text(denial.host),
                port=denial.port,
                address=_text(denial.address),
                reason=denial.reason,
                message=_text(denial.message),
                time=timestamp_to(time_s),
            )
            for time_s, denial in state.denials
        ],
    )


def _error_to(error: ErrorDetail) -> pb.ErrorDetail:
    return pb.ErrorDetail(
        type=_text(error.type),
        message=_text(error.message),
        traceback=_text(error.traceback),
        line=error.line,
        statement=_text(error.statement),
        exit_code=error.exit_code,
    )


def _value_to(packed: Payload) -> pb.Value:
    return pb.Value(packed=_payload_to(packed))


def _payload_to(payload: Payload) -> pb.Payload:
    if isinstance(payload, BlobRef):
        return pb.Payload(blob=pb.BlobRef(blob_id=payload.blob_id, size_bytes=payload.size_bytes))
    return pb.Payload(inline=payload)


def timestamp_to(time_s: float) -> Timestamp:
    seconds, rest = divmod(time_s, 1)
    return Timestamp(seconds=int(seconds), nanos=int(rest * 1_000_000_000))


def _text(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()
