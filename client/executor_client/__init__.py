"""The client of a remote-executor daemon: runs Python for code agents in remote sandboxes.

    from executor_client import ExecutorClient

    with ExecutorClient() as client, client.create_session() as session:
        result = session.execute("1 + 1")
        assert result.output == 2

`AsyncExecutorClient` is the same on an event loop. Importing this package imports neither the server nor smolagents,
nor any image or pickling library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from executor_api.values import DecodeError, EncodeError, EnumValue, OpaqueValue, Record, TupleRecord, ValueLimits
    from executor_client._core.endpoint import TlsConfig
    from executor_client._core.terminal_prompt import ask_in_terminal
    from executor_client._core.tools import Tool
    from executor_client.aio import AsyncExecutorClient
    from executor_client.aio_files import AsyncSessionFiles
    from executor_client.aio_ports import AsyncPortForward, AsyncSessionPorts
    from executor_client.aio_process import AsyncProcess
    from executor_client.aio_processes import AsyncSessionProcesses
    from executor_client.aio_session import AsyncSession
    from executor_client.aio_watch import AsyncFileWatch
    from executor_client.approvals import Approval, ApprovalKind, OnApproval
    from executor_client.checkpoint import Checkpoint
    from executor_client.client import ExecutorClient
    from executor_client.errors import (
        AuthenticationError,
        AuthorizationError,
        CallTimeoutError,
        ConfigurationError,
        ConnectionLost,
        DaemonError,
        EnvironmentFailed,
        EvaluationError,
        ExecutionFailed,
        ExecutorClientError,
        FileError,
        FileExists,
        FileIsDirectory,
        FileNotDirectory,
        FileNotFound,
        FilePermissionDenied,
        InvalidRequest,
        ModulesMissing,
        NotFoundError,
        OutputLimitExceeded,
        PolicyViolationError,
        PreconditionError,
        ProcessFailed,
        ProtocolError,
        RecordingError,
        ReentrantExecution,
        ResourceExhaustedError,
        SessionGone,
        ToolNotShippable,
        UnavailableError,
        Violation,
    )
    from executor_client.events import (
        DisplayEvent,
        ExecutionEvent,
        ImageEvent,
        LimitWarningEvent,
        LogEvent,
        OutputCutEvent,
        QueuedEvent,
        ToolCallEvent,
    )
    from executor_client.file_results import FileChange, FileChanges, FileInfo, FileList
    from executor_client.files import SessionFiles
    from executor_client.ports import PortForward, SessionPorts
    from executor_client.process import Process
    from executor_client.process_results import (
        CompletedProcess,
        PortRules,
        ProcessInfo,
        ProcessOutput,
        ProcessOutputCut,
        ProcessResult,
        ProcessRules,
        ProcessUsage,
        TerminalSize,
    )
    from executor_client.processes import SessionProcesses
    from executor_client.recording import Recorder, Recording
    from executor_client.results import (
        Display,
        EnvironmentInfo,
        ErrorDetail,
        ExecutionResult,
        FileLimits,
        Image,
        Limits,
        NetworkRules,
        NetworkSecret,
        NetworkUsage,
        Outcome,
        PackagesPolicy,
        Policy,
        PolicyRef,
        Quotas,
        RecordingInfo,
        SessionInfo,
        SessionState,
        StateManifest,
        StateRules,
        Usage,
        VariablesState,
    )
    from executor_client.savepoint import Branch, Changes, Rollback, Savepoint
    from executor_client.session import Session
    from executor_client.waits import OnWait, Progress, Wait, WaitKind
    from executor_client.watch import FileWatch

__all__ = [
    "Approval", "ApprovalKind", "AsyncExecutorClient", "AsyncFileWatch", "AsyncPortForward", "AsyncProcess",
    "AsyncSession", "AsyncSessionFiles", "AsyncSessionPorts", "AsyncSessionProcesses", "AuthenticationError",
    "AuthorizationError", "Branch", "CallTimeoutError", "Changes", "Checkpoint", "CompletedProcess",
    "ConfigurationError", "ConnectionLost", "DaemonError", "DecodeError", "Display", "DisplayEvent", "EncodeError",
    "EnumValue", "EnvironmentFailed", "EnvironmentInfo", "ErrorDetail", "EvaluationError", "ExecutionEvent",
    "ExecutionFailed", "ExecutionResult", "ExecutorClient", "ExecutorClientError", "FileChange", "FileChanges",
    "FileError", "FileExists", "FileInfo", "FileIsDirectory", "FileLimits", "FileList", "FileNotDirectory",
    "FileNotFound", "FilePermissionDenied", "FileWatch", "Image", "ImageEvent", "InvalidRequest", "LimitWarningEvent",
    "Limits", "LogEvent", "ModulesMissing", "NetworkRules", "NetworkSecret", "NetworkUsage", "NotFoundError",
    "OnApproval", "OnWait", "OpaqueValue", "Outcome", "OutputCutEvent", "OutputLimitExceeded", "PackagesPolicy",
    "Policy", "PolicyRef", "PolicyViolationError", "PortForward", "PortRules", "PreconditionError", "Process",
    "ProcessFailed", "ProcessInfo", "ProcessOutput", "ProcessOutputCut", "ProcessResult", "ProcessRules",
    "ProcessUsage", "Progress", "ProtocolError", "QueuedEvent", "Quotas", "Record", "Recorder", "Recording",
    "RecordingError", "RecordingInfo", "ReentrantExecution", "ResourceExhaustedError", "Rollback", "Savepoint",
    "Session",
    "SessionFiles", "SessionGone", "SessionInfo", "SessionPorts", "SessionProcesses", "SessionState", "StateManifest",
    "StateRules", "TerminalSize", "TlsConfig", "Tool", "ToolCallEvent", "ToolNotShippable", "TupleRecord",
    "UnavailableError", "Usage", "ValueLimits", "VariablesState", "Violation", "Wait", "WaitKind",
    "ask_in_terminal",
]  # fmt: skip

# The module of each public name, imported on first use (PEP 562): gRPC and its messages take a fifth of a second to
# import, and `executor --help` or a program that only catches our errors does not need them.
_HOMES = {
    "executor_api.values": "DecodeError EncodeError EnumValue OpaqueValue Record TupleRecord ValueLimits",
    "executor_client._core.endpoint": "TlsConfig",
    "executor_client._core.terminal_prompt": "ask_in_terminal",
    "executor_client._core.tools": "Tool",
    "executor_client.aio": "AsyncExecutorClient",
    "executor_client.aio_files": "AsyncSessionFiles",
    "executor_client.aio_ports": "AsyncPortForward AsyncSessionPorts",
    "executor_client.aio_process": "AsyncProcess",
    "executor_client.aio_processes": "AsyncSessionProcesses",
    "executor_client.aio_session": "AsyncSession",
    "executor_client.aio_watch": "AsyncFileWatch",
    "executor_client.approvals": "Approval ApprovalKind OnApproval",
    "executor_client.checkpoint": "Checkpoint",
    "executor_client.client": "ExecutorClient",
    "executor_client.errors": (
        "AuthenticationError AuthorizationError CallTimeoutError ConfigurationError ConnectionLost DaemonError "
        "EnvironmentFailed EvaluationError ExecutionFailed ExecutorClientError FileError FileExists FileIsDirectory "
        "FileNotDirectory FileNotFound FilePermissionDenied InvalidRequest ModulesMissing NotFoundError "
        "OutputLimitExceeded PolicyViolationError PreconditionError ProcessFailed ProtocolError RecordingError "
        "ReentrantExecution ResourceExhaustedError SessionGone ToolNotShippable UnavailableError Violation"
    ),
    "executor_client.events": (
        "DisplayEvent ExecutionEvent ImageEvent LimitWarningEvent LogEvent OutputCutEvent QueuedEvent ToolCallEvent"
    ),
    "executor_client.file_results": "FileChange FileChanges FileInfo FileList",
    "executor_client.files": "SessionFiles",
    "executor_client.ports": "PortForward SessionPorts",
    "executor_client.process": "Process",
    "executor_client.process_results": (
        "CompletedProcess PortRules ProcessInfo ProcessOutput ProcessOutputCut ProcessResult ProcessRules ProcessUsage "
        "TerminalSize"
    ),
    "executor_client.processes": "SessionProcesses",
    "executor_client.recording": "Recorder Recording",
    "executor_client.results": (
        "Display EnvironmentInfo ErrorDetail ExecutionResult FileLimits Image Limits NetworkRules NetworkSecret "
        "NetworkUsage Outcome PackagesPolicy Policy PolicyRef Quotas RecordingInfo SessionInfo SessionState "
        "StateManifest StateRules Usage VariablesState"
    ),
    "executor_client.savepoint": "Branch Changes Rollback Savepoint",
    "executor_client.session": "Session",
    "executor_client.waits": "OnWait Progress Wait WaitKind",
    "executor_client.watch": "FileWatch",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("remote-executor")
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
