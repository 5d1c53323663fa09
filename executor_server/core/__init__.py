"""Values of the domain that at least three packages use: limits, specs, events, errors, import patterns, addresses.

It also holds what every daemon file of SQLite and every log line have in common. It must not know any other package
of the daemon; of the guest it has the constants of `checks` that policies name. A name that two packages use belongs to
the lower one of them.
"""

from executor_server.core.addresses import (
    Address,
    AddressError,
    TcpAddress,
    UnixAddress,
    checked_with_optional,
    umask,
    unix_address,
)
from executor_server.core.errors import (
    BackendFull,
    BackendSilent,
    EnvironmentFailed,
    ExecutorError,
    Forbidden,
    ImageNotReady,
    InvalidRequest,
    ModulesMissing,
    NotFound,
    OutOfRange,
    PolicyViolation,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    SpecUnsupported,
    TooManySessions,
    Unauthenticated,
    Unavailable,
    Violation,
    ViolationKind,
)
from executor_server.core.import_patterns import PATTERN_FORM, covered_by_both, is_covered, is_denied, is_pattern
from executor_server.core.model import (
    DEFAULT_MAX_FILES,
    AuditRules,
    BlobChunk,
    BlobRef,
    ErrorDetail,
    Event,
    EventKind,
    ExecutionLimits,
    FileInfo,
    FileRules,
    Image,
    Limits,
    LimitWarning,
    Log,
    Outcome,
    OutputCut,
    OutputMode,
    Payload,
    PolicyRef,
    Principal,
    Queued,
    Result,
    SandboxSpec,
    SessionFacts,
    SessionSpec,
    ShippedTool,
    StateManifest,
    StateOmission,
    StateRules,
    ToolCall,
    ToolRules,
    ToolSource,
    ToolSpec,
    Usage,
    VariablesState,
)
from executor_server.core.network import (
    NO_NETWORK,
    NO_NETWORK_USE,
    EgressConnection,
    EgressDenial,
    NetworkRules,
    NetworkSecret,
    NetworkUsage,
    secret_names,
)
from executor_server.core.packages import PackagesSpec, Progress
from executor_server.core.processes import (
    ENVIRONMENT_BYTES_MAX,
    ENVIRONMENT_VARIABLES_MAX,
    TERMINAL_CHARS_MAX,
    FileChange,
    FileChanges,
    PortRules,
    PortUse,
    ProcessEvent,
    ProcessEventKind,
    ProcessFacts,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    ProcessResult,
    ProcessRules,
    ProcessStarted,
    SignalTarget,
    TerminalSize,
)
from executor_server.core.savepoints import BranchEnd, Changes, Savepoint, Savepoints
from executor_server.core.sqlite_file import (
    OtherVersionError,
    keep_checksums,
    open_file,
    put_aside,
    row_checksum,
    transaction,
)
from executor_server.guest.checks.rules import LANGUAGE_RULES
