"""Runs an agent of Strands whose commands and files are in a session's sandbox. The model is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from own_daemon import own_daemon
from strands import Agent
from strands.models import Model

from executor_client.integrations.strands import RemoteSandbox


class ScriptedModel(Model):
    """Replies from a list: a name of a tool and its arguments, or the final answer."""

    def __init__(self, script: Sequence[tuple[str, dict[str, Any]] | str]) -> None:
        self.script = list(script)

    def update_config(self, **model_config: Any) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return {}

    async def structured_output(self, output_model: Any, prompt: Any, system_prompt: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError
        yield

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[dict[str, Any], None]:
        reply = self.script.pop(0)
        yield {"messageStart": {"role": "assistant"}}
        if isinstance(reply, str):
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": reply}}}
        else:
            name, arguments = reply
            yield {"contentBlockStart": {"start": {"toolUse": {"name": name, "toolUseId": f"call-{len(self.script)}"}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(arguments)}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(reply, str) else "tool_use"}}


SCRIPT: Sequence[tuple[str, dict[str, Any]] | str] = (
    ("sandbox_file_editor", {"command": "create", "path": "/workspace/pots.csv", "file_text": "mug,12\nvase,48\n"}),
    ("sandbox_shell", {"command": "cut -d, -f2 pots.csv | paste -sd+ | python3 -c 'print(eval(input()))'"}),
    ("sandbox_file_editor", {"command": "view", "path": "/workspace/pots.csv"}),
    ("sandbox_shell", {"command": "cat missing.csv"}),
    "All pots together are 60.",
)


def main() -> None:
    with RemoteSandbox() as sandbox:
        agent = Agent(model=ScriptedModel(SCRIPT), sandbox=sandbox, hooks=[sandbox], callback_handler=None)
        answer = agent("What do all pots cost together?")
    for message in agent.messages:
        for part in message["content"]:
            if "toolResult" in part:
                print("The tool:", " ".join(each["text"] for each in part["toolResult"]["content"]))
    print("The answer:", answer)


if __name__ == "__main__":
    with own_daemon("local"):
        main()
