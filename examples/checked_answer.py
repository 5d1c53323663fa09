"""Checks answers before they are accepted: `final_answer_checks`.

A check gets the answer as an object of this process, and the memory of the run. When it fails, the model reads why and
goes on, with the variables of its sandbox unchanged.
"""

from __future__ import annotations

from typing import Any

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents.memory import AgentMemory

from executor_client.smolagents import CodeAgent

SCRIPT = [
    Reply(
        thought="I share the money by hours worked.",
        code="""
shares = {name: round(amount * worked / sum(hours.values())) for name, worked in hours.items()}
final_answer(shares)
""",
    ),
    Reply(
        thought="Rounding has made a franc too much or too little. Who worked longest gets the difference.",
        expects=["Check adds_up failed", "the shares add up to 101, not to 100"],
        reads={"sum": r"add up to (\d+)"},
        code="""
longest = max(hours, key=hours.get)
shares[longest] += amount - <<sum>>
final_answer(shares)
""",
    ),
]
AMOUNT = 100
HOURS = {"Ada": 2, "Ben": 2, "Cleo": 3}


def is_a_table(answer: Any, memory: AgentMemory, agent: CodeAgent | None = None) -> bool:
    """Returns True if each name has a whole number. (smolagents 1.22 does not pass the agent.)"""
    return isinstance(answer, dict) and all(isinstance(share, int) for share in answer.values())


def adds_up(answer: Any, memory: AgentMemory, agent: CodeAgent | None = None) -> bool:
    total = sum(answer.values())
    if total != AMOUNT:
        raise ValueError(f"the shares add up to {total}, not to {AMOUNT}")
    return True


def main() -> None:
    with CodeAgent(
        tools=[],
        model=ScriptedModel(SCRIPT),
        final_answer_checks=[is_a_table, adds_up],
    ) as agent:
        answer = agent.run("Share the amount.", additional_args={"amount": AMOUNT, "hours": HOURS})
    print("Refused:", agent.memory.steps[1].error)
    print("Accepted:", answer)


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
