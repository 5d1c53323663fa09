"""LangChain's `E2BSandbox`: a deep agent with a scripted model writes, runs and reads in it."""

from __future__ import annotations

from typing import Any

from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_e2b import E2BSandbox

PROGRAM = "print(sum(range(10)))\n"


class Scripted(GenericFakeChatModel):
    """Says its messages in turn, whatever tools it is given."""

    def bind_tools(self, *_: Any, **__: Any) -> Scripted:
        return self


def call(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name}])


def main() -> None:
    sandbox = Sandbox.create(timeout=120)
    try:
        script = [
            call("write_file", file_path="/home/user/add.py", content=PROGRAM),
            call("execute", command="python3 add.py; exit 3"),
            call("grep", pattern="range", path="/home/user"),
            AIMessage("It is 45."),
        ]
        agent = create_deep_agent(Scripted(messages=iter(script)), backend=E2BSandbox(sandbox=sandbox))
        messages = agent.invoke({"messages": [{"role": "user", "content": "add them"}]})["messages"]
        said = {message.name: message.content for message in messages if isinstance(message, ToolMessage)}
        assert "45" in said["execute"] and "3" in said["execute"], said
        assert "add.py" in said["grep"], said
        assert messages[-1].content == "It is 45."
        assert sandbox.files.read("/home/user/add.py") == PROGRAM
    finally:
        sandbox.kill()


if __name__ == "__main__":
    main()
