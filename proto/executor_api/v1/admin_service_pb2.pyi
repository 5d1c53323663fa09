from executor_api.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListAllSessionsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class OwnedSession(_message.Message):
    __slots__ = ("tenant", "principal", "session")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    principal: str
    session: _types_pb2.Session
    def __init__(self, tenant: _Optional[str] = ..., principal: _Optional[str] = ..., session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ...) -> None: ...

class ListAllSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[OwnedSession]
    def __init__(self, sessions: _Optional[_Iterable[_Union[OwnedSession, _Mapping]]] = ...) -> None: ...

class KillSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class KillSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume",)
    RESUME_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    def __init__(self, resume: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "sessions", "busy")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    sessions: int
    busy: int
    def __init__(self, draining: bool = ..., sessions: _Optional[int] = ..., busy: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("tenant", "profile", "sessions", "executions", "creations_in_last_minute", "cpu_time_s_in_last_hour", "output_bytes_in_last_hour", "calls", "quotas")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    CREATIONS_IN_LAST_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_IN_LAST_HOUR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_IN_LAST_HOUR_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    profile: str
    sessions: int
    executions: int
    creations_in_last_minute: int
    cpu_time_s_in_last_hour: float
    output_bytes_in_last_hour: int
    calls: int
    quotas: _types_pb2.Quotas
    def __init__(self, tenant: _Optional[str] = ..., profile: _Optional[str] = ..., sessions: _Optional[int] = ..., executions: _Optional[int] = ..., creations_in_last_minute: _Optional[int] = ..., cpu_time_s_in_last_hour: _Optional[float] = ..., output_bytes_in_last_hour: _Optional[int] = ..., calls: _Optional[int] = ..., quotas: _Optional[_Union[_types_pb2.Quotas, _Mapping]] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...
