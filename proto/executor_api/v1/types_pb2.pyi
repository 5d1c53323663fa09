import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_IDLE: _ClassVar[SessionState]
    SESSION_STATE_BUSY: _ClassVar[SessionState]
    SESSION_STATE_LOST: _ClassVar[SessionState]
    SESSION_STATE_PAUSED: _ClassVar[SessionState]

class ViolationKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VIOLATION_KIND_UNSPECIFIED: _ClassVar[ViolationKind]
    VIOLATION_KIND_ABOVE_CEILING: _ClassVar[ViolationKind]
    VIOLATION_KIND_NOT_ALLOWED: _ClassVar[ViolationKind]
    VIOLATION_KIND_DENIED: _ClassVar[ViolationKind]
    VIOLATION_KIND_UNSUPPORTED: _ClassVar[ViolationKind]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_SUCCEEDED: _ClassVar[Outcome]
    OUTCOME_EXCEPTION: _ClassVar[Outcome]
    OUTCOME_IMPORT_DENIED: _ClassVar[Outcome]
    OUTCOME_POLICY_DENIED: _ClassVar[Outcome]
    OUTCOME_OPERATION_LIMIT: _ClassVar[Outcome]
    OUTCOME_TIMEOUT: _ClassVar[Outcome]
    OUTCOME_CPU_LIMIT: _ClassVar[Outcome]
    OUTCOME_OUT_OF_MEMORY: _ClassVar[Outcome]
    OUTCOME_OUTPUT_LIMIT: _ClassVar[Outcome]
    OUTCOME_EXITED: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_CRASHED: _ClassVar[Outcome]
    OUTCOME_LOST: _ClassVar[Outcome]

class VariablesState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VARIABLES_STATE_UNSPECIFIED: _ClassVar[VariablesState]
    VARIABLES_STATE_KEPT: _ClassVar[VariablesState]
    VARIABLES_STATE_RESET: _ClassVar[VariablesState]
    VARIABLES_STATE_LOST: _ClassVar[VariablesState]
    VARIABLES_STATE_ROLLED_BACK: _ClassVar[VariablesState]

class OutputMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_MODE_UNSPECIFIED: _ClassVar[OutputMode]
    OUTPUT_MODE_TRAILING_EXPRESSION: _ClassVar[OutputMode]
    OUTPUT_MODE_LAST_STATEMENT: _ClassVar[OutputMode]

