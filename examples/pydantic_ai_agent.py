"""A Pydantic AI agent whose commands run in a sandbox, and a second run that continues in it.

Needs `pip install 'remote-executor[server,pydantic-ai]'`. The model is a script.
"""

from __future__ import annotations

from own_daemon import own_daemon
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from executor_client.integrations.pydantic_ai import RemoteWorkspace

agent = Agent(capabilities=[RemoteWorkspace(idle_time_s=600)])


@agent.tool
async def shell(context: RunContext[None], command: str) -> str:
    """Runs a command of the sandbox's shell."""
    result = await context.workspace.run(command, shell=True, timeout=60)
    return f"exit code {result.exit_code}\n{result.stdout}{result.stderr}"


def scripted(command: str) -> FunctionModel:
    """A model that runs one command and answers with what it printed."""

    def step(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        last = messages[-1].parts[-1]
        if isinstance(last, ToolReturnPart):
            return ModelResponse([TextPart(str(last.content).partition("\n")[2])])
        return ModelResponse([ToolCallPart("shell", {"command": command})])

    return FunctionModel(step)


def main() -> None:
    first = agent.run_sync("Write squares", model=scripted("python3 -c 'print(1, 4, 9, 16)' | tee squares"))
    print("squares:", first.output.strip())
    adding = "python3 -c 'print(sum(map(int, open(\"squares\").read().split())))'"
    second = agent.run_sync("Add them", model=scripted(adding), message_history=first.all_messages())
    print("their sum, in the same sandbox:", second.output.strip())


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
