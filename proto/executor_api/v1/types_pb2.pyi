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

class FileFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILE_FORMAT_UNSPECIFIED: _ClassVar[FileFormat]
    FILE_FORMAT_PLAIN: _ClassVar[FileFormat]
    FILE_FORMAT_TAR: _ClassVar[FileFormat]
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_IDLE: SessionState
SESSION_STATE_BUSY: SessionState
SESSION_STATE_LOST: SessionState
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
OUTPUT_MODE_UNSPECIFIED: OutputMode
OUTPUT_MODE_TRAILING_EXPRESSION: OutputMode
OUTPUT_MODE_LAST_STATEMENT: OutputMode
OUTPUT_STREAM_UNSPECIFIED: OutputStream
OUTPUT_STREAM_STDOUT: OutputStream
OUTPUT_STREAM_STDERR: OutputStream
FILE_FORMAT_UNSPECIFIED: FileFormat
FILE_FORMAT_PLAIN: FileFormat
FILE_FORMAT_TAR: FileFormat

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
    __slots__ = ("wall_time_s", "cpu_time_s", "operations", "memory_bytes", "processes", "output_bytes", "disk_bytes", "idle_time_s", "session_time_s")
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIME_S_FIELD_NUMBER: _ClassVar[int]
    wall_time_s: float
    cpu_time_s: float
    operations: int
    memory_bytes: int
    processes: int
    output_bytes: int
    disk_bytes: int
    idle_time_s: float
    session_time_s: float
    def __init__(self, wall_time_s: _Optional[float] = ..., cpu_time_s: _Optional[float] = ..., operations: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., processes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., idle_time_s: _Optional[float] = ..., session_time_s: _Optional[float] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "state", "generation", "backend", "image", "limits", "authorized_imports", "python_version", "create_time", "expire_time", "warm", "labels", "lost_reason")
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
    def __init__(self, session_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., generation: _Optional[int] = ..., backend: _Optional[str] = ..., image: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., authorized_imports: _Optional[_Iterable[str]] = ..., python_version: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., warm: bool = ..., labels: _Optional[_Mapping[str, str]] = ..., lost_reason: _Optional[str] = ...) -> None: ...

class ToolSpec(_message.Message):
    __slots__ = ("name", "description", "parameters", "is_final_answer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_ANSWER_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: _containers.RepeatedScalarFieldContainer[str]
    is_final_answer: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[_Iterable[str]] = ..., is_final_answer: bool = ...) -> None: ...

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
    __slots__ = ("operations", "wall_time_s", "cpu_time_s", "peak_memory_bytes", "output_bytes")
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    operations: int
    wall_time_s: float
    cpu_time_s: float
    peak_memory_bytes: int
    output_bytes: int
    def __init__(self, operations: _Optional[int] = ..., wall_time_s: _Optional[float] = ..., cpu_time_s: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ...) -> None: ...

class ExecutionResult(_message.Message):
    __slots__ = ("outcome", "output", "error", "usage", "variables_state", "generation", "final_answer_call_id", "artifacts", "artifacts_truncated")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINAL_ANSWER_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    output: Value
    error: ErrorDetail
    usage: Usage
    variables_state: VariablesState
    generation: int
    final_answer_call_id: str
    artifacts: _containers.RepeatedCompositeFieldContainer[FileInfo]
    artifacts_truncated: bool
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., output: _Optional[_Union[Value, _Mapping]] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., variables_state: _Optional[_Union[VariablesState, str]] = ..., generation: _Optional[int] = ..., final_answer_call_id: _Optional[str] = ..., artifacts: _Optional[_Iterable[_Union[FileInfo, _Mapping]]] = ..., artifacts_truncated: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "queued", "log", "output_cut", "image", "tool_call", "blob_chunk", "result")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_CUT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    BLOB_CHUNK_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    number: int
    queued: QueuedEvent
    log: LogEvent
    output_cut: OutputCutEvent
    image: ImageEvent
    tool_call: ToolCallEvent
    blob_chunk: BlobChunk
    result: ExecutionResult
    def __init__(self, number: _Optional[int] = ..., queued: _Optional[_Union[QueuedEvent, _Mapping]] = ..., log: _Optional[_Union[LogEvent, _Mapping]] = ..., output_cut: _Optional[_Union[OutputCutEvent, _Mapping]] = ..., image: _Optional[_Union[ImageEvent, _Mapping]] = ..., tool_call: _Optional[_Union[ToolCallEvent, _Mapping]] = ..., blob_chunk: _Optional[_Union[BlobChunk, _Mapping]] = ..., result: _Optional[_Union[ExecutionResult, _Mapping]] = ...) -> None: ...

class FileInfo(_message.Message):
    __slots__ = ("path", "size_bytes", "is_directory", "modify_time")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MODIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    is_directory: bool
    modify_time: _timestamp_pb2.Timestamp
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., is_directory: bool = ..., modify_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("name", "default_limits", "max_limits", "default_imports", "allowed_imports", "images", "backend", "tool_placements", "network")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LIMITS_FIELD_NUMBER: _ClassVar[int]
    MAX_LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TOOL_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    name: str
    default_limits: Limits
    max_limits: Limits
    default_imports: _containers.RepeatedScalarFieldContainer[str]
    allowed_imports: _containers.RepeatedScalarFieldContainer[str]
    images: _containers.RepeatedScalarFieldContainer[str]
    backend: str
    tool_placements: _containers.RepeatedScalarFieldContainer[str]
    network: str
    def __init__(self, name: _Optional[str] = ..., default_limits: _Optional[_Union[Limits, _Mapping]] = ..., max_limits: _Optional[_Union[Limits, _Mapping]] = ..., default_imports: _Optional[_Iterable[str]] = ..., allowed_imports: _Optional[_Iterable[str]] = ..., images: _Optional[_Iterable[str]] = ..., backend: _Optional[str] = ..., tool_placements: _Optional[_Iterable[str]] = ..., network: _Optional[str] = ...) -> None: ...
