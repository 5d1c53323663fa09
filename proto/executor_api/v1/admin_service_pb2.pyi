import datetime

from executor_api.v1 import executor_service_pb2 as _executor_service_pb2
from executor_api.v1 import types_pb2 as _types_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApprovalKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPROVAL_KIND_UNSPECIFIED: _ClassVar[ApprovalKind]
    APPROVAL_KIND_HOST: _ClassVar[ApprovalKind]
    APPROVAL_KIND_PACKAGE: _ClassVar[ApprovalKind]
    APPROVAL_KIND_TOOL: _ClassVar[ApprovalKind]
    APPROVAL_KIND_IMPORT: _ClassVar[ApprovalKind]

class ApprovalDecision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPROVAL_DECISION_UNSPECIFIED: _ClassVar[ApprovalDecision]
    APPROVAL_DECISION_ONCE: _ClassVar[ApprovalDecision]
    APPROVAL_DECISION_SESSION: _ClassVar[ApprovalDecision]
    APPROVAL_DECISION_DENIED: _ClassVar[ApprovalDecision]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_CONNECTING: _ClassVar[NodeState]
    NODE_STATE_SERVING: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_WAITING: _ClassVar[NodeState]
    NODE_STATE_SILENT: _ClassVar[NodeState]
    NODE_STATE_LOST: _ClassVar[NodeState]
    NODE_STATE_REFUSED: _ClassVar[NodeState]

class ExecutionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTION_STATE_UNSPECIFIED: _ClassVar[ExecutionState]
    EXECUTION_STATE_QUEUED: _ClassVar[ExecutionState]
    EXECUTION_STATE_RUNNING: _ClassVar[ExecutionState]
    EXECUTION_STATE_WAITING: _ClassVar[ExecutionState]
    EXECUTION_STATE_ENDED: _ClassVar[ExecutionState]
APPROVAL_KIND_UNSPECIFIED: ApprovalKind
APPROVAL_KIND_HOST: ApprovalKind
APPROVAL_KIND_PACKAGE: ApprovalKind
APPROVAL_KIND_TOOL: ApprovalKind
APPROVAL_KIND_IMPORT: ApprovalKind
APPROVAL_DECISION_UNSPECIFIED: ApprovalDecision
APPROVAL_DECISION_ONCE: ApprovalDecision
APPROVAL_DECISION_SESSION: ApprovalDecision
APPROVAL_DECISION_DENIED: ApprovalDecision
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_CONNECTING: NodeState
NODE_STATE_SERVING: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_WAITING: NodeState
NODE_STATE_SILENT: NodeState
NODE_STATE_LOST: NodeState
NODE_STATE_REFUSED: NodeState
EXECUTION_STATE_UNSPECIFIED: ExecutionState
EXECUTION_STATE_QUEUED: ExecutionState
EXECUTION_STATE_RUNNING: ExecutionState
EXECUTION_STATE_WAITING: ExecutionState
EXECUTION_STATE_ENDED: ExecutionState

class ListAllSessionsRequest(_message.Message):
    __slots__ = ("tenant", "with_requests")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WITH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    with_requests: bool
    def __init__(self, tenant: _Optional[str] = ..., with_requests: bool = ...) -> None: ...

