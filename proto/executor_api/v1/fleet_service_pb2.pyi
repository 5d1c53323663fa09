from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkRequest(_message.Message):
    __slots__ = ("hello", "control", "renewal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    hello: FrontHello
    control: Control
    renewal: Renewal
    def __init__(self, hello: _Optional[_Union[FrontHello, _Mapping]] = ..., control: _Optional[_Union[Control, _Mapping]] = ..., renewal: _Optional[_Union[Renewal, _Mapping]] = ...) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ("hello", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    report: NodeReport
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., report: _Optional[_Union[NodeReport, _Mapping]] = ...) -> None: ...

class FrontHello(_message.Message):
    __slots__ = ("front_id", "term", "protocol", "program_version", "report_interval_s", "lease_s", "fence_s", "lost_epoch", "instance")
    FRONT_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    FENCE_S_FIELD_NUMBER: _ClassVar[int]
    LOST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    front_id: str
    term: int
    protocol: int
    program_version: str
    report_interval_s: float
    lease_s: float
    fence_s: float
    lost_epoch: int
    instance: str
    def __init__(self, front_id: _Optional[str] = ..., term: _Optional[int] = ..., protocol: _Optional[int] = ..., program_version: _Optional[str] = ..., report_interval_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., fence_s: _Optional[float] = ..., lost_epoch: _Optional[int] = ..., instance: _Optional[str] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("node", "epoch", "instance", "protocol", "program_version", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    instance: str
    protocol: int
    program_version: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., instance: _Optional[str] = ..., protocol: _Optional[int] = ..., program_version: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("policy", "fingerprint", "state_key", "locks")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STATE_KEY_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    policy: bytes
    fingerprint: str
    state_key: bytes
    locks: _containers.RepeatedCompositeFieldContainer[LockFile]
    def __init__(self, policy: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., state_key: _Optional[bytes] = ..., locks: _Optional[_Iterable[_Union[LockFile, _Mapping]]] = ...) -> None: ...

class LockFile(_message.Message):
    __slots__ = ("path", "content")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    path: str
    content: bytes
    def __init__(self, path: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("sequence", "epoch", "draining", "control_fingerprint", "control_problem", "max_sessions", "load", "backends", "warm", "full", "opened", "closed", "creating", "tenants")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    CREATING_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    draining: bool
    control_fingerprint: str
    control_problem: str
    max_sessions: int
    load: float
    backends: _containers.RepeatedCompositeFieldContainer[NodeBackend]
    warm: _containers.RepeatedCompositeFieldContainer[WarmKind]
    full: bool
    opened: _containers.RepeatedCompositeFieldContainer[NodeSession]
    closed: _containers.RepeatedScalarFieldContainer[str]
    creating: _containers.RepeatedCompositeFieldContainer[NodeSession]
    tenants: _containers.RepeatedCompositeFieldContainer[NodeTenant]
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., draining: bool = ..., control_fingerprint: _Optional[str] = ..., control_problem: _Optional[str] = ..., max_sessions: _Optional[int] = ..., load: _Optional[float] = ..., backends: _Optional[_Iterable[_Union[NodeBackend, _Mapping]]] = ..., warm: _Optional[_Iterable[_Union[WarmKind, _Mapping]]] = ..., full: bool = ..., opened: _Optional[_Iterable[_Union[NodeSession, _Mapping]]] = ..., closed: _Optional[_Iterable[str]] = ..., creating: _Optional[_Iterable[_Union[NodeSession, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[NodeTenant, _Mapping]]] = ...) -> None: ...

class NodeBackend(_message.Message):
    __slots__ = ("name", "ready", "images")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: bool
    images: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., ready: bool = ..., images: _Optional[_Iterable[str]] = ...) -> None: ...

class WarmKind(_message.Message):
    __slots__ = ("backend", "image", "network", "ready")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    backend: str
    image: str
    network: bool
    ready: int
    def __init__(self, backend: _Optional[str] = ..., image: _Optional[str] = ..., network: bool = ..., ready: _Optional[int] = ...) -> None: ...

class NodeSession(_message.Message):
    __slots__ = ("session_id", "tenant", "request_id", "lost")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    request_id: str
    lost: bool
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., lost: bool = ...) -> None: ...

class NodeTenant(_message.Message):
    __slots__ = ("tenant", "executions", "cpu_time_s", "output_bytes", "egress_bytes", "creations")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    CPU_TIME_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EGRESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    executions: int
    cpu_time_s: float
    output_bytes: int
    egress_bytes: int
    creations: int
    def __init__(self, tenant: _Optional[str] = ..., executions: _Optional[int] = ..., cpu_time_s: _Optional[float] = ..., output_bytes: _Optional[int] = ..., egress_bytes: _Optional[int] = ..., creations: _Optional[int] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("sequence", "egress_bytes")
    class EgressBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EGRESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    egress_bytes: _containers.ScalarMap[str, int]
    def __init__(self, sequence: _Optional[int] = ..., egress_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...
