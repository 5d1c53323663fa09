"""A conversation with an agent that keeps its variables, and shows the words of its model while they arrive.

`reset=False` keeps the memory of earlier turns; the variables stay in the sandbox in any case, until the agent is
cleaned up. `stream_outputs=True` shows the model's words as they arrive, `run(stream=True)` yields them and each step
to the caller.
"""

from __future__ import annotations

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import ActionStep
from smolagents.memory import FinalAnswerStep
from smolagents.models import ChatMessageStreamDelta

from executor_client.smolagents import CodeAgent

SCRIPT = [
    Reply(
        thought="I keep the list, for there may be questions.",
        code="""
primes = [n for n in range(2, 60) if all(n % d for d in range(2, n))]
final_answer(primes[-1])
""",
    ),
    Reply(
        thought="The list is still there. I look at it first.",
        expects=["And the sum of all of them?"],
        code="print(len(primes), 'primes up to', primes[-1])",
    ),
    Reply(
        thought="All <<count>> of them.",
        reads={"count": r"(\d+) primes up to 59"},
        code='final_answer(f"the <<count>> primes add up to {sum(primes)}")',
    ),
]


def main() -> None:
    with CodeAgent(tools=[], model=ScriptedModel(SCRIPT), stream_outputs=True) as agent:
        print("First answer:", agent.run("Which is the largest prime below 60?"))

        words, steps = 0, 0
        for event in agent.run("And the sum of all of them?", reset=False, stream=True):
            if isinstance(event, ChatMessageStreamDelta):
                words += len((event.content or "").split())
            elif isinstance(event, ActionStep):
                steps += 1
                print(f"Step {event.step_number} is done.")
            elif isinstance(event, FinalAnswerStep):
                print("Second answer:", event.output)
        print(f"It took {steps} steps and {words} words.")


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