class OwnedSession(_message.Message):
    __slots__ = ("tenant", "principal", "session", "prelude", "lease_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PRELUDE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    principal: str
    session: _types_pb2.Session
    prelude: str
    lease_id: str
    def __init__(self, tenant: _Optional[str] = ..., principal: _Optional[str] = ..., session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ..., prelude: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ListAllSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[OwnedSession]
    def __init__(self, sessions: _Optional[_Iterable[_Union[OwnedSession, _Mapping]]] = ...) -> None: ...

class KillSessionRequest(_message.Message):
    __slots__ = ("session_id", "unless_used")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    UNLESS_USED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    unless_used: bool
    def __init__(self, session_id: _Optional[str] = ..., unless_used: bool = ...) -> None: ...

class KillSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopExecutionRequest(_message.Message):
    __slots__ = ("session_id", "execution_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    execution_id: str
    def __init__(self, session_id: _Optional[str] = ..., execution_id: _Optional[str] = ...) -> None: ...

class StopExecutionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume", "node", "move")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    node: str
    move: bool
    def __init__(self, resume: bool = ..., node: _Optional[str] = ..., move: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "sessions", "busy", "moved")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    sessions: int
    busy: int
    moved: _containers.RepeatedCompositeFieldContainer[MovedSession]
    def __init__(self, draining: bool = ..., sessions: _Optional[int] = ..., busy: _Optional[int] = ..., moved: _Optional[_Iterable[_Union[MovedSession, _Mapping]]] = ...) -> None: ...

class MovedSession(_message.Message):
    __slots__ = ("session_id", "new_session_id", "problem")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    new_session_id: str
    problem: str
    def __init__(self, session_id: _Optional[str] = ..., new_session_id: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("version", "fingerprint", "changed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    version: str
    fingerprint: str
    changed: bool
    def __init__(self, version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., changed: bool = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "profile", "sessions", "executions", "creations_in_last_minute", "cpu_time_s_in_last_hour", "output_bytes_in_last_hour", "calls", "quotas", "egress_bytes_in_last_hour")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    CREATIONS_IN_LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_IN_LAST_HOUR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_IN_LAST_HOUR_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    EGRESS_BYTES_IN_LAST_HOUR_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    profile: str
    sessions: int
    executions: int
    creations_in_last_minute: int
    cpu_time_s_in_last_hour: float
    output_bytes_in_last_hour: int
    calls: int
    quotas: _types_pb2.Quotas
    egress_bytes_in_last_hour: int
    def __init__(self, tenant: _Optional[str] = ..., profile: _Optional[str] = ..., sessions: _Optional[int] = ..., executions: _Optional[int] = ..., creations_in_last_minute: _Optional[int] = ..., cpu_time_s_in_last_hour: _Optional[float] = ..., output_bytes_in_last_hour: _Optional[int] = ..., calls: _Optional[int] = ..., quotas: _Optional[_Union[_types_pb2.Quotas, _Mapping]] = ..., egress_bytes_in_last_hour: _Optional[int] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class GetSessionNetworkRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class OpenConnection(_message.Message):
    __slots__ = ("host", "port", "address", "rule", "execution_id", "open_time")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_TIME_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    address: str
    rule: str
    execution_id: str
    open_time: _timestamp_pb2.Timestamp
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., address: _Optional[str] = ..., rule: _Optional[str] = ..., execution_id: _Optional[str] = ..., open_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DeniedConnection(_message.Message):
    __slots__ = ("host", "port", "address", "reason", "message", "time")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    address: str
    reason: str
    message: str
    time: _timestamp_pb2.Timestamp
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., address: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class HostUse(_message.Message):
    __slots__ = ("host", "port", "rule", "connections", "denied", "sent_bytes", "received_bytes")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    rule: str
    connections: int
    denied: int
    sent_bytes: int
    received_bytes: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., rule: _Optional[str] = ..., connections: _Optional[int] = ..., denied: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class GetSessionNetworkResponse(_message.Message):
    __slots__ = ("rules", "usage", "exhausted", "connections", "denials", "hosts")
    RULES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    rules: _types_pb2.NetworkRules
    usage: _types_pb2.NetworkUsage
    exhausted: bool
    connections: _containers.RepeatedCompositeFieldContainer[OpenConnection]
    denials: _containers.RepeatedCompositeFieldContainer[DeniedConnection]
    hosts: _containers.RepeatedCompositeFieldContainer[HostUse]
    def __init__(self, rules: _Optional[_Union[_types_pb2.NetworkRules, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.NetworkUsage, _Mapping]] = ..., exhausted: bool = ..., connections: _Optional[_Iterable[_Union[OpenConnection, _Mapping]]] = ..., denials: _Optional[_Iterable[_Union[DeniedConnection, _Mapping]]] = ..., hosts: _Optional[_Iterable[_Union[HostUse, _Mapping]]] = ...) -> None: ...

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestedPackages(_message.Message):
    __slots__ = ("packages",)
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    packages: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, packages: _Optional[_Iterable[str]] = ...) -> None: ...

class Environment(_message.Message):
    __slots__ = ("environment_id", "size_bytes", "create_time", "use_time", "sandboxes", "tenants", "requests", "images", "pins")
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    USE_TIME_FIELD_NUMBER: _ClassVar[int]
    SANDBOXES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    size_bytes: int
    create_time: _timestamp_pb2.Timestamp
    use_time: _timestamp_pb2.Timestamp
    sandboxes: int
    tenants: _containers.RepeatedScalarFieldContainer[str]
    requests: _containers.RepeatedCompositeFieldContainer[RequestedPackages]
    images: _containers.RepeatedScalarFieldContainer[str]
    pins: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, environment_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., use_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sandboxes: _Optional[int] = ..., tenants: _Optional[_Iterable[str]] = ..., requests: _Optional[_Iterable[_Union[RequestedPackages, _Mapping]]] = ..., images: _Optional[_Iterable[str]] = ..., pins: _Optional[_Iterable[str]] = ...) -> None: ...

class EnvironmentBuild(_message.Message):
    __slots__ = ("packages", "image", "tenant", "progress", "is_refresh", "age_s")
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IS_REFRESH_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    packages: _containers.RepeatedScalarFieldContainer[str]
    image: str
    tenant: str
    progress: str
    is_refresh: bool
    age_s: float
    def __init__(self, packages: _Optional[_Iterable[str]] = ..., image: _Optional[str] = ..., tenant: _Optional[str] = ..., progress: _Optional[str] = ..., is_refresh: bool = ..., age_s: _Optional[float] = ...) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("environments", "builds", "total_bytes", "max_bytes")
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    BUILDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[Environment]
    builds: _containers.RepeatedCompositeFieldContainer[EnvironmentBuild]
    total_bytes: int
    max_bytes: int
    def __init__(self, environments: _Optional[_Iterable[_Union[Environment, _Mapping]]] = ..., builds: _Optional[_Iterable[_Union[EnvironmentBuild, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class GetEnvironmentRequest(_message.Message):
    __slots__ = ("environment_id",)
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    def __init__(self, environment_id: _Optional[str] = ...) -> None: ...

class GetEnvironmentResponse(_message.Message):
    __slots__ = ("environment", "modules", "interpreter", "platform", "uv_version", "lock_sha256", "lock")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    INTERPRETER_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    UV_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCK_SHA256_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    environment: Environment
    modules: _containers.RepeatedScalarFieldContainer[str]
    interpreter: str
    platform: str
    uv_version: str
    lock_sha256: str
    lock: str
    def __init__(self, environment: _Optional[_Union[Environment, _Mapping]] = ..., modules: _Optional[_Iterable[str]] = ..., interpreter: _Optional[str] = ..., platform: _Optional[str] = ..., uv_version: _Optional[str] = ..., lock_sha256: _Optional[str] = ..., lock: _Optional[str] = ...) -> None: ...

class CollectEnvironmentsRequest(_message.Message):
    __slots__ = ("max_bytes",)
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_bytes: int
    def __init__(self, max_bytes: _Optional[int] = ...) -> None: ...

class CollectEnvironmentsResponse(_message.Message):
    __slots__ = ("environment_ids", "freed_bytes", "total_bytes")
    ENVIRONMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    environment_ids: _containers.RepeatedScalarFieldContainer[str]
    freed_bytes: int
    total_bytes: int
    def __init__(self, environment_ids: _Optional[_Iterable[str]] = ..., freed_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class WatchApprovalsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Approval(_message.Message):
    __slots__ = ("approval_id", "tenant", "session_id", "request_id", "execution_id", "kind", "what", "rule", "create_time", "wait_s", "detail")
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    approval_id: str
    tenant: str
    session_id: str
    request_id: str
    execution_id: str
    kind: ApprovalKind
    what: str
    rule: str
    create_time: _timestamp_pb2.Timestamp
    wait_s: float
    detail: str
    def __init__(self, approval_id: _Optional[str] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., execution_id: _Optional[str] = ..., kind: _Optional[_Union[ApprovalKind, str]] = ..., what: _Optional[str] = ..., rule: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., wait_s: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class WatchApprovalsResponse(_message.Message):
    __slots__ = ("approvals",)
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    approvals: _containers.RepeatedCompositeFieldContainer[Approval]
    def __init__(self, approvals: _Optional[_Iterable[_Union[Approval, _Mapping]]] = ...) -> None: ...

class DecideApprovalRequest(_message.Message):
    __slots__ = ("approval_id", "decision", "reason")
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    approval_id: str
    decision: ApprovalDecision
    reason: str
    def __init__(self, approval_id: _Optional[str] = ..., decision: _Optional[_Union[ApprovalDecision, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DecideApprovalResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("nodes", "front_id", "term", "control_fingerprint", "parked")
    NODES_FIELD_NUMBER: _ClassVar[int]
    FRONT_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[FleetNode]
    front_id: str
    term: int
    control_fingerprint: str
    parked: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[FleetNode, _Mapping]]] = ..., front_id: _Optional[str] = ..., term: _Optional[int] = ..., control_fingerprint: _Optional[str] = ..., parked: _Optional[int] = ...) -> None: ...

class FleetNode(_message.Message):
    __slots__ = ("node", "link_address", "state", "problem", "epoch", "program_version", "sessions", "creating", "max_sessions", "warm", "load", "lease_left_s", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CREATING_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    node: str
    link_address: str
    state: NodeState
    problem: str
    epoch: int
    program_version: str
    sessions: int
    creating: int
    max_sessions: int
    warm: int
    load: float
    lease_left_s: float
    labels: _containers.ScalarMap[str, str]
    def __init__(self, node: _Optional[str] = ..., link_address: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., problem: _Optional[str] = ..., epoch: _Optional[int] = ..., program_version: _Optional[str] = ..., sessions: _Optional[int] = ..., creating: _Optional[int] = ..., max_sessions: _Optional[int] = ..., warm: _Optional[int] = ..., load: _Optional[float] = ..., lease_left_s: _Optional[float] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WatchSessionsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class SessionUse(_message.Message):
    __slots__ = ("executions", "cpu_time_s", "operations", "output_bytes", "peak_memory_bytes", "network")
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    executions: int
    cpu_time_s: float
    operations: int
    output_bytes: int
    peak_memory_bytes: int
    network: _types_pb2.NetworkUsage
    def __init__(self, executions: _Optional[int] = ..., cpu_time_s: _Optional[float] = ..., operations: _Optional[int] = ..., output_bytes: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., network: _Optional[_Union[_types_pb2.NetworkUsage, _Mapping]] = ...) -> None: ...

class SessionView(_message.Message):
    __slots__ = ("owned", "use", "end_time", "end_reason", "last_outcome")
    OWNED_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    owned: OwnedSession
    use: SessionUse
    end_time: _timestamp_pb2.Timestamp
    end_reason: str
    last_outcome: _types_pb2.Outcome
    def __init__(self, owned: _Optional[_Union[OwnedSession, _Mapping]] = ..., use: _Optional[_Union[SessionUse, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_reason: _Optional[str] = ..., last_outcome: _Optional[_Union[_types_pb2.Outcome, str]] = ...) -> None: ...

class WatchSessionsResponse(_message.Message):
    __slots__ = ("sessions", "forgotten_ids", "complete")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionView]
    forgotten_ids: _containers.RepeatedScalarFieldContainer[str]
    complete: bool
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionView, _Mapping]]] = ..., forgotten_ids: _Optional[_Iterable[str]] = ..., complete: bool = ...) -> None: ...

class InspectSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ForwardedPort(_message.Message):
    __slots__ = ("port", "sent_bytes", "received_bytes")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    port: int
    sent_bytes: int
    received_bytes: int
    def __init__(self, port: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class InspectSessionResponse(_message.Message):
    __slots__ = ("session", "processes", "ports", "savepoints", "tools")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINTS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    session: SessionView
    processes: _containers.RepeatedCompositeFieldContainer[_types_pb2.ProcessInfo]
    ports: _containers.RepeatedCompositeFieldContainer[ForwardedPort]
    savepoints: _containers.RepeatedCompositeFieldContainer[_executor_service_pb2.Savepoint]
    tools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[_Union[SessionView, _Mapping]] = ..., processes: _Optional[_Iterable[_Union[_types_pb2.ProcessInfo, _Mapping]]] = ..., ports: _Optional[_Iterable[_Union[ForwardedPort, _Mapping]]] = ..., savepoints: _Optional[_Iterable[_Union[_executor_service_pb2.Savepoint, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ...) -> None: ...

class ListExecutionsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ExecutionView(_message.Message):
    __slots__ = ("execution_id", "state", "start_time", "end_time", "code", "code_bytes", "result", "number")
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    CODE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    execution_id: str
    state: ExecutionState
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    code: str
    code_bytes: int
    result: _types_pb2.ExecutionResult
    number: int
    def __init__(self, execution_id: _Optional[str] = ..., state: _Optional[_Union[ExecutionState, str]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., code: _Optional[str] = ..., code_bytes: _Optional[int] = ..., result: _Optional[_Union[_types_pb2.ExecutionResult, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class ListExecutionsResponse(_message.Message):
    __slots__ = ("executions",)
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    executions: _containers.RepeatedCompositeFieldContainer[ExecutionView]
    def __init__(self, executions: _Optional[_Iterable[_Union[ExecutionView, _Mapping]]] = ...) -> None: ...

class FollowExecutionRequest(_message.Message):
    __slots__ = ("session_id", "execution_id", "after_event")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    execution_id: str
    after_event: int
    def __init__(self, session_id: _Optional[str] = ..., execution_id: _Optional[str] = ..., after_event: _Optional[int] = ...) -> None: ...

class FollowedEvent(_message.Message):
    __slots__ = ("event", "withheld_bytes")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    event: _types_pb2.Event
    withheld_bytes: int
    def __init__(self, event: _Optional[_Union[_types_pb2.Event, _Mapping]] = ..., withheld_bytes: _Optional[int] = ...) -> None: ...

class AnsweredCall(_message.Message):
    __slots__ = ("call_id", "wait_s")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    wait_s: float
    def __init__(self, call_id: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class FollowExecutionResponse(_message.Message):
    __slots__ = ("execution", "has_content", "missed_events", "events", "answers", "state")
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    HAS_CONTENT_FIELD_NUMBER: _ClassVar[int]
    MISSED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    execution: ExecutionView
    has_content: bool
    missed_events: int
    events: _containers.RepeatedCompositeFieldContainer[FollowedEvent]
    answers: _containers.RepeatedCompositeFieldContainer[AnsweredCall]
    state: ExecutionState
    def __init__(self, execution: _Optional[_Union[ExecutionView, _Mapping]] = ..., has_content: bool = ..., missed_events: _Optional[int] = ..., events: _Optional[_Iterable[_Union[FollowedEvent, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[AnsweredCall, _Mapping]]] = ..., state: _Optional[_Union[ExecutionState, str]] = ...) -> None: ...

class FollowSessionRequest(_message.Message):
    __slots__ = ("session_id", "after_execution_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    after_execution_id: str
    def __init__(self, session_id: _Optional[str] = ..., after_execution_id: _Optional[str] = ...) -> None: ...

class FollowSessionResponse(_message.Message):
    __slots__ = ("parts", "missed_executions", "complete")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    MISSED_EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[FollowExecutionResponse]
    missed_executions: int
    complete: bool
    def __init__(self, parts: _Optional[_Iterable[_Union[FollowExecutionResponse, _Mapping]]] = ..., missed_executions: _Optional[int] = ..., complete: bool = ...) -> None: ...

class TailAuditRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "kinds", "text", "before_seq", "max_records", "follow", "node")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_SEQ_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    text: str
    before_seq: int
    max_records: int
    follow: bool
    node: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ..., text: _Optional[str] = ..., before_seq: _Optional[int] = ..., max_records: _Optional[int] = ..., follow: bool = ..., node: _Optional[str] = ...) -> None: ...

class AuditRecord(_message.Message):
    __slots__ = ("seq", "json", "is_sound")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    IS_SOUND_FIELD_NUMBER: _ClassVar[int]
    seq: int
    json: str
    is_sound: bool
    def __init__(self, seq: _Optional[int] = ..., json: _Optional[str] = ..., is_sound: bool = ...) -> None: ...

class TailAuditResponse(_message.Message):
    __slots__ = ("records", "complete", "continue_before_seq")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_BEFORE_SEQ_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[AuditRecord]
    complete: bool
    continue_before_seq: int
    def __init__(self, records: _Optional[_Iterable[_Union[AuditRecord, _Mapping]]] = ..., complete: bool = ..., continue_before_seq: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolKind(_message.Message):
    __slots__ = ("backend", "image", "size", "depth", "making")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAKING_FIELD_NUMBER: _ClassVar[int]
    backend: str
    image: str
    size: int
    depth: int
    making: int
    def __init__(self, backend: _Optional[str] = ..., image: _Optional[str] = ..., size: _Optional[int] = ..., depth: _Optional[int] = ..., making: _Optional[int] = ...) -> None: ...

class BackendStatus(_message.Message):
    __slots__ = ("backend", "state", "sessions", "images")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    backend: str
    state: str
    sessions: int
    images: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, backend: _Optional[str] = ..., state: _Optional[str] = ..., sessions: _Optional[int] = ..., images: _Optional[_Iterable[str]] = ...) -> None: ...

class AuditStatus(_message.Message):
    __slots__ = ("is_configured", "is_failing", "lost_records", "last_seq", "last_hash")
    IS_CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    IS_FAILING_FIELD_NUMBER: _ClassVar[int]
    LOST_RECORDS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    is_configured: bool
    is_failing: bool
    lost_records: int
    last_seq: int
    last_hash: str
    def __init__(self, is_configured: bool = ..., is_failing: bool = ..., lost_records: _Optional[int] = ..., last_seq: _Optional[int] = ..., last_hash: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "start_time", "draining", "sessions", "max_sessions", "busy", "approvals", "load", "cpus", "memory_bytes", "available_memory_bytes", "pool", "backends", "audit", "policy", "is_front")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    IS_FRONT_FIELD_NUMBER: _ClassVar[int]
    version: str
    start_time: _timestamp_pb2.Timestamp
    draining: bool
    sessions: int
    max_sessions: int
    busy: int
    approvals: int
    load: float
    cpus: int
    memory_bytes: int
    available_memory_bytes: int
    pool: _containers.RepeatedCompositeFieldContainer[PoolKind]
    backends: _containers.RepeatedCompositeFieldContainer[BackendStatus]
    audit: AuditStatus
    policy: _types_pb2.PolicyRef
    is_front: bool
    def __init__(self, version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., draining: bool = ..., sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., busy: _Optional[int] = ..., approvals: _Optional[int] = ..., load: _Optional[float] = ..., cpus: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., available_memory_bytes: _Optional[int] = ..., pool: _Optional[_Iterable[_Union[PoolKind, _Mapping]]] = ..., backends: _Optional[_Iterable[_Union[BackendStatus, _Mapping]]] = ..., audit: _Optional[_Union[AuditStatus, _Mapping]] = ..., policy: _Optional[_Union[_types_pb2.PolicyRef, _Mapping]] = ..., is_front: bool = ...) -> None: ...

class ShowPolicyRequest(_message.Message):
    __slots__ = ("rules",)
    RULES_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rules: _Optional[_Iterable[str]] = ...) -> None: ...

class PolicyLine(_message.Message):
    __slots__ = ("rule", "number", "text", "meaning")
    RULE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MEANING_FIELD_NUMBER: _ClassVar[int]
    rule: str
    number: int
    text: str
    meaning: str
    def __init__(self, rule: _Optional[str] = ..., number: _Optional[int] = ..., text: _Optional[str] = ..., meaning: _Optional[str] = ...) -> None: ...

class ShowPolicyResponse(_message.Message):
    __slots__ = ("policy", "path", "content", "load_time", "before", "changes", "lines")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    policy: _types_pb2.PolicyRef
    path: str
    content: str
    load_time: _timestamp_pb2.Timestamp
    before: _types_pb2.PolicyRef
    changes: _containers.RepeatedScalarFieldContainer[str]
    lines: _containers.RepeatedCompositeFieldContainer[PolicyLine]
    def __init__(self, policy: _Optional[_Union[_types_pb2.PolicyRef, _Mapping]] = ..., path: _Optional[str] = ..., content: _Optional[str] = ..., load_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., before: _Optional[_Union[_types_pb2.PolicyRef, _Mapping]] = ..., changes: _Optional[_Iterable[str]] = ..., lines: _Optional[_Iterable[_Union[PolicyLine, _Mapping]]] = ...) -> None: ...

class ExplainPolicyRequest(_message.Message):
    __slots__ = ("tenant", "question")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    question: str
    def __init__(self, tenant: _Optional[str] = ..., question: _Optional[str] = ...) -> None: ...

class ExplainPolicyResponse(_message.Message):
    __slots__ = ("granted", "text")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    text: str
    def __init__(self, granted: bool = ..., text: _Optional[str] = ...) -> None: ...