class OutputStream(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_STREAM_UNSPECIFIED: _ClassVar[OutputStream]
    OUTPUT_STREAM_STDOUT: _ClassVar[OutputStream]
    OUTPUT_STREAM_STDERR: _ClassVar[OutputStream]

class SignalTarget(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SIGNAL_TARGET_UNSPECIFIED: _ClassVar[SignalTarget]
    SIGNAL_TARGET_GROUP: _ClassVar[SignalTarget]
    SIGNAL_TARGET_PROCESS: _ClassVar[SignalTarget]
    SIGNAL_TARGET_TREE: _ClassVar[SignalTarget]

class ProcessOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROCESS_OUTCOME_UNSPECIFIED: _ClassVar[ProcessOutcome]
    PROCESS_OUTCOME_EXITED: _ClassVar[ProcessOutcome]
    PROCESS_OUTCOME_SIGNALLED: _ClassVar[ProcessOutcome]
    PROCESS_OUTCOME_TIMEOUT: _ClassVar[ProcessOutcome]
    PROCESS_OUTCOME_LOST: _ClassVar[ProcessOutcome]

class FileFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILE_FORMAT_UNSPECIFIED: _ClassVar[FileFormat]
    FILE_FORMAT_PLAIN: _ClassVar[FileFormat]
    FILE_FORMAT_TAR: _ClassVar[FileFormat]

class FileChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILE_CHANGE_KIND_UNSPECIFIED: _ClassVar[FileChangeKind]
    FILE_CHANGE_KIND_CREATED: _ClassVar[FileChangeKind]
    FILE_CHANGE_KIND_CHANGED: _ClassVar[FileChangeKind]
    FILE_CHANGE_KIND_DELETED: _ClassVar[FileChangeKind]
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_IDLE: SessionState
SESSION_STATE_BUSY: SessionState
SESSION_STATE_LOST: SessionState
SESSION_STATE_PAUSED: SessionState
VIOLATION_KIND_UNSPECIFIED: ViolationKind
VIOLATION_KIND_ABOVE_CEILING: ViolationKind
VIOLATION_KIND_NOT_ALLOWED: ViolationKind
VIOLATION_KIND_DENIED: ViolationKind
VIOLATION_KIND_UNSUPPORTED: ViolationKind
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_SUCCEEDED: Outcome
OUTCOME_EXCEPTION: Outcome
OUTCOME_IMPORT_DENIED: Outcome
OUTCOME_POLICY_DENIED: Outcome
OUTCOME_OPERATION_LIMIT: Outcome
OUTCOME_TIMEOUT: Outcome
OUTCOME_CPU_LIMIT: Outcome
OUTCOME_OUT_OF_MEMORY: Outcome
OUTCOME_OUTPUT_LIMIT: Outcome
OUTCOME_EXITED: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_CRASHED: Outcome
OUTCOME_LOST: Outcome
VARIABLES_STATE_UNSPECIFIED: VariablesState
VARIABLES_STATE_KEPT: VariablesState
VARIABLES_STATE_RESET: VariablesState
VARIABLES_STATE_LOST: VariablesState
VARIABLES_STATE_ROLLED_BACK: VariablesState
OUTPUT_MODE_UNSPECIFIED: OutputMode
OUTPUT_MODE_TRAILING_EXPRESSION: OutputMode
OUTPUT_MODE_LAST_STATEMENT: OutputMode
OUTPUT_STREAM_UNSPECIFIED: OutputStream
OUTPUT_STREAM_STDOUT: OutputStream
OUTPUT_STREAM_STDERR: OutputStream
SIGNAL_TARGET_UNSPECIFIED: SignalTarget
SIGNAL_TARGET_GROUP: SignalTarget
SIGNAL_TARGET_PROCESS: SignalTarget
SIGNAL_TARGET_TREE: SignalTarget
PROCESS_OUTCOME_UNSPECIFIED: ProcessOutcome
PROCESS_OUTCOME_EXITED: ProcessOutcome
PROCESS_OUTCOME_SIGNALLED: ProcessOutcome
PROCESS_OUTCOME_TIMEOUT: ProcessOutcome
PROCESS_OUTCOME_LOST: ProcessOutcome
FILE_FORMAT_UNSPECIFIED: FileFormat
FILE_FORMAT_PLAIN: FileFormat
FILE_FORMAT_TAR: FileFormat
FILE_CHANGE_KIND_UNSPECIFIED: FileChangeKind
FILE_CHANGE_KIND_CREATED: FileChangeKind
FILE_CHANGE_KIND_CHANGED: FileChangeKind
FILE_CHANGE_KIND_DELETED: FileChangeKind

class BlobRef(_message.Message):
    __slots__ = ("blob_id", "size_bytes")
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    blob_id: str
    size_bytes: int
    def __init__(self, blob_id: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class BlobChunk(_message.Message):
    __slots__ = ("blob_id", "data")
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    blob_id: str
    data: bytes
    def __init__(self, blob_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("inline", "blob")
    INLINE_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    inline: bytes
    blob: BlobRef
    def __init__(self, inline: _Optional[bytes] = ..., blob: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: Payload
    def __init__(self, packed: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class NamedValue(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Value
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("wall_time_s", "cpu_time_s", "operations", "memory_bytes", "processes", "output_bytes", "disk_bytes", "idle_time_s", "session_time_s", "session_operations", "owner_grace_s", "max_files")
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    OWNER_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_FILES_FIELD_NUMBER: _ClassVar[int]
    wall_time_s: float
    cpu_time_s: float
    operations: int
    memory_bytes: int
    processes: int
    output_bytes: int
    disk_bytes: int
    idle_time_s: float
    session_time_s: float
    session_operations: int
    owner_grace_s: float
    max_files: int
    def __init__(self, wall_time_s: _Optional[float] = ..., cpu_time_s: _Optional[float] = ..., operations: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., processes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., idle_time_s: _Optional[float] = ..., session_time_s: _Optional[float] = ..., session_operations: _Optional[int] = ..., owner_grace_s: _Optional[float] = ..., max_files: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "state", "generation", "backend", "image", "limits", "authorized_imports", "python_version", "create_time", "expire_time", "warm", "labels", "lost_reason", "policy", "denied_imports", "workspace_imports", "refused_language", "missing_modules", "leased", "network", "denied_network", "network_usage", "packages", "environment_id", "images_with_missing", "node", "name", "env_names")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LOST_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DENIED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    MISSING_MODULES_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    DENIED_NETWORK_FIELD_NUMBER: _ClassVar[int]
    NETWORK_USAGE_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGES_WITH_MISSING_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENV_NAMES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    state: SessionState
    generation: int
    backend: str
    image: str
    limits: Limits
    authorized_imports: _containers.RepeatedScalarFieldContainer[str]
    python_version: str
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    warm: bool
    labels: _containers.ScalarMap[str, str]
    lost_reason: str
    policy: PolicyRef
    denied_imports: _containers.RepeatedScalarFieldContainer[str]
    workspace_imports: bool
    refused_language: _containers.RepeatedScalarFieldContainer[str]
    missing_modules: _containers.RepeatedScalarFieldContainer[str]
    leased: bool
    network: _containers.RepeatedScalarFieldContainer[str]
    denied_network: _containers.RepeatedScalarFieldContainer[str]
    network_usage: NetworkUsage
    packages: _containers.RepeatedScalarFieldContainer[str]
    environment_id: str
    images_with_missing: _containers.RepeatedScalarFieldContainer[str]
    node: str
    name: str
    env_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., generation: _Optional[int] = ..., backend: _Optional[str] = ..., image: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., authorized_imports: _Optional[_Iterable[str]] = ..., python_version: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., warm: bool = ..., labels: _Optional[_Mapping[str, str]] = ..., lost_reason: _Optional[str] = ..., policy: _Optional[_Union[PolicyRef, _Mapping]] = ..., denied_imports: _Optional[_Iterable[str]] = ..., workspace_imports: bool = ..., refused_language: _Optional[_Iterable[str]] = ..., missing_modules: _Optional[_Iterable[str]] = ..., leased: bool = ..., network: _Optional[_Iterable[str]] = ..., denied_network: _Optional[_Iterable[str]] = ..., network_usage: _Optional[_Union[NetworkUsage, _Mapping]] = ..., packages: _Optional[_Iterable[str]] = ..., environment_id: _Optional[str] = ..., images_with_missing: _Optional[_Iterable[str]] = ..., node: _Optional[str] = ..., name: _Optional[str] = ..., env_names: _Optional[_Iterable[str]] = ...) -> None: ...

class PolicyRef(_message.Message):
    __slots__ = ("profile", "version", "fingerprint")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    profile: str
    version: str
    fingerprint: str
    def __init__(self, profile: _Optional[str] = ..., version: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Violation(_message.Message):
    __slots__ = ("field", "kind", "requested", "allowed", "rule")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    field: str
    kind: ViolationKind
    requested: str
    allowed: str
    rule: str
    def __init__(self, field: _Optional[str] = ..., kind: _Optional[_Union[ViolationKind, str]] = ..., requested: _Optional[str] = ..., allowed: _Optional[str] = ..., rule: _Optional[str] = ...) -> None: ...

class Violations(_message.Message):
    __slots__ = ("violations", "omitted")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedCompositeFieldContainer[Violation]
    omitted: int
    def __init__(self, violations: _Optional[_Iterable[_Union[Violation, _Mapping]]] = ..., omitted: _Optional[int] = ...) -> None: ...

class ToolSpec(_message.Message):
    __slots__ = ("name", "description", "parameters", "is_final_answer", "shipped")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: _containers.RepeatedScalarFieldContainer[str]
    is_final_answer: bool
    shipped: ShippedTool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[_Iterable[str]] = ..., is_final_answer: bool = ..., shipped: _Optional[_Union[ShippedTool, _Mapping]] = ...) -> None: ...

class ShippedTool(_message.Message):
    __slots__ = ("source", "value", "modules")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    source: ToolSource
    value: Value
    modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, source: _Optional[_Union[ToolSource, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ..., modules: _Optional[_Iterable[str]] = ...) -> None: ...

class ToolSource(_message.Message):
    __slots__ = ("text", "entry", "bindings")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    text: str
    entry: str
    bindings: Value
    def __init__(self, text: _Optional[str] = ..., entry: _Optional[str] = ..., bindings: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class QueuedEvent(_message.Message):
    __slots__ = ("ahead",)
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ahead: int
    def __init__(self, ahead: _Optional[int] = ...) -> None: ...

class LogEvent(_message.Message):
    __slots__ = ("stream", "text")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    stream: OutputStream
    text: str
    def __init__(self, stream: _Optional[_Union[OutputStream, str]] = ..., text: _Optional[str] = ...) -> None: ...

class OutputCutEvent(_message.Message):
    __slots__ = ("omitted_bytes",)
    OMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    omitted_bytes: int
    def __init__(self, omitted_bytes: _Optional[int] = ...) -> None: ...

class ImageEvent(_message.Message):
    __slots__ = ("data", "mime_type", "source")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    data: Payload
    mime_type: str
    source: str
    def __init__(self, data: _Optional[_Union[Payload, _Mapping]] = ..., mime_type: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class DisplayEvent(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: Payload
    def __init__(self, data: _Optional[_Union[Payload, _Mapping]] = ...) -> None: ...

class ToolCallEvent(_message.Message):
    __slots__ = ("call_id", "name", "arguments")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    name: str
    arguments: Value
    def __init__(self, call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("type", "message", "traceback", "line", "statement", "exit_code")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    traceback: str
    line: int
    statement: str
    exit_code: int
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., line: _Optional[int] = ..., statement: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("operations", "wall_time_s", "cpu_time_s", "peak_memory_bytes", "output_bytes", "network")
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    operations: int
    wall_time_s: float
    cpu_time_s: float
    peak_memory_bytes: int
    output_bytes: int
    network: NetworkUsage
    def __init__(self, operations: _Optional[int] = ..., wall_time_s: _Optional[float] = ..., cpu_time_s: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., network: _Optional[_Union[NetworkUsage, _Mapping]] = ...) -> None: ...

class NetworkUsage(_message.Message):
    __slots__ = ("connections", "denied", "sent_bytes", "received_bytes")
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    connections: int
    denied: int
    sent_bytes: int
    received_bytes: int
    def __init__(self, connections: _Optional[int] = ..., denied: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class LimitWarningEvent(_message.Message):
    __slots__ = ("limit", "used", "budget")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    limit: str
    used: int
    budget: int
    def __init__(self, limit: _Optional[str] = ..., used: _Optional[int] = ..., budget: _Optional[int] = ...) -> None: ...

class ExecutionResult(_message.Message):
    __slots__ = ("outcome", "output", "error", "usage", "variables_state", "generation", "final_answer_call_id", "artifacts", "artifacts_truncated", "policy_fingerprint", "savepoint", "branch", "savepoint_refused")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINAL_ANSWER_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    output: Value
    error: ErrorDetail
    usage: Usage
    variables_state: VariablesState
    generation: int
    final_answer_call_id: str
    artifacts: _containers.RepeatedCompositeFieldContainer[FileInfo]
    artifacts_truncated: bool
    policy_fingerprint: str
    savepoint: int
    branch: BranchEnd
    savepoint_refused: str
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., output: _Optional[_Union[Value, _Mapping]] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., variables_state: _Optional[_Union[VariablesState, str]] = ..., generation: _Optional[int] = ..., final_answer_call_id: _Optional[str] = ..., artifacts: _Optional[_Iterable[_Union[FileInfo, _Mapping]]] = ..., artifacts_truncated: bool = ..., policy_fingerprint: _Optional[str] = ..., savepoint: _Optional[int] = ..., branch: _Optional[_Union[BranchEnd, _Mapping]] = ..., savepoint_refused: _Optional[str] = ...) -> None: ...

class BranchEnd(_message.Message):
    __slots__ = ("number", "refused", "why_not_kept", "variables", "files", "left_out")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_KEPT_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    number: int
    refused: str
    why_not_kept: str
    variables: Changes
    files: Changes
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., refused: _Optional[str] = ..., why_not_kept: _Optional[str] = ..., variables: _Optional[_Union[Changes, _Mapping]] = ..., files: _Optional[_Union[Changes, _Mapping]] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class Changes(_message.Message):
    __slots__ = ("added", "changed", "removed", "unknown", "truncated")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedScalarFieldContainer[str]
    changed: _containers.RepeatedScalarFieldContainer[str]
    removed: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    truncated: bool
    def __init__(self, added: _Optional[_Iterable[str]] = ..., changed: _Optional[_Iterable[str]] = ..., removed: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ..., truncated: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "queued", "log", "output_cut", "image", "tool_call", "blob_chunk", "result", "limit_warning", "display")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CUT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    BLOB_CHUNK_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_WARNING_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_FIELD_NUMBER: _ClassVar[int]
    number: int
    queued: QueuedEvent
    log: LogEvent
    output_cut: OutputCutEvent
    image: ImageEvent
    tool_call: ToolCallEvent
    blob_chunk: BlobChunk
    result: ExecutionResult
    limit_warning: LimitWarningEvent
    display: DisplayEvent
    def __init__(self, number: _Optional[int] = ..., queued: _Optional[_Union[QueuedEvent, _Mapping]] = ..., log: _Optional[_Union[LogEvent, _Mapping]] = ..., output_cut: _Optional[_Union[OutputCutEvent, _Mapping]] = ..., image: _Optional[_Union[ImageEvent, _Mapping]] = ..., tool_call: _Optional[_Union[ToolCallEvent, _Mapping]] = ..., blob_chunk: _Optional[_Union[BlobChunk, _Mapping]] = ..., result: _Optional[_Union[ExecutionResult, _Mapping]] = ..., limit_warning: _Optional[_Union[LimitWarningEvent, _Mapping]] = ..., display: _Optional[_Union[DisplayEvent, _Mapping]] = ...) -> None: ...

class TerminalSize(_message.Message):
    __slots__ = ("columns", "rows")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    columns: int
    rows: int
    def __init__(self, columns: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class ProcessStarted(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class ProcessOutput(_message.Message):
    __slots__ = ("stream", "data")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    stream: OutputStream
    data: bytes
    def __init__(self, stream: _Optional[_Union[OutputStream, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ProcessOutputCut(_message.Message):
    __slots__ = ("omitted_bytes",)
    OMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    omitted_bytes: int
    def __init__(self, omitted_bytes: _Optional[int] = ...) -> None: ...

class ProcessResult(_message.Message):
    __slots__ = ("outcome", "exit_code", "signal", "wall_time_s", "cpu_time_s", "peak_memory_bytes", "output_bytes", "lost_reason")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_REASON_FIELD_NUMBER: _ClassVar[int]
    outcome: ProcessOutcome
    exit_code: int
    signal: int
    wall_time_s: float
    cpu_time_s: float
    peak_memory_bytes: int
    output_bytes: int
    lost_reason: str
    def __init__(self, outcome: _Optional[_Union[ProcessOutcome, str]] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., wall_time_s: _Optional[float] = ..., cpu_time_s: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., lost_reason: _Optional[str] = ...) -> None: ...

class ProcessEvent(_message.Message):
    __slots__ = ("number", "started", "output", "output_cut", "result")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CUT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    number: int
    started: ProcessStarted
    output: ProcessOutput
    output_cut: ProcessOutputCut
    result: ProcessResult
    def __init__(self, number: _Optional[int] = ..., started: _Optional[_Union[ProcessStarted, _Mapping]] = ..., output: _Optional[_Union[ProcessOutput, _Mapping]] = ..., output_cut: _Optional[_Union[ProcessOutputCut, _Mapping]] = ..., result: _Optional[_Union[ProcessResult, _Mapping]] = ...) -> None: ...

class ProcessInfo(_message.Message):
    __slots__ = ("process_id", "argv", "cwd", "pid", "has_pty", "has_stdin", "start_time", "result", "first_event", "last_event", "written_bytes")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HAS_PTY_FIELD_NUMBER: _ClassVar[int]
    HAS_STDIN_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    process_id: str
    argv: _containers.RepeatedScalarFieldContainer[str]
    cwd: str
    pid: int
    has_pty: bool
    has_stdin: bool
    start_time: _timestamp_pb2.Timestamp
    result: ProcessResult
    first_event: int
    last_event: int
    written_bytes: int
    def __init__(self, process_id: _Optional[str] = ..., argv: _Optional[_Iterable[str]] = ..., cwd: _Optional[str] = ..., pid: _Optional[int] = ..., has_pty: bool = ..., has_stdin: bool = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., result: _Optional[_Union[ProcessResult, _Mapping]] = ..., first_event: _Optional[int] = ..., last_event: _Optional[int] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class ProcessRules(_message.Message):
    __slots__ = ("allowed", "pty", "max", "max_output_bytes")
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    PTY_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    allowed: bool
    pty: bool
    max: int
    max_output_bytes: int
    def __init__(self, allowed: bool = ..., pty: bool = ..., max: _Optional[int] = ..., max_output_bytes: _Optional[int] = ...) -> None: ...

class PortRules(_message.Message):
    __slots__ = ("allowed", "max_connections")
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    allowed: _containers.RepeatedScalarFieldContainer[str]
    max_connections: int
    def __init__(self, allowed: _Optional[_Iterable[str]] = ..., max_connections: _Optional[int] = ...) -> None: ...

class FileInfo(_message.Message):
    __slots__ = ("path", "size_bytes", "is_directory", "modify_time", "mode", "is_link", "target", "user_id", "group_id")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MODIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    IS_LINK_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    is_directory: bool
    modify_time: _timestamp_pb2.Timestamp
    mode: int
    is_link: bool
    target: str
    user_id: int
    group_id: int
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., is_directory: bool = ..., modify_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., mode: _Optional[int] = ..., is_link: bool = ..., target: _Optional[str] = ..., user_id: _Optional[int] = ..., group_id: _Optional[int] = ...) -> None: ...

class FileChange(_message.Message):
    __slots__ = ("path", "kind", "is_directory")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IS_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: FileChangeKind
    is_directory: bool
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[_Union[FileChangeKind, str]] = ..., is_directory: bool = ...) -> None: ...

class FileLimits(_message.Message):
    __slots__ = ("max_put_bytes", "max_get_bytes", "max_puts", "max_gets")
    MAX_PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_GET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PUTS_FIELD_NUMBER: _ClassVar[int]
    MAX_GETS_FIELD_NUMBER: _ClassVar[int]
    max_put_bytes: int
    max_get_bytes: int
    max_puts: int
    max_gets: int
    def __init__(self, max_put_bytes: _Optional[int] = ..., max_get_bytes: _Optional[int] = ..., max_puts: _Optional[int] = ..., max_gets: _Optional[int] = ...) -> None: ...

class StateRules(_message.Message):
    __slots__ = ("export", "restore", "max_bytes", "allow_foreign", "savepoints", "savepoint_file_bytes", "branches")
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FOREIGN_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINTS_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    export: bool
    restore: bool
    max_bytes: int
    allow_foreign: bool
    savepoints: int
    savepoint_file_bytes: int
    branches: int
    def __init__(self, export: bool = ..., restore: bool = ..., max_bytes: _Optional[int] = ..., allow_foreign: bool = ..., savepoints: _Optional[int] = ..., savepoint_file_bytes: _Optional[int] = ..., branches: _Optional[int] = ...) -> None: ...

class Quotas(_message.Message):
    __slots__ = ("sessions", "executions", "creations_per_minute", "cpu_time_s_per_hour", "output_bytes_per_hour", "calls", "calls_per_second", "egress_bytes_per_hour")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    CREATIONS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EGRESS_BYTES_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    executions: int
    creations_per_minute: int
    cpu_time_s_per_hour: float
    output_bytes_per_hour: int
    calls: int
    calls_per_second: int
    egress_bytes_per_hour: int
    def __init__(self, sessions: _Optional[int] = ..., executions: _Optional[int] = ..., creations_per_minute: _Optional[int] = ..., cpu_time_s_per_hour: _Optional[float] = ..., output_bytes_per_hour: _Optional[int] = ..., calls: _Optional[int] = ..., calls_per_second: _Optional[int] = ..., egress_bytes_per_hour: _Optional[int] = ...) -> None: ...

class NetworkSecret(_message.Message):
    __slots__ = ("host", "header", "methods", "paths")
    HOST_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    host: str
    header: str
    methods: _containers.RepeatedScalarFieldContainer[str]
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, host: _Optional[str] = ..., header: _Optional[str] = ..., methods: _Optional[_Iterable[str]] = ..., paths: _Optional[_Iterable[str]] = ...) -> None: ...

class NetworkRules(_message.Message):
    __slots__ = ("default_hosts", "allowed_hosts", "denied_hosts", "secrets", "max_connections", "max_new_connections_per_minute", "max_sent_bytes", "max_received_bytes", "max_connection_s", "ask_hosts")
    DEFAULT_HOSTS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_HOSTS_FIELD_NUMBER: _ClassVar[int]
    DENIED_HOSTS_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_CONNECTIONS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTION_S_FIELD_NUMBER: _ClassVar[int]
    ASK_HOSTS_FIELD_NUMBER: _ClassVar[int]
    default_hosts: _containers.RepeatedScalarFieldContainer[str]
    allowed_hosts: _containers.RepeatedScalarFieldContainer[str]
    denied_hosts: _containers.RepeatedScalarFieldContainer[str]
    secrets: _containers.RepeatedCompositeFieldContainer[NetworkSecret]
    max_connections: int
    max_new_connections_per_minute: int
    max_sent_bytes: int
    max_received_bytes: int
    max_connection_s: float
    ask_hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, default_hosts: _Optional[_Iterable[str]] = ..., allowed_hosts: _Optional[_Iterable[str]] = ..., denied_hosts: _Optional[_Iterable[str]] = ..., secrets: _Optional[_Iterable[_Union[NetworkSecret, _Mapping]]] = ..., max_connections: _Optional[int] = ..., max_new_connections_per_minute: _Optional[int] = ..., max_sent_bytes: _Optional[int] = ..., max_received_bytes: _Optional[int] = ..., max_connection_s: _Optional[float] = ..., ask_hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class PackagesPolicy(_message.Message):
    __slots__ = ("allowed", "locked", "auto", "max_requirements", "max_environment_bytes", "exclude_newer_s", "ask")
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ENVIRONMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_NEWER_S_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    allowed: _containers.RepeatedScalarFieldContainer[str]
    locked: _containers.RepeatedScalarFieldContainer[str]
    auto: bool
    max_requirements: int
    max_environment_bytes: int
    exclude_newer_s: float
    ask: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, allowed: _Optional[_Iterable[str]] = ..., locked: _Optional[_Iterable[str]] = ..., auto: bool = ..., max_requirements: _Optional[int] = ..., max_environment_bytes: _Optional[int] = ..., exclude_newer_s: _Optional[float] = ..., ask: _Optional[_Iterable[str]] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("policy", "default_limits", "max_limits", "default_imports", "allowed_imports", "images", "backend", "tool_placements", "network", "denied_imports", "refused_language", "allowed_tools", "files", "execution_default_limits", "execution_max_limits", "quotas", "backends", "state", "network_rules", "packages", "processes", "ports", "workspace_imports", "ask_imports", "ask_tools", "record")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LIMITS_FIELD_NUMBER: _ClassVar[int]
    MAX_LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TOOL_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    DENIED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_DEFAULT_LIMITS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_MAX_LIMITS_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NETWORK_RULES_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    ASK_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    ASK_TOOLS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    policy: PolicyRef
    default_limits: Limits
    max_limits: Limits
    default_imports: _containers.RepeatedScalarFieldContainer[str]
    allowed_imports: _containers.RepeatedScalarFieldContainer[str]
    images: _containers.RepeatedScalarFieldContainer[str]
    backend: str
    tool_placements: _containers.RepeatedScalarFieldContainer[str]
    network: str
    denied_imports: _containers.RepeatedScalarFieldContainer[str]
    refused_language: _containers.RepeatedScalarFieldContainer[str]
    allowed_tools: _containers.RepeatedScalarFieldContainer[str]
    files: FileLimits
    execution_default_limits: Limits
    execution_max_limits: Limits
    quotas: Quotas
    backends: _containers.RepeatedScalarFieldContainer[str]
    state: StateRules
    network_rules: NetworkRules
    packages: PackagesPolicy
    processes: ProcessRules
    ports: PortRules
    workspace_imports: bool
    ask_imports: _containers.RepeatedScalarFieldContainer[str]
    ask_tools: _containers.RepeatedScalarFieldContainer[str]
    record: str
    def __init__(self, policy: _Optional[_Union[PolicyRef, _Mapping]] = ..., default_limits: _Optional[_Union[Limits, _Mapping]] = ..., max_limits: _Optional[_Union[Limits, _Mapping]] = ..., default_imports: _Optional[_Iterable[str]] = ..., allowed_imports: _Optional[_Iterable[str]] = ..., images: _Optional[_Iterable[str]] = ..., backend: _Optional[str] = ..., tool_placements: _Optional[_Iterable[str]] = ..., network: _Optional[str] = ..., denied_imports: _Optional[_Iterable[str]] = ..., refused_language: _Optional[_Iterable[str]] = ..., allowed_tools: _Optional[_Iterable[str]] = ..., files: _Optional[_Union[FileLimits, _Mapping]] = ..., execution_default_limits: _Optional[_Union[Limits, _Mapping]] = ..., execution_max_limits: _Optional[_Union[Limits, _Mapping]] = ..., quotas: _Optional[_Union[Quotas, _Mapping]] = ..., backends: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[StateRules, _Mapping]] = ..., network_rules: _Optional[_Union[NetworkRules, _Mapping]] = ..., packages: _Optional[_Union[PackagesPolicy, _Mapping]] = ..., processes: _Optional[_Union[ProcessRules, _Mapping]] = ..., ports: _Optional[_Union[PortRules, _Mapping]] = ..., workspace_imports: bool = ..., ask_imports: _Optional[_Iterable[str]] = ..., ask_tools: _Optional[_Iterable[str]] = ..., record: _Optional[str] = ...) -> None: ...
