"""Runs an agent step by step, and changes its memory between the steps.

That is useful when steps take days, or when an observation is too long for later steps: here a page of numbers, which
is shortened after the model has read it once.
"""

from __future__ import annotations

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import ActionStep
from smolagents.agents import ActionOutput
from smolagents.memory import TaskStep
from smolagents.monitoring import Timing

from executor_client.smolagents import CodeAgent

SCRIPT = [
    Reply(
        thought="I list the square numbers.",
        code="squares = [n * n for n in range(1, 1001)]\nfor square in squares:\n    print(square)",
    ),
    Reply(
        thought="I count those that end with 9.",
        expects=["1000 lines, the last one: 1000000"],
        code="nines = [square for square in squares if square % 10 == 9]\nprint(len(nines), 'of them')",
    ),
    Reply(thought="There are <<count>>.", reads={"count": r"(\d+) of them"}, code="final_answer(<<count>>)"),
]
MAX_STEPS = 10


def main() -> None:
    with CodeAgent(tools=[], model=ScriptedModel(SCRIPT), verbosity_level=0) as agent:
        # run() begins with these calls: they create the session and send it the variables and tools.
        agent.python_executor.send_variables(variables=agent.state)
        agent.python_executor.send_tools({**agent.tools, **agent.managed_agents})
        agent.memory.steps.append(TaskStep(task="How many squares of 1 to 1000 end with 9?"))

        for number in range(1, MAX_STEPS + 1):
            step = ActionStep(step_number=number, timing=Timing(start_time=0.0))
            result: ActionOutput = agent.step(step)
            agent.memory.steps.append(step)
            print(f"Step {number}: {len(step.observations)} characters observed")
            if result.is_final_answer:
                break
            cut_down(step)
    print("The answer:", result.output)


def cut_down(step: ActionStep) -> None:
    """Shortens a long observation to the part that later steps need."""
    if len(step.observations) > 1_000:
        lines = [line for line in step.observations.splitlines() if line.isdecimal()]
        step.observations = f"{len(lines)} lines, the last one: {lines[-1]}"


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
