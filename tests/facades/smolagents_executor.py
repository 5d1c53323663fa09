"""smolagents with `executor_type="e2b"`: an agent with a scripted model, state between its steps, and an answer."""

from __future__ import annotations

from typing import Any

from smolagents import ChatMessage, CodeAgent, MessageRole, Model, tool

STEPS = (
    "numbers = [scale(each) for each in (1, 2, 3)]\nprint('scaled', numbers)",
    "final_answer({'sum': sum(numbers), 'numbers': numbers})",
)


@tool
def scale(number: int) -> int:
    """Scales a number.

    Args:
        number: The number.
    """
    return number * 10


class Scripted(Model):
    """Says the steps in turn."""

    def __init__(self) -> None:
        super().__init__(model_id="scripted")
        self.heard: list[str] = []

    def generate(self, messages: Any, **_: Any) -> ChatMessage:
        self.heard.append(str(messages))
        step = STEPS[len(self.heard) - 1]
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: go on\n<code>\n{step}\n</code>")


def main() -> None:
    model = Scripted()
    with CodeAgent(tools=[scale], model=model, executor_type="e2b", max_steps=3) as agent:
        answer = agent.run("scale and add")
    assert answer == {"sum": 60, "numbers": [10, 20, 30]}, answer
    assert "scaled [10, 20, 30]" in model.heard[1], model.heard[1]


if __name__ == "__main__":
    main()
