"""A deep agent that writes, edits and runs a program in a sandbox.

Needs `pip install 'remote-executor[server,deepagents]'`. The model is a script.
"""

from __future__ import annotations

from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from own_daemon import own_daemon

from executor_client.integrations.deepagents import RemoteSandbox, with_artifacts

PATH = "/workspace/total.py"
SCRIPT: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"file_path": PATH, "content": "print(sum(range(10)))\n"}),
    ("edit_file", {"file_path": PATH, "old_string": "range(10)", "new_string": "range(101)"}),
    ("execute", {"command": f"python3 {PATH}"}),
]


class Scripted(BaseChatModel):
    """Makes the calls of SCRIPT one after the other, then answers with the last result."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        results = [each for each in messages if isinstance(each, ToolMessage)]
        if len(results) < len(SCRIPT):
            name, arguments = SCRIPT[len(results)]
            made = AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{len(results)}"}])
        else:
            made = AIMessage(str(results[-1].content))
        return ChatResult(generations=[ChatGeneration(message=made)])


def main() -> None:
    with RemoteSandbox() as sandbox:
        agent = create_deep_agent(Scripted(), backend=with_artifacts(sandbox))
        state = agent.invoke({"messages": [("user", "Add the numbers up to 100")]})
    for message in state["messages"]:
        if isinstance(message, ToolMessage):
            print(f"{message.name}:", str(message.content).splitlines()[0])


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
