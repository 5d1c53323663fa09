"""The smolagents integration: runs the code of a `CodeAgent` in a sandbox of the execution daemon.

    from executor_client.smolagents import CodeAgent
    with CodeAgent(tools=[...], model=model) as agent:
        agent.run("...")

or `smolagents.CodeAgent(..., executor=RemoteExecutor())`, or `register()` and `executor_type="remote"`.
docs/smolagents.md describes the features and the differences to smolagents' own executors.

Owns everything that knows smolagents: the executor, the placement of tools, step callbacks, saving and loading. It must
not know gRPC or the wire: it uses sessions of `executor_client`. The base client never imports this package.

The import changes three things in smolagents: an agent with a `RemoteExecutor` is saved as "remote", not as "local"; a
saved agent finds `RemoteCodeAgent` by name; and `agent.interrupt()` ends the running step of a `RemoteExecutor`.
"""

try:
    import smolagents as _smolagents
except ModuleNotFoundError as error:
    if error.name != "smolagents":
        raise
    raise ModuleNotFoundError(
        "executor_client.smolagents needs smolagents, which is not installed here: "
        "pip install 'remote-executor[smolagents]'",
        name="smolagents",
    ) from None

from executor_client.smolagents.agent import (
    RemoteCodeAgent,
    find_managed_agents_by_class,
    interrupt_running_steps,
    name_executor_when_saved,
    register,
    unregister,
)
from executor_client.smolagents.code_output import RemoteCodeOutput
from executor_client.smolagents.computer_tools import (
    FileTools,
    SandboxUnavailable,
    SessionSource,
    ShellTool,
    ShellTools,
)
from executor_client.smolagents.executor import RemoteExecutor
from executor_client.smolagents.failures import CodeExecutionError, CodeTimeoutError, DaemonLost
from executor_client.smolagents.images import capture_images
from executor_client.smolagents.interpreter_tool import RemotePythonInterpreterTool
from executor_client.smolagents.undo import UndoTool

CodeAgent = RemoteCodeAgent

__all__ = [
    "CodeAgent",
    "CodeExecutionError",
    "CodeTimeoutError",
    "DaemonLost",
    "FileTools",
    "RemoteCodeAgent",
    "RemoteCodeOutput",
    "RemoteExecutor",
    "RemotePythonInterpreterTool",
    "SandboxUnavailable",
    "SessionSource",
    "ShellTool",
    "ShellTools",
    "UndoTool",
    "capture_images",
    "register",
    "unregister",
]

del _smolagents
name_executor_when_saved()
find_managed_agents_by_class()
interrupt_running_steps()
