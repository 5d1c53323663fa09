"""An agent in a container of its own: smolagents' loop, a scripted model, and its code in the daemon's sandboxes."""

from __future__ import annotations

from smolagents import ChatMessage, MessageRole, Model

from executor_client.smolagents import CodeAgent

STEPS = (
    "import pandas as pd\n"
    "sales = pd.DataFrame({'region': ['north', 'south'], 'chf': [182_700, 134_850]})\n"
    "print(sales)",
    "total = int(sales['chf'].sum())\nprint(f'{total:,} CHF')",
    "final_answer(f'The two regions sold for {total:,} CHF.')",
)


class ScriptedModel(Model):
    """Plays the model: the next step of the script at each call."""

    def __init__(self) -> None:
        super().__init__(model_id="scripted")
        self._steps = iter(STEPS)

    def generate(self, messages: object, **kwargs: object) -> ChatMessage:
        return ChatMessage(MessageRole.ASSISTANT, f"<code>\n{next(self._steps)}\n</code>")


with CodeAgent(tools=[], model=ScriptedModel(), additional_authorized_imports=["pandas"]) as agent:
    answer = agent.run("How much was sold?")
print(f"The agent's answer: {answer}")
raise SystemExit(0 if "317,550" in str(answer) else 1)
