import datetime

from executor_api.v1 import types_pb2 as _types_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateSessionRequest(_message.Message):
    __slots__ = ("request_id", "image", "authorized_imports", "limits", "labels", "prelude", "backend", "network", "packages", "lease_id", "modules", "node_labels", "name", "env")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NodeLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PRELUDE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    NODE_LABELS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    image: str
    authorized_imports: _containers.RepeatedScalarFieldContainer[str]
    limits: _types_pb2.Limits
    labels: _containers.ScalarMap[str, str]
    prelude: str
    backend: str
    network: _containers.RepeatedScalarFieldContainer[str]
    packages: _containers.RepeatedScalarFieldContainer[str]
    lease_id: str
    modules: _containers.RepeatedScalarFieldContainer[str]
    node_labels: _containers.ScalarMap[str, str]
    name: str
    env: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., image: _Optional[str] = ..., authorized_imports: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., prelude: _Optional[str] = ..., backend: _Optional[str] = ..., network: _Optional[_Iterable[str]] = ..., packages: _Optional[_Iterable[str]] = ..., lease_id: _Optional[str] = ..., modules: _Optional[_Iterable[str]] = ..., node_labels: _Optional[_Mapping[str, str]] = ..., name: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ...) -> None: ...

class PrepareEnvironmentRequest(_message.Message):
    __slots__ = ("packages", "image", "backend", "request_id")
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    packages: _containers.RepeatedScalarFieldContainer[str]
    image: str
    backend: str
    request_id: str
    def __init__(self, packages: _Optional[_Iterable[str]] = ..., image: _Optional[str] = ..., backend: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class PrepareEnvironmentResponse(_message.Message):
    __slots__ = ("environment_id", "pins", "size_bytes", "modules")
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    pins: _containers.RepeatedScalarFieldContainer[str]
    size_bytes: int
    modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, environment_id: _Optional[str] = ..., pins: _Optional[_Iterable[str]] = ..., size_bytes: _Optional[int] = ..., modules: _Optional[_Iterable[str]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id", "name", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    lease_id: str
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[_types_pb2.Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[_types_pb2.Session, _Mapping]]] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("session_id", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("sessions", "renew_after_s")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RENEW_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    renew_after_s: float
    def __init__(self, sessions: _Optional[int] = ..., renew_after_s: _Optional[float] = ...) -> None: ...

class EndLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class EndLeaseResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    def __init__(self, sessions: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ...) -> None: ...

class AuthorizeImportsRequest(_message.Message):
    __slots__ = ("session_id", "authorized_imports")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    authorized_imports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., authorized_imports: _Optional[_Iterable[str]] = ...) -> None: ...

class AuthorizeImportsResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("session_id", "execution_id", "code", "output_mode", "limits", "savepoint", "branch", "whole_output")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    execution_id: str
    code: str
    output_mode: _types_pb2.OutputMode
    limits: _types_pb2.Limits
    savepoint: bool
    branch: bool
    whole_output: bool
    def __init__(self, session_id: _Optional[str] = ..., execution_id: _Optional[str] = ..., code: _Optional[str] = ..., output_mode: _Optional[_Union[_types_pb2.OutputMode, str]] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., savepoint: bool = ..., branch: bool = ..., whole_output: bool = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _types_pb2.Event
    def __init__(self, event: _Optional[_Union[_types_pb2.Event, _Mapping]] = ...) -> None: ...

class AttachExecutionRequest(_message.Message):
    __slots__ = ("session_id", "execution_id", "after_event")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    execution_id: str
    after_event: int
    def __init__(self, session_id: _Optional[str] = ..., execution_id: _Optional[str] = ..., after_event: _Optional[int] = ...) -> None: ...

class AttachExecutionResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _types_pb2.Event
    def __init__(self, event: _Optional[_Union[_types_pb2.Event, _Mapping]] = ...) -> None: ...

class CancelExecutionRequest(_message.Message):
    __slots__ = ("session_id", "execution_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    execution_id: str
    def __init__(self, session_id: _Optional[str] = ..., execution_id: _Optional[str] = ...) -> None: ...

class CancelExecutionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToolError(_message.Message):
    __slots__ = ("type", "message", "arguments")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    arguments: bytes
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., arguments: _Optional[bytes] = ...) -> None: ...

class SubmitToolResultRequest(_message.Message):
    __slots__ = ("session_id", "execution_id", "call_id", "value", "error")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    execution_id: str
    call_id: str
    value: _types_pb2.Value
    error: ToolError
    def __init__(self, session_id: _Optional[str] = ..., execution_id: _Optional[str] = ..., call_id: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.Value, _Mapping]] = ..., error: _Optional[_Union[ToolError, _Mapping]] = ...) -> None: ...

class SubmitToolResultResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterToolsRequest(_message.Message):
    __slots__ = ("session_id", "tools")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tools: _containers.RepeatedCompositeFieldContainer[_types_pb2.ToolSpec]
    def __init__(self, session_id: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[_types_pb2.ToolSpec, _Mapping]]] = ...) -> None: ...

class RegisterToolsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetVariablesRequest(_message.Message):
    __slots__ = ("session_id", "variables")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    variables: _containers.RepeatedCompositeFieldContainer[_types_pb2.NamedValue]
    def __init__(self, session_id: _Optional[str] = ..., variables: _Optional[_Iterable[_Union[_types_pb2.NamedValue, _Mapping]]] = ...) -> None: ...

class SetVariablesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVariablesRequest(_message.Message):
    __slots__ = ("session_id", "names")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class Variables(_message.Message):
    __slots__ = ("variables", "missing")
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedCompositeFieldContainer[_types_pb2.NamedValue]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, variables: _Optional[_Iterable[_Union[_types_pb2.NamedValue, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class GetVariablesResponse(_message.Message):
    __slots__ = ("blob_chunk", "variables")
    BLOB_CHUNK_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    blob_chunk: _types_pb2.BlobChunk
    variables: Variables
    def __init__(self, blob_chunk: _Optional[_Union[_types_pb2.BlobChunk, _Mapping]] = ..., variables: _Optional[_Union[Variables, _Mapping]] = ...) -> None: ...

class UploadBlobRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: UploadBlobHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[UploadBlobHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadBlobHeader(_message.Message):
    __slots__ = ("session_id", "size_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    size_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class UploadBlobResponse(_message.Message):
    __slots__ = ("blob_id",)
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    blob_id: str
    def __init__(self, blob_id: _Optional[str] = ...) -> None: ...

class PutFileHeader(_message.Message):
    __slots__ = ("session_id", "path", "size_bytes", "format", "append", "mode")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    size_bytes: int
    format: _types_pb2.FileFormat
    append: bool
    mode: int
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., format: _Optional[_Union[_types_pb2.FileFormat, str]] = ..., append: bool = ..., mode: _Optional[int] = ...) -> None: ...

class PutFileRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutFileHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PutFileHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutFileResponse(_message.Message):
    __slots__ = ("file",)
    FILE_FIELD_NUMBER: _ClassVar[int]
    file: _types_pb2.FileInfo
    def __init__(self, file: _Optional[_Union[_types_pb2.FileInfo, _Mapping]] = ...) -> None: ...

class GetFileRequest(_message.Message):
    __slots__ = ("session_id", "path", "format", "offset", "length", "excluded")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    format: _types_pb2.FileFormat
    offset: int
    length: int
    excluded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., format: _Optional[_Union[_types_pb2.FileFormat, str]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., excluded: _Optional[_Iterable[str]] = ...) -> None: ...

class GetFileResponse(_message.Message):
    __slots__ = ("file", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: _types_pb2.FileInfo
    data: bytes
    def __init__(self, file: _Optional[_Union[_types_pb2.FileInfo, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ListFilesRequest(_message.Message):
    __slots__ = ("session_id", "path", "recursive")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    recursive: bool
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., recursive: bool = ...) -> None: ...

class ListFilesResponse(_message.Message):
    __slots__ = ("files", "truncated")
    FILES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[_types_pb2.FileInfo]
    truncated: bool
    def __init__(self, files: _Optional[_Iterable[_Union[_types_pb2.FileInfo, _Mapping]]] = ..., truncated: bool = ...) -> None: ...

class ManageFileRequest(_message.Message):
    __slots__ = ("session_id", "path", "stat", "realpath", "mkdir", "move", "remove")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STAT_FIELD_NUMBER: _ClassVar[int]
    REALPATH_FIELD_NUMBER: _ClassVar[int]
    MKDIR_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    stat: StatFile
    realpath: ResolvePath
    mkdir: MakeDirectory
    move: MoveFile
    remove: RemoveFile
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., stat: _Optional[_Union[StatFile, _Mapping]] = ..., realpath: _Optional[_Union[ResolvePath, _Mapping]] = ..., mkdir: _Optional[_Union[MakeDirectory, _Mapping]] = ..., move: _Optional[_Union[MoveFile, _Mapping]] = ..., remove: _Optional[_Union[RemoveFile, _Mapping]] = ...) -> None: ...

class StatFile(_message.Message):
    __slots__ = ("follow",)
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    def __init__(self, follow: bool = ...) -> None: ...

class ResolvePath(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MakeDirectory(_message.Message):
    __slots__ = ("parents", "exist_ok")
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    EXIST_OK_FIELD_NUMBER: _ClassVar[int]
    parents: bool
    exist_ok: bool
    def __init__(self, parents: bool = ..., exist_ok: bool = ...) -> None: ...

class MoveFile(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: str
    def __init__(self, target: _Optional[str] = ...) -> None: ...

class RemoveFile(_message.Message):
    __slots__ = ("recursive", "missing_ok")
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    MISSING_OK_FIELD_NUMBER: _ClassVar[int]
    recursive: bool
    missing_ok: bool
    def __init__(self, recursive: bool = ..., missing_ok: bool = ...) -> None: ...

class ManageFileResponse(_message.Message):
    __slots__ = ("file",)
    FILE_FIELD_NUMBER: _ClassVar[int]
    file: _types_pb2.FileInfo
    def __init__(self, file: _Optional[_Union[_types_pb2.FileInfo, _Mapping]] = ...) -> None: ...

class WatchFilesRequest(_message.Message):
    __slots__ = ("session_id", "path", "recursive")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    recursive: bool
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., recursive: bool = ...) -> None: ...

class WatchFilesResponse(_message.Message):
    __slots__ = ("changes", "overflowed")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    OVERFLOWED_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[_types_pb2.FileChange]
    overflowed: bool
    def __init__(self, changes: _Optional[_Iterable[_Union[_types_pb2.FileChange, _Mapping]]] = ..., overflowed: bool = ...) -> None: ...

class Savepoint(_message.Message):
    __slots__ = ("number", "made_time", "files", "file_bytes", "left_out", "is_branch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MADE_TIME_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    IS_BRANCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    made_time: _timestamp_pb2.Timestamp
    files: int
    file_bytes: int
    left_out: _containers.RepeatedScalarFieldContainer[str]
    is_branch: bool
    def __init__(self, number: _Optional[int] = ..., made_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., files: _Optional[int] = ..., file_bytes: _Optional[int] = ..., left_out: _Optional[_Iterable[str]] = ..., is_branch: bool = ...) -> None: ...

class TakeSavepointRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class TakeSavepointResponse(_message.Message):
    __slots__ = ("savepoints", "dropped")
    SAVEPOINTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    savepoints: _containers.RepeatedCompositeFieldContainer[Savepoint]
    dropped: int
    def __init__(self, savepoints: _Optional[_Iterable[_Union[Savepoint, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("session_id", "savepoint")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    savepoint: int
    def __init__(self, session_id: _Optional[str] = ..., savepoint: _Optional[int] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("savepoints", "dropped", "generation", "left_out")
    SAVEPOINTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    savepoints: _containers.RepeatedCompositeFieldContainer[Savepoint]
    dropped: int
    generation: int
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, savepoints: _Optional[_Iterable[_Union[Savepoint, _Mapping]]] = ..., dropped: _Optional[int] = ..., generation: _Optional[int] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class ListSavepointsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListSavepointsResponse(_message.Message):
    __slots__ = ("savepoints",)
    SAVEPOINTS_FIELD_NUMBER: _ClassVar[int]
    savepoints: _containers.RepeatedCompositeFieldContainer[Savepoint]
    def __init__(self, savepoints: _Optional[_Iterable[_Union[Savepoint, _Mapping]]] = ...) -> None: ...

class ExportStateRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ExportStateResponse(_message.Message):
    __slots__ = ("data", "manifest")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    manifest: StateManifest
    def __init__(self, data: _Optional[bytes] = ..., manifest: _Optional[_Union[StateManifest, _Mapping]] = ...) -> None: ...

class RestoreStateRequest(_message.Message):
    __slots__ = ("session_id", "data")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    data: bytes
    def __init__(self, session_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class RestoreStateResponse(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: StateManifest
    def __init__(self, manifest: _Optional[_Union[StateManifest, _Mapping]] = ...) -> None: ...

class StateManifest(_message.Message):
    __slots__ = ("variables", "omitted_variables", "files", "file_bytes", "omitted_files", "python_version")
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OMITTED_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FILES_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedScalarFieldContainer[str]
    omitted_variables: _containers.RepeatedCompositeFieldContainer[StateOmission]
    files: int
    file_bytes: int
    omitted_files: _containers.RepeatedCompositeFieldContainer[StateOmission]
    python_version: str
    def __init__(self, variables: _Optional[_Iterable[str]] = ..., omitted_variables: _Optional[_Iterable[_Union[StateOmission, _Mapping]]] = ..., files: _Optional[int] = ..., file_bytes: _Optional[int] = ..., omitted_files: _Optional[_Iterable[_Union[StateOmission, _Mapping]]] = ..., python_version: _Optional[str] = ...) -> None: ...

class StateOmission(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: _types_pb2.Policy
    def __init__(self, policy: _Optional[_Union[_types_pb2.Policy, _Mapping]] = ...) -> None: ...

class RenameSessionRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RenameSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ...) -> None: ...

class StartProcessRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "argv", "cwd", "env", "pty", "stdin", "timeout_s", "prefers_bash", "merge_stderr")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    PTY_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PREFERS_BASH_FIELD_NUMBER: _ClassVar[int]
    MERGE_STDERR_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    argv: _containers.RepeatedScalarFieldContainer[str]
    cwd: str
    env: _containers.ScalarMap[str, str]
    pty: _types_pb2.TerminalSize
    stdin: bool
    timeout_s: float
    prefers_bash: bool
    merge_stderr: bool
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., argv: _Optional[_Iterable[str]] = ..., cwd: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., pty: _Optional[_Union[_types_pb2.TerminalSize, _Mapping]] = ..., stdin: bool = ..., timeout_s: _Optional[float] = ..., prefers_bash: bool = ..., merge_stderr: bool = ...) -> None: ...

class StartProcessResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _types_pb2.ProcessEvent
    def __init__(self, event: _Optional[_Union[_types_pb2.ProcessEvent, _Mapping]] = ...) -> None: ...

class AttachProcessRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "after_event")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    after_event: int
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., after_event: _Optional[int] = ...) -> None: ...

class AttachProcessResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _types_pb2.ProcessEvent
    def __init__(self, event: _Optional[_Union[_types_pb2.ProcessEvent, _Mapping]] = ...) -> None: ...

class ListProcessesRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListProcessesResponse(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[_types_pb2.ProcessInfo]
    def __init__(self, processes: _Optional[_Iterable[_Union[_types_pb2.ProcessInfo, _Mapping]]] = ...) -> None: ...

class WriteProcessRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "offset", "data", "eof")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EOF_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    offset: int
    data: bytes
    eof: bool
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., eof: bool = ...) -> None: ...

class WriteProcessResponse(_message.Message):
    __slots__ = ("written_bytes",)
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    written_bytes: int
    def __init__(self, written_bytes: _Optional[int] = ...) -> None: ...

class ResizeProcessRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "size")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    size: _types_pb2.TerminalSize
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., size: _Optional[_Union[_types_pb2.TerminalSize, _Mapping]] = ...) -> None: ...

class ResizeProcessResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SignalProcessRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "signal", "target")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    signal: int
    target: _types_pb2.SignalTarget
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., signal: _Optional[int] = ..., target: _Optional[_Union[_types_pb2.SignalTarget, str]] = ...) -> None: ...

class SignalProcessResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardPortRequest(_message.Message):
    __slots__ = ("open", "data", "shutdown")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    open: OpenPort
    data: bytes
    shutdown: Shutdown
    def __init__(self, open: _Optional[_Union[OpenPort, _Mapping]] = ..., data: _Optional[bytes] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ...) -> None: ...

class OpenPort(_message.Message):
    __slots__ = ("session_id", "port")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    port: int
    def __init__(self, session_id: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardPortResponse(_message.Message):
    __slots__ = ("opened", "data", "shutdown")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    opened: PortOpened
    data: bytes
    shutdown: Shutdown
    def __init__(self, opened: _Optional[_Union[PortOpened, _Mapping]] = ..., data: _Optional[bytes] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ...) -> None: ...

class PortOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRecordingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRecordingsResponse(_message.Message):
    __slots__ = ("recordings",)
    RECORDINGS_FIELD_NUMBER: _ClassVar[int]
    recordings: _containers.RepeatedCompositeFieldContainer[RecordingInfo]
    def __init__(self, recordings: _Optional[_Iterable[_Union[RecordingInfo, _Mapping]]] = ...) -> None: ...

class RecordingInfo(_message.Message):
    __slots__ = ("session_id", "tenant", "mode", "create_time", "end_time", "expire_time", "size_bytes", "ended")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    mode: str
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    size_bytes: int
    ended: str
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., mode: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., size_bytes: _Optional[int] = ..., ended: _Optional[str] = ...) -> None: ...

class GetRecordingRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetRecordingResponse(_message.Message):
    __slots__ = ("recording", "entries", "blob_chunk", "completeness")
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BLOB_CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETENESS_FIELD_NUMBER: _ClassVar[int]
    recording: RecordingInfo
    entries: bytes
    blob_chunk: _types_pb2.BlobChunk
    completeness: RecordingCompleteness
    def __init__(self, recording: _Optional[_Union[RecordingInfo, _Mapping]] = ..., entries: _Optional[bytes] = ..., blob_chunk: _Optional[_Union[_types_pb2.BlobChunk, _Mapping]] = ..., completeness: _Optional[_Union[RecordingCompleteness, _Mapping]] = ...) -> None: ...

class RecordedEntry(_message.Message):
    __slots__ = ("time_s", "kind", "step", "redacted", "message", "json")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REDACTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    kind: str
    step: int
    redacted: bool
    message: bytes
    json: bytes
    def __init__(self, time_s: _Optional[float] = ..., kind: _Optional[str] = ..., step: _Optional[int] = ..., redacted: bool = ..., message: _Optional[bytes] = ..., json: _Optional[bytes] = ...) -> None: ...

class RecordedProcessEvent(_message.Message):
    __slots__ = ("process_id", "event")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    process_id: str
    event: _types_pb2.ProcessEvent
    def __init__(self, process_id: _Optional[str] = ..., event: _Optional[_Union[_types_pb2.ProcessEvent, _Mapping]] = ...) -> None: ...

class RecordingCompleteness(_message.Message):
    __slots__ = ("ended", "redacted_tools", "referenced", "unknown")
    class ReferencedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class UnknownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REDACTED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    ended: str
    redacted_tools: _containers.RepeatedScalarFieldContainer[str]
    referenced: _containers.ScalarMap[str, int]
    unknown: _containers.ScalarMap[str, int]
    def __init__(self, ended: _Optional[str] = ..., redacted_tools: _Optional[_Iterable[str]] = ..., referenced: _Optional[_Mapping[str, int]] = ..., unknown: _Optional[_Mapping[str, int]] = ...) -> None: ...
