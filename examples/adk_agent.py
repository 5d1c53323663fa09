"""Runs an agent of Google ADK whose commands and files are in a session's sandbox. The model is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from google.adk.agents import Agent
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.tools.environment import EnvironmentToolset
from google.genai.types import Content, Part
from own_daemon import own_daemon

from executor_client.integrations.google_adk import RemoteEnvironment


class ScriptedLlm(BaseLlm):
    """Replies from a list: a name of a tool and its arguments, the final answer, or what a function returns."""

    model: str = "scripted"
    script: list[Any]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        reply = self.script.pop(0)
        reply = reply() if callable(reply) else reply
        part = Part(text=reply) if isinstance(reply, str) else Part.from_function_call(name=reply[0], args=reply[1])
        yield LlmResponse(content=Content(role="model", parts=[part]))


SCRIPT: Sequence[Any] = (
    ("WriteFile", {"path": "words.txt", "content": "kiln clay kiln glaze\n"}),
    ("Execute", {"command": "tr ' ' '\\n' < words.txt | sort | uniq -c | sort -rn | head -1"}),
    ("EditFile", {"path": "words.txt", "old_string": "glaze", "new_string": "clay clay"}),
    ("ReadFile", {"path": "words.txt"}),
    ("Execute", {"command": "cat missing.txt"}),
    "The most frequent word was kiln.",
)


async def run(script: Sequence[Any]) -> None:
    toolset = EnvironmentToolset(environment=RemoteEnvironment())
    agent = Agent(name="counter", model=ScriptedLlm(script=list(script)), tools=[toolset])
    async with InMemoryRunner(agent=agent, app_name="counting") as runner:
        session = await runner.session_service.create_session(app_name="counting", user_id="ada")
        question = Content(role="user", parts=[Part(text="Which word is the most frequent?")])
        events = runner.run_async(user_id="ada", session_id=session.id, new_message=question)
        async for event in events:
            for response in event.get_function_responses():
                print(f"{response.name}: {response.response}")
            if event.is_final_response() and event.content:
                print("The answer:", event.content.parts[0].text)


def main() -> None:
    asyncio.run(run(SCRIPT))


if __name__ == "__main__":
    with own_daemon("local"):
        main()
