"""Writes responses: values of the daemon become messages, mostly by field name (executor_api.messages).

Protobuf types stop here and in from_wire.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from executor_api.displays import DISPLAY_TYPE
from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import (
    NO_NETWORK_USE,
    BlobChunk,
    BlobRef,
    Event,
    Image,
    LimitWarning,
    Log,
    NetworkRules,
    NetworkUsage,
    OutputCut,
    OutputMode,
    Payload,
    ProcessEvent,
    ProcessOutput,
    ProcessOutputCut,
    ProcessResult,
    ProcessStarted,
    Queued,
    Result,
    ToolCall,
)
from executor_server.packages import BuildInfo, EnvironmentInfo
from executor_server.policy import PackagesSummary, PolicySummary
from executor_server.sessions import Session, VariablesReply
from executor_server.sessions.journal import ExecutionRequest, ProcessLog, ToolFailure


def session_to(session: Session) -> pb.Session:
    spec = session.spec
    return write(
        pb.Session,
        session,
        spec,
        state=session.state,
        backend=session.backend_name,
        image=spec.sandbox.image,
        network=spec.network.allowed,
        denied_network=spec.network.denied,
        network_usage=network_usage_to(session.network.usage),
        packages=spec.sandbox.packages.requirements if spec.sandbox.packages is not None else (),
    )


def owned_session_to(session: Session) -> admin_pb.OwnedSession:
    owner = session.owner
    return admin_pb.OwnedSession(tenant=owner.tenant, principal=owner.name, session=session_to(session))


def event_to(event: Event) -> pb.Event:
    kind = event.kind
    match kind:
        case Log():
            return write(pb.Event, event, log=kind)
        case Result():
            return write(pb.Event, event, result=_result_to(kind))
        case ToolCall():
            call = write(pb.ToolCallEvent, kind, arguments=_value_to(kind.arguments))
            return write(pb.Event, event, tool_call=call)
        case BlobChunk():
            return write(pb.Event, event, blob_chunk=kind)
        case Image(mime_type=mime_type) if mime_type == DISPLAY_TYPE:
            return write(pb.Event, event, display=pb.DisplayEvent(data=_payload_to(kind.data)))
        case Image():
            return write(pb.Event, event, image=write(pb.ImageEvent, kind, data=_payload_to(kind.data)))
        case OutputCut():
            return write(pb.Event, event, output_cut=kind)
        case Queued():
            return write(pb.Event, event, queued=kind)
        case LimitWarning():
            return write(pb.Event, event, limit_warning=kind)


_OUTPUT_MODES = {
    OutputMode.TRAILING_EXPRESSION: pb.OUTPUT_MODE_TRAILING_EXPRESSION,
    OutputMode.LAST_STATEMENT: pb.OUTPUT_MODE_LAST_STATEMENT,
    OutputMode.WHOLE_EXPRESSION: pb.OUTPUT_MODE_TRAILING_EXPRESSION,
}


def execute_request_to(request: ExecutionRequest) -> service_pb.ExecuteRequest:
    """Returns the request that a client sent, without its session."""
    asked = {name: value for name, value in vars(request.limits).items() if value is not None}
    return service_pb.ExecuteRequest(
        execution_id=request.execution_id,
        code=request.code,
        output_mode=_OUTPUT_MODES[request.mode],
        limits=pb.Limits(**asked) if asked else None,
        savepoint=request.savepoint,
        branch=request.branch,
        whole_output=request.mode is OutputMode.WHOLE_EXPRESSION,
    )


def tool_answer_to(call_id: str, answer: Payload | ToolFailure) -> service_pb.SubmitToolResultRequest:
    """Returns the answer to a tool call as a client sent it, without its session and execution."""
    if isinstance(answer, ToolFailure):
        error = service_pb.ToolError(type=answer.type, message=answer.message, arguments=answer.arguments)
        return service_pb.SubmitToolResultRequest(call_id=call_id, error=error)
    return service_pb.SubmitToolResultRequest(call_id=call_id, value=_value_to(answer))


def variables_to(reply: VariablesReply) -> service_pb.Variables:
    variables = [write(pb.NamedValue, name=name, value=_value_to(packed)) for name, packed in reply.variables]
    return write(service_pb.Variables, reply, variables=variables)


def policy_to(summary: PolicySummary) -> pb.Policy:
    return write(
        pb.Policy,
        summary,
        backend=next(iter(summary.backends), ""),
        tool_placements=summary.tools.placements,
        allowed_tools=summary.tools.allowed,
        ask_tools=summary.tools.ask,
        record=summary.record.mode,
        network="names" if summary.network.rules.any else "none",
        network_rules=_network_rules_to(summary.network.rules, summary.network.default, summary.network.allowed),
        packages=summary.packages if summary.packages != PackagesSummary() else None,
        ports=write(pb.PortRules, summary.ports, allowed=summary.ports.written),
    )


def _network_rules_to(rules: NetworkRules, default: Sequence[str], allowed: Sequence[str]) -> pb.NetworkRules | None:
    if not rules.any:
        return None
    return write(
        pb.NetworkRules,
        rules,
        default_hosts=default,
        allowed_hosts=allowed,
        denied_hosts=rules.denied,
        ask_hosts=rules.ask,
    )


def _result_to(result: Result) -> pb.ExecutionResult:
    return write(
        pb.ExecutionResult,
        result,
        output=None if result.output is None else _value_to(result.output),
        usage=write(pb.Usage, result.usage, network=network_usage_to(result.network)),
    )


def network_usage_to(usage: NetworkUsage) -> NetworkUsage | None:
    return None if usage == NO_NETWORK_USE else usage


def session_network_to(session: Session) -> admin_pb.GetSessionNetworkResponse:
    rules, state = session.spec.network, session.network.state
    return write(
        admin_pb.GetSessionNetworkResponse,
        rules=_network_rules_to(rules, (), rules.allowed),
        usage=network_usage_to(state.usage),
        exhausted=state.is_exhausted,
        connections=[write(admin_pb.OpenConnection, each, each.connection) for each in state.open],
        denials=[write(admin_pb.DeniedConnection, denial, time=time_s) for time_s, denial in state.denials],
        hosts=[write(admin_pb.HostUse, each) for each in state.hosts],
    )


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


def process_event_to(event: ProcessEvent) -> pb.ProcessEvent:
    match event.kind:
        case ProcessStarted():
            return write(pb.ProcessEvent, event, started=event.kind)
        case ProcessOutput():
            return write(pb.ProcessEvent, event, output=event.kind)
        case ProcessOutputCut():
            return write(pb.ProcessEvent, event, output_cut=event.kind)
        case ProcessResult():
            return write(pb.ProcessEvent, event, result=event.kind)


def process_info_to(log: ProcessLog) -> pb.ProcessInfo:
    return write(
        pb.ProcessInfo,
        log,
        log.description,
        process_id=log.process_id,
        first_event=log.first_number,
        last_event=log.last_number,
    )


def _value_to(packed: Payload) -> pb.Value:
    return pb.Value(packed=_payload_to(packed))


def _payload_to(payload: Payload) -> pb.Payload:
    if isinstance(payload, BlobRef):
        return pb.Payload(blob=write(pb.BlobRef, payload))
    return pb.Payload(inline=payload)
